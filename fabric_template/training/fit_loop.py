"""Run the training loop over epochs and batches, and validate. Read this module first.

A hook may save a checkpoint in the middle of an epoch. ``run.progress.phase`` is part of the
checkpoint, and the resumed run finishes this phase. The phases of an epoch are:

- "epoch_start": the hooks before the first batch
- "batch": a batch, from on_train_batch_start to the optimizer step
- "batch_end": the hooks and the logging after a batch
- "validation": a validation after a batch
- "validation_end": the last hooks of a validation
- "epoch_end": the hooks after the last batch
- None: between two batches or two epochs.

A run that resumes in the phase "batch" repeats all batches since the last optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.state import restore_position
from ..rng_state import capture_rng_state, restore_rng_state
from .evaluation_loop import evaluate
from .lr_schedulers import step_lr_schedulers, step_schedulers_after_batch
from .optimization import is_logging_due, is_window_end
from .progress import ValidationSchedule

if TYPE_CHECKING:
    from .run_state import RunState


def fit(run: RunState) -> None:
    """Train until a limit is reached, or a callback or a signal requests a stop."""
    run.data.setup_train_loader()
    run.validation_schedule = ValidationSchedule(run)
    run.row.choose_interval()
    is_done = run.stop.is_due_between_epochs and not run.progress.is_in_epoch
    if is_done or run.config.limit_train_batches == 0:
        # As in Trainer, a fit without a batch calls neither on_train_start nor on_train_end.
        restore_position(run)
        run.row.write_after_training()
        return
    if run.validation_schedule.is_in_this_epoch():
        run.data.setup_val_loaders()
    run.row.start_clock()
    # A checkpoint saved in on_train_epoch_end does not count the finished epoch in epochs_done.
    # Trainer counts the finished epoch while on_train_start runs, so add 1 during this hook.
    was_saved_at_end = run.progress.phase == "epoch_end" and run.progress.is_epoch_complete
    if was_saved_at_end:
        run.progress.epochs_done += 1
    run.hooks.call("on_train_start")
    if was_saved_at_end:
        run.progress.epochs_done -= 1
    # Nothing may draw random numbers between this line and the first batch.
    restore_position(run)
    while run.progress.is_in_epoch or not run.stop.is_due_between_epochs:
        with run.hooks.profiled("run_training_epoch"):
            train_epoch(run)
        if run.stop.signal is not None:
            # If a limit ended the epoch early, keep the file last.ckpt that end_epoch has saved.
            if run.progress.is_in_epoch or run.progress.is_epoch_complete:
                # Save before on_train_end, because callbacks may replace the weights there.
                run.checkpoints.save_last(run)
            break
    run.hooks.call("on_train_end")
    # Write the CSV row of the last steps after the last checkpoint. A resume removes this row.
    run.row.write_after_training()


def train_epoch(run: RunState) -> None:
    """Train on the batches of one epoch, or on its remaining batches after a resume."""
    progress = run.progress
    if progress.is_in_epoch:
        resume_epoch(run)
    else:
        start_epoch(run)
    run.console.start_epoch(run)
    if not run.stop.is_due and not progress.is_epoch_complete:
        train_batches(run)
    # As in Trainer, an epoch that max_steps ends early counts as finished. An epoch that a signal
    # ends is not finished, so that a resumed run continues this epoch.
    if run.stop.signal is None or progress.is_epoch_complete:
        end_epoch(run)


def start_epoch(run: RunState) -> None:
    """Reload the dataloaders if a reload is due, and call the hooks."""
    run.data.setup_train_loader()
    run.validation_schedule.count_batches()
    run.data.train.set_epoch()
    run.progress.start_epoch()
    run.hooks.call("on_train_epoch_start")
    run.data.start_train_batches()
    run.progress.phase = None


def resume_epoch(run: RunState) -> None:
    """Restart the loader at its saved position, and finish an interrupted batch."""
    run.data.train.set_epoch()
    run.data.train.start()
    if run.progress.phase in ("batch_end", "validation", "validation_end"):
        end_batch(run)


def train_batches(run: RunState) -> None:
    """Train on the batches of an epoch, and call ``end_train_batch`` after each."""
    progress, hooks, results, loaders = run.progress, run.hooks, run.results, run.data.train
    train_batch = hooks.with_profiler("run_training_batch", run.optimization.train_batch)
    for batch, _, _ in loaders.batches():
        batch_idx = progress.start_batch(loaders.is_last)
        results.start_batch(batch)
        outputs = None
        if batch is None:
            run.warn_once(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        elif hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            # Like Trainer, call neither on_train_batch_end nor a validation if the hook returns -1.
            progress.is_last_batch, progress.phase = True, None
            step_schedulers_after_batch(run)
            break
        else:
            # Run forward, loss, backward, clipping and step.
            outputs = train_batch(batch, batch_idx)
        end_train_batch(run, outputs, batch, batch_idx)
        if progress.is_epoch_complete or run.stop.is_due:
            break
    else:
        # The loader yielded fewer batches than its length or the limit.
        end_short_epoch(run)


def end_train_batch(run: RunState, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Step the schedulers, call ``on_train_batch_end``, and end the batch."""
    run.progress.phase = "batch_end"
    if run.lr_schedulers:
        step_schedulers_after_batch(run)
    run.hooks.call("on_train_batch_end", outputs, batch, batch_idx)
    run.results.end_batch()
    end_batch(run)


