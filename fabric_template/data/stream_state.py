"""Load the state of a stream for one pass, so that later passes are those of the saved run.

What ``load_state_dict`` of a stream or loader sets may apply to each later pass, too: later passes
then have only the rest of the data. It may also have to last, such as the number of an epoch. The
saved run decides: there, the number of the epoch is the same, but nothing has set the position at
which the stream starts. After the resumed pass, StreamState sets such a position back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..plain_state import Decoder, Part, PlainState, digest
from .loader_parts import is_of_library

_DEEPEST = 4
_MOST_OBJECTS = 100
_MOST_ITEMS = 20
_NO_STREAMS = (type, ModuleType, FunctionType, MethodType, Tensor, nn.Module)
# The iterator of a pass is not part of the state between passes.
_IGNORED = ("_iterator",)
_MISSING: Any = object()


class StreamState:
    """The state of a loader or stream that implements ``state_dict`` and ``load_state_dict``.

    Args:
        stream: The loader or the stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._parts = {
            name: Part(owner, _IGNORED, has_attributes=not is_of_library(owner))
            for name, owner in find_objects(stream).items()
        }
        self._plain = PlainState(self._parts)
        # The attributes that load_state_dict has made different from the saved run: the digest
        # of the loaded value, and the encoded value of the saved run.
        self._different: dict[tuple[str, str], tuple[Any, Any]] = {}
        # The loaded state until the first batch after it is read.
        self._loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state(), "attributes": self.attributes()}

    def state(self) -> Any:
        """Return the stream's state. Before a batch is read, many streams do not know their own."""
        return deepcopy(self._stream.state_dict() if self._loaded is None else self._loaded)

    def start_reading(self) -> None:
        self._loaded = None

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the changed attributes, without what load_state_dict has set."""
        attributes = self._plain.changed_attributes()
        for (name, attribute), value in self._unused():
            attributes.setdefault(name, {}).pop(attribute, None)
            if value is not _MISSING:
                attributes[name][attribute] = value
        return attributes

    @contextmanager
    def loaded(self, state: dict[str, Any]) -> Iterator[None]:
        """Load a state. Create the iterator of the resumed pass in the block."""
        values, digests = self._plain.small_attributes(), self._plain.digests()
        names = {name: set(part.attributes()) for name, part in self._parts.items()}
        self._stream.load_state_dict(deepcopy(state["state"]))
        self._loaded = state["state"]
        yield
        for name, saved in state["attributes"].items():
            # The other attributes had their first values in the saved run.
            values.setdefault(name, {}).update(saved)
            names.setdefault(name, set()).update(saved)
        for name, found in self._plain.digests().items():
            known, changed = values.get(name, {}), state["attributes"].get(name, {})
            for attribute, loaded in found.items():
                is_same = attribute not in changed and loaded == digests[name].get(attribute)
                if not is_same and (attribute in known or attribute not in names[name]):
                    self._compare((name, attribute), loaded, known.get(attribute, _MISSING))

    def _compare(self, place: tuple[str, str], loaded: Any, value: Any) -> None:
        """Keep the value of the saved run if another one was loaded."""
        with suppress(Exception):
            if value is _MISSING or digest(Decoder().decode(value)) != loaded:
                self._different[place] = (loaded, value)

    def end_pass(self) -> None:
        """Undo what load_state_dict has set, unless the resumed pass has changed it since."""
        values: dict[str, dict[str, Any]] = {}
        for (name, attribute), value in self._unused():
            if value is _MISSING:
                self._parts[name].namespace().pop(attribute, None)
            else:
                values.setdefault(name, {})[attribute] = value
        self._plain.load_attributes(values)
        self._different.clear()

    def _unused(self) -> list[tuple[tuple[str, str], Any]]:
        """List the different attributes that still have the value that was loaded."""
        digests = self._plain.digests() if self._different else {}
        return [
            (place, value)
            for place, (loaded, value) in self._different.items()
            if digests[place[0]].get(place[1]) == loaded
        ]


def find_objects(stream: Any) -> dict[str, Any]:
    """Return a stream and the objects in its attributes, keyed by the names of the attributes."""
    found, seen = {"stream": stream}, {id(stream)}
    level = [("stream", stream)]
    for _ in range(_DEEPEST):
        previous, level = level, []
        for name, owner in previous:
            for attribute, value in items_of(owner):
                is_new = id(value) not in seen and len(found) < _MOST_OBJECTS
                if is_new and hasattr(value, "__dict__") and not isinstance(value, _NO_STREAMS):
                    seen.add(id(value))
                    found[f"{name}.{attribute}"] = value
                    level.append((f"{name}.{attribute}", value))
    return found


def items_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, and the items of lists and dicts among them."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if name in _IGNORED:
            continue
        yield name, value
        if type(value) in (list, tuple, dict) and len(value) <= _MOST_ITEMS:
            items = value.items() if type(value) is dict else enumerate(value)
            yield from ((f"{name}.{key}", item) for key, item in items)
