"""Reasons: why training is over, in words, and what goes on all the same."""

from __future__ import annotations

import signal

from .overrides import is_a
from .run import Run


def ended_by(run: Run) -> str | None:
    """What has ended a run that is resumed, and what to write to go on; None: there is something to train."""
    return "; ".join(reason) if (reason := _reason(run)) else None


def why_ended(run: Run) -> str:
    """Why training is over; an empty text: it is not."""
    stop = run.stop
    if stop.signal is not None or stop.error:
        return stop.error if stop.signal is None else signal.Signals(stop.signal).name
    return (_reason(run) or ("",))[0]


def _reason(run: Run) -> tuple[str, str] | None:
    """What has ended training in good order, and what goes on all the same."""
    stop, config = run.stop, run.config
    epochs, steps = stop.limits()
    if stop.is_nan:
        return (
            f"the loss is not finite (NaN or inf) since batch {stop.bad_since} (on_nan={config.on_nan})",
            "a resume goes on",
        )
    if stop.steps_done:
        return f"max_steps={steps} is reached", "more max_steps go on"
    if epochs != -1 and run.at.epochs_done >= epochs:
        return f"max_epochs={epochs} is reached", "more max_epochs go on"
    if stop.is_time_over or stop.is_late:
        return f"max_time={config.max_time!r} is over", "more max_time goes on"
    if not (stop.should_stop and stop.may_stop):
        return None
    stops = [callback for callback in run.hooks.callbacks if is_a(callback, "EarlyStopping")]
    stops = [callback for callback in stops if callback.wait_count >= callback.patience or callback.stopped_epoch]
    by = [f" (EarlyStopping on {callback.monitor!r})" for callback in stops]
    return f"should_stop was set{''.join(by)}", "resume='last' goes on all the same"
