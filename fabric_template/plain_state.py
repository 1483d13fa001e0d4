"""Save state that objects keep outside of state_dict(), namely generators and plain attributes.

A value is plain if it is None, a number, a string, a tensor, a NumPy array, or a container of plain
values. Only attributes that have changed since the start are saved. Each value becomes a tuple of
its kind and content, which torch.load(weights_only=True) can read. Other values are left out. An
error becomes a warning instead of reaching the caller, and the attribute is left out.

The key of a value is its place: the object's name and the attribute's name. Of an attribute with
state_dict() and load_state_dict(), such as a module's own scheduler, the state is saved.
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .rng_state import find_generators, get_generator_state, set_generator_state

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_SEQUENCES: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, deque)
}
_DICTS: dict[str, type] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)
}
_CONTAINERS = frozenset((*_SEQUENCES.values(), *_DICTS.values()))
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}
# These limits bound the cost of a save: the bytes and items of a saved attribute, the bytes of a
# tensor that is compared as a whole, the items of a container that are compared, and its depth.
_MOST_BYTES = 256 * 2**20
_MOST_ITEMS = 1_000_000
_COMPARED_BYTES = 2**20
_COMPARED_ITEMS = 50_000
_DEEPEST = 12
# The encoded form of an attribute that has been deleted.
REMOVED: Any = ("removed", None)

Place = tuple[str, str]


class NotPlainError(Exception):
    """Raised for a value that is not plain."""


class TooLargeError(Exception):
    """Raised for a value that is too large to save."""


# Comparing values


def digest(value: Any, most: int = _COMPARED_ITEMS) -> Any:
    """Return a value that differs after a plain value has changed.

    A large tensor is compared by its identity, its version and a sample of its numbers. A large
    array or container is compared only by a sample.

    Args:
        most: About how many items of a container are compared.
    """
    kind = type(value)
    if kind in _ATOMS or kind is range:
        return kind, value
    if kind is Tensor:
        return _digest_tensor(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _digest_array(np.asarray(value))
    if kind not in _CONTAINERS or most == 0:
        raise NotPlainError
    items = _items_of(value)
    if set(map(type, items)) <= _ATOMS:
        return kind, len(items), _sample(items, most)
    found = _sample(items, -(-most // 8))
    # The limit decreases at each level, so a container that contains itself is refused.
    most_inside = min(most - 1, max(most // len(found), 8))
    return kind, len(items), [digest(item, most_inside) for item in found]


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _sample(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else [*items[:: -(-len(items) // most)], items[-1]]


def _digest_tensor(tensor: Tensor) -> Any:
    if not is_plain_tensor(tensor):
        raise NotPlainError
    place = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
    values = tensor.detach().reshape(-1)
    if values.numel() * values.element_size() <= _COMPARED_BYTES:
        return place, _checksum(values)
    version = None if tensor.is_inference() else tensor._version
    return place, id(tensor), version, _checksum(values[:: values.numel() // _COMPARED_ITEMS])


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor's values are in memory, where they can be copied."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_dense and tensor.device.type != "meta"


def address_of(tensor: Tensor) -> int:
    """Return the memory address that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


def shares_memory(value: Any, addresses: Collection[int]) -> bool:
    """Return whether a value is a tensor whose memory is at one of the given addresses."""
    return type(value) is Tensor and is_plain_tensor(value) and address_of(value) in addresses


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().data)


