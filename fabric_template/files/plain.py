"""Plain: what a checkpoint stores for values that weights_only does not read, and how they come back as they were.

In their place stands the plain value that is nearest (a number for NumPy's, text for a path or a date, a list for a
deque), so that any reader makes something of the file; a note beside it, by keys, says what it was. Nothing that a note
names is imported or called: the kinds are those listed here, and members of enums that the program itself has imported.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import operator
import pathlib
import pickle
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from .errors import CheckpointError
from .ordinary import NOTES

_LEAVES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, torch.layout})
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}
_DTYPE = re.compile(r"[<>|=]([biufc]\d\d?|[mM]8(\[\d*\w+\])?)")

# name: (class, what stands there, what comes back of it); what stands there may hold values of any kind itself
_KINDS: dict[str, tuple[type, Callable, Callable]] = {
    "bytes": (bytes, lambda value: value.decode("latin1"), lambda plain: plain.encode("latin1")),  # b"" only
    "bytearray": (bytearray, bytes, bytearray),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda plain: range(*plain)),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], lambda plain: slice(*plain)),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "timedelta": (datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds],
                  lambda plain: datetime.timedelta(*plain)),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda value: [value.numerator, value.denominator],
                 lambda plain: fractions.Fraction(*plain)),
    "UUID": (uuid.UUID, str, uuid.UUID),
    "Path": (type(pathlib.Path()), str, pathlib.Path),
    "PurePosixPath": (pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    "PureWindowsPath": (pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    "Namespace": (argparse.Namespace, vars, lambda plain: argparse.Namespace(**plain)),
    "SimpleNamespace": (types.SimpleNamespace, vars, lambda plain: types.SimpleNamespace(**plain)),
    "deque": (deque, list, deque),
    "defaultdict": (defaultdict, dict, lambda plain, name: defaultdict(_FACTORIES.get(name), plain)),
    "TorchVersion": (type(torch.__version__), str, type(torch.__version__)),
}  # fmt: skip
_KIND_OF = {kind: name for name, (kind, _, _) in _KINDS.items()}


_LEFT_OUT: Any = object()


def store(value: Any, lenient: bool = False) -> tuple[Any, Any, list[tuple[str, Any]]]:
    """What stands in a file for a value, the note by which `restore` brings it back, and what has no plain value.

    Args:
        value: usually a dict; it is not changed.
        lenient: leave what has no plain value out of its dict, or take the fields of a dataclass, the items of a tuple.

    Example:
        >>> store({"rate": numpy.float64(0.5), "seen": deque([1], maxlen=3)})
        ({'rate': 0.5, 'seen': [1]}, {'in': {'rate': {'kind': ['numpy', '<f8']}, 'seen': {'kind': ['deque', 3]}}}, [])
    """
    storing = _Storing(lenient)
    return *storing.store(value, ""), storing.odd


def is_plain(value: Any) -> bool:
    """Whether a checkpoint brings this value back."""
    return not store(value, lenient=True)[2]


def restore(plain: Any, note: Any) -> Any:
    """Bring back what `store` was given.

    Example:
        >>> restore(*store({"seen": deque([1], maxlen=3)})[:2])
        {'seen': deque([1], maxlen=3)}
    """
    try:
        return _restore(plain, note)
    except Exception as error:  # a file may say anything
        raise CheckpointError(f"the note on the kinds of its values does not fit them: {error!r}") from error


def brought_back(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it was read, with its values as they were saved."""
    return restore(checkpoint, checkpoint.pop(NOTES, None))


