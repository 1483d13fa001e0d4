"""Train on one batch, from the forward pass to the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..distributed.strategies import gather_tensors
from ..errors import ConfigurationError, ConfigurationTypeError, describe
from ..lightning_compat.private import set_step_callback, wrap_optimizer
from .configure_optimizers import (
    check_parameters,
    make_optimizers,
    move_optimizer_states,
    parse_optimizers,
)
from .first_step_check import FirstStepCheck
from .module_adapter import parameters_of, takes_batch_idx

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from .run import Run


def is_logging_due(run: Run) -> bool:
    """Return whether the values of the current training or evaluation batch should be logged."""
    progress, every = run.progress, run.config.log_every_n_steps
    if not every:
        return False
    # progress.logging_step is incremented after the batch, so add 1 for the current batch.
    is_training = progress.stage in ("train", None)
    count = progress.logging_step + 1 if is_training else progress.eval_batches_done
    return count % every == 0 or run.stop.should_stop or bool(run.config.fast_dev_run)


class Optimization:
    """Holds the optimizers and schedulers, and runs backward passes, clipping and optimizer steps.

    AutomaticOptimization and ManualOptimization are its two subclasses.

    Attributes:
        lightning_optimizers: The optimizers, each wrapped in a LightningOptimizer, whose step()
            handles precision, hooks and counters.
    """

    is_automatic = True
    train_batch: Callable[[Any, int], Any]

    def __init__(self, run: Run) -> None:
        self.run = run
        self.optimizers: list[Optimizer] = []
        self.lightning_optimizers: list[LightningOptimizer] = []
        self.lr_schedulers: list[LRSchedulerConfig] = []
        self.is_backward_skipped = False
        self.kept_loss: Tensor | None = None
        self._outputs: dict[str, Any] = {}

    def configure(self) -> None:
        """Use the optimizers passed to ``fit``, or those that ``configure_optimizers`` returns."""
        run, given = self.run, self.run.plan.optimizer
        if given is None:
            where, returned = "configure_optimizers", run.hooks.call_module("configure_optimizers")
        else:
            where, returned = "optimizer", make_optimizers(given, run.model, run.network)
        has_own_step = run.hooks.is_overridden("lr_scheduler_step")
        is_automatic, is_distributed = run.module.automatic_optimization, run.fabric.world_size > 1
        optimizers, schedulers = parse_optimizers(returned, is_automatic, has_own_step, where)
        self.use(optimizers, schedulers)
        check_parameters(optimizers, self.outside_parameters(), run.model, is_distributed)
        move_optimizer_states(optimizers)

    def use(self, optimizers: list[Optimizer], lr_schedulers: list[LRSchedulerConfig]) -> None:
        """Set the optimizers and schedulers of the run."""
        strategy = self.run.loop.strategy
        self.optimizers, self.lr_schedulers = optimizers, lr_schedulers
        self.lightning_optimizers = [wrap_optimizer(item, strategy) for item in optimizers]

    def start(self) -> AutomaticOptimization | ManualOptimization:
        """Return an AutomaticOptimization or ManualOptimization with the current optimizers."""
        is_automatic = self.run.module.automatic_optimization
        optimization = (AutomaticOptimization if is_automatic else ManualOptimization)(self.run)
        optimization.use(self.optimizers, self.lr_schedulers)
        optimization.setup()
        return optimization

    def outside_parameters(self) -> dict[str, Tensor]:
        """Return the optimizers' parameters that do not belong to the network.

        A key such as "optimizer.0.3" contains the index of the optimizer and the index of the
        parameter.
        """
        found: dict[str, Tensor] = {}
        known = {id(parameter) for parameter in self.run.network.parameters()}
        for index, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group.get("params", ())]
            for position, parameter in enumerate(parameters):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    found[f"optimizer.{index}.{position}"] = parameter
        return found

    def named_parameters(self) -> dict[str, Tensor]:
        """Return all parameters of the network and of the optimizers, keyed by name."""
        return {**dict(self.run.network.named_parameters()), **self.outside_parameters()}

    def release(self) -> None:
        """Free the memory of the last loss, its graph and the outputs of the last step."""
        self.kept_loss, self._outputs = None, {}

    def setup(self) -> None:
        """Look up the methods for the training step, the backward pass and gradient clipping."""
        run, hooks = self.run, self.run.hooks
        step = self.run.module.training_step
        self.call_step = run.make_step("training_step", step)
        if not takes_batch_idx(step):
            call_with_batch = self.call_step
            self.call_step = lambda batch, batch_idx: call_with_batch(batch)
        self._scaler = getattr(run.fabric.strategy.precision, "scaler", None)
        self._module_backward = hooks.module_method("backward")
        self._module_clipping = hooks.module_method("configure_gradient_clipping")
        self._call_backward = self._run_backward
        if self.is_automatic:
            # explain_error reads hooks.current, so set hooks.current to "backward" during the
            # backward pass.
            self._call_backward = hooks.inside("backward", self._run_backward)
        action = f"[Strategy]{type(run.fabric.strategy).__name__}.backward"
        self._profiled_backward = hooks.with_profiler(action, self._backward_with_hooks)

    def skip_backward(self, is_skipped: bool) -> None:
        """Set whether to skip backward passes, for example to update only BatchNorm statistics."""
        self.is_backward_skipped = is_skipped

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, and the hooks before and after it."""
        self._profiled_backward(loss, *args, **kwargs)

    def _backward_with_hooks(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.run.hooks.call("on_before_backward", loss)
        self._call_backward(loss, *args, **kwargs)
        self.run.hooks.call("on_after_backward")

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._module_backward is not None:
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            self._module_backward(scaled, *args, **kwargs)
        elif self.run.steps.needs_no_strategy:
            loss.backward(*args, **kwargs)
        else:
            self.run.fabric.strategy.backward(loss, None, *args, **kwargs)

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Call ``on_before_optimizer_step`` and, in automatic optimization, clip the gradients."""
        self.run.hooks.call("on_before_optimizer_step", optimizer)
        config = self.run.config
        if config.log_grad_norm and is_logging_due(self.run):
            self.run.row.add_step_value("grad_norm", gradient_norm(optimizer))
        if not self.is_automatic:
            return
        value, algorithm = config.gradient_clip_val, config.gradient_clip_algorithm
        if self._module_clipping is not None:
            kind = GradClipAlgorithmType(algorithm.lower()) if algorithm else None
            self._module_clipping(optimizer, gradient_clip_val=value, gradient_clip_algorithm=kind)
        elif value:
            clip_gradients(self._clipped_parameters(optimizer), value, algorithm)

    def _clipped_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return an optimizer's parameters in the order in which their norms are added up.

        The order affects the rounding of the total norm. For a LightningModule, use the order of
        the optimizer, as in Trainer. For other models, use the order of ``model.parameters()``, as
        in a hand-written loop.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.run.is_lightning_module:
            return parameters
        trained = set(parameters)
        ordered: list[Tensor] = [p for p in self.run.network.parameters() if p in trained]
        # A hook may have added parameters that do not belong to the network.
        return ordered if len(ordered) == len(trained) else parameters

    def optimizer_step(self, optimizer: Optimizer, closure: Callable, **kwargs: Any) -> Any:
        """Run the closure, unscale and clip the gradients, and step the optimizer."""
        scaler = self._scaler
        if scaler is None:

            def closure_and_clip() -> Any:
                result = closure()
                self.prepare_step(optimizer)
                return result

            strategy = self.run.fabric.strategy
            return strategy.optimizer_step(optimizer, closure=closure_and_clip, **kwargs)
        result = closure()
        is_skipped = result is None and self.is_automatic
        if not is_skipped and not unscales_itself(optimizer):
            scaler.unscale_(optimizer)
        self.prepare_step(optimizer)
        if is_skipped:
            return result
        # The gradient scaler skips the step if the gradients are not finite.
        step_output = scaler.step(optimizer, **kwargs)
        scaler.update()
        return step_output

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """Return the gradients to save in a checkpoint, keyed by parameter name."""
        return {}

    def _copy_gradients(self, cleared: Collection[int] = ()) -> dict[str, Tensor]:
        """Return copies of the parameters' gradients for a checkpoint.

        Args:
            cleared: The ids of parameters to leave out.
        """
        if self.run.steps.is_model_parallel:
            # FSDP accumulates gradients in private tensors, so a checkpoint cannot contain them.
            self.run.warn_once(
                "A checkpoint saved within an accumulation window does not contain sharded"
                " gradients. To resume exactly, save after an optimizer step."
            )
            return {}
        kept = {name: p for name, p in self.named_parameters().items() if id(p) not in cleared}
        gradients = {name: p.grad for name, p in kept.items() if p.grad is not None}
        # Copy gradients to the CPU, because the GPU may have no memory left.
        return {name: grad.to("cpu", copy=True) for name, grad in gradients.items()}


class AutomaticOptimization(Optimization):
    """Trains on a batch with automatic optimization, in which the loop steps the optimizer.

    After training_step, hooks run in Trainer's order: on_before_zero_grad, on_before_backward,
    on_after_backward and on_before_optimizer_step. The loop clears the gradients on the first batch
    of an accumulation window, and steps the optimizer on the last batch.
    """

    def setup(self) -> None:
        super().setup()
        hooks = self.run.hooks
        self._optimizer = optimizer = self.optimizers[0]
        self._module_zero_grad = hooks.module_method("optimizer_zero_grad")
        # The profiler measures optimizer_step as part of _take_step, so do not measure it twice.
        self._module_optimizer_step = hooks.module_method("optimizer_step", is_profiled=False)
        is_lbfgs = isinstance(optimizer, LBFGS)
        needs_closure = self._module_optimizer_step is not None or self._scaler is not None
        # All of torch's optimizers except LBFGS call the closure once at the start of step().
        # Calling the closure before step() gives the same results and is faster.
        calls_closure_first = type(optimizer).__module__.startswith("torch.optim.") and not is_lbfgs
        is_simple = (calls_closure_first or not takes_closure(optimizer)) and not needs_closure
        step = self._step_without_closure if is_simple else self._step_with_closure
        action = f"[LightningModule]{type(self.run.module).__name__}.optimizer_step"
        self._take_step = hooks.with_profiler(action, step)
        if self._scaler is not None:
            self._check_scaler()
        if self._module_clipping is None:
            self._check_sparse_layers()
        # FirstStepCheck cannot compare the gradients of sharded networks.
        self._first_step_check: FirstStepCheck | None = None
        if not self.run.steps.is_model_parallel:
            self._first_step_check = FirstStepCheck(optimizer, self.run.fabric)

    def _check_scaler(self) -> None:
        """Raise an error if the optimizer does not work with a gradient scaler."""
        optimizer = self._optimizer
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError("AMP and the LBFGS optimizer are not compatible.")
        if self.run.config.gradient_clip_val and unscales_itself(optimizer):
            raise RuntimeError(
                f"The current optimizer, {type(optimizer).__qualname__}, does not allow for"
                " gradient clipping because it performs unscaling of gradients internally. HINT:"
                " Are you using a 'fused' optimizer?"
            )

    def _check_sparse_layers(self) -> None:
        """Raise an error if torch cannot clip the gradients of a layer."""
        clip_val, modules = self.run.config.gradient_clip_val, self.run.network.modules()
        sparse = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        trained = {parameter for parameter in parameters if parameter.requires_grad}
        if clip_val and not trained.isdisjoint(layer.weight for layer in sparse):
            raise ConfigurationError(
                f"gradient_clip_val: got {clip_val} for a layer with sparse=True, whose gradients"
                " torch cannot clip. Write sparse=False, or leave out gradient_clip_val."
            )

    def train_batch(self, batch: Any, batch_idx: int) -> Any:
        """Train on one batch, and return the outputs for ``on_train_batch_end``."""
        run, progress = self.run, self.run.progress
        # An optimizer's closure returns only the loss, so _forward_backward stores the other
        # outputs of training_step in _outputs.
        self._outputs = {}
        if progress.is_window_end:
            self._take_step(batch, batch_idx)
            # Like Trainer, also count steps that a gradient scaler has skipped.
            progress.count_steps()
        else:
            with run.steps.no_backward_sync():
                self._forward_backward(batch, batch_idx)
        return self._outputs

    def _step_without_closure(self, batch: Any, batch_idx: int) -> None:
        loss = self._forward_backward(batch, batch_idx)
        self.prepare_step(self._optimizer)
        if self.run.steps.needs_no_strategy:
            self._optimizer.step()
        else:
            self.run.fabric.strategy.optimizer_step(self._optimizer)
        # Keep the loss until the next step, because the loss keeps autograd's AccumulateGrad nodes
        # alive. The next step saves time by reusing these nodes. An overridden backward() may
        # retain the whole graph, so do not keep the loss of such a module.
        self.kept_loss = loss if self._module_backward is None else None

    def _step_with_closure(self, batch: Any, batch_idx: int) -> None:
        """Step the optimizer with a closure that computes the loss and the gradients."""
        was_called = False

        @torch.enable_grad()
        def closure() -> Any:
            nonlocal was_called
            was_called = True
            loss = self._forward_backward(batch, batch_idx)
            return None if loss is None else loss.detach()

        if self._module_optimizer_step is None:
            self.optimizer_step(self._optimizer, closure)
        else:
            wrapped = self.lightning_optimizers[0]
            self._module_optimizer_step(self.run.progress.epochs_done, batch_idx, wrapped, closure)
        if not was_called:
            raise ConfigurationError(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your"
                " `optimizer_step` hook? It could also happen because the"
                " `optimizer.step(optimizer_closure)` call did not execute it internally."
                f" {type(self._optimizer).__name__}.step: call the closure argument, or define"
                " step(self) without this argument."
            )

    def _forward_backward(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Run ``training_step`` and, if it returns a loss, the backward pass. Return the loss."""
        run, check = self.run, self._first_step_check
        if check is None:
            output = self.call_step(batch, batch_idx)
        else:
            self._first_step_check = None
            output = check.call_step(self.call_step, batch, batch_idx)
        loss = output if isinstance(output, Tensor) else find_loss(run, output)
        if loss is not None:
            if loss.is_leaf or loss._base is not None:
                # Copy a loss that may be a parameter, because the optimizer changes parameters in
                # place.
                loss = loss.clone()
            if not loss.requires_grad and not self.is_backward_skipped:
                raise ConfigurationError(
                    f"training_step: got a loss without a gradient at batch {batch_idx}, expected a"
                    " tensor computed from the model's parameters. Remove detach(), item(),"
                    " no_grad() or requires_grad=False."
                )
            run.row.add_train_output(output, loss)
            if run.progress.accumulate_grad_batches > 1:
                loss = loss / run.progress.accumulate_grad_batches
            if run.hooks.is_used("on_train_batch_end"):
                # As in Trainer, hooks get the loss divided by the number of accumulated batches.
                extras = output if isinstance(output, Mapping) else {}
                self._outputs = {**extras, "loss": loss.detach()}
        if self.is_backward_skipped:
            return loss
        if run.progress.is_window_start:
            self._zero_grad(batch_idx)
        if loss is not None:
            self._profiled_backward(loss)
            if check is not None:
                check.check_gradients()
        return loss

    def _zero_grad(self, batch_idx: int) -> None:
        self.run.hooks.call("on_before_zero_grad", self._optimizer)
        if self._module_zero_grad is not None:
            self._module_zero_grad(self.run.progress.epochs_done, batch_idx, self._optimizer)
        elif has_own_zero_grad(self._optimizer):
            self._optimizer.zero_grad()
        else:
            # Do not call Optimizer.zero_grad(), because its call to record_function() takes 20
            # microseconds.
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def accumulated_gradients(self) -> dict[str, Tensor]:
        progress, optimizer = self.run.progress, self._optimizer
        if progress.phase == "train_batch":
            # A checkpoint saved within a batch need not contain the accumulated gradients, because
            # a resumed run repeats all batches since the last optimizer step.
            return {}
        if not progress.is_window_end:
            return self._copy_gradients()
        if self.run.steps.is_model_parallel:
            return {}
        cleared: set[int] = set()
        # Unless zero_grad() is overridden, do not save the gradients of the optimizer's parameters,
        # because the next batch clears these gradients.
        if self._module_zero_grad is None and not has_own_zero_grad(optimizer):
            cleared = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return self._copy_gradients(cleared)


class ManualOptimization(Optimization):
    """Trains on a batch with manual optimization, in which the user's code steps the optimizers."""

    is_automatic = False

    def setup(self) -> None:
        super().setup()
        # The indices of the optimizers that have stepped since the last backward pass.
        self._stepped_optimizers: set[int] = set()
        # With DDP, a step function must call loop.backward(loss), because in manual optimization
        # loss.backward() does not average gradients.
        self._averages_gradients = self.run.steps.ddp is None or self.run.is_lightning_module
        if self._scaler is not None and not self.run.is_lightning_module:
            raise ConfigurationError(
                "precision: got '16-mixed' for a training step that calls optimizer.step(), but the"
                " optimizers of such a step do not unscale the gradients. Write 'bf16-mixed', or a"
                " LightningModule with automatic_optimization = False."
            )

    def hook_unwrapped_steps(self, stack: ExitStack) -> None:
        """Use torch's hooks to count the steps of optimizers that Fabric does not wrap."""
        for index, optimizer in enumerate(self.optimizers):
            if not isinstance(optimizer, Optimizer):
                raise ConfigurationTypeError(
                    f"optimizer: got {describe(optimizer)} in manual optimization, expected a"
                    " torch.optim.Optimizer. The loop uses its hooks to count optimizer steps."
                )
            handle = optimizer.register_step_pre_hook(self._prepare_unwrapped_step)
            stack.callback(handle.remove)
            handle = optimizer.register_step_post_hook(partial(self._count_step, index))
            stack.callback(handle.remove)

    def _prepare_unwrapped_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # If step() gets a closure, do not call on_before_optimizer_step, because the closure has
        # not computed the gradients yet.
        has_closure = len(args) > 1 or bool(kwargs)
        if self.run.hooks.current == "training_step" and not has_closure:
            self.prepare_step(optimizer)

    def train_batch(self, batch: Any, batch_idx: int) -> Any:
        """Run ``training_step``, and return the outputs for ``on_train_batch_end``."""
        run = self.run
        if run.is_lightning_module:
            # Before every batch, register the callbacks that count optimizer steps, because a hook
            # may have replaced an optimizer.
            for index, optimizer in enumerate(self.lightning_optimizers):
                set_step_callback(optimizer, partial(self._count_step, index))
        else:
            # Forget the optimizer steps of the previous batch. loop.backward(loss) also does this,
            # but a step function may call loss.backward() instead.
            self._stepped_optimizers.clear()
        output = self.call_step(batch, batch_idx)
        if output is None:
            return {}
        if not isinstance(output, Tensor | Mapping):
            raise ConfigurationTypeError(
                "In manual optimization, `training_step` must either return a Tensor or have no"
                f" return. training_step: got a {type(output).__name__}."
            )
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss = outputs.get("loss")
        if isinstance(loss, Tensor):
            if run.progress.batches_done == 1 and not run.is_lightning_module:
                self._check_gradients(loss)
            outputs["loss"] = loss.detach()
        run.row.add_train_output(output, loss if isinstance(loss, Tensor) else None)
        return outputs

    def _check_gradients(self, loss: Tensor) -> None:
        """Raise an error if a step function neither computes gradients nor uses an optimizer."""
        has_gradients = any(p.grad is not None for p in self.run.network.parameters())
        if loss.requires_grad and not self._stepped_optimizers and not has_gradients:
            raise ConfigurationError(
                "training_step: fit got several optimizers, but the step used none of them. With"
                " several optimizers, the step itself must call loss.backward(), and must call"
                " zero_grad() and step() on each optimizer. To let the loop make these calls, pass"
                " one optimizer with all parameters."
            )

    def _count_step(self, index: int, *args: Any) -> None:
        """Count an optimizer step, but only if ``training_step`` called ``optimizer.step()``."""
        if not self._averages_gradients:
            raise ConfigurationError(
                "training_step: got loss.backward() in a run with several processes, expected"
                " loop.backward(loss), which averages the gradients."
            )
        self._stepped_optimizers.add(index)
        if self.run.hooks.current == "training_step":
            self.run.progress.count_steps()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, and average the gradients over the processes."""
        if (ddp := self.run.steps.ddp) is not None:
            prepare_for_backward(ddp, loss)
            self._averages_gradients = True
        super().backward(loss, *args, **kwargs)
        self._stepped_optimizers.clear()

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """Return all gradients as copies, because the user's code decides when to clear them."""
        are_used = len(self._stepped_optimizers) == len(self.optimizers)
        return {} if are_used and self.run.steps.is_model_parallel else self._copy_gradients()


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.zero_grad`` differs from torch's Optimizer.zero_grad."""
    return getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad


def unscales_itself(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` unscales the gradients itself, as fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def clip_gradients(parameters: list[Tensor], value: float, algorithm: str | None) -> None:
    if not value or value <= 0:
        return
    if str(algorithm).lower() == "value":
        torch.nn.utils.clip_grad_value_(parameters, clip_value=value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` accepts a closure, as it does in torch's optimizers."""
    parameters = parameters_of(optimizer.step)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or "closure" in parameters


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """Return the total norm of an optimizer's gradients.

    All processes must call this function, because sharded gradients are combined across processes.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norms = [norm_of(p.grad) for p in parameters if p.grad is not None]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def norm_of(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, which may be sparse, complex or sharded."""
    if gradient.layout is torch.sparse_coo:
        # A sparse gradient may repeat an index. coalesce() sums the values of each index.
        gradient = gradient.coalesce().values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    return gather_tensors(torch.linalg.vector_norm(gradient)).float()


def find_loss(run: Run, output: Any) -> Tensor | None:
    """Return the loss in ``output``, or None if training_step returned None to skip the batch."""
    if isinstance(output, tuple) and hasattr(output, "_asdict") and not run.is_lightning_module:
        output = output._asdict()
    loss = output
    if isinstance(output, tuple) and len(output) == 2 and not run.is_lightning_module:
        loss = output[0]
    elif isinstance(output, Mapping):
        loss = output.get("loss")
        if loss is None:
            raise ConfigurationError(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key"
                f" needs to be present. training_step: got the keys {sorted(map(str, output))}."
            )
    if isinstance(loss, Tensor):
        return loss
    if loss is not None or not run.is_lightning_module:
        lightnings = (
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None"
            " (where the step will be skipped). "
        )
        raise ConfigurationTypeError(
            f"{lightnings if run.is_lightning_module else ''}training_step: got {describe(loss)},"
            " expected the loss as a tensor. Write `return loss` at the end of the step."
        )
    if run.fabric.world_size > 1:
        raise RuntimeError(
            "Skipping the `training_step` by returning None in distributed training is not"
            " supported."
        )
    run.warn_once("`training_step` returned `None`. If this was on purpose, ignore this warning...")
    return None