def _digest_array(array: np.ndarray) -> Any:
    if not is_plain_dtype(array.dtype):
        raise NotPlainError
    place = (array.shape, array.dtype.str)
    if array.nbytes <= 32 * _COMPARED_BYTES:
        return place, zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    # An array of strings may have few, but large items, so the step must be at least 1.
    step = max(array.size // _COMPARED_ITEMS, 1)
    return place, array.reshape(-1)[::step].tobytes()


def is_plain_dtype(dtype: np.dtype) -> bool:
    return not dtype.hasobject and dtype.names is None


def is_stateful(value: Any) -> bool:
    """Return whether a value has a state_dict to save. Modules and loaders are saved elsewhere."""
    kind = type(value)
    has_methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    is_loader = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return has_methods and not is_loader and not isinstance(value, nn.Module)


# Encoding values


class Encoder:
    """Encode plain values. A value that is in several places is encoded only once.

    Args:
        device: The run's device. A tensor on it is restored to the resumed run's device.
        covered: Memory addresses of tensors that are saved anyway, such as parameters.
        most_bytes: The largest size of an attribute in bytes.
    """

    def __init__(
        self, device: torch.device, covered: Collection[int] = (), most_bytes: int = _MOST_BYTES
    ) -> None:
        self._device, self._covered, self._most_bytes = device, covered, most_bytes
        # Keep each value alive, so that no new value gets its id.
        self._known: dict[int, tuple[Any, Any]] = {}
        self._bytes = self._items = 0

    def encode_attribute(self, value: Any) -> Any:
        self._bytes = self._items = 0
        return self._encode(value, 0)

    def _encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        if kind is Tensor:
            encoded: Any = self._encode_tensor(value)
        elif kind is np.ndarray or isinstance(value, np.generic):
            encoded = self._encode_array(value)
        elif kind is range:
            encoded = "range", [value.start, value.stop, value.step]
        elif kind in _CONTAINERS and depth <= _DEEPEST:
            encoded = self._encode_container(value, kind, depth)
        else:
            raise NotPlainError
        self._known[id(value)] = (value, encoded)
        return encoded

    def _encode_container(self, value: Any, kind: type, depth: int) -> Any:
        self._count(items=len(value))
        items = _items_of(value)
        if not set(map(type, items)) <= _ATOMS:
            items = [self._encode(item, depth + 1) for item in items]
        if kind is deque:
            return "deque", items, value.maxlen
        if kind is defaultdict:
            return "defaultdict", items, getattr(value.default_factory, "__name__", None)
        return kind.__name__, items

    def _encode_tensor(self, tensor: Tensor) -> Any:
        if not is_plain_tensor(tensor) or shares_memory(tensor, self._covered):
            raise NotPlainError
        self._count(size=tensor.numel() * tensor.element_size())
        copied = tensor.detach().to("cpu", copy=True)
        has_gradient = tensor.requires_grad and tensor.is_leaf
        return "tensor", copied, has_gradient, tensor.device == self._device

    def _encode_array(self, value: Any) -> Any:
        array = np.asarray(value)
        if not is_plain_dtype(array.dtype):
            raise NotPlainError
        self._count(size=array.nbytes)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        data = bytearray(array.tobytes())
        # torch.frombuffer refuses an empty buffer.
        encoded = torch.frombuffer(data, dtype=torch.uint8) if data else None
        return kind, encoded, array.dtype.str, list(array.shape)

    def _count(self, size: int = 0, items: int = 0) -> None:
        self._bytes += size
        self._items += items
        if self._bytes > self._most_bytes or self._items > _MOST_ITEMS:
            raise TooLargeError


class Decoder:
    """Decode encoded values. A value that was in several places is decoded only once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._known: dict[int, Any] = {}

    def decode(self, encoded: Any) -> Any:
        if not isinstance(encoded, tuple | list):
            return encoded
        if id(encoded) not in self._known:
            self._known[id(encoded)] = self._decode(*encoded)
        return self._known[id(encoded)]

    def _decode(self, kind: str, content: Any, *options: Any) -> Any:
        if kind == "tensor":
            has_gradient, is_on_device = options
            value = content.to(self._device if is_on_device else "cpu", copy=True)
            return value.requires_grad_(has_gradient)
        if kind in ("array", "scalar"):
            dtype, shape = options
            data = b"" if content is None else content.numpy().tobytes()
            array = np.frombuffer(data, dtype).reshape(shape).copy()
            return array if kind == "array" else array[()]
        items = [self.decode(item) for item in content]
        if kind == "range":
            return range(*items)
        if kind in _SEQUENCES:
            # Among sequences, only a deque has an option, its maxlen.
            return _SEQUENCES[kind](items, *options)
        pairs = dict(zip(items[::2], items[1::2], strict=True))
        if kind == "defaultdict":
            # Only factories that are built-in types are restored.
            return defaultdict(_FACTORIES.get(*options), pairs)
        return _DICTS[kind](pairs)


def replace_content(current: Any, value: Any) -> bool:
    """Replace an object's content by another object's, or return False if this is impossible."""
    kind = type(current)
    if kind is not type(value):
        return False
    if kind in (Tensor, np.ndarray) and (current.shape, current.dtype) != (
        value.shape,
        value.dtype,
    ):
        return False
    if kind is Tensor and not current.is_inference() and current.is_leaf:
        current.detach().copy_(value)
        current.requires_grad_(value.requires_grad)
    elif kind is np.ndarray and current.flags.writeable:
        current[...] = value
    elif kind is set or kind in _DICTS.values():
        current.clear()
        current.update(value)
    elif kind is list or (kind is deque and current.maxlen == value.maxlen):
        current.clear()
        current.extend(value)
    else:
        return False
    return True


def load_object(current: Any, state: Any) -> None:
    if not is_stateful(current):
        raise ValueError("an object that was created during training is missing now")
    current.load_state_dict(state)


# Objects


@dataclass(frozen=True)
class Part:
    """An object whose state is saved.

    Args:
        instance: The object.
        ignored: The names of attributes that are not saved.
        has_attributes: Whether to save attributes. Generators are always saved.
        has_buffers: Whether to save a module's buffers instead of its attributes.
    """

    instance: Any
    ignored: Collection[str] = ()
    has_attributes: bool = True
    has_buffers: bool = False

    def namespace(self) -> dict[str, Any]:
        """Return the dict that holds the attributes. Changing this dict changes the object."""
        if isinstance(self.instance, type):
            return {}
        attributes = getattr(self.instance, "__dict__", {})
        return attributes["_buffers"] if self.has_buffers else attributes

    def attributes(self) -> dict[str, Any]:
        if not self.has_attributes:
            return {}
        return {n: value for n, value in self.namespace().items() if n not in self.ignored}


class PlainState:
    """The generators and plain attributes of several objects.

    Args:
        parts: The objects by name. Attributes that change after this call are saved.
        device: The run's device.
        network: A module whose state_dict is saved anyway.
    """

    is_per_process = True

    def __init__(
        self,
        parts: dict[str, Part],
        device: torch.device | None = None,
        network: nn.Module | None = None,
    ) -> None:
        self._parts, self._network = parts, network
        self._device = torch.device("cpu") if device is None else device
        self._warned: set[str] = set()
        # Objects whose state is saved elsewhere, by id. None: save no object's state.
        self._saved: dict[int, Any] | None = None
        self._at_start = self.digests()

    def add(self, parts: dict[str, Part], saved: Iterable[Any]) -> None:
        """Add objects to save. Also save states of objects in attributes, except for ``saved``."""
        self._saved = {id(part): part for part in saved}
        self._parts |= parts
        for place, found in self.digests().items():
            if place[0] in parts:
                self._at_start[place] = found

    def generators(self) -> dict[str, Any]:
        """Return each generator once, under the names of its object and attribute."""
        found: dict[int, tuple[str, Any]] = {}
        for name, part in self._parts.items():
            for attribute, generator in find_generators(part.namespace()).items():
                found.setdefault(id(generator), (f"{name}.{attribute}", generator))
        return dict(found.values())

    def generator_states(self) -> dict[str, Any]:
        return {name: get_generator_state(part) for name, part in self.generators().items()}

    def load_generator_states(self, states: dict[str, Any]) -> None:
        generators = self.generators()
        for name, state in states.items():
            if name in generators:
                with self._guarded(f"the generator {name}"):
                    set_generator_state(generators[name], state)

    def state_dict(self, has_attributes: bool = True) -> dict[str, Any]:
        """Return the generators' states, and the attributes that have changed."""
        attributes = self.changed_attributes() if has_attributes else {}
        return {"generators": self.generator_states(), "attributes": attributes}

    def changed_attributes(self) -> dict[Place, Any]:
        """Return the encoded attributes that have changed since the start."""
        encoder = Encoder(self._device, self._addresses_of_network())
        attributes = dict(self.attributes())
        changed = {place: REMOVED for place in self._at_start if place not in attributes}
        for place, value in attributes.items():
            with self._guarded(f"the attribute {'.'.join(place)}"):
                if self._is_saved_as_state(value):
                    changed[place] = "state", encoder.encode_attribute(value.state_dict())
                elif digest(value) != self._at_start.get(place, self):
                    changed[place] = encoder.encode_attribute(value)
        return changed

    def _is_saved_as_state(self, value: Any) -> bool:
        return self._saved is not None and id(value) not in self._saved and is_stateful(value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_generator_states(state["generators"])
        self.load_attributes(state["attributes"])
        for place, encoded in state["attributes"].items():
            if encoded != REMOVED:
                # Without an initial value, the attribute counts as changed, and is saved again.
                self._at_start.pop(place, None)

    def load_attributes(self, saved: dict[Place, Any], is_in_place: bool = True) -> None:
        """Set the saved attributes. Objects that share a list or a tensor continue to share it.

        Args:
            is_in_place: Whether to change lists and tensors in place, because others may hold them.
        """
        decoder, targets = Decoder(self._device), self._targets(saved)
        covered = self._addresses_of_network()
        placed: dict[int, Any] = {}
        for (name, attribute), encoded in saved.items():
            if name not in self._parts:
                continue
            namespace = self._parts[name].namespace()
            if encoded == REMOVED:
                namespace.pop(attribute, None)
                continue
            with self._guarded(f"the attribute {name}.{attribute}"):
                if isinstance(encoded, tuple) and encoded[0] == "state":
                    if is_in_place:
                        load_object(namespace.get(attribute), decoder.decode(encoded[1]))
                    continue
                if id(encoded) not in placed:
                    current, value = namespace.get(attribute), decoder.decode(encoded)
                    is_alone = len(targets.get(id(current), ())) <= 1
                    is_kept = is_in_place and is_alone and not shares_memory(current, covered)
                    is_replaced = is_kept and replace_content(current, value)
                    placed[id(encoded)] = current if is_replaced else value
                namespace[attribute] = placed[id(encoded)]

    @contextmanager
    def replaced(self, state: dict[str, Any]) -> Iterator[None]:
        """Set a state's generators and attributes, and undo this at the end of the block."""
        generators = self.generator_states()
        previous = {name: dict(part.namespace()) for name, part in self._parts.items()}
        self.load_generator_states(state["generators"])
        self.load_attributes(state["attributes"], is_in_place=False)
        try:
            yield
        finally:
            self.load_generator_states(generators)
            for name, attribute in state["attributes"]:
                if attribute in previous.get(name, ()):
                    self._parts[name].namespace()[attribute] = previous[name][attribute]
                elif name in previous:
                    self._parts[name].namespace().pop(attribute, None)

    def attributes(self) -> Iterator[tuple[Place, Any]]:
        """Yield each attribute's place and value."""
        for name, part in self._parts.items():
            for attribute, value in part.attributes().items():
                yield (name, attribute), value

    def _addresses_of_network(self) -> set[int]:
        """Return the addresses of the tensors in the network's state_dict."""
        if self._network is None:
            return set()
        saved = self._network.state_dict(keep_vars=True).values()
        return {address_of(value) for value in saved if type(value) in (nn.Parameter, Tensor)}

    def _targets(self, saved: dict[Place, Any]) -> dict[int, set[int]]:
        """For each current value, return the ids of the saved values that would replace it."""
        found: dict[int, set[int]] = defaultdict(set)
        for place, value in self.attributes():
            if type(value) not in _ATOMS and saved.get(place) != REMOVED:
                found[id(value)].add(id(saved.get(place)))
        return found

    def digests(self) -> dict[Place, Any]:
        """Return a digest of each plain attribute."""
        found: dict[Place, Any] = {}
        for place, value in self.attributes():
            with suppress(Exception):
                found[place] = digest(value)
        return found

    def small_attributes(self) -> dict[Place, tuple[Any, Any]]:
        """Return each small attribute's digest and encoded value, whether it has changed or not."""
        encoder = Encoder(self._device, most_bytes=_COMPARED_BYTES)
        found: dict[Place, tuple[Any, Any]] = {}
        for place, value in self.attributes():
            with suppress(Exception):
                found[place] = digest(value), encoder.encode_attribute(value)
        return found

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Turn an error into a warning, which is shown once per attribute."""
        try:
            yield
        except (NotPlainError, RecursionError):
            pass
        except Exception as error:
            if what in self._warned:
                return
            self._warned.add(what)
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, TooLargeError):
                reason = f"it has more than {_MOST_BYTES >> 20} MB or {_MOST_ITEMS:,} items"
            # A warning filter may turn the warning into an error, which must not end the run.
            with suppress(Warning):
                warnings.warn(
                    f"checkpoint: {what} is neither saved nor restored, because {reason}. A resumed"
                    " run may differ. Save it in on_save_checkpoint, or as a buffer of a module.",
                    stacklevel=4,
                )
