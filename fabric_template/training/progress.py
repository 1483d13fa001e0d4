"""Count the batches, steps and epochs of a run, and decide when to validate and stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..config import parse_duration
from ..distributed.signals import SECONDS_BETWEEN_CHECKS, SignalHandler
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..config import LoopConfig
    from .run import Run


@dataclass
class Progress:
    """Counts batches, steps and epochs. Only methods of Progress change the counters."""

    is_per_process = False

    stage: str | None = None
    """One of "train", "validate", "sanity_check", "test" and "predict", or None after the run."""
    global_step: int = 0
    """The number of optimizer steps."""
    epochs_done: int = 0
    """The number of completed epochs."""
    batches_done: int = 0
    """The number of batches in this epoch, including the current one."""
    total_batches: int = 0
    """The number of training batches in all epochs so far."""
    optimizer_steps_in_epoch: int = 0
    logging_step: int = 0
    """The number of batches that ended with an optimizer step, which is the step in loggers."""
    is_last_batch: bool = False
    """Whether the current batch is the last one of its epoch."""
    is_in_epoch: bool = False
    """Whether an epoch has started but not ended."""
    phase: str | None = None
    """The current phase of an epoch. The docstring of fit_loop.py lists the phases."""
    batches_at_window_start: int = 0
    """The value of batches_done at the last optimizer step of this epoch."""
    num_train_batches: int | float = math.inf
    """The number of training batches per epoch, or infinity if it is unknown."""
    eval_batches_done: int = 0
    """The number of batches in the current evaluation, including the current one."""
    total_eval_batches: int = 0
    """The number of batches in this epoch's validations, or in the current test or prediction."""
    eval_batches_by_loader: dict[int, int] = field(default_factory=dict)
    """The number of evaluated batches of each loader. Loggers receive this number as the step."""
    has_started: bool = False
    """Whether on_train_start has run."""
    accumulate_grad_batches: int = 1
    """The number of batches per optimizer step."""

    # Stages

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        """Set ``stage`` for the duration of a `with` block."""
        before, self.stage = self.stage, stage
        yield
        # If the `with` block raises an error, keep the new stage, as Trainer does.
        self.stage = before

    def continue_after(self, other: Progress) -> None:
        """Start an evaluation with the previous run's counters, such as global_step."""
        names = ("global_step", "epochs_done", "total_batches", "logging_step")
        vars(self).update({name: getattr(other, name) for name in names})

    def set_options(self, config: LoopConfig) -> None:
        self.accumulate_grad_batches = config.accumulate_grad_batches

    def end_run(self) -> None:
        self.stage = None

    # Training

    def start_training(self) -> None:
        """Record that on_train_start has run."""
        self.has_started = True

    def count_train_batches(self, num_batches: int | float) -> None:
        """Set the number of training batches per epoch."""
        self.num_train_batches = num_batches

    def start_epoch(self) -> None:
        self.is_in_epoch, self.is_last_batch = True, False
        self.batches_done = self.optimizer_steps_in_epoch = self.batches_at_window_start = 0
        self.total_eval_batches = 0
        self.phase = "start_epoch"

    def enter(self, phase: str | None) -> None:
        """Record the current phase of the epoch, so that a resumed run can continue from there."""
        self.phase = phase

    def start_batch(self, is_last: bool) -> int:
        """Count a training batch, and return the batch's index in the epoch."""
        batch_idx = self.batches_done
        self.phase = "train_batch"
        self.is_last_batch = is_last
        self.batches_done = batch_idx + 1
        self.total_batches += 1
        return batch_idx

    def count_steps(self, steps: int = 1) -> None:
        self.global_step += steps
        self.optimizer_steps_in_epoch += steps

    def finish_batch(self, is_window_end: bool) -> None:
        self.phase = None
        if is_window_end:
            self.logging_step += 1
            self.batches_at_window_start = self.batches_done

    def end_batches(self) -> None:
        """Mark the current batch as the last one of its epoch."""
        self.is_last_batch = True

    def resume_epoch_end(self) -> None:
        """Continue at the end of the saved epoch, after its last batch."""
        self.is_in_epoch = self.is_last_batch = True
        self.phase = "end_epoch"

    def end_epoch(self) -> None:
        self.epochs_done += 1
        self.is_in_epoch, self.phase = False, None

    # Evaluation

    def start_evaluation(self) -> None:
        self.eval_batches_done = 0

    def restart_eval_steps(self) -> None:
        """Reset the batch counts when the evaluation loaders are reloaded."""
        self.eval_batches_by_loader = {}

    def count_eval_batch(self) -> None:
        self.eval_batches_done += 1
        self.total_eval_batches += self.stage != "sanity_check"

    def count_eval_step(self, dataloader_idx: int) -> int:
        """Count a batch, and return how many batches of the same loader came before it."""
        count = self.eval_batches_by_loader.get(dataloader_idx, 0)
        self.eval_batches_by_loader[dataloader_idx] = count + 1
        return count

    # Conditions

    @property
    def newest_epoch(self) -> int:
        """The current epoch's index or, between epochs, the last finished epoch's index."""
        return max(0, self.epochs_done - (not self.is_in_epoch))

    @property
    def is_epoch_complete(self) -> bool:
        """Return whether the current batch is the last one of the epoch."""
        return self.is_last_batch or self.batches_done >= self.num_train_batches

    @property
    def is_window_start(self) -> bool:
        """Return whether the current batch is the first one of its accumulation window."""
        return self.batches_done - 1 == self.batches_at_window_start

    @property
    def is_window_end(self) -> bool:
        """Return whether the current batch ends its accumulation window or the epoch."""
        if self.batches_done % self.accumulate_grad_batches:
            return self.is_epoch_complete
        return True

    def crosses(self, every: int, since: int) -> bool:
        """Return whether the steps after ``since`` include a multiple of ``every``."""
        # Do not test global_step % every. In manual optimization, one batch may take several steps,
        # and global_step may jump over a multiple.
        return self.global_step // every > since // every

    @property
    def trainer_epoch(self) -> int:
        """The value that callbacks get as ``trainer.current_epoch``.

        As in Trainer, current_epoch is 4 in on_train_start if a run resumes after epoch 3.
        """
        is_ending = self.phase == "end_epoch" and self.is_epoch_complete
        return self.epochs_done + (is_ending and not self.has_started)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the counters to save, without the batches that a resumed run will repeat."""
        without = ("stage", "num_train_batches", "has_started", "accumulate_grad_batches")
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in without}
        # A run that resumes in the phase "train_batch" or "start_epoch" repeats the entire phase.
        if self.phase == "train_batch":
            dropped = self.batches_done - self.batches_at_window_start
            state["batches_done"] -= dropped
            state["total_batches"] -= dropped
            state |= {"is_last_batch": False, "phase": None}
        elif self.phase == "start_epoch":
            state |= {"is_in_epoch": False, "phase": None}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class StopCondition:
    """Decides whether a limit, ``should_stop`` or a signal ends training.

    Args:
        config: The options, such as max_epochs and max_steps.
        timers: The Timer callbacks, which limit the training time. With a Timer, max_epochs may
            be omitted.

    Attributes:
        divergence: The reason why on_nan="stop" ends training, or an empty string.
        failure: The class and the message of an error that ended the run. The error itself is not
            stored, because its traceback would keep the last batch and the last graph in memory.
    """

    is_per_process = False

    def __init__(self, config: LoopConfig, progress: Progress, timers: list[Any]) -> None:
        self.progress, self._timers = progress, timers
        self.set_options(config)
        self.should_stop = False
        self.signal: int | None = None
        self.divergence = ""
        self.failure: str | None = None

    def set_options(self, config: LoopConfig) -> None:
        self.max_steps, self.min_steps = config.max_steps, config.min_steps
        has_limit = bool(self._timers) or config.max_steps != -1
        default_max, default_min = -1 if has_limit else 1000, 0 if config.min_steps is None else 1
        self.max_epochs = default_max if config.max_epochs is None else config.max_epochs
        self.min_epochs = default_min if config.min_epochs is None else config.min_epochs

    @property
    def has_max_steps(self) -> bool:
        return self.max_steps != -1 and self.progress.global_step >= self.max_steps

    @property
    def has_max_epochs(self) -> bool:
        return self.max_epochs != -1 and self.progress.epochs_done >= self.max_epochs

    @property
    def is_out_of_time(self) -> bool:
        """Return whether a Timer callback has requested the end of training."""
        remaining = [timer.time_remaining() for timer in self._timers]
        return any(seconds is not None and seconds <= 0 for seconds in remaining)

    @property
    def can_stop_early(self) -> bool:
        has_min_steps = self.progress.global_step >= (self.min_steps or 0)
        return has_min_steps and self.progress.epochs_done >= self.min_epochs

    @property
    def is_requested(self) -> bool:
        """Return whether should_stop, a signal or a diverged loss requests the end of training.

        should_stop is ignored until min_epochs and min_steps are reached.
        """
        if self.should_stop and self.can_stop_early:
            return True
        return self.signal is not None or bool(self.divergence)

    @property
    def is_due(self) -> bool:
        """Return whether training ends after the current batch."""
        return self.has_max_steps or self.is_requested

    @property
    def is_due_between_epochs(self) -> bool:
        """Return whether training ends before the next epoch."""
        return self.is_due or self.has_max_epochs or self.progress.num_train_batches == 0

    @property
    def has_no_batches_left(self) -> bool:
        """Return whether a resumed run has no more batches to train on."""
        return self.is_due if self.progress.is_in_epoch else self.is_due_between_epochs

    @property
    def is_finished(self) -> bool:
        """Return whether training has ended and the last epoch's hooks have been called."""
        return self.has_no_batches_left and not self.progress.is_in_epoch

    def request(self, is_requested: bool) -> None:
        """Set or clear should_stop, which takes effect after min_epochs and min_steps."""
        self.should_stop = bool(is_requested)

    def stop_diverged_run(self) -> None:
        step = self.progress.global_step
        self.divergence = f"the loss is not finite (NaN or inf) at step {step} (on_nan='stop')"

    def fail(self, error: BaseException) -> None:
        """Store the class and the message of the error that ends the run."""
        self.failure = f"{type(error).__name__}: {error}"

    def check_signals(self, signals: SignalHandler, is_due: bool = False) -> None:
        """Stop training if any process received a signal. All processes must call this method."""
        self.signal = signals.agree(self.signal, self.progress.total_batches, is_due)

    def state_dict(self) -> dict[str, Any]:
        # If max_time ended training, save should_stop=False, because a resumed run may have a
        # larger max_time.
        should_stop = self.should_stop and not self.is_out_of_time
        return {"should_stop": should_stop, "divergence": self.divergence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Keep should_stop=True if a Timer callback has set it in on_fit_start.
        self.should_stop = self.should_stop or state["should_stop"]
        self.divergence = state["divergence"]


class ValidationSchedule:
    """Decides when to validate during training.

    Attributes:
        every_n_batches: The interval in training batches, or infinity if the interval has a
            different unit, such as seconds.
    """

    is_per_process = True

    def __init__(self, run: Run) -> None:
        self.run = run
        self.every_n_batches: int | float = math.inf
        self._interval: Any = run.config.val_check_interval
        self._has_validation = False
        self._seconds: float | None = None
        interval = run.config.val_check_interval
        if interval is not None and not isinstance(interval, int | float):
            self._seconds = parse_duration(interval).total_seconds()
        self.restart()

    def start(self) -> None:
        """Compute the validation interval once the number of training batches is known."""
        self.restart()
        self.count_batches()

    def restart(self) -> None:
        self._last_global_step = self.run.progress.global_step
        self._restarted_at = self._checked_at = time.monotonic()
        self._checked_batch = self._next_batch = self.run.progress.total_batches
        self._is_time_up = False

    def count_batches(self) -> None:
        """Compute the number of training batches between two validations.

        Like Trainer, call this only when a training loader is created. If a hook changes
        val_check_interval, the old value therefore stays in use until the loader is reloaded.
        """
        self._set_interval(self.run.config.val_check_interval)

    def _set_interval(self, interval: Any) -> None:
        config = self.run.config
        self._interval = interval
        self._has_validation = self.run.has_validation
        is_enabled = self.run.should_validate
        num_batches = self.run.progress.num_train_batches
        if self._seconds is not None or config.validate_every_n_steps:
            return
        if not isinstance(interval, int | float):
            raise ConfigurationError(
                f"val_check_interval: got {interval!r} in a hook, expected a number of batches, or"
                " a fraction of an epoch. Pass a duration to FabricLoop(val_check_interval=...)."
            )
        if isinstance(interval, int):
            if interval > num_batches and self._counts_in_epoch and is_enabled:
                raise ValueError(
                    f" `val_check_interval` ({interval}) must be less than or equal to the number"
                    f" of the training batches ({num_batches}). If you want to disable validation"
                    " set `limit_val_batches` to 0.0 instead. If you want to validate based on the"
                    " total training batches, set `check_val_every_n_epoch=None`."
                )
            self.every_n_batches = interval
        elif num_batches != math.inf:
            self.every_n_batches = max(1, int(num_batches * interval))
        elif interval != 1.0 and is_enabled and config.limit_train_batches != 0:
            raise ConfigurationError(
                "When using an IterableDataset for `train_dataloader`,"
                f" `{self.run.plan.loop_name}(val_check_interval)` must be time based, `1.0` or an"
                " int. An int k specifies checking validation every"
                " k training batches."
            )

    @property
    def _counts_in_epoch(self) -> bool:
        return self.run.config.check_val_every_n_epoch is not None

    def is_in_this_epoch(self) -> bool:
        config = self.run.config
        every = config.check_val_every_n_epoch
        is_due = every is None or (self.run.progress.epochs_done + 1) % every == 0
        return is_due and self._has_validation and config.limit_val_batches != 0

    def is_due(self) -> bool:
        """Return whether to validate after the current batch."""
        if not self.is_in_this_epoch():
            return False
        stop = self.run.stop
        return self.is_planned() or (stop.should_stop and stop.can_stop_early)

    def is_planned(self) -> bool:
        """Return whether an option such as val_check_interval requires a validation now."""
        progress = self.run.progress
        if self._seconds is not None:
            self._check_time(self._seconds)
            return self._is_time_up
        if every_n_steps := self.run.config.validate_every_n_steps:
            return progress.crosses(every_n_steps, self._last_global_step)
        if self.every_n_batches == math.inf:
            return progress.is_last_batch
        count = progress.batches_done if self._counts_in_epoch else progress.total_batches
        return count % self.every_n_batches == 0

    def _check_time(self, interval: float) -> None:
        """Check whether ``interval`` seconds have passed since the last validation."""
        now, batches = time.monotonic(), self.run.progress.total_batches
        remaining = interval - (now - self._restarted_at)
        if self.run.fabric.world_size == 1:
            self._is_time_up = remaining <= 0
            return
        if self._is_time_up or batches < self._next_batch:
            return
        rate = (batches - self._checked_batch) / max(now - self._checked_at, 1e-6)
        wait = max(1, int(rate * min(remaining, SECONDS_BETWEEN_CHECKS)))
        # All processes must validate after the same batch, so the first process decides for all.
        values = self.run.signals.broadcast([int(remaining <= 0), wait])
        self._is_time_up, self._next_batch = bool(values[0]), batches + values[1]
        self._checked_at, self._checked_batch = now, batches

    def is_due_at_short_end(self) -> bool:
        """Return whether to validate after an epoch that had fewer batches than expected."""
        progress, every = self.run.progress, self.every_n_batches
        if every == math.inf or not self._counts_in_epoch or not self.is_in_this_epoch():
            return False
        return progress.num_train_batches % every == 0 and progress.batches_done % every != 0

    def state_dict(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._restarted_at
        # After a hook has changed val_check_interval, the old value stays in use until the training
        # loader is reloaded, so save both values. Durations need not be saved.
        option = self.run.config.val_check_interval
        interval = (option, self._interval) if isinstance(option, int | float) else (None, None)
        return {
            "last_global_step": self._last_global_step,
            "seconds": seconds,
            "interval": interval,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restart()
        self._last_global_step = state["last_global_step"]
        self._restarted_at -= state["seconds"]
        option, interval = state.get("interval", (None, None))
        if option is not None and option == self.run.config.val_check_interval:
            self._set_interval(interval)
