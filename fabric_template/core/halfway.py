"""Halfway: a batch or an epoch in whose middle a checkpoint was saved, and what is left of it."""

from __future__ import annotations

from .run import Run
from .schedulers import step_schedulers


def finish_batch(run: Run) -> None:
    """What was left of a batch when a callback saved the checkpoint in one of its hooks: as it stands behind that hook."""
    at, stop, validation, saved_in = run.at, run.stop, run.validation, run.origin.saved_in
    validation.begin_epoch(behind=0 if at.accumulates else 1)
    if saved_in == "on_train_epoch_end":
        if not (at.is_last_of_epoch or stop.now):  # of an epoch that was cut short, and now goes on
            run.origin.saved_in = None
            run.metrics.batches_go_on()
    elif saved_in is not None and at.batches_done:  # not as the epoch begins
        ends_window = not at.accumulates
        if saved_in != "on_validation_end":
            if ends_window and run.metrics.train.any_on_step:
                run.log.step()
            validation.after_batch()
        else:
            validation.ran_behind = at.total_batches
        if ends_window:
            step_schedulers(run, "step", plateau=True)
            at.end_window()
    if stop.now:
        run.data.batches.close()  # there is no next one
    if stop.is_time_over and saved_in is None and validation.is_on and not validation.is_planned():
        validation.validate()  # as it was when max_time had ended this epoch
