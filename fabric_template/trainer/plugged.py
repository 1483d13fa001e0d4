"""Plugged: callbacks of packages that are installed, which Lightning adds to every Trainer."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "lightning.pytorch.callbacks_factory"


def plugged_callbacks() -> list[Any]:
    """What the functions give that installed packages name under the entry point ``lightning.pytorch.callbacks_factory``.

    Source: "Entry Points" in `Lightning's documentation <https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html>`_.

    Example:
        >>> plugged_callbacks()  # where no package has any
        []
    """
    made = [factory.load()() for factory in _factories(tuple(sys.path))]
    return [callback for given in made for callback in (given if isinstance(given, list) else [given])]


@cache
def _factories(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Asked once per process, as all packages on the path are looked through for it."""
    return tuple(entry_points(group=GROUP))
