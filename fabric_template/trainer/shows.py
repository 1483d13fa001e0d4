"""Shows: properties that show what stands elsewhere, and words that equal Trainer's enums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def shows(path: str, doc: str, otherwise: Any = None) -> property:
    """A property that shows what stands at the end of a path; `otherwise` (made of a class) where the way there ends in None.

    Example:
        >>> class Face:
        ...     run = None
        ...     steps = shows("run.at.global_step", "Optimizer steps so far.", 0)
        >>> Face().steps
        0
    """
    *way, last = path.split(".")

    def show(self: Any) -> Any:
        for name in way:
            if (self := getattr(self, name)) is None:
                return otherwise() if isinstance(otherwise, type) else otherwise
        return getattr(self, last)

    return property(show, doc=doc)


class Word(str):
    """A word that equals the member of Trainer's enum that has it, and has its ``value``."""

    @property
    def value(self) -> str:
        """The word itself."""
        return str(self)


class State(SimpleNamespace):
    """What runs: ``fn`` ("fit", "validate", "test", "predict"), ``stage``, ``status``; Trainer's enums equal these words."""

    def __eq__(self, other: object) -> bool:
        return all(getattr(other, name, None) == value for name, value in vars(self).items())

    finished = property(lambda self: self.status == "finished", doc="Whether the last run came to its end.")
    stopped = property(
        lambda self: self.finished or self.interrupted, doc="Whether it is over, in one way or the other."
    )
    interrupted = property(lambda self: self.status == "interrupted", doc="Whether it was interrupted or failed.")
