"""Stop: when training ends: its limits, ``should_stop``, time, a signal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .config import Settings
from .hooks import Hooks
from .limits import Limits
from .progress import Progress
from .said import Said


class Stop(Limits):
    """Why training ends: ``signals`` (process.signals.Signals) knows what comes from outside, and when the time is over."""

    def __init__(self, config: Settings, at: Progress, hooks: Hooks, signals: Any, said: Said, speaks: bool) -> None:
        super().__init__(config, at, hooks, said, speaks)
        self.signals = signals
        self.listens = False  # whether anything may come from outside that `heard` has to look for
        self.should_stop = False
        self.is_late = False  # max_time is over as an epoch ends
        self.signal: int | None = None  # that ended training
        self.error = ""  # the same
        self.bad = 0  # batches in a row whose loss is not finite, where on_nan counts them,
        self.bad_since = 0  # and the first of them
        self._began: float | None = None  # time.monotonic's, as training began

    # ---- now?

    @property
    def may_stop(self) -> bool:
        """Whether min_epochs and min_steps allow to stop early."""
        return self.is_enough or self.is_nan

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

    @property
    def is_time_over(self) -> bool:
        """Whether max_time was over when training began: as the checkpoint was saved, or because it is none at all."""
        return (left := self.time_left()) is not None and left <= 0 and self.may_stop

    # ---- in another process, and across a restart

    def ending(self) -> dict[str, Any]:
        """How the run has ended here, for `know` in the caller's process."""
        return {name: getattr(self, name) for name in ("should_stop", "signal", "is_late", "bad", "bad_since")}

    def know(self, ending: Mapping[str, Any]) -> None:
        """Know how the run has ended elsewhere."""
        vars(self).update(ending)

    def state_dict(self) -> dict[str, Any]:
        """Whether the run is to stop, and the seconds that it has trained."""
        now = 0.0 if self._began is None else time.monotonic() - self._began
        return {"should_stop": self.should_stop, "elapsed": self.elapsed + now}
