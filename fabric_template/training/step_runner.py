"""The steps of a run with precision, strategy and compilation around them.

Plain Fabric runs ``model.training_step`` on one device outside of its precision: ``bf16-mixed`` trains
in float32 silently. Here every step goes through the same door.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.strategies import no_gradient_sync, shard_network, wrap_step


class _CallStep(nn.Module):
    """The module that the strategy wraps: its forward calls any step of the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class StepRunner:
    """Prepares the network for its device and strategy, and calls steps on it.

    Args:
        fabric: Gives device, precision and strategy.
        source: The object whose methods are the steps.
        network: The module that holds the parameters.
        compile: The option of this name.
    """

    def __init__(
        self, fabric: Fabric, source: Any, network: nn.Module, compile: Any = False
    ) -> None:
        self.fabric, self.source, self.network = fabric, source, network
        self.precision = fabric.strategy.precision
        self.is_plain = (
            type(fabric.strategy) is SingleDeviceStrategy and type(self.precision) is Precision
        )
        self.is_model_parallel = isinstance(fabric.strategy, ModelParallelStrategy)
        self.wrapped: Any = None
        self._compile_options = _compile_options(compile)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The wrapper that reduces gradients over the processes, if there is one."""
        return self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else None

    @property
    def converts_dtype(self) -> bool:
        """Return whether the precision changes the dtype of parameters and inputs."""
        name = str(self.precision.precision)
        return name.endswith("-true") and name != "32-true"

    def convert_network(self) -> None:
        """Give the network its precision's dtype, before weights are loaded into it."""
        if self.converts_dtype:
            self.precision.convert_module(self.network)

    def setup(self, is_training: bool) -> None:
        """Move the network to its device, and shard or wrap it for the strategy if it is trained."""
        self.convert_network()
        if self.is_model_parallel:
            shard_network(self.fabric, self.network, type(self.source).__name__)
            return
        has_parameters = any(parameter.requires_grad for parameter in self.network.parameters())
        self.fabric.to_device(self.network)
        is_alone = isinstance(self.fabric.strategy, SingleDeviceStrategy)
        if is_training and has_parameters and not is_alone:
            self.wrapped = self.fabric.strategy.setup_module(_CallStep(self.network))
        for module in self.network.modules():
            # Metrics and LightningModules keep their device and dtype in attributes of their own.
            if type(module).to is not nn.Module.to:
                module.to(self.fabric.device)
                if self.converts_dtype:
                    self.precision.convert_module(module)

    def get(self, name: str, method: Callable) -> Callable:
        """Return a step with everything around it that this run needs."""
        if self._compile_options is not None:
            method = torch.compile(method, **self._compile_options)
        if self.is_model_parallel:
            method = wrap_step(self.network, method)
        if self.wrapped is not None:
            is_manual = not getattr(self.source, "automatic_optimization", True)
            if name == "training_step" and is_manual and self.ddp is not None:
                method = partial(_call_manually, self.ddp, self.wrapped, method)
            else:
                method = partial(_call_wrapped, self.wrapped, method)
        context = self.precision_context()
        return method if context is None else _inside(context, method)

    def precision_context(self) -> Callable[[], AbstractContextManager] | None:
        """Return what makes the context of a step, or None where the precision needs none."""
        if isinstance(self.precision, MixedPrecision):
            is_bfloat16 = self.precision.precision == "bf16-mixed"
            dtype = torch.bfloat16 if is_bfloat16 else torch.float16
            # Trainer switches the cache of casts off, so a weight that is used twice is cast twice.
            return partial(torch.autocast, self.precision.device, dtype=dtype, cache_enabled=False)
        return None if self.precision.precision == "32-true" else self.precision.forward_context

    def no_backward_sync(self, is_enabled: bool = True) -> AbstractContextManager:
        """Return a context in which gradients are not reduced over the processes."""
        if self.is_model_parallel and is_enabled:
            return no_gradient_sync(self.network)
        return self.ddp.no_sync() if self.ddp is not None and is_enabled else nullcontext()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients, scaled where the precision scales."""
        if self.is_plain:
            loss.backward(*args, **kwargs)
        else:
            self.fabric.strategy.backward(loss, None, *args, **kwargs)


def _compile_options(compile: Any) -> dict[str, Any] | None:
    if compile is False:
        return None
    if isinstance(compile, dict):
        return compile
    return {} if compile is True else {"mode": compile}


def _call_wrapped(wrapped: Callable, method: Callable, *args: Any, **kwargs: Any) -> Any:
    return wrapped(partial(method, *args, **kwargs))


def _call_manually(
    ddp: DistributedDataParallel, wrapped: Callable, method: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Call a step that runs its own backward: DDP prepares for each backward, not for one at the end."""

    def step() -> Any:
        output = method(*args, **kwargs)
        ddp.require_backward_grad_sync = False
        return output

    try:
        return wrapped(step)
    finally:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True


def _inside(context: Callable[[], AbstractContextManager], method: Callable) -> Callable:
    def step(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return step
