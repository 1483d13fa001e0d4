"""Validation: after which training batches a fit validates, and what that is inside an epoch."""

from __future__ import annotations

import time

from .config import parse_duration
from .evaluate import evaluate
from .interval import val_check_batch
from .overrides import overrides
from .passes import INFINITE
from .run import Run


class Validation:
    """The validation of a fit: every so many batches, at an epoch's end, or by the clock."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batch: int | float | None = None  # every so many batches; None: by the clock
        self.every = run.config.validate_every_n_steps  # optimizer steps
        self._steps_before = 0  # the batch at hand
        self.seconds = 0.0  # between validations that go by the clock
        self.validated_at = 0.0
        self.is_on = False  # in the epoch that runs
        self.ran_behind = 0  # how many training batches in all it ran last

    def set_up(self, num_batches: int | float) -> None:
        """Know the length of an epoch."""
        interval = self.run.config.val_check_interval
        self.batch = val_check_batch(self.run.config, num_batches, self.validates)
        if not isinstance(interval, int | float):
            self.seconds = parse_duration(interval).total_seconds()

    def start_clock(self) -> None:
        """The time until the next validation that goes by the clock counts from now."""
        self.validated_at = time.monotonic()

    @property
    def validates(self) -> bool:
        """Whether the fit validates at all."""
        run = self.run
        has_step = overrides(run.trained.owner, "validation_step") is not None
        return has_step and run.config.limit_val_batches > 0 and run.data.given.has("val")

    @property
    def in_this_epoch(self) -> bool:
        """Whether this epoch validates at all."""
        every = self.run.config.check_val_every_n_epoch
        return self.validates and (every is None or (self.run.at.current_epoch + 1) % every == 0)

    def begin_epoch(self, behind: int = 0) -> None:
        """Know whether the epoch that runs validates; so many steps of the batch at hand have been taken."""
        self.is_on = self.in_this_epoch
        self._steps_before = self.run.at.global_step - behind

    def after_batch(self) -> bool:
        """Validate, if that is due behind the batch at hand; returns whether it was."""
        stop = self.run.stop
        due = self.is_on and ((stop.should_stop and stop.may_stop) or self.is_planned())
        self._steps_before = self.run.at.global_step
        if due:
            self.validate()
        return due

    def validate(self) -> None:
        """Validate inside the training epoch, and judge what was measured."""
        run = self.run
        if not run.at.accumulates:
            (overrides(run.trained.owner, "on_validation_model_zero_grad") or run.trained.net.zero_grad)()
        kept, before = run.metrics.pause(), run.log.measured()
        run.data.set_up_val()
        run.data.val.set_epoch(run.at.current_epoch)
        evaluate(run, "validate")
        score = None if run.log.measured() is before else run.log.score()
        run.metrics.resume(kept)
        run.keeper.save_validation(run, score)
        self.ran_behind = run.at.total_batches
        self.start_clock()

    def is_planned(self) -> bool:
        """Whether a validation is due behind the batch at hand, in a run that nothing stops."""
        run, batch = self.run, self.batch
        if self.every is not None:
            return run.at.global_step // self.every > self._steps_before // self.every
        if batch is None:
            return time.monotonic() - self.validated_at >= self.seconds
        if batch == INFINITE:
            limit = run.config.limit_train_batches
            if isinstance(limit, int) and not run.at.is_last_batch:
                return run.at.batches_done % limit == 0
            return run.at.is_last_batch
        count = run.at.total_batches if run.config.check_val_every_n_epoch is None else run.at.batches_done
        return count % batch == 0 or (run.at.is_last_batch and run.trained.hands_iterator)

    def due_at_end(self) -> bool:
        """Whether to validate at the end of a pass that was shorter than it was to be, as if it had been whole."""
        each = self.run.config.check_val_every_n_epoch is not None
        batch = self.batch
        return each and bool(batch and self.run.at.num_batches % batch == 0) and not self.is_planned()
