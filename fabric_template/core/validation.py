"""Schedule: after which training batches a fit validates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .config import LoopConfig, parse_duration
from .errors import Misuse
from .hooks import overrides
from .passes import INFINITE

if TYPE_CHECKING:
    from .run import Run


class Schedule:
    """When a fit validates: every so many batches, at an epoch's end, or by the clock."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batch: int | float | None = None  # every so many batches; None: by the clock
        self.seconds = 0.0  # between validations that go by the clock
        self.validated_at = 0.0

    def set_up(self, num_batches: int | float) -> None:
        """Know the length of an epoch."""
        self.batch = val_check_batch(self.run.config, num_batches, self.validates)
        if self.batch is None:
            self.seconds = parse_duration(self.run.config.val_check_interval).total_seconds()

    def start_clock(self) -> None:
        """The time until the next validation that goes by the clock counts from now."""
        self.validated_at = time.monotonic()

    @property
    def validates(self) -> bool:
        """Whether the fit validates at all."""
        run = self.run
        has_step = overrides(run.owner, "validation_step") is not None
        return has_step and run.config.limit_val_batches > 0 and run.feed.has("val")

    @property
    def in_this_epoch(self) -> bool:
        """Whether this epoch validates at all."""
        every = self.run.config.check_val_every_n_epoch
        return self.validates and (every is None or (self.run.current_epoch + 1) % every == 0)

    def due(self) -> bool:
        """Whether to validate after the batch at hand, in an epoch that validates."""
        return (self.run.should_stop and self.run.may_stop) or self.is_planned()

    def is_planned(self) -> bool:
        """The same, of a run that nothing stops."""
        run, batch = self.run, self.batch
        if batch is None:
            return time.monotonic() - self.validated_at >= self.seconds
        if batch == INFINITE:
            limit = run.config.limit_train_batches
            if isinstance(limit, int) and not run.is_last_batch:
                return run.batches_done % limit == 0
            return run.is_last_batch
        count = run.total_batches if run.config.check_val_every_n_epoch is None else run.batches_done
        return count % batch == 0 or (run.is_last_batch and run.hands_iterator)

    def due_at_end(self) -> bool:
        """Whether to validate at the end of a pass that was shorter than it was to be, as if it had been whole."""
        each = self.run.config.check_val_every_n_epoch is not None
        return each and bool(self.batch) and self.run.feed.num_batches % self.batch == 0 and not self.is_planned()


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
            f"val_check_interval={interval}: the train loader has no length, so there is no fraction of it; expected 1.0,"
            " an int (batches) or a time"
        )
    return max(1, int(num_batches * interval))
