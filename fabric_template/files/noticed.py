"""Noticed: what a run forgets at a resume, as far as that can be seen: plain attributes that hooks have changed."""

from __future__ import annotations

import dis
import numbers
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from types import CodeType, MethodType
from typing import Any

from torch import nn

from ..core.overrides import HOOKS, overrides
from ..core.run import Run

MOST_PARTS, MOST_ITEMS, MOST_CHARACTERS = 100, 100, 1000  # looked at, so that a save costs nothing
_LIBRARIES = ("torch.", "torchmetrics.", "lightning.", "pytorch_lightning.", "lightning_utilities.")
_PACKAGE = __package__.rpartition(".")[0] + "."  # another one in a copy
_MODULES_OWN = frozenset(vars(nn.Module()))
_STARTS = ("training_step", "validation_step", *(name for name in HOOKS if name.endswith("_start")))


class Noticed:
    """Digests of plain attributes (numbers, texts, flags, lists and dicts of these) of the user's own objects.

    Of module and submodules, callbacks, datamodule and training datasets. A checkpoint holds the digests of those that
    have changed since training began. Where an object has another value after a resume, nothing has brought it back.
    """

    def __init__(self, run: Run) -> None:
        self.parts = dict(_parts(run))
        self.began = self._digests()
        self.kept: set[str] = set()  # of a run that goes on, whether they change once more or not

    def state_dict(self) -> dict[str, str]:
        """The digest of each attribute that has changed."""
        now = self._digests()
        return {name: text for name, text in now.items() if name in self.kept or self.began.get(name) != text}

    def forgotten(self, state: Mapping[str, str], in_epoch: bool) -> list[str]:
        """The attributes that have other values than when this was saved, but for those that are made anew before use."""
        now = self._digests()
        self.kept = set(state)
        names = [name for name, text in state.items() if now.get(name) != text]
        owners = {name.rpartition(".")[0] for name in names} & self.parts.keys()
        anew = {key: _made_anew(self.parts[key], in_epoch) for key in owners}
        return [
            name for name in names if (split := name.rpartition("."))[0] in owners and split[2] not in anew[split[0]]
        ]

    def _digests(self) -> dict[str, str]:
        return {
            f"{key}.{name}": f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}"
            for key, part in self.parts.items()
            for name, value in list(vars(part).items())
            if name not in _MODULES_OWN and (text := _text(value)) is not None
        }


def tell_forgotten(run: Run, noticed: Noticed, state: Mapping[str, str]) -> None:
    """Say in one line what is not as it was, and that ``on_train_epoch_start`` is not called for an epoch that goes on."""
    in_epoch = not run.at.between_epochs
    names = noticed.forgotten(state, in_epoch)
    listens = [
        type(p).__name__
        for p in (*run.hooks.callbacks, run.trained.owner)
        if _is_own(p) and overrides(p, "on_train_epoch_start")
    ]
    told = []
    if in_epoch and listens:
        told.append(
            f"on_train_epoch_start of {', '.join(listens)} was called before, and is not called again in this epoch"
        )
    if names:
        more = f" and {len(names) - 10} more" * (len(names) > 10)
        told.append(
            f"{', '.join(names[:10])}{more} had changed in training, which no state_dict has brought back: keep such values"
            " in a buffer, a state_dict, or on_save_checkpoint and on_load_checkpoint"
        )
    if told and run.fabric.is_global_zero:
        text = f"resume: {'; '.join(told)}"
        run.said.warn(text) if names else print(text, file=sys.stderr)


def _parts(run: Run) -> Iterator[tuple[str, Any]]:
    """The objects of the user's own classes, by name."""
    owner, net, datamodule = run.trained.owner, run.trained.net, run.trained.datamodule
    given = [(type(part).__name__, part) for part in (owner, *run.hooks.callbacks, datamodule)]
    given += [(f"{type(net).__name__}.{path}", part) for path, part in net.named_modules() if path]
    datasets = [getattr(loader, "dataset", None) for loader in run.data.train.loaders]
    given += [(type(dataset).__name__, dataset) for dataset in datasets]
    seen: dict[int, str] = {}
    for name, part in given:
        if len(seen) < MOST_PARTS and id(part) not in seen and _is_own(part):
            others = sum(other.partition("#")[0] == name for other in seen.values())
            seen[id(part)] = f"{name}#{others + 1}" if others else name
            yield seen[id(part)], part


def _is_own(part: Any) -> bool:
    return hasattr(part, "__dict__") and not type(part).__module__.startswith((*_LIBRARIES, _PACKAGE))


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


def _made_anew(part: Any, in_epoch: bool) -> set[str]:
    """The attributes that a library's class sets, and those that a hook or step to come sets before it looks at them."""
    methods = [overrides(part, name) for name in _STARTS if not (in_epoch and name == "on_train_epoch_start")]
    for base in type(part).__mro__:
        methods += vars(base).values() if base.__module__.startswith(_LIBRARIES) else ()
    return {name for method in methods for name, is_set in _uses(method).items() if is_set}


def _uses(method: Any) -> dict[str, bool]:
    """The attributes that a function's code names, and whether the first that it does is to set or clear them."""
    function = method.__func__ if isinstance(method, MethodType) else method
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    uses: dict[str, bool] = {}
    steps = list(dis.get_instructions(code)) if isinstance(code, CodeType) else []
    for step, after in zip_longest(steps, steps[1:]):
        if step.opname in ("STORE_ATTR", "LOAD_ATTR", "LOAD_METHOD"):
            clears = getattr(after, "argval", None) == "clear"
            uses.setdefault(step.argval, step.opname == "STORE_ATTR" or clears)
    return uses
