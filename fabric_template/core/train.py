"""Train: epoch after epoch, batch after batch, in Trainer's order. The page to read.

How a batch becomes a step stands in update.py, what a validation does in validation.py; who makes `run`, in process/build.py.
"""

from __future__ import annotations

from enum import Enum

from .run import Run
from .said import is_interactive
from .schedulers import step_schedulers


class Then(Enum):
    """What comes behind a batch."""

    GO_ON = "the next batch"
    END = "the end of the epoch"
    LEAVE = "nothing: a signal ends training here"


def fit(run: Run) -> None:
    """Train until there is a reason to stop."""
    stop, validation = run.stop, run.validation
    run.data.set_up_train()
    if (stop.before_epoch() and not was_cut_short(run)) or run.config.limit_train_batches == 0:
        run.bookmark.stay_finished()
        run.keeper.nothing_to_do(run)
        return
    run.bookmark.note_data()
    if run.origin.saved_in == "on_train_epoch_end" and run.at.is_last_of_epoch:  # to its end only the row is lacking:
        run.at.ahead = stop.limits()[1] == -1  # the next one is shown
    if validation.in_this_epoch and (run.origin.pending is None or run.bookmark.had_val()):
        run.data.set_up_val()
    stop.start_clock()
    validation.start_clock()
    run.metrics.start(run.metrics.train)
    run.hooks.call("on_train_start")
    run.at.ahead = False
    while (was_cut_short(run) or not stop.before_epoch()) and stop.signals.agreed is None:
        run.hooks.timed(train_epoch, "run_training_epoch")(run)
        stop.agree()
    run.keeper.finish(run, interrupted=stop.signals.agreed is not None)
    if stop.signals.agreed is None or is_interactive():
        run.hooks.call("on_train_end")


def was_cut_short(run: Run) -> bool:
    """Whether the epoch was ended in its middle that a checkpoint is from; its end comes (once more)."""
    return run.stop.now and run.origin.pending is not None and not run.at.between_epochs


def train_epoch(run: Run) -> None:
    """One epoch: every batch of a pass, then its end."""
    if run.origin.pending is not None:
        run.bookmark.go_on()
    if run.at.begins_epoch():
        begin_epoch(run)
    at, metrics, hooks, update = run.at, run.metrics, run.hooks, run.update
    batches, transfer, schedulers = run.data.batches, run.data.transfer, run.optimizing.schedulers
    batch_starts, batch_ends = hooks.caller("on_train_batch_start"), hooks.caller("on_train_batch_end")
    run.validation.begin_epoch()
    run.bar.start(run.stop.place(), at.num_batches, at.batches_done)
    then = Then.GO_ON
    for batch in batches if not run.stop.is_asked else ():  # by a hook at the epoch's start
        batch_idx = at.begin_batch(batches.is_last)
        if transfer is not None:
            batch = transfer(batch, 0)
        metrics.batch_starts(batch)
        outputs = None
        if batch is None and not run.trained.hands_iterator:  # the batch still counts, as under Trainer
            run.said.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            ends_window = not at.accumulates
        elif batch_starts is not None and batch_starts(batch, batch_idx) == -1:  # leave out the rest
            at.end_pass()
            step_behind_update(run)
            break
        else:
            ends_window = not at.accumulates
            outputs = update.train(batch, batch_idx, ends_window)
        if ends_window and schedulers:
            step_behind_update(run)
        if batch_ends is not None:
            batch_ends(outputs, metrics.train.batch, batch_idx)
        then = behind_batch(run, ends_window)
        if then is not Then.GO_ON:
            break
    else:
        run_out(run)
    if then is not Then.LEAVE:
        end_epoch(run)


def begin_epoch(run: Run) -> None:
    """Its loaders, its order of the samples, its hooks, its pass over the batches."""
    run.keeper.begin_epoch()
    run.data.set_up_train()
    run.data.train.set_epoch(run.at.current_epoch)
    run.hooks.call("on_train_epoch_start")
    run.data.begin_epoch()


def step_behind_update(run: Run) -> None:
    """After an update: schedulers by step; after the epoch's last batch, those by epoch."""
    if run.at.is_last_of_epoch or run.stop.steps_done:
        run.log.note_rates()
    step_schedulers(run, "step", plateau=False)
    if run.at.is_last_of_epoch:
        step_schedulers(run, "epoch", plateau=False)


def behind_batch(run: Run, ends_window: bool) -> Then:
    """What comes behind the hooks of a batch: its log, a validation, the end of its window, and of training."""
    at, stop, validation, metrics = run.at, run.stop, run.validation, run.metrics
    metrics.batch_ends()
    if ends_window and metrics.train.any_on_step:
        run.log.step()
    if run.bar.enabled:
        run.bar.advance(at.batches_done)
    validated = validation.is_on and validation.after_batch()
    if ends_window:
        if run.optimizing.schedulers:
            step_schedulers(run, "step", plateau=True)
        at.end_window()
        if stop.listens and not at.is_last_of_epoch and stop.heard():
            cut_short(run, validated)
    if at.is_last_of_epoch or stop.is_asked:
        return Then.END
    if ends_window:
        if stop.signals.agreed is not None:
            return Then.LEAVE
        if run.keeper.every is not None:
            run.keeper.save_step(run)
    return Then.GO_ON


def cut_short(run: Run, validated: bool) -> None:
    """Time is over (max_time): saved here, to go on exactly; then the epoch ends as a whole one does."""
    run.keeper.cut_short(run)
    run.stop.ask()
    if run.validation.is_on and not validated:
        run.validation.validate()


def run_out(run: Run) -> None:
    """There is no other batch; where none was known to be the last one, what comes after that comes now."""
    if run.at.is_last_of_epoch or run.stop.now:
        return
    run.data.ran_out()
    run.log.note_rates()
    step_schedulers(run, "epoch", plateau=False)
    if run.validation.is_on and run.validation.due_at_end():
        run.validation.validate()


def end_epoch(run: Run) -> None:
    """Hooks, metrics, schedulers that follow them, the row, the checkpoint."""
    at = run.at
    if not at.is_last_of_epoch:
        run.keeper.cut_short(run)
    run.log.end_batches()
    if run.origin.saved_in != "on_train_epoch_end":  # in which a callback saved the file that is resumed
        run.hooks.call_epoch_end("on_train_epoch_end")
    run.origin.saved_in = None
    run.metrics.merge()
    if at.is_last_of_epoch:
        step_schedulers(run, "epoch", plateau=True)
    score = run.log.score()
    run.log.epoch(run.metrics.merge())
    run.metrics.epoch_ends()
    at.end_epoch()
    run.stop.end_epoch()
    run.keeper.save_epoch(run, score)
