"""Interval: after how many training batches a fit validates."""

from __future__ import annotations

from .config import LoopConfig
from .errors import Misuse
from .passes import INFINITE


def val_check_batch(config: LoopConfig, num_batches: int | float, validates: bool) -> int | float | None:
    """Validate every so many batches; None: by the clock; infinity: at the end of a pass without length.

    Raises:
        Misuse: for an interval longer than the epoch, and for a fraction of a loader without length.

    Example:
        >>> val_check_batch(LoopConfig(val_check_interval=0.25), 10, validates=True)
        2
    """
    interval = config.val_check_interval
    if not isinstance(interval, int | float):
        return None
    if isinstance(interval, int):
        if interval > num_batches and config.check_val_every_n_epoch is not None and validates:
            raise Misuse(
                f"`val_check_interval` ({interval}) must be less than or equal to the number of the training batches"
                f" ({num_batches}). If you want to disable validation set `limit_val_batches` to 0.0 instead. If you want"
                " to validate based on the total training batches, set `check_val_every_n_epoch=None`."
            )
        return interval
    if num_batches == INFINITE:
        if interval == 1.0:
            return INFINITE
        raise Misuse(
            f"val_check_interval={interval}: the train loader has no length, so there is no fraction of it. When using an"
            " IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be time based, `1.0` or an int. An"
            " int k specifies checking validation every k training batches."
        )
    return max(1, int(num_batches * interval))
