"""Noticed: plain attributes that hooks have changed, which a resume may have forgotten: differences.py says so then."""

from __future__ import annotations

import numbers
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..core.overrides import class_of
from ..core.run import Run

MOST_PARTS, MOST_ITEMS, MOST_CHARACTERS = 100, 100, 1000  # looked at, so that a save costs nothing
LIBRARIES = ("torch.", "torchmetrics.", "lightning.", "pytorch_lightning.", "lightning_utilities.")
_PACKAGE = __package__.rpartition(".")[0] + "."  # another one in a copy
_MODULES_OWN = frozenset(vars(nn.Module()))


class Noticed:
    """Digests of plain attributes (numbers, texts, flags, lists and dicts of these) of the user's own objects.

    Of module and submodules, callbacks, datamodule and training datasets. A checkpoint holds the digests of those that
    have changed since training began. Where an object has another value after a resume, nothing has brought it back.
    """

    def __init__(self, run: Run) -> None:
        self.parts = dict(_parts(run))
        self.began = self.digests()
        self.kept: set[str] = set()  # of a run that goes on, whether they change once more or not

    def state_dict(self) -> dict[str, str]:
        """The digest of each attribute that has changed."""
        now = self.digests()
        return {name: text for name, text in now.items() if name in self.kept or self.began.get(name) != text}

    def digests(self) -> dict[str, str]:
        """Of each attribute, as it is now."""
        return {
            f"{key}.{name}": f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"
            for key, part in self.parts.items()
            for name, value in list(vars(part).items())
            if name not in _MODULES_OWN and (text := _text(value)) is not None
        }


def _parts(run: Run) -> Iterator[tuple[str, Any]]:
    """The objects of the user's own classes, by name."""
    owner, net, datamodule = run.trained.owner, run.trained.net, run.trained.datamodule
    given = [(class_of(part).__name__, part) for part in (owner, *run.hooks.callbacks, datamodule)]
    given += [(f"{class_of(net).__name__}.{path}", part) for path, part in net.named_modules() if path]
    datasets = [getattr(loader, "dataset", None) for loader in run.data.train.loaders]
    given += [(type(dataset).__name__, dataset) for dataset in datasets]
    seen: dict[int, str] = {}
    for name, part in given:
        if len(seen) < MOST_PARTS and id(part) not in seen and is_own(part):
            others = sum(other.partition("#")[0] == name for other in seen.values())
            seen[id(part)] = f"{name}#{others + 1}" if others else name
            yield seen[id(part)], part


def is_own(part: Any) -> bool:
    """Whether an object is of a class of the user's."""
    return hasattr(part, "__dict__") and not class_of(part).__module__.startswith((*LIBRARIES, _PACKAGE))


def _text(value: Any, left: list[int] | None = None) -> str | None:
    """A plain value as a text, of what is long its length and its end; None for any other, and for what is too much."""
    left = [MOST_ITEMS * 5] if left is None else left
    left[0] -= 1
    if type(value) in (int, float, bool) or value is None or isinstance(value, str | bytes | numbers.Number):
        return repr(value[-MOST_CHARACTERS:] if isinstance(value, str | bytes) else value)
    if isinstance(value, list | tuple):
        items: Iterable[Any] = value[-MOST_ITEMS:]
    elif isinstance(value, Mapping | set | frozenset | deque):
        items = value if len(value) <= MOST_ITEMS else ()
        items = [*items, *value.values()] if isinstance(value, Mapping) and items else items
        items = sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    else:
        return None
    texts: list[str] = []
    for item in items:
        if left[0] <= 0 or (text := _text(item, left)) is None:
            return None
        texts.append(text)
    return f"{len(value)} {texts}"
