"""Train in epochs and batches, and decide when to validate and to stop. Read this page first."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.warnings import PossibleUserWarning

from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..checkpoint.state import restore_position
from ..config import parse_duration
from ..errors import ConfigurationError
from .evaluation_loop import evaluate
from .module_adapter import takes_iterator, train_with_iterator
from .optimization import (
    after_optimizer_step,
    is_step_due,
    learning_rates,
    step_lr_schedulers,
)

if TYPE_CHECKING:
    from .run_state import RunState


def fit(run: RunState) -> None:
    """Train until a limit is reached or something asks to stop."""
    run.data.setup_train_loader()
    run.validation_schedule = ValidationSchedule(run)
    is_resumed_in_epoch = run.progress.is_in_epoch
    if (run.stop.is_fit_done and not is_resumed_in_epoch) or run.config.limit_train_batches == 0:
        restore_position(run)
        return
    if eval_modules := [name for name, part in run.network.named_modules() if not part.training]:
        run.warn_once(
            f"Found {len(eval_modules)} module(s) in eval mode at the start of training. This may lead to"
            " unexpected behavior during training. If this is intentional, you can ignore this warning.",
            PossibleUserWarning,
        )
    if run.should_validate and run.validation_schedule.is_in_this_epoch():
        run.progress.stage = "validate"
        run.data.setup_eval_loaders("val")
        run.progress.stage = "train"
    run.history.start_clock()
    restore_position(run)
    if run.progress.phase == "epoch_end":
        # The last hook of an epoch saved the checkpoint. The next epoch is current in on_train_start.
        train_epoch(run)
    rng_state = capture_rng_state() if run.resumes else None
    # GradientAccumulationScheduler refuses a run that accumulates before it has started.
    accumulate, run.accumulate_grad_batches = (
        run.accumulate_grad_batches,
        run.config.accumulate_grad_batches,
    )
    run.hooks.call("on_train_start")
    if rng_state is not None:
        run.accumulate_grad_batches = accumulate
        restore_rng_state(rng_state)
    while run.progress.is_in_epoch or not run.stop.is_fit_done:
        with run.hooks.profiled("run_training_epoch"):
            train_epoch(run)
        if run.stop.signal is not None:
            # Before on_train_end, where callbacks may exchange the weights.
            run.checkpoints.save_signal(run)
            break
    run.hooks.call("on_train_end")


def train_epoch(run: RunState) -> None:
    """Train on the batches of one epoch, or on the rest of it after a resume."""
    progress = run.progress
    if not progress.is_in_epoch:
        start_epoch(run)
    else:
        resume_epoch(run)
    run.console.start_epoch(run)
    if not run.stop.is_reached and not progress.is_epoch_complete:
        if takes_iterator(run.hooks.source.training_step):
            train_with_iterator(run, end_step)
        else:
            train_batches(run)
    if run.stop.signal is None or progress.is_epoch_complete:
        end_epoch(run)


def start_epoch(run: RunState) -> None:
    """Load new dataloaders where they are due, and call the hooks."""
    run.data.setup_train_loader()
    run.validation_schedule.count_batches()
    run.data.set_epoch("train", run.progress.epochs_done)
    run.progress.start_epoch()
    run.hooks.call("on_train_epoch_start")
    run.data.start_train_batches()
    run.progress.phase = None


def resume_epoch(run: RunState) -> None:
    """Continue at the next batch, after the end of the last one if a hook in it saved the checkpoint."""
    run.data.resume_train_batches()
    if run.progress.phase in ("batch_end", "validation", "validation_end"):
        end_batch(run)


def train_batches(run: RunState) -> None:
    """Train on each batch, and do what is due after it."""
    progress, hooks, results = run.progress, run.hooks, run.results
    train_batch = hooks.with_profiler("run_training_batch", run.optimization.train_batch)
    for batch, is_last in run.data.train_batches():
        batch_idx = progress.start_batch(is_last)
        results.start_batch(batch)
        outputs = None
        if batch is None:
            run.warn_once(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        elif hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            progress.is_last_batch, progress.phase = True, None
            after_optimizer_step(run)
            break
        else:
            outputs = train_batch(batch, batch_idx)  # forward, loss, backward, clip, step
        end_step(run, outputs, batch, batch_idx)
        if progress.is_epoch_complete or run.stop.is_reached:
            break
    else:
        end_short_epoch(run)


def end_step(run: RunState, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Step the schedulers, call ``on_train_batch_end``, and end the batch."""
    run.progress.phase = "batch_end"
    after_optimizer_step(run)
    run.hooks.call("on_train_batch_end", outputs, batch, batch_idx)
    run.results.end_batch()
    end_batch(run)


def end_short_epoch(run: RunState) -> None:
    """End an epoch whose loader gave fewer batches than its length or the limit says."""
    run.progress.is_last_batch = True
    run.data.train.check_short_pass(run.progress.batches_done)
    if run.lr_schedulers:
        run.history.learning_rates = learning_rates(run)
        step_lr_schedulers(run, "epoch", plateau=False)
    if run.validation_schedule.is_due_at_short_end():
        validate(run)


def end_batch(run: RunState) -> None:
    """Log, validate if it is due, listen to signals, save. The end of a batch exists only here."""
    progress, is_stepping = run.progress, is_step_due(run)
    is_logging = is_stepping or not run.module.automatic_optimization
    if is_logging and progress.phase == "batch_end":
        run.loggers.log_step(run)
    run.console.update(run)
    if progress.phase in ("validation", "validation_end") or run.validation_schedule.is_due():
        validate(run)
    step_lr_schedulers(run, "step", plateau=True)
    progress.phase = None
    if is_stepping:
        progress.logging_step += 1
        progress.batches_at_last_step = progress.batches_done
        run.signals.check(run)
        run.checkpoints.save_step(run)


