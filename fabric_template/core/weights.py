"""Weights: how much each batch of a window counts for the optimizer's step, where they do not count alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer


class Weights:
    """Gradients of a window, each batch's times its weight, over the sum of weights: those of one large batch.

    With several processes over all of their batches: DDP gives each the mean of their gradients, so that is divided by the
    mean of their sums.

    Example:
        >>> weigh = Weights(len, Fabric(accelerator="cpu"))
        >>> weigh(torch.tensor(0.5), [1, 2, 3], begins=True), weigh(torch.tensor(0.5), [1], begins=False), weigh.total
        (tensor(1.5000), tensor(0.5000), 4)
    """

    def __init__(self, of_batch: Callable[[Any], Any], fabric: Fabric) -> None:
        self._of_batch, self._fabric = of_batch, fabric
        self.total: Any = None  # of the window so far, a number or a tensor; None: nothing waits

    def __call__(self, loss: Tensor, batch: Any, begins: bool) -> Tensor:
        """The loss of the next batch, times its weight; ``begins``: of the first one of a window."""
        weight = self._of_batch(batch)
        self.total = weight if begins or self.total is None else self.total + weight
        return loss * weight

    def divide(self, optimizer: Optimizer) -> None:
        """As the window ends: the gradients over the sum of weights."""
        total, self.total = self.total, None
        if total is None:  # a window of one batch
            return
        if self._fabric.world_size > 1:
            total = self._fabric.all_reduce(torch.as_tensor(total, dtype=torch.float64, device=self._fabric.device))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(total)
