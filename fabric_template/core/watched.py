"""Watched: what the steps returned, of a run that ends where the loss is no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .returned import Returned
from .stop import Stop


class Watched(Returned):
    """The loss of each batch is read: a CPU-GPU sync point. After so many bad ones in a row it ends."""

    def __init__(self, stop: Stop, all_reduce: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self._stop, self._all_reduce = stop, all_reduce

    def add(self, values: dict[str, Tensor], batch_size: int, step: int) -> None:
        """Add them, and note whether the loss is finite, on all ranks."""
        super().add(values, batch_size, step)
        if (loss := values.get("train_loss")) is not None:
            bad = (~torch.isfinite(loss)).any().float()
            bad = bad if self._all_reduce is None else self._all_reduce(bad, reduce_op="sum")
            self._note(bool(bad), step)

    def _note(self, is_bad: bool, step: int) -> None:
        stop = self._stop
        if is_bad and not stop.bad:
            stop.bad_since = step
        stop.bad = stop.bad + 1 if is_bad else 0
        stop.should_stop |= is_bad and stop.is_nan

    def add_later(self, loss: Tensor, batch_size: int, step: int, together: Any) -> None:
        """At once."""
        self.add({"train_loss": loss}, batch_size, step)
