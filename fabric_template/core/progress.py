"""Progress: how far a run is; every counter of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .passes import INFINITE


class Progress:
    """How far a run is.

    Args:
        window: batches per optimizer step; a callback may change it between epochs.

    Example:
        >>> at = Progress(window=2)
        >>> at.begins_epoch(), at.begin_batch(is_last=False), at.accumulates
        (True, 0, True)
    """

    def __init__(self, window: int = 1) -> None:
        self.stage: str | None = None  # "train", "validate", "sanity_check", "test", "predict"; None: nothing runs
        self.global_step = 0
        self.epochs_done = 0  # whole epochs
        self.batches_done = 0  # batches of this epoch, the one at hand included
        self.total_batches = 0
        self.num_batches: int | float = INFINITE  # training batches of an epoch
        self.batches_that_stepped = 0  # the step that loggers see
        self.steps_in_epoch = 0
        self.stepped_before = 0  # batches_that_stepped, of the epochs before
        self.is_last_batch = False
        self.between_epochs = True
        self.ahead = False  # whether the next epoch is shown already
        self.window = window
        self.evaluated = self.evaluated_in_all = 0  # batches of this evaluation; of all since the epoch began

    # ---- as training goes on

    def begins_epoch(self) -> bool:
        """Whether an epoch begins here (False: it goes on from a checkpoint in its middle); counts from its start."""
        if not self.between_epochs:
            return False
        self.between_epochs, self.is_last_batch = False, False
        self.batches_done = self.steps_in_epoch = self.evaluated_in_all = 0
        self.stepped_before = self.batches_that_stepped
        return True

    def begin_batch(self, is_last: bool) -> int:
        """A training batch is at hand; returns its index in the epoch."""
        self.is_last_batch = is_last
        batch_idx = self.batches_done
        self.batches_done = batch_idx + 1
        self.total_batches += 1
        return batch_idx

    def stepped(self) -> None:
        """The optimizer has taken a step."""
        self.global_step += 1
        self.steps_in_epoch += 1

    def stepped_by_hand(self, count: int) -> None:
        """The module has taken so many steps itself: a batch is a window, whatever has stepped."""
        self.global_step += count
        self.steps_in_epoch = self.batches_done

    def end_window(self) -> None:
        """All that belongs to an optimizer's step is done."""
        self.batches_that_stepped += 1

    def end_pass(self, is_over: bool = True) -> None:
        """The batch at hand has turned out to be the last, or not."""
        self.is_last_batch = is_over

    def begin_again(self) -> None:
        """The first batch has turned out to be none."""
        self.batches_done = 0

    def end_epoch(self) -> None:
        """The epoch is over."""
        self.epochs_done += 1
        self.between_epochs = True

    def expect(self, num_batches: int | float) -> None:
        """An epoch has so many training batches."""
        self.num_batches = num_batches

    def regroup(self, batches: int) -> None:
        """Other processes have done so many batches of the epoch, counted in ours."""
        self.total_batches += batches - self.batches_done
        self.batches_done, self.steps_in_epoch = batches, batches // self.window
        self.stepped_before = self.batches_that_stepped - self.steps_in_epoch

    def accumulate(self, window: int) -> None:
        """So many batches make a step of the optimizer from now on."""
        self.window = window

    def enter(self, stage: str | None) -> str | None:
        """Another stage runs now; returns the one before."""
        before, self.stage = self.stage, stage
        return before

    def begin_evaluation(self, stage: str | None) -> str | None:
        """The same, and its batches are counted from 0."""
        self.evaluated = 0
        return self.enter(stage)

    def evaluate_batch(self) -> None:
        """A batch is evaluated."""
        self.evaluated += 1
        self.evaluated_in_all += 1

    @contextmanager
    def shown_in(self, epoch: int) -> Iterator[None]:
        """Within, it looks as if another epoch were running."""
        kept, self.epochs_done = self.epochs_done, epoch
        try:
            yield
        finally:
            self.epochs_done = kept

    # ---- what follows from it

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, or that would be next; counted from 0."""
        return self.epochs_done + self.ahead

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the batch at hand is the epoch's last."""
        return self.is_last_batch or self.batches_done == self.num_batches

    @property
    def accumulates(self) -> bool:
        """Whether the optimizer waits for more batches."""
        return self.batches_done % self.window != 0 and not self.is_last_of_epoch

    @property
    def in_pass(self) -> bool:
        """Whether a pass over the training batches has begun that is not over; the first one begins before its epoch."""
        return not self.between_epochs or self.epochs_done == 0

    # ---- across a restart

    def stand_at(self, other: Progress) -> None:
        """Stand where another process has come to."""
        vars(self).update(vars(other))

    def follow(self, last: Progress) -> None:
        """An evaluation comes after another run: how far that has trained still counts."""
        self.epochs_done, self.global_step = last.epochs_done, last.global_step
        self.total_batches, self.batches_that_stepped = last.total_batches, last.batches_that_stepped

    def follow_evaluations(self, last: Progress) -> None:
        """What has been evaluated is counted on."""
        self.evaluated_in_all = last.evaluated_in_all

    def load(self, global_step: int, counters: Mapping[str, Any]) -> None:
        """Stand where a checkpoint was saved."""
        self.global_step = global_step
        self.epochs_done, self.batches_done = counters["epoch"], counters["batch_idx"]
        self.total_batches, self.batches_that_stepped = counters["total_batches"], counters["batches_that_stepped"]
        self.steps_in_epoch, self.is_last_batch = counters["steps_in_epoch"], counters["is_last_batch"]
        before = self.batches_that_stepped - self.batches_done // self.window
        self.stepped_before = counters.get("stepped_before", before)
        self.between_epochs = self.batches_done == 0
