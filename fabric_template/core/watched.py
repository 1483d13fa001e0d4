"""Watched: what the steps returned, of a run that ends where the loss is no number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .returned import Returned


class Watched(Returned):
    """The loss of each batch is read: a CPU-GPU sync point."""

    def __init__(self, note: Callable[[bool, int], None], all_reduce: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self._note, self._all_reduce = note, all_reduce

    def add(self, values: dict[str, Tensor], batch_size: int, step: int) -> None:
        """Add them, and note whether the loss is finite, on all ranks."""
        super().add(values, batch_size, step)
        if (loss := values.get("train_loss")) is not None:
            bad = (~torch.isfinite(loss)).float()
            bad = bad if self._all_reduce is None else self._all_reduce(bad, reduce_op="sum")
            self._note(not bad.any(), step)
