"""Buckets: in which order DDP sums gradients over the ranks, noted in a run's first step and laid again on resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Buckets:
    """DDP lays its buckets anew after a run's first step, in the order in which the gradients came.

    Three ranks or more add in an order that depends on where in its bucket a gradient lies, so that a resumed run has
    other last bits unless it begins with the buckets of the run that it goes on. Two ranks have only one order.
    """

    def __init__(self, wrapped: nn.Module, world_size: int) -> None:
        self.order: list[int] = []  # the parameters, by the arrival of their gradients; empty: not known, or no matter
        self.wrapped = wrapped
        self.ddp = next((part for part in wrapped.modules() if isinstance(part, DistributedDataParallel)), None)
        self.matter = self.ddp is not None and world_size > 2 and not self.ddp.find_unused_parameters
        self.parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        self._handles: list[Any] = []

    def begin(self, ours: Mapping[str, Any] | None, backward: Callable[[Tensor], None]) -> None:
        """Begin with the buckets of the run that goes on, or note those of a new one.

        They are laid by a backward of zeros, in which nobody's code takes part.
        """
        ddp = self.ddp
        is_mid = bool(ddp is not None and ours and ours["batches_that_stepped"] and torch.distributed.get_rank() == 0)
        for hook, state in ddp._comm_hooks if ddp is not None and is_mid else ():
            kind = type(state).__name__
            if not (state is None or isinstance(state, torch.distributed.ProcessGroup) or kind[0] == "_"):
                warnings.warn(
                    f"resume: DDP's communication hook {getattr(hook, '__name__', hook)} has a {kind}, which no checkpoint"
                    " holds: it begins anew, and this run does not go on to the bit",
                    stacklevel=2,
                )
        if ddp is None or not self.matter:
            return
        order = list(ours.get("buckets", ())) if ours else []
        whole = sorted(order) == list(range(len(self.parameters)))
        if whole and all(parameter.requires_grad for parameter in self.parameters):
            self.order = order
            with torch.enable_grad():
                backward(self.wrapped(partial(_zero, [self.parameters[index] for index in reversed(order)])))
            return
        if not ddp.static_graph:
            for index, parameter in enumerate(self.parameters):
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, ddp, index)))
        if is_mid:
            why = "static_graph=True" if ddp.static_graph else "in which the checkpoint does not say"
            warnings.warn(
                "resume: with three ranks or more DDP adds the gradients of its first step in another order than those of"
                f" later ones ({why}): this run does not go on to the bit; with find_unused_parameters=True it would",
                stacklevel=2,
            )

    def _arrived(self, ddp: DistributedDataParallel, index: int, _: Tensor) -> None:
        """The gradient is there; of the first backward that is summed over the ranks only, after which there is no cost."""
        if ddp.require_backward_grad_sync:
            self._handles[index].remove()
            self.order.append(index)


def _zero(parameters: list[nn.Parameter]) -> Tensor:
    """Zero, made of these parameters: backward comes to the last one first."""
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = total + parameter.sum().real.float() * 0.0
    return total
