"""Run the training loop over epochs and batches, including validation.

To understand the code of the package, read this module first.

An epoch has the phases "start_epoch", "train_batch", "log_batch", "validate", "report_validation",
"finish_batch" and "end_epoch". ``run.progress.phase`` is the current phase, or None between two
batches or epochs. A resumed run continues in the phase in which the checkpoint was saved.

If a checkpoint is saved during "train_batch", the resumed run repeats all batches since the last
optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..checkpoint.restore import restore_position
from ..lightning_compat.callbacks import finish_averaging, resume_averaging
from ..loggers.run_config import write_run_config
from ..rng_state import capture_rng_state, restore_rng_state
from .evaluation_loop import evaluate
from .lr_schedulers import step_lr_schedulers, step_schedulers_after_batch
from .optimization import is_logging_due

if TYPE_CHECKING:
    from .run import Run


def fit(run: Run) -> None:
    """Train until a limit is reached, or until a callback or a signal requests a stop."""
    run.data.setup_train_loader()
    write_run_config(run)
    run.validation_schedule.start()
    run.row.choose_interval()
    if run.stop.is_finished or run.config.limit_train_batches == 0:
        # Like Trainer, skip on_train_start and on_train_end if no training batches are left.
        restore_position(run)
        finish_averaging(run)
        run.row.write_after_training()
        return
    if run.validation_schedule.is_in_this_epoch():
        run.data.setup_val_loaders()
    run.row.start_clock()
    run.hooks.call("on_train_start")
    run.mark_changes()
    run.progress.start_training()
    resume_averaging(run)
    # Code between restore_position and the first batch must not draw random numbers.
    restore_position(run)
    if run.plan.start.is_before_epoch_end:
        end_saved_epoch(run)
    while run.progress.is_in_epoch or not run.stop.is_due_between_epochs:
        with run.hooks.profiled("run_training_epoch"):
            train_epoch(run)
        if run.stop.signal is not None:
            # If a limit such as max_steps has ended the epoch early, end_epoch has already saved
            # last.ckpt.
            if run.progress.is_in_epoch or run.progress.is_epoch_complete:
                # Save before on_train_end, because callbacks may replace the weights there.
                run.checkpoints.save_after_signal(run)
            break
    run.hooks.call("on_train_end")
    run.row.write_after_training()


def end_saved_epoch(run: Run) -> None:
    """End the saved epoch if Trainer saved the checkpoint just before ``on_train_epoch_end``.

    Like Trainer, do not step ReduceLROnPlateau, because Trainer does not save the metrics.
    """
    run.progress.resume_epoch_end()
    run.hooks.call_train_epoch_end()
    run.loggers.log_train_epoch()
    run.results.reset()
    run.progress.end_epoch()


def train_epoch(run: Run) -> None:
    """Train on the batches of one epoch, or on the remaining batches of a resumed epoch."""
    progress = run.progress
    if progress.is_in_epoch:
        resume_epoch(run)
    else:
        start_epoch(run)
    run.console.start_epoch(run)
    if not run.stop.is_due and not progress.is_epoch_complete:
        train_batches(run)
    # Like Trainer, call end_epoch() even if max_steps ends training within an epoch. If a signal
    # interrupts an epoch, skip end_epoch(), because a resumed run continues the epoch.
    if run.stop.signal is None or progress.is_epoch_complete:
        end_epoch(run)


def start_epoch(run: Run) -> None:
    """Create the training loader if necessary, and call the hooks at the start of an epoch."""
    if run.data.setup_train_loader():
        run.validation_schedule.count_batches()
    run.data.set_train_epoch()
    run.progress.start_epoch()
    run.hooks.call("on_train_epoch_start")
    run.data.start_train_batches()
    run.progress.enter(None)


def resume_epoch(run: Run) -> None:
    """After a resume, run the remaining phases of the last batch, such as "validate"."""
    if run.progress.phase in PHASES_AFTER_BATCH:
        run_phases(run, run.progress.phase)


def train_batches(run: Run) -> None:
    """Train on the batches of an epoch, and call ``end_train_batch`` after each batch."""
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
            # Like Trainer, end the epoch without a validation if on_train_batch_start returns -1.
            progress.end_batches()
            progress.enter(None)
            step_schedulers_after_batch(run)
            break
        else:
            # train_batch runs the forward pass, the backward pass, clipping and the optimizer step.
            outputs = train_batch(batch, batch_idx)
        end_train_batch(run, outputs, batch, batch_idx)
        if progress.is_epoch_complete or run.stop.is_due:
            break
    else:
        # The loader yielded fewer batches than expected from len(loader) and limit_train_batches.
        end_short_epoch(run)


def end_train_batch(run: Run, outputs: Any, batch: Any, batch_idx: int) -> None:
    """After a training batch, step schedulers, call hooks, log, validate and save."""
    run.progress.enter("log_batch")
    # Record the learning rate before on_train_batch_end, because the hook may change it.
    if run.optimization.lr_schedulers or run.hooks.is_used("on_train_batch_end"):
        step_schedulers_after_batch(run)
    run.hooks.call("on_train_batch_end", outputs, batch, batch_idx)
    run.results.end_batch()
    run_phases(run, "log_batch")


def run_phases(run: Run, phase: str | None) -> None:
    """After a batch, log, validate and save, starting with ``phase``, such as "validate"."""
    while phase is not None:
        run.progress.enter(phase)
        phase = PHASES_AFTER_BATCH[phase](run)


def log_batch(run: Run) -> str:
    """Log the batch's values if logging is due, and update the progress bar."""
    is_logging = run.progress.is_window_end or not run.optimization.is_automatic
    if is_logging and is_logging_due(run):
        run.loggers.log_step()
    if run.console.is_enabled:
        run.console.update(run)
    return "validate" if run.validation_schedule.is_due() else "finish_batch"


