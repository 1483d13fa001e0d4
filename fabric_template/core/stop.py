"""Stop: why training ends, and when: limits, ``should_stop``, time, a signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from .config import Settings, parse_duration
from .hooks import Hooks
from .overrides import is_a
from .progress import Progress
from .said import Said


class Stop:
    """Why training ends: ``signals`` (process.signals.Signals) knows what comes from outside, and when the time is over."""

    def __init__(self, config: Settings, at: Progress, hooks: Hooks, signals: Any, said: Said, speaks: bool) -> None:
        self._config, self._at, self._hooks = config, at, hooks
        self.signals, self._said, self._speaks = signals, said, speaks
        self.max_epochs, self._max_steps = config.max_epochs, config.max_steps
        self.listens = False  # whether anything may come from outside that `heard` has to look for
        self.should_stop = False
        self.is_late = False  # max_time is over as an epoch ends
        self.signal: int | None = None  # that ended training
        self.error = ""  # the same
        self.bad = 0  # batches in a row whose loss is not finite, where on_nan counts them,
        self._bad_since = 0  # and the first of them
        self.elapsed = 0.0  # seconds trained before a resume
        self._began: float | None = None  # time.monotonic's, as training began

    # ---- limits

    def limits(self) -> tuple[int, int]:
        """(max_epochs, max_steps), -1 for no limit."""
        epochs = self.max_epochs
        if epochs is None:
            epochs = -1 if is_endless(self._config, self._hooks.callbacks) else 1000
        return epochs, self._max_steps

    @property
    def has_timer(self) -> bool:
        """Whether a Timer callback ends the run."""
        return has_timer(self._hooks.callbacks)

    @property
    def steps_done(self) -> bool:
        """Whether max_steps is reached."""
        return self._max_steps != -1 and self._at.global_step >= self._max_steps

    @property
    def min_epochs(self) -> int:
        """How many epochs there are at least; one when there are to be steps."""
        config = self._config
        return config.min_epochs if config.min_epochs is not None else 0 if config.min_steps is None else 1

    @property
    def may_stop(self) -> bool:
        """Whether min_epochs and min_steps allow to stop early."""
        enough = self._at.epochs_done >= self.min_epochs and self._at.global_step >= (self._config.min_steps or 0)
        return enough or self.is_nan

    # ---- now?

    @property
    def is_asked(self) -> bool:
        """Whether training ends behind the batch at hand: max_steps is reached, or ``should_stop`` is set and may be heeded."""
        if self.should_stop and self.may_stop:
            return True
        # `steps_done`, without its call: this is asked behind each batch
        return self._max_steps != -1 and self._at.global_step >= self._max_steps

    @property
    def now(self) -> bool:
        """Whether training ends here, in the middle of an epoch, too."""
        return self.is_asked or self.is_time_over

    def before_epoch(self) -> bool:
        """Whether to leave the loop of epochs: asked before the first one, too."""
        epochs, _ = self.limits()
        at = self._at
        return at.num_batches == 0 or self.now or (epochs != -1 and at.epochs_done >= epochs)

    def ask(self, stops: bool = True) -> None:
        """Training is to end behind the batch at hand, as soon as it may; or not any more."""
        self.should_stop = stops

    def end_for(self, signal: int | None) -> None:
        """A signal has ended training; None: none has."""
        self.signal = signal

    def note_loss(self, is_finite: bool, batch: int) -> None:
        """How the loss of a batch of this fit is: after on_nan in a row that are not finite, training is to end."""
        if is_finite:
            self.bad = 0
            return
        self._bad_since = self._bad_since if self.bad else batch
        self.bad += 1
        self.should_stop |= self.is_nan

    @property
    def is_nan(self) -> bool:
        """Whether there were as many of them as end training."""
        most = self._config.on_nan
        return isinstance(most, int) and self.bad >= most

    def fail(self, error: BaseException) -> None:
        """An error has ended the run."""
        self.error = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")

    def heard(self, now: bool = False) -> bool:
        """Whether max_time is over and may end the run here; among several ranks, agree on that and on a signal."""
        if not self.signals.check(self._at.total_batches, now):
            return False
        if not self.may_stop:
            self.tell_held_back(f"max_time={self._config.max_time!r} is over")
        return self.may_stop

    def end_epoch(self) -> None:
        """Before an epoch's end is saved: how late it is."""
        self.is_late = self.heard(now=True)

    def agree(self) -> None:
        """An epoch is over: what was late by then is to stop now."""
        self.should_stop |= self.is_late

    # ---- time

    def start_clock(self) -> None:
        """Training begins: its time counts from now."""
        self._began = now = time.monotonic()
        if (left := self.time_left()) is not None:
            self.signals.deadline = now + left
        self.listens = self.signals.checks

    def time_left(self) -> float | None:
        """Seconds of max_time that are left, those counted that were trained before a resume; None: no limit here."""
        if not self._config.max_time:
            return None
        if self.has_timer:
            self._say(f"max_time={self._config.max_time!r} is ignored: the callbacks have a Timer already")
            return None
        return parse_duration(self._config.max_time).total_seconds() - self.elapsed

    @property
    def is_time_over(self) -> bool:
        """Whether max_time was over when the checkpoint was saved."""
        return bool(self.elapsed) and (left := self.time_left()) is not None and left <= 0 and self.may_stop

    # ---- words

    def tell_held_back(self, why: str) -> None:
        """Say once that the run was to stop and goes on, unless the epoch at hand is the last that it must have."""
        config, at = self._config, self._at
        epochs = at.epochs_done + (at.is_last_of_epoch and not at.between_epochs)
        if epochs < self.min_epochs or at.global_step < (config.min_steps or 0):
            words = f"`min_epochs={config.min_epochs}` or `min_steps={config.min_steps}`"
            self._say(f"{why} but the required {words} has not been met. Training will continue...")

    def _say(self, text: str) -> None:
        if self._speaks:
            self._said.line(text)

    def place(self) -> str:
        """The epoch that runs, counted from 0 as everywhere, and of how many."""
        epochs, _ = self.limits()
        return f"epoch {self._at.current_epoch}" + (f"/{epochs}" if epochs != -1 else "")

    def ended_by(self) -> str | None:
        """What has ended a run that is resumed, and what to write to go on; None: there is something to train."""
        return "; ".join(reason) if (reason := self._reason()) else None

    def why(self) -> str:
        """Why training is over; an empty text: it is not."""
        if self.signal is not None or self.error:
            return self.error if self.signal is None else signal.Signals(self.signal).name
        return (self._reason() or ("",))[0]

    def _reason(self) -> tuple[str, str] | None:
        """What has ended training in good order, and what goes on all the same."""
        epochs, steps = self.limits()
        if self.is_nan:
            batch, most = self._bad_since, self._config.on_nan
            return f"the loss is not finite (NaN or inf) since batch {batch} (on_nan={most})", "a resume goes on"
        if self.steps_done:
            return f"max_steps={steps} is reached", "more max_steps go on"
        if epochs != -1 and self._at.epochs_done >= epochs:
            return f"max_epochs={epochs} is reached", "more max_epochs go on"
        if self.is_time_over or self.is_late:
            return f"max_time={self._config.max_time!r} is over", "more max_time goes on"
        if not (self.should_stop and self.may_stop):
            return None
        stops = [stop for stop in self._hooks.callbacks if is_a(stop, "EarlyStopping")]
        stops = [stop for stop in stops if stop.wait_count >= stop.patience or stop.stopped_epoch]
        by = [f" (EarlyStopping on {stop.monitor!r})" for stop in stops]
        return f"should_stop was set{''.join(by)}", "resume='last' goes on all the same"

    # ---- in another process, and across a restart

    def ending(self) -> dict[str, Any]:
        """How the run has ended here, for `know` in the caller's process."""
        return {name: getattr(self, name) for name in ("should_stop", "signal", "is_late", "bad", "_bad_since")}

    def know(self, ending: Mapping[str, Any]) -> None:
        """Know how the run has ended elsewhere."""
        vars(self).update(ending)

    def state_dict(self) -> dict[str, Any]:
        """Whether the run is to stop, and the seconds that it has trained."""
        now = 0.0 if self._began is None else time.monotonic() - self._began
        return {"should_stop": self.should_stop, "elapsed": self.elapsed + now}

    def load_state_dict(self, state: Mapping[str, Any], is_auto: bool) -> None:
        """Know again that a run was to stop, and how much of its time is over.

        A run that ``should_stop`` has ended stays so for ``resume="auto"``, the word of a requeue. "last" or a path is a
        wish to go on. Where min_epochs or min_steps still kept it going, it goes on knowing that it is to stop then.
        """
        self.elapsed = state.get("elapsed", 0.0)
        if state.get("should_stop") and (is_auto or not self.may_stop):
            self.should_stop = True


def is_endless(config: Settings, callbacks: list[Any]) -> bool:
    """Whether something else than max_epochs ends a run: then there is no limit of epochs, where none was given."""
    return config.max_steps != -1 or config.max_time is not None or has_timer(callbacks)


def has_timer(callbacks: list[Any]) -> bool:
    """Whether one of these is a Timer, which ends the run itself."""
    return any(is_a(callback, "Timer") for callback in callbacks)
