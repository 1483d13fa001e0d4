"""Finished: a run that had come to its end is started again, as by a scheduler that requeues; it stays as it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.config import parse_duration
from ..core.hooks import is_a, overrides
from ..trainer.averaging import go_on

if TYPE_CHECKING:
    from ..core.run import Run

AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")  # give their weights to the module when training ends
_LIGHTNINGS = ("lightning.pytorch.", "pytorch_lightning.")


def end_state(run: Run) -> dict[str, Any]:
    """What a checkpoint holds of the run's end: whether it is to stop, and the seconds that it has trained."""
    since = run.trains_since
    now = 0.0 if since is None else time.monotonic() - since
    return {"should_stop": run.should_stop, "elapsed": run.elapsed + now}


def restore_end(run: Run, ours: Mapping[str, Any]) -> None:
    """Know again that a run was to stop, and how much of its time is over.

    A run that ``should_stop`` has ended stays so for ``resume="auto"``, the word of a requeue. "last" or a path is a wish to
    go on. Where min_epochs or min_steps still kept it going, it goes on knowing that it is to stop then.
    """
    run.elapsed = ours.get("elapsed", 0.0)
    if ours.get("should_stop") and (run.is_auto or not run.may_stop):
        run.should_stop = True


def time_left(run: Run) -> float | None:
    """Seconds of max_time that are left, those counted that were trained before a resume; None: no limit here."""
    if not run.config.max_time:
        return None
    if run.has_timer:
        _say_once(run, f"max_time={run.config.max_time!r} is ignored: the callbacks have a Timer already")
        return None
    return parse_duration(run.config.max_time).total_seconds() - run.elapsed


def heeds_time(run: Run) -> bool:
    """Whether a run that is late ends here, as far as min_epochs and min_steps allow."""
    if not run.may_stop:
        tell_held_back(run, f"max_time={run.config.max_time!r} is over")
    return run.may_stop


def tell_held_back(run: Run, why: str) -> None:
    """Say once that the run was to stop and goes on, unless the epoch at hand is the last that it must have."""
    epochs = run.epochs_done + (run.is_last_of_epoch and not run.between_epochs)
    if epochs < run.min_epochs or run.global_step < (run.config.min_steps or 0):
        words = f"`min_epochs={run.config.min_epochs}` or `min_steps={run.config.min_steps}`"
        _say_once(run, f"{why} but the required {words} has not been met. Training will continue...")


def _say_once(run: Run, text: str) -> None:
    if run.fabric.is_global_zero and text not in run.said:
        run.said.add(text)
        print(text, file=sys.stderr)


def is_time_over(run: Run) -> bool:
    """Whether max_time was over when the checkpoint was saved."""
    return bool(run.elapsed) and (left := time_left(run)) is not None and left <= 0 and run.may_stop


def ended_by(run: Run) -> str | None:
    """What has ended a run that is resumed, and what to write to go on; None: there is something to train."""
    epochs, steps = run.limits()
    if run.steps_done:
        return f"max_steps={steps} is reached; more max_steps go on"
    if epochs != -1 and run.epochs_done >= epochs:
        return f"max_epochs={epochs} is reached; more max_epochs go on"
    if is_time_over(run):
        return f"max_time={run.config.max_time!r} is over; more max_time goes on"
    if not (run.should_stop and run.may_stop):
        return None
    stops = [stop for stop in run.callbacks if is_a(stop, "EarlyStopping")]
    by = [f" (EarlyStopping on {stop.monitor!r})" for stop in stops if stop.wait_count >= stop.patience]
    return f"should_stop was set{''.join(by)}; resume='last' goes on all the same"


def tell_finished(run: Run) -> None:
    """Say in one line that the run that is resumed is finished, if it is, and whose end may have done more to it."""
    if not run.fabric.is_global_zero or not (why := ended_by(run)):
        return
    place = f"epoch {run.epochs_done}, step {run.global_step}"
    own = [part for part in (*run.callbacks, run.owner) if not type(part).__module__.startswith(_LIGHTNINGS)]
    names = [type(part).__name__ for part in own if overrides(part, "on_train_end")]
    again = f". What on_train_end of {', '.join(names)} does is not done again" if names and run.between_epochs else ""
    print(
        f"resume: '{run.resume_path}' is of a finished run ({place}), nothing is trained: {why}{again}", file=sys.stderr
    )


def end_again(run: Run, trainer: Any) -> None:
    """The weights as they were at the run's end: Lightning's averaging callbacks give the module theirs only then."""
    go_on(run, has_ended=True)
    for callback in run.callbacks:
        # with BatchNorm they are given in an epoch of its own, which is over
        has_batch_norm = is_a(callback, AVERAGING[1]) and callback.pl_module_contains_batch_norm(run.net)
        if is_a(callback, *AVERAGING) and not (has_batch_norm and run.epochs_done >= run.limits()[0]):
            callback.on_train_end(trainer, run.net)
