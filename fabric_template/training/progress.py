"""Counters of a run, and the conditions that end it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import LoopConfig


@dataclass
class Progress:
    """How far a run is. Every counter is written by the loops only.

    Attributes:
        stage: "train", "validate", "sanity_check", "test" or "predict"; None between stages.
        global_step: Optimizer steps taken.
        epochs_done: Whole epochs.
        batches_done: Batches of this epoch, the current one included.
        total_batches: Batches of all epochs.
        optimizer_steps_in_epoch: Optimizer steps of this epoch.
        logging_step: The step that loggers see: batches after which the optimizer stepped.
        is_last_batch: Whether the current batch is the last one of its epoch.
        is_in_epoch: Whether an epoch has started and not ended.
        phase: Where in an epoch the run is, for checkpoints that hooks save: "epoch_start", "step",
            "batch_end", "validation", "validation_end", "epoch_end"; None between batches.
        batches_at_last_step: batches_done after the last optimizer step.
        num_train_batches: Batches of an epoch; infinite where nobody knows.
        eval_batches_done: Batches of the current evaluation.
        total_eval_batches: Batches of the validations in this epoch, or of all calls of a stage.
    """

    stage: str | None = None
    global_step: int = 0
    epochs_done: int = 0
    batches_done: int = 0
    total_batches: int = 0
    optimizer_steps_in_epoch: int = 0
    logging_step: int = 0
    is_last_batch: bool = False
    is_in_epoch: bool = False
    phase: str | None = None
    batches_at_last_step: int = 0
    num_train_batches: int | float = math.inf
    eval_batches_done: int = 0
    total_eval_batches: int = 0

    def start_epoch(self) -> None:
        self.is_in_epoch, self.is_last_batch = True, False
        self.batches_done = self.optimizer_steps_in_epoch = self.batches_at_last_step = 0
        self.total_eval_batches = 0
        self.phase = "epoch_start"

    def start_batch(self, is_last: bool) -> int:
        """Count a training batch. Returns its index in the epoch."""
        batch_idx = self.batches_done
        self.phase = "step"
        self.is_last_batch = is_last
        self.batches_done = batch_idx + 1
        self.total_batches += 1
        return batch_idx

    def count_eval_batch(self) -> None:
        self.eval_batches_done += 1
        self.total_eval_batches += self.stage != "sanity_check"

    def end_epoch(self) -> None:
        self.epochs_done += 1
        self.is_in_epoch, self.phase = False, None

    @property
    def is_epoch_complete(self) -> bool:
        """Return whether the current batch is the last one that this epoch trains on."""
        return self.is_last_batch or self.batches_done >= self.num_train_batches

    def continue_from(self, other: Progress) -> None:
        """Take over the counters of an earlier call: an evaluation keeps what was trained."""
        for name in ("global_step", "epochs_done", "total_batches", "logging_step"):
            setattr(self, name, getattr(other, name))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. A checkpoint of the middle of a step resumes after the last whole one."""
        without = ("stage", "num_train_batches")
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in without}
        if self.phase == "step":
            dropped = self.batches_done - self.batches_at_last_step
            state["batches_done"] -= dropped
            state["total_batches"] -= dropped
            state |= {"is_last_batch": False, "phase": None}
        elif self.phase == "epoch_start":
            state |= {"is_in_epoch": False, "phase": None}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {f.name for f in fields(self)}
        for name, value in state.items():
            if name in known:
                setattr(self, name, value)


class StopCondition:
    """Decides when training ends: limits, ``should_stop`` and signals.

    Args:
        config: The options, in which None stands for "no limit given".
        has_other_limit: Whether a Timer callback ends the run, so that epochs need no limit.
    """

    def __init__(self, config: LoopConfig, progress: Progress, has_other_limit: bool) -> None:
        self.progress = progress
        self.max_steps = config.max_steps
        self.min_steps = config.min_steps
        max_epochs = config.max_epochs
        if max_epochs is None:
            max_epochs = -1 if has_other_limit or self.max_steps != -1 else 1000
        self.max_epochs: int = max_epochs
        min_epochs = config.min_epochs
        if min_epochs is None:
            min_epochs = 0 if config.min_steps is None else 1
        self.min_epochs: int = min_epochs
        self.should_stop = False
        self.signal: int | None = None
        # Set by StopOnNonFiniteLoss. Nothing is saved while the loss is not finite, and no minimum of
        # epochs or steps continues a training that has diverged.
        self.is_diverging = False
        self.divergence = ""

    @property
    def has_max_steps(self) -> bool:
        """Return whether max_steps is reached."""
        return self.max_steps != -1 and self.progress.global_step >= self.max_steps

    @property
    def has_max_epochs(self) -> bool:
        """Return whether max_epochs is reached."""
        return self.max_epochs != -1 and self.progress.epochs_done >= self.max_epochs

    @property
    def can_stop_early(self) -> bool:
        """Return whether min_epochs and min_steps are reached."""
        progress = self.progress
        enough_epochs = progress.epochs_done >= self.min_epochs
        return enough_epochs and progress.global_step >= (self.min_steps or 0)

    @property
    def is_requested(self) -> bool:
        """Return whether something asked to stop and may be heeded."""
        is_heeded = self.should_stop and self.can_stop_early
        return is_heeded or self.signal is not None or bool(self.divergence)

    @property
    def is_reached(self) -> bool:
        """Return whether training ends after the current batch."""
        return self.has_max_steps or self.is_requested

    @property
    def is_fit_done(self) -> bool:
        """Return whether no further epoch starts."""
        return self.is_reached or self.has_max_epochs or self.progress.num_train_batches == 0

    def reason(self) -> str:
        """Return the sentence that the log shows at the end of training."""
        if self.progress.num_train_batches == 0:
            return "`Trainer.fit` stopped: No training batches."
        if self.has_max_steps:
            return f"`Trainer.fit` stopped: `max_steps={self.max_steps!r}` reached."
        if self.has_max_epochs:
            return f"`Trainer.fit` stopped: `max_epochs={self.max_epochs!r}` reached."
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"should_stop": self.should_stop, "divergence": self.divergence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.should_stop, self.divergence = state["should_stop"], state["divergence"]
