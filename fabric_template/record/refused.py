"""Refused: what ``self.log`` says where nothing can be logged; imported where that happens."""

from __future__ import annotations

import warnings

from ..core.errors import Misuse


def refuse(name: str, fx: str | None, enabled: bool, predicts: bool) -> None:
    """Say why nothing can be logged here; under barebones, once and by the way."""
    if not enabled:
        warnings.warn(
            "You are trying to `self.log()` but `Trainer(barebones=True)` is configured. Logging can impact raw speed so it is"
            f" disabled under this setting: leave barebones out to log {name!r}",
            stacklevel=3,
        )
        return
    where = f"inside `{fx}`" if fx else "outside of the loop's hooks"
    if predicts:
        raise Misuse(
            "You are trying to `self.log()` but the loop's result collection is not registered yet. This is most likely because"
            " you are trying to log in a `predict` hook, but it doesn't support logging: write to `self.logger` directly"
        )
    raise Misuse(
        f"You can't `self.log()` {where}. HINT: You can still log directly to the logger by using `self.logger.experiment`."
        f" {name!r} is logged in training_step, validation_step, test_step or the hooks around them"
    )
