"""Returned: what the steps returned, summed up on the device: the history of modules that log nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOOK_EVERY = 32  # steps between two looks, on the device, for a loss that is no number


class Returned:
    """The means of what a step returned, weighted by batch size: sums on their device, read as the epoch ends.

    Example:
        >>> returned = Returned()
        >>> returned.add({"train_loss": torch.tensor(1.0)}, 2, step=0)
        >>> returned.add({"train_loss": torch.tensor(4.0)}, 1, step=1)
        >>> returned.means()
        {'train_loss': 2.0}
    """

    def __init__(self) -> None:
        self._together: Any = None  # where losses wait that are not in the sums yet
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self._add_up()
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, int] = {}
        self.total: Tensor | None = None  # of these, the training losses'
        self._together = None
        self._bad_step: Tensor | None = None  # by which the loss was not finite, on the device; -1: it is

    def add(self, values: dict[str, Tensor], batch_size: int, step: int) -> None:
        """Add one step's values (0-dim tensors) for a batch of so many samples."""
        self._add_up()
        for name, value in values.items():
            if value.dim():  # a loss for each sample: of manual optimization, or with a backward of one's own
                value = value.mean(dtype=torch.promote_types(value.dtype, torch.float32))
            total = self._sums.get(name)
            if total is None:
                dtype = torch.promote_types(value.dtype, torch.float32)
                total = torch.zeros((), dtype=dtype, device=value.device)
                self._weights[name] = 0
            self._sums[name] = torch.add(total, value, alpha=batch_size)  # cheaper than in place
            self._weights[name] += batch_size
        self.total = self._sums.get("train_loss")
        if self.total is not None and step % LOOK_EVERY == LOOK_EVERY - 1:
            self._look(self.total, step)

    def add_later(self, loss: Tensor, batch_size: int, step: int, together: Any) -> None:
        """The same for a copy of the training loss that `self.log` has made: with what is logged, before anybody looks."""
        total = self.total
        if self._together is None and total is not None and together.takes(total):
            self._together = together
        if self._together is None or total is None or total.dtype is not loss.dtype:
            self.add({"train_loss": loss}, batch_size, step)
            return
        together.add(self, loss, batch_size)
        self._weights["train_loss"] += batch_size
        if step % LOOK_EVERY == LOOK_EVERY - 1:
            self._add_up()
            self._look(total, step)

    def _add_up(self) -> None:
        if self._together is not None:
            self._together.add_up()

    def means(self, all_reduce: Callable[..., Tensor] | None = None) -> dict[str, float]:
        """The mean of each name so far, over all ranks when told how to add them. CPU-GPU sync point."""
        self._add_up()
        found = {}
        for name, total in self._sums.items():
            weight = torch.tensor(self._weights[name], dtype=total.dtype, device=total.device)
            pair = torch.stack([total, weight])
            total, weight = pair if all_reduce is None else all_reduce(pair, reduce_op="sum")
            found[name] = (total / weight).item()
        return found

    def bad_step(self, step: int) -> int | None:
        """The step by which the training loss was no number any more, None if it still is. CPU-GPU sync point."""
        self._add_up()
        if self.total is None or math.isfinite(self.total.item()):  # then it was so by every step
            return None
        return int(self._look(self.total, step))

    def _look(self, total: Tensor, step: int) -> Tensor:
        now = torch.where(torch.isfinite(total), -1, step)
        before = self._bad_step
        self._bad_step = now if before is None else torch.where(before < 0, now, before)
        return self._bad_step

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, for a checkpoint in the middle of an epoch."""
        self._add_up()
        return {
            "sums": {k: v.clone().cpu() for k, v in self._sums.items()},
            "weights": dict(self._weights),
            "bad_step": None if self._bad_step is None else int(self._bad_step),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from a checkpoint's sums."""
        self.reset()
        self._sums = {name: total.to(device, copy=True) for name, total in state["sums"].items()}
        self._weights, self.total = dict(state["weights"]), self._sums.get("train_loss")
        self._bad_step = None if state["bad_step"] is None else torch.tensor(state["bad_step"], device=device)
