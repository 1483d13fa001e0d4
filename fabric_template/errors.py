"""Exceptions for users, and warnings that are shown once."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable

from lightning.fabric.utilities.exceptions import MisconfigurationException


class ConfigurationError(MisconfigurationException, ValueError):
    """A value, a model or a combination that cannot work.

    Code written for Trainer catches it as Lightning's MisconfigurationException, other code as a
    ValueError.
    """


class ConfigurationTypeError(MisconfigurationException, TypeError):
    """An argument of a wrong type."""


class MissingDataError(ConfigurationTypeError, ConfigurationError):
    """A call without data. It is a TypeError, as for any missing argument, and a ValueError."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used. The message names the fix."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file whose bytes are not those that were written."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint file that does not exist."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the known option nearest to an unknown one.

    Example:
        >>> nearest_name("max_epoch", ["max_epochs", "name"])
        'did you mean max_epochs?'
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known))}"


class WarnOnce:
    """Show each warning once in a run, on the process that may print."""

    def __init__(self, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self._shown: set[str] = set()

    def __call__(self, message: str, category: type[Warning] = UserWarning) -> None:
        if self.is_enabled and message not in self._shown:
            self._shown.add(message)
            warnings.warn(message, category, stacklevel=3)
