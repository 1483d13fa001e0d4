"""From one batch to the optimizer step: forward, backward, clipping, accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..distributed.strategies import clip_grad_norm
from ..errors import ConfigurationError, ConfigurationTypeError
from ..lightning_compat.private import set_step_callback
from .hooks import overridden
from .module_adapter import takes_batch_idx, takes_iterator

if TYPE_CHECKING:
    from .run_state import RunState

_BACKWARD_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward")


def is_step_due(run: RunState) -> bool:
    """Return whether the optimizer steps after the current batch.

    This is the one place that decides when an accumulation window ends. Every N-th batch ends one,
    and the last batch of an epoch, as in Trainer.
    """
    is_full = run.progress.batches_done % run.accumulate_grad_batches == 0
    return is_full or run.progress.is_epoch_complete


class AutomaticOptimization:
    """One batch of automatic optimization: the loop steps the optimizer.

    Hooks fire in Trainer's order::

        training_step
        on_before_zero_grad, zero_grad              # first batch of an accumulation window
        on_before_backward, backward, on_after_backward
        on_before_optimizer_step, clipping, step    # last batch of an accumulation window

    Attributes:
        is_accumulating: Whether gradients wait for more batches.
        skip_backward: Set by StochasticWeightAveraging, which updates the statistics of BatchNorm by
            forward passes alone.
    """

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.is_accumulating = False
        self.skip_backward = False
        self._outputs: dict[str, Any] = {}
        self._arguments: tuple = ()
        self._batch_idx = 0
        self._last_loss: Tensor | None = None
        self.setup()

    def setup(self) -> None:
        """Look up what each batch needs. Called again when callbacks or optimizers change."""
        run, hooks = self.run, self.run.hooks
        step = hooks.source.training_step
        name = type(hooks.source).__name__
        strategy = type(run.fabric.strategy).__name__
        self._step = run.make_step("training_step", step)
        self._takes_batch_idx = takes_batch_idx(step) and not takes_iterator(step)
        self._optimizer = run.optimizers[0]
        self._scaler = getattr(run.fabric.strategy.precision, "scaler", None)
        self._has_backward_hooks = any(map(hooks.is_used, _BACKWARD_HOOKS))
        self._keeps_outputs = hooks.is_used("on_train_batch_end")
        self._own_backward = self._own_method("backward")
        self._own_zero_grad = self._own_method("optimizer_zero_grad")
        # Measured as _take_step below.
        own_step = overridden(hooks.source, "optimizer_step")
        self._own_step = None if own_step is None else hooks.inside("optimizer_step", own_step)
        self._before_step = prepare_step_functions(run)
        self._backward = hooks.with_profiler(f"[Strategy]{strategy}.backward", self._run_backward)
        self._take_step = hooks.with_profiler(
            f"[LightningModule]{name}.optimizer_step",
            self._step_with_closure if self._needs_closure() else self._step_plainly,
        )
        if self._scaler is not None and isinstance(self._optimizer, LBFGS):
            raise ConfigurationError("AMP and the LBFGS optimizer are not compatible.")
        unscales_itself = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        if self._scaler is not None and unscales_itself and run.config.gradient_clip_val:
            raise RuntimeError(
                f"The current optimizer, {type(self._optimizer).__qualname__}, does not allow for gradient"
                " clipping because it performs unscaling of gradients internally. HINT: Are you using a"
                " 'fused' optimizer?"
            )

    def _own_method(self, name: str) -> Callable | None:
        method = self.run.hooks.module_method(name)
        return None if method is None else self.run.hooks.inside(name, method)

    def _needs_closure(self) -> bool:
        """Return whether ``optimizer.step`` needs a closure.

        torch's own optimizers, but LBFGS, run the closure once before they step. Without it they
        compute the same bits for less.
        """
        optimizer = self._optimizer
        is_simple = type(optimizer).__module__.startswith("torch.optim.")
        if isinstance(optimizer, LBFGS) or self._scaler is not None:
            return True
        return self._own_step is not None or not is_simple

    def end_training(self) -> None:
        """Free the graph of the last loss."""
        self._last_loss = None

    def train_batch(self, batch: Any, batch_idx: int) -> Any:
        """Train on one batch. Returns what ``on_train_batch_end`` gets as its outputs."""
        self._arguments = (batch, batch_idx) if self._takes_batch_idx else (batch,)
        self._batch_idx = batch_idx
        self.is_accumulating = not is_step_due(self.run)
        if self.is_accumulating:
            with self.run.steps.no_backward_sync():
                self._forward_backward()
        else:
            self._take_step()
            self.run.progress.global_step += 1
            self.run.progress.optimizer_steps_in_epoch += 1
        outputs, self._outputs, self._arguments = self._outputs, {}, ()
        return outputs

    def _forward_backward(self) -> Tensor | None:
        """Run the step and backward. Returns the loss, or None if the step skipped the batch."""
        output = self._step(*self._arguments)
        loss = self._loss_of(output)
        if loss is not None:
            self._keep(output, loss)
            if self.run.accumulate_grad_batches > 1:
                loss = loss / self.run.accumulate_grad_batches
        if self.skip_backward:
            return loss
        # The first batch of an accumulation window, also where the batch that ended the last one was None.
        if self._batch_idx % self.run.accumulate_grad_batches == 0:
            self._zero_grad()
        if loss is None:
            return None
        self._backward(loss)
        return loss

    def _loss_of(self, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor):
            output = find_loss(output, self.run)
        if output is not None and not output.requires_grad and not self.skip_backward:
            raise ConfigurationError(
                f"training_step: got a loss without gradient at batch {self._batch_idx}, expected a"
                " tensor computed from the model's parameters. Remove detach(), no_grad() or"
                " requires_grad=False."
            )
        return output

    def _keep(self, output: Any, loss: Tensor) -> None:
        """Keep what the step returned for the history and for ``on_train_batch_end``."""
        self.run.history.add_train_output(output, loss)
        if self._keeps_outputs:
            value = loss.detach()
            if self.run.accumulate_grad_batches > 1:
                value = value / self.run.accumulate_grad_batches
            self._outputs = (
                {**output, "loss": value} if isinstance(output, Mapping) else {"loss": value}
            )

    def _zero_grad(self) -> None:
        self.run.hooks.call("on_before_zero_grad", self._optimizer)
        if self._own_zero_grad is None:
            self._optimizer.zero_grad()
        else:
            epoch = self.run.progress.epochs_done
            self._own_zero_grad(epoch, self._batch_idx, self._optimizer)

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        hooks = self.run.hooks
        if self._has_backward_hooks:
            hooks.call("on_before_backward", loss)
        if self._own_backward is None:
            self.run.steps.backward(loss, *args, **kwargs)
        else:
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            self._own_backward(scaled, *args, **kwargs)
        if self._has_backward_hooks:
            hooks.call("on_after_backward")

    def _step_plainly(self) -> None:
        """Run the step, backward and clipping, then the optimizer."""
        loss = self._forward_backward()
        for prepare in self._before_step:
            prepare(self._optimizer)
        if self.run.steps.is_plain:
            self._optimizer.step()
        else:
            self.run.fabric.strategy.optimizer_step(self._optimizer)
        # Keep the graph alive until the next forward, as a hand-written loop does. Freeing it here
        # makes autograd create its node of each parameter again, and slows the optimizer.
        # What keeps its graph by itself would double its memory.
        self._last_loss = loss if self._own_backward is None else None

    def _step_with_closure(self) -> None:
        """Let the optimizer, or the module's ``optimizer_step``, call the closure."""
        was_called = False

        @torch.enable_grad()
        def closure() -> Any:
            nonlocal was_called
            was_called = True
            loss = self._forward_backward()
            return None if loss is None else loss.detach()

        if self._own_step is None:
            self.optimizer_step(self._optimizer, closure)
        else:
            wrapped = self.run.loop.strategy.lightning_optimizers[0]
            self._own_step(self.run.progress.epochs_done, self._batch_idx, wrapped, closure)
        if not was_called:
            raise ConfigurationError(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your"
                " `optimizer_step` hook? It could also happen because the"
                " `optimizer.step(optimizer_closure)` call did not execute it internally."
            )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable, **kwargs: Any) -> Any:
        """Step an optimizer with its closure, the hooks before it and the gradient scaler."""
        return step_with_closure(self.run, optimizer, closure, self._before_step, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward with its hooks, for ``manual_backward``."""
        self._run_backward(loss, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients of an accumulation window that has not ended."""
        # A checkpoint of the middle of a step resumes at the start of its accumulation window.
        is_accumulating = self.is_accumulating and self.run.progress.phase != "step"
        gradients = self._waiting_gradients() if is_accumulating else {}
        return {"is_accumulating": is_accumulating, "gradients": gradients}

    def _waiting_gradients(self) -> dict[str, Tensor]:
        if self.run.steps.is_model_parallel:
            # FSDP holds them unsharded, where nobody reads them.
            self.run.warn_once(
                "A checkpoint in an accumulation window lacks the gradients of a sharded model. Write"
                " val_check_interval= with a multiple of accumulate_grad_batches."
            )
            return {}
        parameters = self.run.network.named_parameters()
        return {name: p.grad.clone() for name, p in parameters if p.grad is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_accumulating = state["is_accumulating"]
        gradients = state["gradients"]
        for name, parameter in self.run.network.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)


class ManualOptimization(AutomaticOptimization):
    """One batch of manual optimization: ``training_step`` steps its optimizers itself."""

    def setup(self) -> None:
        run, hooks = self.run, self.run.hooks
        # Optimizers that have stepped since the last backward. The gradients of the others may wait.
        self.stepped: set[int] = set()
        step = hooks.source.training_step
        self._step = run.make_step("training_step", step)
        self._takes_batch_idx = takes_batch_idx(step) and not takes_iterator(step)
        self._scaler = getattr(run.fabric.strategy.precision, "scaler", None)
        self._has_backward_hooks = any(map(hooks.is_used, _BACKWARD_HOOKS))
        self._own_backward = self._own_method("backward")
        self._before_step = [partial(hooks.call, "on_before_optimizer_step")]
        # DDP adds gradients over the processes only if it was prepared for this backward.
        self._is_prepared = run.steps.ddp is None or run.is_lightning_module

    @contextmanager
    def counting_plain_steps(self) -> Iterator[None]:
        """Count steps of the optimizers themselves, which step functions and plain objects have."""
        handles = []
        for index, optimizer in enumerate(self.run.optimizers):
            handles.append(optimizer.register_step_post_hook(partial(self._count_step, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def train_batch(self, batch: Any, batch_idx: int) -> Any:
        """Run the step. Returns what ``on_train_batch_end`` gets as its outputs."""
        if self.run.is_lightning_module:
            # A module may have set its own callbacks in the batch before.
            for index, optimizer in enumerate(self.run.loop.strategy.lightning_optimizers):
                set_step_callback(optimizer, partial(self._count_step, index))
        else:
            self.stepped.clear()
        output = self._step(batch, batch_idx) if self._takes_batch_idx else self._step(batch)
        if not isinstance(output, Tensor | Mapping | None):
            raise ConfigurationTypeError(
                "In manual optimization, `training_step` must either return a Tensor or have no"
                f" return. training_step: got a {type(output).__name__}."
            )
        self.run.progress.optimizer_steps_in_epoch = self.run.progress.batches_done
        if output is None:
            return {}
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        if isinstance(loss := outputs.get("loss"), Tensor):
            if self.run.progress.batches_done == 1 and not self.run.is_lightning_module:
                self._check_gradients(loss)
            outputs["loss"] = loss.detach()
            self.run.history.add_train_output(output, outputs["loss"])
        return outputs

    def _check_gradients(self, loss: Tensor) -> None:
        """Refuse a step function that leaves its optimizers to the loop: nothing would be trained."""
        has_gradients = any(p.grad is not None for p in self.run.network.parameters())
        if loss.requires_grad and not self.stepped and not has_gradients:
            raise ConfigurationError(
                "training_step: got several optimizers and used none of them, expected zero_grad(),"
                " loss.backward() and step() of each. Give one optimizer with all parameters to let"
                " the loop minimize the loss."
            )

    def _count_step(self, index: int, *args: Any) -> None:
        """Count a step that ``training_step`` takes. Steps of other hooks do not count."""
        if not self._is_prepared:
            raise ConfigurationError(
                "training_step: got loss.backward() in a run of several processes, expected"
                " loop.backward(loss), which adds their gradients."
            )
        self.stepped.add(index)
        if self.run.hooks.current == "training_step":
            self.run.progress.global_step += 1

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward with its hooks, for ``manual_backward``."""
        if (ddp := self.run.steps.ddp) is not None:
            from lightning.pytorch.overrides.distributed import prepare_for_backward

            prepare_for_backward(ddp, loss)
            self._is_prepared = True
        self._run_backward(loss, *args, **kwargs)
        self.stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that no optimizer has used yet."""
        optimizers = [o for index, o in enumerate(self.run.optimizers) if index not in self.stepped]
        parameters = {
            id(p) for o in optimizers for group in o.param_groups for p in group["params"]
        }
        names = {name for name, p in self.run.network.named_parameters() if id(p) in parameters}
        gradients = {n: g for n, g in self._waiting_gradients().items() if n in names}
        return {"is_accumulating": False, "gradients": gradients}


def prepare_step_functions(run: RunState) -> list[Callable[[Optimizer], Any]]:
    """Return what is done with the gradients before the optimizer steps, in order."""
    hooks, config = run.hooks, run.config
    functions: list[Callable[[Optimizer], Any]] = []
    if hooks.is_used("on_before_optimizer_step"):
        functions.append(partial(hooks.call, "on_before_optimizer_step"))
    value, algorithm = config.gradient_clip_val, config.gradient_clip_algorithm
    own_clipping = hooks.module_method("configure_gradient_clipping")
    if own_clipping is not None:
        own = hooks.inside("configure_gradient_clipping", own_clipping)
        if algorithm is not None:
            algorithm = GradClipAlgorithmType(algorithm.lower())
        functions.append(partial(own, gradient_clip_val=value, gradient_clip_algorithm=algorithm))
    elif value:
        functions.append(partial(clip_gradients, run, value=value, algorithm=algorithm))
    return functions


def clip_gradients(
    run: RunState, optimizer: Optimizer, value: float, algorithm: str | None
) -> None:
    """Limit the gradients of an optimizer's parameters, by their common norm or each by value."""
    if not value or value <= 0:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if str(algorithm or "norm").lower() == "value":
        torch.nn.utils.clip_grad_value_(parameters, clip_value=value)
    elif run.steps.is_model_parallel:
        clip_grad_norm(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)


def step_with_closure(
    run: RunState,
    optimizer: Optimizer,
    closure: Callable,
    before_step: list[Callable[[Optimizer], Any]],
    **kwargs: Any,
) -> Any:
    """Run the closure, prepare the gradients and step the optimizer.

    With a gradient scaler the closure runs first, because gradients must be unscaled before anybody
    reads them. A step whose gradients are not finite is skipped by the scaler.
    """
    scaler = getattr(run.fabric.strategy.precision, "scaler", None)
    if scaler is None:

        def closure_and_clip() -> Any:
            result = closure()
            for prepare in before_step:
                prepare(optimizer)
            return result

        return run.fabric.strategy.optimizer_step(optimizer, closure=closure_and_clip, **kwargs)
    result = closure()
    is_skipped = result is None and run.module.automatic_optimization
    if not is_skipped and not getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)
    for prepare in before_step:
        prepare(optimizer)
    if is_skipped:
        return result
    step_output = scaler.step(optimizer, **kwargs)
    scaler.update()
    return step_output


def find_loss(output: Any, run: RunState) -> Tensor | None:
    """Return the loss in what a step returned. None skips the batch."""
    if output is None:
        if not run.is_lightning_module:
            raise ConfigurationError(
                "training_step: got None, expected the loss, a tensor. Write return loss at its end."
            )
        if run.fabric.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not"
                " supported. It is recommended that you rewrite your training logic to avoid having"
                " to skip the step in the first place."
            )
        run.warn_once(
            "`training_step` returned `None`. If this was on purpose, ignore this warning..."
        )
        return None
    loss = output
    if isinstance(output, tuple) and len(output) == 2 and not run.is_lightning_module:
        loss = output[0]
    elif isinstance(output, Mapping):
        loss = output.get("loss")
        if loss is None:
            raise ConfigurationError(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to"
                f" be present. training_step: got the keys {sorted(map(str, output))}."
            )
    if not isinstance(loss, Tensor):
        raise ConfigurationTypeError(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the"
            f" step will be skipped). training_step: got a {type(loss).__name__}. Write return loss."
        )
    return loss