def end_batch(run: RunState) -> None:
    """Log, validate if a validation is due, check for signals, and save."""
    progress, is_stepping = run.progress, is_window_end(run)
    # If a resumed run continues a validation, the batch before the validation was already logged.
    was_in_validation = progress.phase in ("validation", "validation_end")
    is_logging = is_stepping or not run.optimization.is_automatic
    if is_logging and not was_in_validation and is_logging_due(run):
        run.loggers.log_step(run)
    if run.console.is_enabled:
        run.console.update(run)
    if was_in_validation or run.validation_schedule.is_due():
        validate(run)
    if run.lr_schedulers:
        step_lr_schedulers(run, "step", reduce_on_plateau=True)
    progress.phase = None
    if is_stepping:
        progress.logging_step += 1
        progress.batches_at_window_start = progress.batches_done
        if run.signals.received is not None or run.is_distributed:
            run.signals.check(run)
        if run.config.save_every_n_steps:
            run.checkpoints.save_after_step(run)


def validate(run: RunState) -> None:
    """Run a validation during training, and save a checkpoint after it."""
    if is_window_end(run):
        # As in Trainer, free the gradients before a validation that follows an optimizer step.
        own_zero_grad = run.hooks.module_method("on_validation_model_zero_grad")
        (own_zero_grad or run.network.zero_grad)()
    if run.progress.phase != "validation_end":
        # A request to stop causes an unplanned validation. A resumed run does not repeat this
        # validation, so restore the random state afterwards.
        rng_state = None if run.validation_schedule.is_planned() else capture_rng_state()
        run.progress.phase = "validation"
        with run.row.excluded():
            evaluate(run, "validate")
        run.results.start_training()
        if rng_state is not None and run.stop.is_requested:
            restore_rng_state(rng_state)
    run.validation_schedule.restart()
    run.row.write_after_validation()
    run.checkpoints.save_after_validation(run)


def end_short_epoch(run: RunState) -> None:
    """End an epoch whose loader yielded fewer batches than its length or the limit."""
    run.progress.is_last_batch = True
    step_lr_schedulers(run, "epoch", reduce_on_plateau=False)
    if run.validation_schedule.is_due_at_short_end():
        validate(run)


def end_epoch(run: RunState) -> None:
    """Call the hooks, step the schedulers with interval "epoch", log the epoch, and save."""
    progress = run.progress
    if progress.phase != "epoch_end":
        run.results.end_batches()
        progress.phase = "epoch_end"
        run.hooks.call_train_epoch_end()
        if not progress.is_epoch_complete:
            # A limit ended the epoch early. Save, so that a run with a higher limit can continue.
            run.checkpoints.save_in_epoch(run)
    run.results.update_metrics()
    if progress.is_epoch_complete:
        step_lr_schedulers(run, "epoch", reduce_on_plateau=True)
    run.loggers.log_train_epoch(run)
    run.row.write_after_epoch()
    run.results.reset()
    run.data.train.end_pass()
    progress.end_epoch()
    run.signals.check(run, is_due=True)
    run.checkpoints.save_after_epoch(run)
