"""Stop a training whose loss is NaN or infinite: the option on_nan with a number."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class StopOnNonFiniteLoss(Callback):
    """Stops after a number of batches in a row whose loss is not finite. All processes stop together.

    From the first of these batches on no checkpoint is saved, so that the last good one stays. It reads the
    loss of every batch from the device.

    Args:
        patience: How many batches in a row.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._count = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        is_finite = torch.ones((), device=trainer.fabric.device)
        if loss is not None:
            is_finite = torch.isfinite(loss).all().float()
        if trainer.fabric.world_size > 1:
            is_finite = trainer.fabric.all_reduce(is_finite, reduce_op="min")
        self._count = 0 if is_finite else self._count + 1
        stop = trainer.run.stop
        stop.is_diverging = self._count > 0
        if self._count == self.patience:
            first = trainer.run.progress.total_batches - self.patience
            stop.divergence = (
                f"the loss is not finite (NaN or inf) since batch {first} (on_nan={self.patience})"
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        reason, path = trainer.run.stop.divergence, trainer.checkpoint_path("last")
        if reason and trainer.is_global_zero:
            kept = f"The last good checkpoint is '{path}'." if path else "No checkpoint was saved."
            warnings.warn(
                f"on_nan: {reason}. Training stops after step {trainer.global_step}. {kept}",
                stacklevel=2,
            )
