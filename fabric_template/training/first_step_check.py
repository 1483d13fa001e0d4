"""Refuse a training_step that calls backward() or optimizer.step() in automatic optimization.

FirstStepCheck checks only the first batch of a run. A training_step may call backward() on losses
that it does not return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigurationError

REMEDY = (
    "expected a step that only computes the loss. Remove loss.backward(), optimizer.step() and"
    " zero_grad() from the step, because the loop calls them."
)


class FirstStepCheck:
    """Raises an error if training_step calls optimizer.step(), or calls backward() on its loss."""

    def __init__(self, optimizer: Optimizer, fabric: Fabric) -> None:
        self.fabric = fabric
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # The gradients that training_step has computed, keyed by parameter index.
        self._found: dict[int, Tensor] = {}

    def call_step(self, step: Callable, batch: Any, batch_idx: int) -> Any:
        """Call training_step, and store gradients if training_step itself calls backward()."""
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        # Raise an error if training_step calls optimizer.step(), because the loop itself calls it.
        handle = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            output = step(batch, batch_idx)
        finally:
            handle.remove()
        for index, (parameter, old) in enumerate(zip(self.parameters, before, strict=True)):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if old is None or not torch.equal(gradient, old):
                self._found[index] = gradient if old is None else gradient - old
        return output

    def _refuse_step(self, optimizer: Any, *_: Any) -> None:
        trained = {id(parameter) for parameter in self.parameters}
        groups = optimizer.param_groups
        if any(id(parameter) in trained for group in groups for parameter in group["params"]):
            raise ConfigurationError(f"training_step: got a call to optimizer.step(), {REMEDY}")

    def check_gradients(self) -> None:
        """Raise an error if training_step has already called backward() on its loss.

        All processes must call this method.
        """
        found = self._found
        has_all = all(self.parameters[index].grad is not None for index in found)
        flags = [float(has_all and index in found) for index in range(len(self.parameters))]
        shares = self._means([torch.tensor(flags, device=self.fabric.device)])
        # Compare gradients only if all processes have gradients of the same parameters.
        if set(shares.tolist()) not in ({1.0}, {0.0, 1.0}):
            return
        # Normalize the gradients, because accumulation and gradient scaling change their norm.
        own = self._means(list(found.values()))
        loops = self._means([self.parameters[index].grad for index in found])
        is_float32 = self.fabric.strategy.precision.precision == "32-true"
        if (own / own.norm() - loops / loops.norm()).norm() < (1e-4 if is_float32 else 1e-2):
            raise ConfigurationError(f"training_step: got a call to loss.backward(), {REMEDY}")

    def _means(self, tensors: list[Any]) -> Tensor:
        """Average each tensor over all processes, and concatenate the averages on the CPU."""
        means: Any = self.fabric.all_reduce(tensors) if self.fabric.world_size > 1 else tensors
        # Compare gradients on the CPU, because MPS has no float64, and GPU memory may be full.
        return torch.cat([tensor.flatten().cpu().double() for tensor in means])
