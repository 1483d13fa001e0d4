"""Returned: what the steps returned, summed up on the device: the history of modules that log nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOOK_EVERY = 32  # steps between two looks, on the device, for a loss that is no number


class Returned:
    """The means of what a step returned, weighted by batch size: the history of a module that logs nothing.

    Sums are kept on their device; nothing is read back before the epoch ends.

    Example:
        >>> returned = Returned()
        >>> returned.add({"train_loss": torch.tensor(1.0)}, 2, step=0)
        >>> returned.add({"train_loss": torch.tensor(4.0)}, 1, step=1)
        >>> returned.means()
        {'train_loss': 2.0}
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, int] = {}
        self._bad_step: Tensor | None = None  # by which the loss was not finite, on the device; -1: it is

    def add(self, values: dict[str, Tensor], batch_size: int, step: int) -> None:
        """Add one step's values (0-dim tensors) for a batch of so many samples."""
        for name, value in values.items():
            total = self._sums.get(name)
            if total is None:
                dtype = torch.promote_types(value.dtype, torch.float32)
                total = torch.zeros((), dtype=dtype, device=value.device)
                self._weights[name] = 0
            self._sums[name] = torch.add(total, value, alpha=batch_size)  # cheaper than in place
            self._weights[name] += batch_size
        if step % LOOK_EVERY == LOOK_EVERY - 1:
            self._look(step)

    def means(self, all_reduce: Callable[..., Tensor] | None = None) -> dict[str, float]:
        """The mean of each name so far, over all ranks when told how to add them. CPU-GPU sync point."""
        found = {}
        for name, total in self._sums.items():
            weight = torch.tensor(self._weights[name], dtype=total.dtype, device=total.device)
            pair = torch.stack([total.reshape(()), weight])  # a loss may have shape (1,)
            total, weight = pair if all_reduce is None else all_reduce(pair, reduce_op="sum")
            found[name] = (total / weight).item()
        return found

    def bad_step(self, step: int) -> int | None:
        """The step by which the training loss was no number any more, None if it still is. CPU-GPU sync point."""
        self._look(step)
        found = -1 if self._bad_step is None else int(self._bad_step)
        return None if found < 0 else found

    def _look(self, step: int) -> None:
        total = self._sums.get("train_loss")
        if total is not None:
            now = torch.where(torch.isfinite(total), -1, step)
            before = self._bad_step
            self._bad_step = now if before is None else torch.where(before < 0, now, before)

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, for a checkpoint in the middle of an epoch."""
        return {
            "sums": {k: v.clone().cpu() for k, v in self._sums.items()},
            "weights": dict(self._weights),
            "bad_step": None if self._bad_step is None else int(self._bad_step),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums."""
        self._sums = {name: total.to(device, copy=True) for name, total in state["sums"].items()}
        self._weights = dict(state["weights"])
        self._bad_step = None if state["bad_step"] is None else torch.tensor(state["bad_step"], device=device)
