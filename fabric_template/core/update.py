"""Update: from one batch to the optimizer's step, with the window of accumulation, clipping and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .functions import takes_batch_idx
from .outputs import loss_in, refuse_without_gradient
from .overrides import class_of, overrides
from .run import Run
from .steps import is_plain

if TYPE_CHECKING:
    from .closed import ClosedStep

OWN = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")  # a module's own parts
UPDATE_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class AutomaticUpdate:
    """One batch of automatic optimization: the step, backward, and the optimizer at the end of a window.

    ``optimizer.step`` gets a closure that runs the step and backward, as Trainer's does, so that optimizers which
    evaluate it several times (LBFGS) work; hooks fire in Trainer's order::

        training_step
        on_before_zero_grad, zero_grad               # first batch of a window
        on_before_backward, backward, on_after_backward
        on_before_optimizer_step, clipping, step     # last batch of a window, or of the epoch
    """

    def __init__(self, run: Run) -> None:
        self.run, self.hooks = run, run.hooks
        self._batch: tuple = ()
        self._batch_idx = 0
        self._outputs: dict[str, Any] = {}
        self._last_loss: Tensor | None = None
        self.set_up()

    def set_up(self) -> None:
        """Know what there is to call; once more where a callback brings other optimizers."""
        run, hooks, timed = self.run, self.hooks, self.hooks.timed
        self.fabric, self.owner, self.is_plain = run.fabric, run.trained.owner, is_plain(run.fabric)
        strategy = f"[Strategy]{type(self.fabric.strategy).__name__}"  # so profilers call these parts
        self.named = f"[LightningModule]{class_of(self.owner).__name__}"
        self.step = hooks.named("training_step", timed(run.steps.get("training_step"), f"{strategy}.training_step"))
        self.takes_idx = takes_batch_idx(self.owner.training_step)
        # None: manual, with one of its own
        self.optimizer: Any = (*run.optimizing.optimizers, None)[0]
        self.scaler: Any = getattr(self.fabric.strategy.precision, "scaler", None)
        hooks.changed = self.set_up
        self.shows = hooks.heard("on_train_batch_end")
        self.keeps = not run.config.barebones or self.shows
        self.heard = any(map(hooks.heard, UPDATE_HOOKS))
        parts = {name: overrides(self.owner, name) for name in OWN}
        own = {name: None if part is None else hooks.named(name, part) for name, part in parts.items()}
        self.own_step, self.own_zero, self.own_backward, self.own_clip = (own[name] for name in OWN)
        self._backward = timed(
            Tensor.backward if self.is_plain else (run.steps.sharded or self.fabric).backward, f"{strategy}.backward"
        )
        if self.own_backward is not None:
            self.own_backward = timed(self.own_backward, f"{strategy}.backward")
        if hooks.profiler is not None:
            zero_grad = self.own_zero or (lambda epoch, batch_idx, optimizer: optimizer.zero_grad())
            self.own_zero = timed(zero_grad, f"{self.named}.optimizer_zero_grad")
        self.before_step = tuple(self.preparations())
        # torch's own optimizers but LBFGS run a closure first and once: the same bits without it, for less
        is_torchs = type(self.optimizer).__module__.startswith("torch.optim.") and not isinstance(self.optimizer, LBFGS)
        self.needs_closure = not is_torchs or self.scaler is not None or self.own_step is not None
        vars(self).pop("closed", None)
        if self.needs_closure:
            self.closed.check(self.optimizer)
        self.optimizer_step = timed(
            self.closed_step if self.needs_closure else self.plain_step, f"{self.named}.optimizer_step"
        )
        self.train = timed(self, "run_training_batch")
        if run.trained.hands_iterator:
            from .handed import handing_over

            self.train = handing_over(run, self.train)

    def preparations(self) -> Iterator[Callable[[Optimizer], Any]]:
        """What is done with the gradients before the optimizer steps, in this order: weights, the hook, clipping."""
        if self.heard:
            yield partial(self.hooks.call, "on_before_optimizer_step")
        value, algorithm = self.run.config.gradient_clip_val, self.run.config.gradient_clip_algorithm
        if self.own_clip is not None:
            own = self.hooks.timed(self.own_clip, f"{self.named}.configure_gradient_clipping")
            yield partial(own, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        elif value:
            from .clipping import clip_gradients

            yield partial(clip_gradients, self.run, value=value, algorithm=algorithm)

    def __call__(self, batch: Any, batch_idx: int, last_of_window: bool) -> Any:
        """Train on one batch; returns what ``on_train_batch_end`` gets as outputs."""
        self._batch = (batch, batch_idx) if self.takes_idx else (batch,)
        self._batch_idx = batch_idx
        if last_of_window:
            self.optimizer_step()
            self.run.at.stepped()
        elif not self.run.steps.syncs:
            self.closure()
        else:
            with self.run.steps.no_sync():
                self.closure()
        outputs, self._outputs, self._batch = self._outputs, {}, ()
        return outputs

    def closure(self) -> Tensor | None:
        """The step and backward; returns the loss as the optimizer wants it."""
        output = self.step(*self._batch)
        window = self.run.at.window
        loss = output if isinstance(output, Tensor) else loss_in(output, self.run)
        if loss is not None:
            if not loss.requires_grad:
                refuse_without_gradient(self._batch_idx)
            if self.keeps:
                self._keep(output, loss)
            if window > 1:
                loss = loss / window
        if self._batch_idx % window == 0:
            if self.heard:
                self.hooks.call("on_before_zero_grad", self.optimizer)
            if self.own_zero is None:
                self.optimizer.zero_grad()
            else:
                self.own_zero(self.run.at.current_epoch, self._batch_idx, self.optimizer)
        if loss is None:
            return None
        self.backward(loss)
        return loss.detach() if self.needs_closure else loss

    @property
    def skips_backward(self) -> bool:
        """Whether only the step runs, as StochasticWeightAveraging wants it for BatchNorm's statistics."""
        return "closure" in vars(self)

    def forward_only(self) -> Tensor | None:
        """The closure without backward, for the place of the usual one, which is spared the question."""
        output = self.step(*self._batch)
        loss = output if isinstance(output, Tensor) else loss_in(output, self.run)
        if loss is not None and self.keeps:
            self._keep(output, loss)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward with its hooks, scaled when there is a scaler."""
        if self.heard:
            self.hooks.call("on_before_backward", loss)
        if self.own_backward is None:
            self._backward(loss, *args, **kwargs)
        else:
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            self.own_backward(scaled, *args, **kwargs)
        if self.heard:
            self.hooks.call("on_after_backward")

    def _keep(self, output: Any, loss: Tensor) -> None:
        """Keep the loss, and what was returned with it, for hooks and history; hooks get it divided by the window."""
        run, copy = self.run, self.run.metrics.copy_of(loss)
        if output is not loss:
            run.log.note_returned(output, loss.detach())
        elif copy is None:
            run.history.train.add({"train_loss": loss.detach()}, run.log.size_of_batch(), run.at.total_batches - 1)
        else:
            together = run.metrics.train.together
            run.history.train.add_later(copy, run.log.size_of_batch(), run.at.total_batches - 1, together)
        if self.shows:
            value = loss.detach() / run.at.window if run.at.window > 1 else loss.detach()
            self._outputs = {**output, "loss": value} if isinstance(output, dict) else {"loss": value}

    def plain_step(self) -> None:
        """The ordinary case: an optimizer that needs no closure."""
        loss = self.closure()
        for prepare in self.before_step:
            prepare(self.optimizer)
        if self.is_plain:
            self.optimizer.step()
        else:
            self.fabric.strategy.optimizer_step(self.optimizer)
        # until the next forward, as a loop by hand does: its graph keeps autograd's node of each parameter, which would be made
        # anew, and another owner of it, without which each operation of the optimizer locks the interpreter to count them
        self._last_loss = loss if self.own_backward is None else None

    def closed_step(self) -> None:
        """The optimizer, or the module's own ``optimizer_step``, calls the closure."""
        step = partial(self.step_with, self.optimizer)
        if self.own_step is not None:
            optimizer = self.run.optimizing.wrapped[0]
            step = partial(self.own_step, self.run.at.current_epoch, self._batch_idx, optimizer)
        self.closed.train(step, self.closure)

    def step_with(self, optimizer: Optimizer, closure: Callable | None, **arguments: Any) -> Any:
        """What ``optimizer.step(closure)`` does when a module calls it, from its own ``optimizer_step`` or by hand."""
        return self.closed(optimizer, closure, **arguments)

    def stepped(self, optimizer: Optimizer) -> None:
        """A module has stepped it: counted with the batch's window."""

    @cached_property
    def closed(self) -> ClosedStep:
        """The step around a closure, which the usual ones do without."""
        from .closed import ClosedStep

        return ClosedStep(self.run, self.scaler, self.before_step)

    def waiting(self) -> list[Optimizer]:
        """The optimizers whose gradients wait for another batch, where a checkpoint is saved: in the middle of a window.

        After an error, or saved within a step, the run goes on behind the last whole one.
        """
        run = self.run
        breaks = run.failure.has_come or run.metrics.in_step
        return run.optimizing.optimizers if run.at.accumulates and not breaks else []

    def close(self) -> None:
        """The run is over."""
        self._last_loss = None
