"""Update: from one batch to the optimizer's step, with the window of accumulation, clipping and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .errors import Misuse, MisuseOfType
from .functions import takes_batch_idx
from .optimizers import NoOptimizer
from .overrides import is_a, overrides
from .run import Run
from .weights import Weights

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
        self._called = False  # the closure, by a step that gets it
        self.weights: Any = None
        if (of_batch := run.config.accumulate_weights) is not None:
            self.weights = Weights(self._samples if of_batch == "samples" else of_batch, run.fabric)
        self.set_up()

    def _samples(self, batch: Any) -> int:
        return self.run.metrics.train.size_of_batch()

    def set_up(self) -> None:
        """Know what there is to call; once more where a callback brings other optimizers."""
        run, named = self.run, self.hooks.named
        config, owner, fabric = run.config, run.trained.owner, run.fabric
        self.fabric, self.owner = fabric, owner
        step, strategy = run.steps.get("training_step"), type(fabric.strategy).__name__
        self.step = named("training_step", self.hooks.timed(step, f"[Strategy]{strategy}.training_step"))
        self.takes_idx = takes_batch_idx(owner.training_step)
        # none: manual, with one of its own
        self.optimizer: Any = run.optimizing.optimizers[0] if run.optimizing.optimizers else NoOptimizer()
        self.scaler: Any = getattr(fabric.strategy.precision, "scaler", None)
        own = {name: named(name, method) for name in OWN if (method := overrides(owner, name)) is not None}
        self.own_step, self.own_zero = own.get("optimizer_step"), own.get("optimizer_zero_grad")
        self.own_backward, self.own_clip = own.get("backward"), own.get("configure_gradient_clipping")
        self.wrapped_optimizers = run.optimizing.wrapped
        self.is_plain = run.steps.is_plain
        self.keeps = not config.barebones or self.hooks.heard("on_train_batch_end")
        backward = Tensor.backward if self.is_plain else fabric.backward
        self._backward = self.hooks.timed(backward, f"[Strategy]{strategy}.backward")
        if self.own_backward is not None:
            self.own_backward = self.hooks.timed(self.own_backward, f"[Strategy]{strategy}.backward")
        self.heard = any(self.hooks.heard(name) for name in UPDATE_HOOKS)
        self.before_step = tuple(self.preparations())
        self.lenient = run.trained.is_lightning
        if self.scaler is not None and isinstance(self.optimizer, LBFGS):
            raise MisuseOfType(
                "AMP and the LBFGS optimizer are not compatible: expected precision='bf16-mixed' or '32-true'"
            )
        mode = config.compile.get("mode") if isinstance(config.compile, dict) else config.compile
        if (
            fabric.device.type == "cuda"
            and mode in ("reduce-overhead", "max-autotune")
            and config.accumulate_grad_batches != 1
        ):
            raise Misuse(
                f"compile={config.compile!r} with accumulate_grad_batches={config.accumulate_grad_batches}: the CUDA graphs of"
                " torch.compile overwrite gradients that are still needed; write compile=True, or"
                " compile='max-autotune-no-cudagraphs'"
            )
        # torch's own optimizers but LBFGS run a closure first and once: the same bits without it, for less
        is_torchs = type(self.optimizer).__module__.startswith("torch.optim.") and not isinstance(self.optimizer, LBFGS)
        self.needs_closure = not is_torchs or self.scaler is not None or self.own_step is not None
        name, way = (
            f"[LightningModule]{type(owner).__name__}",
            self.closed_step if self.needs_closure else self.plain_step,
        )
        self.optimizer_step = self.hooks.timed(way, f"{name}.optimizer_step")
        if self.hooks.profiler is not None:  # which sees these parts by Trainer's names
            zero_grad = self.own_zero or (lambda epoch, batch_idx, optimizer: optimizer.zero_grad())
            self.own_zero = self.hooks.timed(zero_grad, f"{name}.optimizer_zero_grad")
        self.train = self.hooks.timed(self, "run_training_batch")
        if run.trained.hands_iterator:
            self.train = run.data.handing_over(self.train)

    def preparations(self) -> Iterator[Callable[[Optimizer], Any]]:
        """What is done with the gradients before the optimizer steps, in this order: weights, the hook, clipping."""
        if self.weights is not None:
            yield self.weights.divide
        if self.heard:
            yield partial(self.hooks.call, "on_before_optimizer_step")
        value, algorithm = self.run.config.gradient_clip_val, self.run.config.gradient_clip_algorithm
        if self.own_clip is not None:
            own = self.hooks.timed(self.own_clip, f"[LightningModule]{type(self.owner).__name__}.{OWN[-1]}")
            yield partial(own, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        elif value:
            yield partial(clip_gradients, self.fabric.strategy.precision, value=value, algorithm=algorithm)

    def __call__(self, batch: Any, batch_idx: int, last_of_window: bool) -> Any:
        """Train on one batch; returns what ``on_train_batch_end`` gets as outputs."""
        self._batch = (batch, batch_idx) if self.takes_idx else (batch,)
        self._batch_idx = batch_idx
        if last_of_window:
            self.optimizer_step()
            self.run.at.stepped()
        elif self.run.steps.wrapped is None:
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
        loss = output if isinstance(output, Tensor) else self._loss_in(output)
        if loss is not None:
            if not loss.requires_grad:
                raise Misuse(
                    f"training_step returned a loss without gradient at batch {self._batch_idx}: expected a tensor computed"
                    " from the model's parameters; is it detached, computed under torch.no_grad, or is everything frozen?"
                )
            if self.keeps:
                self._keep(output, loss)
            if window > 1 and self.weights is None:
                loss = loss / window
            elif window > 1:
                loss = self.weights(loss, self._batch[0], begins=self._batch_idx % window == 0)
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
        return loss.detach() if self.needs_closure else None

    @property
    def skips_backward(self) -> bool:
        """Whether only the step runs, as StochasticWeightAveraging wants it for BatchNorm's statistics."""
        return "closure" in vars(self)

    @skips_backward.setter
    def skips_backward(self, skips: bool) -> None:
        vars(self).pop("closure", None)
        if skips:  # in the place of the usual one, which is spared the question
            vars(self)["closure"] = self._forward_only

    def _forward_only(self) -> Tensor | None:
        output = self.step(*self._batch)
        loss = output if isinstance(output, Tensor) else self._loss_in(output)
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

    def _loss_in(self, output: Any) -> Tensor | None:
        """The loss in what a step returned when that is no tensor; None to skip the batch."""
        if output is None:
            if not self.lenient:
                raise Misuse("training_step returned None: expected the loss, a tensor; write return loss at its end")
            if self.run.fabric.world_size > 1:
                raise RuntimeError(
                    "Skipping the `training_step` by returning None in distributed training is not supported. It is"
                    " recommended that you rewrite your training logic to avoid having to skip the step in the first place."
                )
            self.run.said.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return None
        loss = output
        if isinstance(output, Mapping):
            loss = output.get("loss")
            if loss is None:
                raise Misuse(
                    "In automatic optimization, when `training_step` returns a dict, the 'loss' key needs to be present;"
                    f" found the keys {sorted(map(str, output))}: write return {{'loss': loss, ...}}"
                )
        elif isinstance(output, tuple) and len(output) == 2 and not self.lenient:
            loss = output[0]
        if not isinstance(loss, Tensor):
            raise MisuseOfType(
                "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step will be"
                f" skipped); it returned a {type(loss).__name__}: write return loss"
            )
        return loss

    def _keep(self, output: Any, loss: Tensor) -> None:
        """Keep the loss, and what was returned with it, for hooks and history; hooks get it divided by the window."""
        run, value = self.run, loss.detach()
        if output is loss:
            run.history.train.add({"train_loss": value}, run.log.size_of_batch(), run.at.total_batches - 1)
        else:
            run.log.note_returned(output, value)
        if run.at.window > 1:
            value = value / run.at.window
        self._outputs = {**output, "loss": value} if isinstance(output, dict) else {"loss": value}

    def plain_step(self) -> None:
        """The ordinary case: an optimizer that needs no closure."""
        self.closure()
        for prepare in self.before_step:
            prepare(self.optimizer)
        if self.is_plain:
            self.optimizer.step()
        else:
            self.fabric.strategy.optimizer_step(self.optimizer)

    def closed_step(self) -> None:
        """The optimizer, or the module's own ``optimizer_step``, calls the closure."""
        self._called = False
        closure = torch.enable_grad()(self._noted_closure)
        if self.own_step is None:
            self.step_with(self.optimizer, closure)
        else:
            self.own_step(self.run.at.current_epoch, self._batch_idx, self.wrapped_optimizers[0], closure)
        if not self._called:  # nothing was trained on
            raise Misuse(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step` hook? It"
                " could also happen because the `optimizer.step(optimizer_closure)` call did not execute it internally: write"
                " optimizer.step(closure=optimizer_closure), and loss = closure() in an optimizer of your own"
            )

    def _noted_closure(self) -> Tensor | None:
        self._called = True
        return self.closure()

    def step_with(self, optimizer: Optimizer, closure: Callable | None, **arguments: Any) -> Any:
        """What ``optimizer.step(closure)`` does when a module calls it from its own ``optimizer_step``."""
        closure = closure or (lambda: None)
        if self.scaler is not None:
            return self.scaled_step(optimizer, closure, **arguments)

        def closure_and_clip() -> Any:
            result = closure()
            for prepare in self.before_step:
                prepare(optimizer)
            return result

        return self.fabric.strategy.optimizer_step(optimizer, closure=closure_and_clip, **arguments)

    def scaled_step(self, optimizer: Optimizer, closure: Callable, **arguments: Any) -> Any:
        """With a GradScaler: torch takes no closure here, and gradients are unscaled before anyone looks at them."""
        result = closure()
        skipped = result is None and self.run.trained.is_automatic
        handles_unscaling = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's fused optimizers
        if not skipped and not handles_unscaling:
            self.scaler.unscale_(optimizer)
        for prepare in self.before_step:
            prepare(optimizer)
        if skipped:
            return result
        output = self.scaler.step(optimizer, **arguments)  # skips the step where gradients are not finite
        self.scaler.update()
        return output

    def waiting(self) -> list[Optimizer]:
        """The optimizers whose gradients wait for another batch, where a checkpoint is saved: in the middle of a window.

        After an error the run goes on behind the last whole one.
        """
        run, at = self.run, self.run.at
        epoch = at.epochs_done - at.between_epochs  # that ends here, or has just ended
        # behind it Lightning's StochasticWeightAveraging goes forward only, to renew BatchNorm's statistics, and then steps
        is_left = (at.between_epochs or at.is_last_of_epoch) and any(
            callback.swa_end == epoch and callback.pl_module_contains_batch_norm(run.trained.net)
            for callback in self.hooks.callbacks
            if is_a(callback, "StochasticWeightAveraging")
        )
        return run.optimizing.optimizers if (at.accumulates or is_left) and not run.failure.has_come else []


def clip_gradients(precision: Precision, optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
    """Limit the gradients of an optimizer's parameters: all together ("norm", the default) or each ("value")."""
    if not value or value <= 0:
        return
    if isinstance(precision, MixedPrecision) and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise RuntimeError(
            f"The current optimizer, {type(optimizer).__qualname__}, does not allow for gradient clipping because it"
            " performs unscaling of gradients internally. HINT: Are you using a 'fused' optimizer?"
        )
    parameters = precision.main_params(optimizer)
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)
