"""Telling: a list of callbacks that tells of its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Telling(list[Any]):
    """The callbacks of a run, as ``trainer.callbacks``: ``changed(before)`` hears of each change, with what the list was.

    Example:
        >>> callbacks = Telling([1], lambda before: print(f"not {before} any more"))
        >>> callbacks.append(2)
        not [1] any more
    """

    def __init__(self, callbacks: Iterable[Any], changed: Callable[[list[Any]], None]) -> None:
        super().__init__(callbacks)
        self._changed = changed

    def __reduce__(self) -> tuple[type, tuple]:
        return list, (list(self),)  # of another process, or a copy: of no run


def _telling(name: str) -> Callable:
    """The list's deed of this name, which then tells of it, with what the list was before."""
    deed = getattr(list, name)

    def tell(self: Telling, *args: Any, **words: Any) -> Any:
        before = list(self)
        result = deed(self, *args, **words)
        self._changed(before)
        return result

    return tell


_IN_PLACE = ["append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"]
for _name in [*_IN_PLACE, "__setitem__", "__delitem__", "__iadd__"]:
    setattr(Telling, _name, _telling(_name))
