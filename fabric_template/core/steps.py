"""Steps: StepModule, the one door for precision, DDP and compile.

Plain Fabric runs ``model.training_step`` on one device around its own precision: ``bf16-mixed`` silently trains in
float32. Here every step of every kind goes through the same door.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .net import Modes, with_a_note

if TYPE_CHECKING:
    from lightning.fabric.wrappers import _FabricModule

    from .buckets import Buckets
    from .compiling import Compiling
    from .sharded import Sharded


class StepModule(nn.Module):
    """What is handed to ``fabric.setup`` in the owner's place: its forward runs any step.

    Fabric's wrapper converts the tensors it sees and registers LightningModules as callbacks. It sees neither here: the
    arguments travel inside an object of their own, and the owner is no child.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run a step with its arguments filled in."""
        return call()


class Steps:
    """The steps of one run, each ready to be called."""

    def __init__(self, fabric: Fabric, owner: Any, net: nn.Module, compiling: Compiling | None = None) -> None:
        self.fabric, self.owner, self.net, self.compiling = fabric, owner, net, compiling
        self.wrapped: _FabricModule | None = None  # by the strategy (DDP); None on a single device
        self.buckets: Buckets | None = None  # of DDP
        self.sharded: Sharded | None = None  # a net whose weights lie in parts
        self.syncs = False  # whether a backward sums gradients over the ranks
        self.precision = fabric.strategy.precision
        self.modes: Modes | None = None  # in which an evaluation that is on has found the modules

    def convert_net(self) -> None:
        """Give the net its precision's dtype: before it takes weights, which a narrower one would round."""
        if self._converts:
            self.precision.convert_module(self.net)

    def setup(self, training: bool) -> None:
        """Move the net to its device; wrap it for the strategy when it is going to be trained, or share it out."""
        if is_shared_out(self.fabric):
            from .sharded import Sharded

            self.sharded = Sharded(self.fabric, self.net, self.owner)
            self.sharded.set_up()
        elif training and any(p.requires_grad for p in self.net.parameters()):
            wrapped = self.fabric.setup(StepModule(self.net))
            if not isinstance(self.fabric.strategy, SingleDeviceStrategy):
                from .buckets import Buckets

                self.wrapped, self.buckets = wrapped, Buckets(wrapped, self.fabric.world_size)
        else:
            self.fabric.to_device(self.precision.convert_module(self.net))
        self.syncs = self.wrapped is not None or self.sharded is not None
        for part in with_a_note(self.net):
            part.to(self.fabric.device)
            if self._converts:
                # as Trainer: double() leaves a torchmetric's sums as they are, to() would not
                self.precision.convert_module(part)

    @property
    def _converts(self) -> bool:
        is_own = not type(self.precision).__module__.startswith("lightning.")  # somebody's, who knows what it converts
        return is_own or (str(self.precision.precision).endswith("-true") and self.precision.precision != "32-true")

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """What sums gradients over the ranks, if it is DDP."""
        return self.buckets.ddp if self.buckets is not None else None

    @property
    def talks(self) -> bool:
        """Whether each step, in a validation too, waits for the other ranks: for weights, or rank zero's buffers in DDP."""
        return self.sharded is not None or (self.ddp is not None and self.ddp.will_sync_module_buffers())

    def get(self, name: str) -> Callable:
        """The step of this name with precision, strategy and compilation around it."""
        method = getattr(self.owner, name)
        if self.compiling is not None:
            method = self.compiling.step(name, method)
        if self.wrapped is not None:
            by_hand = name == "training_step" and not getattr(self.owner, "automatic_optimization", True)
            through = partial(_by_hand, self.ddp) if by_hand and self.ddp is not None else _through
            method = partial(through, self.wrapped, method)
        elif self.sharded is not None:
            method = self.sharded.step(method)
        context = self.context()
        return method if context is None else _inside(context, method)

    def context(self) -> Callable[[], Any] | None:
        """The precision's context manager for a step; None where there is nothing to do."""
        precision = self.precision
        if isinstance(precision, MixedPrecision):
            dtype = torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
            # Trainer's own setting, and so its bits: weights used twice in a step are cast twice
            return lambda: torch.autocast(precision.device, dtype=dtype, cache_enabled=False)
        return None if precision.precision == "32-true" else precision.forward_context

    def convert(self) -> Callable[[Any], Any] | None:
        """What turns a batch into the precision's dtype; None where it stays as it is."""
        return self.precision.convert_input if self._converts else None

    def no_sync(self) -> Any:
        """A context in which gradients are not averaged over the ranks: all but the last batch of a window."""
        if self.sharded is not None:
            return self.sharded.no_sync()
        return nullcontext() if self.wrapped is None else self.fabric.no_backward_sync(self.wrapped)


def is_shared_out(fabric: Fabric) -> bool:
    """Whether the strategy gives each rank its part of the weights."""
    return isinstance(fabric.strategy, ModelParallelStrategy)


def is_plain(fabric: Fabric) -> bool:
    """One device in float32: Fabric's backward and its strategy's step come to ``loss.backward()`` and ``step()``."""
    return type(fabric.strategy) is SingleDeviceStrategy and type(fabric.strategy.precision) is Precision


def _through(wrapped: Callable, method: Callable, *args: Any) -> Any:
    """The call with its arguments, opaque to wrappers that would convert or scatter them."""
    return wrapped(partial(method, *args))


def _by_hand(ddp: DistributedDataParallel, wrapped: nn.Module, method: Callable, *args: Any) -> Any:
    """The same for a step with backwards of its own: DDP is made ready before each, and not for one after the step."""

    def step() -> Any:
        output = method(*args)
        ddp.require_backward_grad_sync = False
        return output

    try:
        return wrapped(step)
    finally:  # buffers are rank zero's in the next forward, as with automatic optimization: checkpoints have those only
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True


def _inside(context: Callable[[], Any], method: Callable) -> Callable:
    def step(*args: Any) -> Any:
        with context():
            return method(*args)

    return step
