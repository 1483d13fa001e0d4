"""Said: what a run tells its user, each line once."""

from __future__ import annotations

import sys
import warnings

from lightning.fabric import Fabric
from lightning.fabric.utilities.warnings import PossibleUserWarning


def is_interactive() -> bool:
    """Whether this is a notebook or an interactive session; a script that has only imported IPython is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(sys, "ps1") or shell is not None


class Said:
    """What has been told; the same words are not told again.

    Example:
        >>> said = Said()
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     said.warn("the disk is full"); said.warn("the disk is full")
        >>> len(told)
        1
    """

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def warn(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Warn, the first time."""
        if self._is_new(text):
            warnings.warn(text, kind, stacklevel=3)

    def line(self, text: str) -> None:
        """Print it on stderr, the first time."""
        if self._is_new(text):
            print(text, file=sys.stderr)

    def _is_new(self, text: str) -> bool:
        is_new = text not in self._texts
        self._texts.add(text)
        return is_new


def advise(fabric: Fabric, text: str, category: type[Warning] = PossibleUserWarning) -> None:
    """Warn on rank zero."""
    if fabric.is_global_zero:
        warnings.warn(text, category, stacklevel=2)


def count(number: int, word: str) -> str:
    """A number and its word, in the plural where there are several."""
    return f"{number} {word}{'s' * (number != 1)}"