def validate(run: RunState) -> None:
    """Validate inside of training."""
    if is_step_due(run):
        zero_grad = run.hooks.module_method("on_validation_model_zero_grad")
        (zero_grad or run.network.zero_grad)()
    if run.progress.phase != "validation_end":
        # A resumed run does not repeat a validation that only a stop has caused, nor its random numbers.
        is_extra = run.stop.is_requested and not run.validation_schedule.is_planned()
        rng_state = capture_rng_state() if is_extra else None
        run.progress.phase = "validation"
        run.progress.stage = "validate"
        run.data.setup_eval_loaders("val")
        evaluate(run, "validate")
        run.results.start_training()
        run.progress.stage = "train"
        if rng_state is not None:
            restore_rng_state(rng_state)
    run.validation_schedule.restart()
    run.checkpoints.save_validation(run)


def end_epoch(run: RunState) -> None:
    """Call the hooks, step the schedulers by epoch, write the epoch's row, save."""
    if run.progress.phase != "epoch_end":
        run.checkpoints.save_stopped(run)
        run.results.end_batches()
        run.history.end_train_batches()
        run.progress.phase = "epoch_end"
        run.hooks.call_train_epoch_end()
    run.results.update_metrics()
    if run.progress.is_epoch_complete:
        step_lr_schedulers(run, "epoch", plateau=True)
    run.loggers.log_train_epoch(run)
    run.results.reset()
    run.data.train.end_epoch()
    run.progress.end_epoch()
    run.signals.check(run, is_due=True)
    run.checkpoints.save_epoch(run)


class ValidationSchedule:
    """Decides after which training batches a fit validates."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.every_n_batches: int | float | None = None
        self._seconds: float | None = None
        self._is_enabled = False
        self._restarted_at = time.monotonic()
        self._last_global_step = run.progress.global_step
        interval = run.config.val_check_interval
        if not isinstance(interval, int | float):
            self._seconds = parse_duration(interval).total_seconds()
        self.count_batches()

    def count_batches(self) -> None:
        """Look up the interval in batches. Called again when the training loader may have changed."""
        self._is_enabled = self.run.should_validate
        if self._seconds is None and not self.run.config.validate_every_n_steps:
            self.every_n_batches = self._batches_between(self.run.config.val_check_interval)
            if takes_iterator(self.run.hooks.source.training_step):
                # The number of steps is not known, so the last batch decides when to validate.
                self.every_n_batches = math.inf

    def _batches_between(self, interval: int | float) -> int | float:
        num_batches = self.run.progress.num_train_batches
        if isinstance(interval, int):
            counts_epochs = self.run.config.check_val_every_n_epoch is not None
            if interval > num_batches and counts_epochs and self.run.should_validate:
                raise ValueError(
                    f" `val_check_interval` ({interval}) must be less than or equal to the number of the"
                    f" training batches ({num_batches}). If you want to disable validation set"
                    " `limit_val_batches` to 0.0 instead. If you want to validate based on the total"
                    " training batches, set `check_val_every_n_epoch=None`."
                )
            return interval
        if num_batches == math.inf:
            if interval != 1.0 and self.run.should_validate:
                raise ConfigurationError(
                    "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)`"
                    " must be time based, `1.0` or an int. An int k specifies checking validation every"
                    " k training batches."
                )
            return math.inf
        return max(1, int(num_batches * interval))

    def state_dict(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._restarted_at
        return {"last_global_step": self._last_global_step, "seconds": seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_global_step = state["last_global_step"]
        self._restarted_at = time.monotonic() - state["seconds"]

    def restart(self) -> None:
        """Count steps and seconds from here on."""
        self._last_global_step = self.run.progress.global_step
        self._restarted_at = time.monotonic()

    def is_in_this_epoch(self) -> bool:
        """Return whether check_val_every_n_epoch lets this epoch validate."""
        every = self.run.config.check_val_every_n_epoch
        return every is None or (self.run.progress.epochs_done + 1) % every == 0

    def is_due(self) -> bool:
        """Return whether to validate after the current batch."""
        run = self.run
        if not self._is_enabled or not self.is_in_this_epoch():
            return False
        return self.is_planned() or (run.stop.should_stop and run.stop.can_stop_early)

    def is_due_at_short_end(self) -> bool:
        """Return whether to validate at the end of an epoch that was shorter than its length."""
        progress, every = self.run.progress, self.every_n_batches
        counts_epochs = self.run.config.check_val_every_n_epoch is not None
        if every is None or every == math.inf or not counts_epochs or not self.run.should_validate:
            return False
        is_planned_at_end = progress.num_train_batches % every == 0
        return is_planned_at_end and self.is_in_this_epoch() and progress.batches_done % every != 0

    def is_planned(self) -> bool:
        """Return whether the options ask for a validation after the current batch."""
        run, progress = self.run, self.run.progress
        if self._seconds is not None:
            return time.monotonic() - self._restarted_at >= self._seconds
        if every_n_steps := run.config.validate_every_n_steps:
            return progress.global_step // every_n_steps > self._last_global_step // every_n_steps
        if self.every_n_batches == math.inf:
            limit = run.config.limit_train_batches
            if isinstance(limit, int) and not progress.is_last_batch:
                return progress.batches_done % limit == 0
            return progress.is_last_batch
        counts_all = run.config.check_val_every_n_epoch is None
        count = progress.total_batches if counts_all else progress.batches_done
        return count % self.every_n_batches == 0
