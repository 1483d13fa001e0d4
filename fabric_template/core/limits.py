"""Limits: how much a run trains at most and at least, in epochs, steps and time."""

from __future__ import annotations

from typing import Any

from .config import Settings, parse_duration
from .hooks import Hooks
from .overrides import is_a
from .progress import Progress
from .said import Said


class Limits:
    """What the configuration and a Timer among the callbacks say, and how far the run is."""

    def __init__(self, config: Settings, at: Progress, hooks: Hooks, said: Said, speaks: bool) -> None:
        self._config, self._at, self._hooks = config, at, hooks
        self._said, self._speaks = said, speaks
        self.max_epochs, self._max_steps = config.max_epochs, config.max_steps
        self.elapsed = 0.0  # seconds trained before a resume

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
    def is_enough(self) -> bool:
        """Whether min_epochs and min_steps are reached."""
        return self._at.epochs_done >= self.min_epochs and self._at.global_step >= (self._config.min_steps or 0)

    def time_left(self) -> float | None:
        """Seconds of max_time that are left, those counted that were trained before a resume; None: no limit here."""
        if self._config.max_time is None:
            return None
        if self.has_timer:
            self._say(f"max_time={self._config.max_time!r} is ignored: the callbacks have a Timer already")
            return None
        return parse_duration(self._config.max_time).total_seconds() - self.elapsed

    def tell_held_back(self, why: str) -> None:
        """Say once that the run was to stop and goes on, unless the epoch at hand is the last that it must have."""
        config, at = self._config, self._at
        epochs = at.epochs_done + (at.is_last_of_epoch and not at.between_epochs)
        if epochs < self.min_epochs or at.global_step < (config.min_steps or 0):
            words = f"`min_epochs={config.min_epochs}` or `min_steps={config.min_steps}`"
            self._say(f"{why} but the required {words} has not been met. Training will continue...")

    def place(self) -> str:
        """The epoch that runs, counted from 0 as everywhere, and of how many."""
        epochs, _ = self.limits()
        return f"epoch {self._at.current_epoch}" + (f"/{epochs}" if epochs != -1 else "")

    def _say(self, text: str) -> None:
        if self._speaks:
            self._said.line(text)


def is_endless(config: Settings, callbacks: list[Any]) -> bool:
    """Whether something else than max_epochs ends a run: then there is no limit of epochs, where none was given."""
    return config.max_steps != -1 or config.max_time is not None or has_timer(callbacks)


def has_timer(callbacks: list[Any]) -> bool:
    """Whether one of these is a Timer, which ends the run itself."""
    return any(is_a(callback, "Timer") for callback in callbacks)