def validate(run: Run) -> str:
    free_gradients(run)
    run.row.record_learning_rates()
    run.data.train.read_to_end()
    # If this validation runs only because should_stop is True, restore the RNG state afterwards. A
    # resumed run then draws the same random numbers as a run that never stopped.
    rng_state = None if run.validation_schedule.is_planned() else capture_rng_state()
    with run.row.excluded():
        evaluate(run, "validate")
    run.results.start_training()
    if rng_state is not None and run.stop.is_requested:
        restore_rng_state(rng_state)
    return "report_validation"


def free_gradients(run: Run) -> None:
    """Like Trainer, free gradients that the optimizer has already used, to save memory."""
    if run.progress.is_window_end:
        own_zero_grad = run.hooks.module_method("on_validation_model_zero_grad")
        (own_zero_grad or run.network.zero_grad)()


def report_validation(run: Run) -> str:
    """Write a row to metrics.csv after a validation, and then save a checkpoint."""
    run.validation_schedule.restart()
    run.row.write_after_validation()
    run.checkpoints.save_after_validation(run)
    return "finish_batch"


def finish_batch(run: Run) -> None:
    """After a batch, step ReduceLROnPlateau, check for signals, and save due checkpoints."""
    if run.optimization.lr_schedulers:
        step_lr_schedulers(run, "step", reduce_on_plateau=True)
    is_stepping = run.progress.is_window_end
    run.progress.finish_batch(is_stepping)
    if is_stepping:
        if run.signals.is_check_due:
            run.stop.check_signals(run.signals)
        if run.config.save_every_n_steps:
            run.checkpoints.save_after_step(run)


PHASES_AFTER_BATCH: dict[str, Callable[[Run], str | None]] = {
    "log_batch": log_batch,
    "validate": validate,
    "report_validation": report_validation,
    "finish_batch": finish_batch,
}


def end_short_epoch(run: Run) -> None:
    """After an epoch with fewer batches than expected, step schedulers, and validate if due."""
    run.progress.end_batches()
    step_lr_schedulers(run, "epoch", reduce_on_plateau=False)
    if run.validation_schedule.is_due_at_short_end():
        run.progress.enter("validate")
        validate(run)
        run.progress.enter("report_validation")
        report_validation(run)


def end_epoch(run: Run) -> None:
    """At the end of an epoch, call hooks, step schedulers, log values, and save a checkpoint."""
    progress = run.progress
    run.data.train.read_to_end()
    if progress.phase != "end_epoch":
        run.results.end_batches()
        progress.enter("end_epoch")
        run.row.record_learning_rates()
        run.hooks.call_train_epoch_end()
        if not progress.is_epoch_complete:
            # The epoch has ended early, for example because of max_steps. A run with a higher
            # max_steps can resume from this checkpoint and finish the epoch.
            run.checkpoints.save_in_epoch(run)
    run.results.update_metrics()
    if progress.is_epoch_complete:
        step_lr_schedulers(run, "epoch", reduce_on_plateau=True)
    run.loggers.log_train_epoch()
    run.row.write_after_epoch()
    run.results.reset()
    run.data.train.end_pass()
    progress.end_epoch()
    run.stop.check_signals(run.signals, is_due=True)
    run.checkpoints.save_after_epoch(run)