def without_odd(hparams: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Hyperparameters as far as a checkpoint brings them back, and what to say of the others."""
    kept, note, odd = store(hparams, lenient=True)
    if not odd:
        return hparams, None
    told = []
    for path, value in odd:
        nearest = _nearest(value)
        fate = "is left out" if nearest is None else f"is kept as a {type(nearest).__name__}"
        told.append(f"{path} ({describe(value)}) {fate}")
    return restore(kept, note), (
        f"hyperparameters that a checkpoint does not bring back as they are: {', '.join(told)}; name them in"
        " save_hyperparameters(ignore=[...]) and give them to load_from_checkpoint(path, ...), or write plain values"
    )


def describe(value: Any) -> str:
    """What a value is, in two words.

    Example:
        >>> describe(torch.nn.ReLU), describe(torch.nn.ReLU())
        ('the class ReLU', 'a ReLU')
    """
    kind = "class" if isinstance(value, type) else type(value).__name__
    if (name := getattr(value, "__name__", None)) is None:
        return f"a {kind}"
    return f"the {'function' if 'function' in kind else kind} {name}"


class _Storing:
    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.odd: list[tuple[str, Any]] = []
        self.allowed = [part[0] if isinstance(part, tuple) else part for part in torch.serialization.get_safe_globals()]

    def store(self, value: Any, path: str) -> tuple[Any, Any]:
        kind, name = type(value), _KIND_OF.get(type(value))
        if kind in _LEAVES or (kind is bytes and value) or (kind is set and _LEAVES.issuperset(map(type, value))):
            return value, None
        if kind in (torch.Tensor, torch.nn.Parameter):
            if value.layout is torch.strided and 0 in value.stride() and value.numel() > 1:
                return value.contiguous(), None  # an expanded one claims more than is there
            return (value.detach() if kind is torch.Tensor and vars(value) else value), None
        if kind in (dict, OrderedDict, Counter, list, tuple):
            return self._parts(value, path)
        owner = value if isinstance(value, type) else kind
        if kind.__module__.startswith("omegaconf.") and hasattr(kind, "_get_root"):
            return _without_cache(value), None
        if any(value is part or kind is part for part in self.allowed) or owner.__module__.startswith("omegaconf."):
            return value, None  # the program, or this package, lets them be read
        if name is not None:
            plain, note = self.store(_KINDS[name][1](value), path)
            extra = [value.maxlen] if kind is deque else []
            if kind is defaultdict:
                extra = [getattr(value.default_factory, "__name__", None)]
            is_known = kind is not defaultdict or value.default_factory in (None, *_FACTORIES.values())
            if is_known and (name not in ("time", "datetime") or repr(_KINDS[name][2](plain)) == repr(value)):
                return plain, {"kind": [name, *extra], **(note or {})}
        elif isinstance(value, enum.Enum):
            names = kind.__module__, kind.__qualname__, value.name
            if _member(*names) is value:
                return (value.value if type(value.value) in _LEAVES else value.name), {"kind": ["enum", *names]}
        elif isinstance(value, numpy.generic | numpy.ndarray) and (stored := _store_numpy(value)) is not None:
            return stored
        elif (base := next((base for base in (str, int, float) if isinstance(value, base)), None)) is not None:
            return base(value), None
        self.odd.append((path, value))
        if not self.lenient:
            return (value if _can_be_pickled(value) else repr(value)), None
        nearest = _nearest(value)
        return (_LEFT_OUT, None) if nearest is None else self.store(nearest, path)

    def _parts(self, value: Any, path: str) -> tuple[Any, Any]:
        is_dict = isinstance(value, dict)
        values = list(value.values()) if is_dict else value
        if _LEAVES.issuperset(map(type, values)) and (not is_dict or _LEAVES.issuperset(map(type, value))):
            return value, None
        parts, notes, keys = {}, {}, {}
        for key, part in value.items() if is_dict else enumerate(value):
            where = f"{path}[{key!r}]" if path else str(key)
            name, key_note = (key, None) if type(key) in _LEAVES else self.store(key, where)
            plain, note = self.store(part, where)
            if plain is _LEFT_OUT and not is_dict:
                return _LEFT_OUT, None
            if plain is _LEFT_OUT or name is _LEFT_OUT:
                continue
            if name in parts:  # two keys that only their kinds tell apart
                self.odd.append((where, key))
                return (_LEFT_OUT if self.lenient else value), None
            parts[name] = plain
            notes.update({name: note} if note else {})
            keys.update({name: key_note} if key_note else {})
        if not notes and len(parts) == len(values) and all(map(operator.is_, parts.values(), values)) and not keys:
            return value, None
        return _rebuilt(value, parts), {word: found for word, found in (("in", notes), ("keys", keys)) if found} or None


def _rebuilt(value: Any, parts: dict) -> Any:
    if isinstance(value, dict):
        new = copy.copy(value)  # with the _metadata of a state_dict
        new.clear()
        dict.update(new, parts) if type(new) is Counter else new.update(parts)
        return new
    return type(value)(parts.values())


def _restore(plain: Any, note: Any) -> Any:
    if not note:
        return plain
    if notes := note.get("in"):
        parts = dict(plain) if isinstance(plain, dict) else dict(enumerate(plain))
        parts.update({key: _restore(parts[key], inner) for key, inner in notes.items()})
        plain = _rebuilt(plain, parts)
    if keys := note.get("keys"):
        plain = _rebuilt(plain, {_restore(key, keys.get(key)): part for key, part in plain.items()})
    if "kind" not in note:
        return plain
    name, *extra = note["kind"]
    if name == "enum":
        return plain if (member := _member(*extra)) is None else member
    if name in ("numpy", "array"):
        if not _DTYPE.fullmatch(extra[0]):
            raise ValueError(f"no dtype: {extra[0]}")
        dtype = numpy.dtype(extra[0])
        if name == "array":
            array = plain.numpy()
            return array.view(dtype) if dtype.kind in "mM" else array.astype(dtype, copy=False)
        return numpy.int64(plain).view(dtype) if dtype.kind in "mM" else dtype.type(plain)
    return _KINDS[name][2](plain, *extra)


def _store_numpy(value: Any) -> tuple[Any, Any] | None:
    if isinstance(value, numpy.str_ | numpy.bytes_) or not _DTYPE.fullmatch(value.dtype.str):
        return None
    is_time = value.dtype.kind in "mM"
    if isinstance(value, numpy.generic):
        plain = value.view("i8").item() if is_time else value.item()
        return (plain, {"kind": ["numpy", value.dtype.str]}) if type(plain) in _LEAVES else None
    if type(value) is not numpy.ndarray:
        return None
    native = numpy.array(value, dtype="i8" if is_time else value.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native), {"kind": ["array", value.dtype.str]}
    except TypeError:  # a dtype that torch has not
        return None


def _without_cache(config: Any) -> Any:
    """An OmegaConf configuration without what its resolvers have noted (Hydra's ``${now:...}``), which cannot be read."""
    from omegaconf import OmegaConf

    root = config._get_root()
    if not OmegaConf.get_cache(root):
        return config
    OmegaConf.clear_cache(root := copy.deepcopy(root))
    key = config._get_full_key(None)
    return OmegaConf.select(root, key) if key else root


def _member(module: str, name: str, member: str) -> Any:
    """A member of an enum that is imported already; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found.__members__.get(member) if isinstance(found, enum.EnumMeta) else None


def _nearest(value: Any) -> Any:
    """What a hyperparameter is kept as, where its class cannot come back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    bases = (Mapping, dict), (tuple, tuple), (list, list), (set, set)
    return next((to(value) for base, to in bases if isinstance(value, base)), None)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
