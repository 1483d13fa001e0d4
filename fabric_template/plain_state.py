"""Save the random generators and object attributes that state_dict() does not contain.

A value is plain if it is None, a number, a string, a tensor, a NumPy array, or a container of plain
values. Only plain attributes that have changed since the start of the run are saved. An array, a
tensor or a container is encoded as a tuple (kind, content, ...), which
torch.load(weights_only=True) can read. An attribute that is too large is not saved, but causes a
warning.

In a checkpoint, the key of a value is the pair (object name, attribute name). If a module's
attribute is a scheduler, the scheduler's state_dict is saved. If a module's attribute is a replay
buffer, the buffer's attributes are saved.
"""

from __future__ import annotations

import io
import marshal
import math
import sys
import warnings
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import count, islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .rng_state import find_generators, get_generator_state, set_generator_state

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_SEQUENCES: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, deque)
}
_DICTS: dict[str, type] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)
}
_TENSORS = (Tensor, nn.Parameter)
_CONTAINERS = frozenset((*_SEQUENCES.values(), *_DICTS.values()))
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}
_VALUES: dict[str, Any] = {
    kind.__name__: kind for kind in (range, timedelta, date, datetime, Fraction, Decimal, bytearray)
}
# Limits that keep checkpoints small and quick to save.
_MOST_BYTES = 256 * 2**20  # The maximum size of a saved attribute.
_MOST_ITEMS = 1_000_000  # The maximum number of items in a saved attribute.
_COMPARED_BYTES = 2**20  # The maximum size of a GPU tensor that is compared as a whole.
_COMPARED_ITEMS = 50_000  # The maximum number of container items or array elements in a digest.
_DEEPEST = 12  # The maximum nesting depth of a saved container.
_MOST_OBJECTS = 500  # The maximum number of objects whose attributes are saved.
_MOST_CHECKED = 64  # The maximum number of items whose types are checked in a container.
_MOST_SEARCHED = 500  # The maximum number of items in a container that is searched for objects.
# Do not save objects from these packages, because they may hold open files or processes.
_LIBRARIES = {"lightning", "numpy", "pytorch_lightning", "torch", "torchmetrics"}
_LIBRARIES |= sys.stdlib_module_names
# The attributes that torch sets in every module.
_OF_MODULE = frozenset(vars(nn.Module()))
# In a checkpoint, this value marks a deleted attribute.
REMOVED: Any = ("removed", None)
# Replaces the digest or the encoded value of an attribute that cannot be saved.
UNKNOWN: Any = ("unknown", None)
_NOT_CREATED = "the saved run, but not this run, created it during training"

Place = tuple[str, str]


class NotPlainError(Exception):
    """Raised if a value cannot be saved, because its type is not supported."""


class TooLargeError(Exception):
    """Raised if an attribute is too large to be saved."""


# Comparing values


def digest(value: Any, most: int = _COMPARED_ITEMS) -> Any:
    """Return a digest of a value, to detect later changes to it.

    The digest of a large value, such as a GPU tensor of more than 1 MB, covers only a sample of its
    elements.

    Args:
        most: The maximum number of items in the digest of a container.
    """
    kind = type(value)
    if kind in (float, complex):
        # NaN does not equal NaN, but their texts are equal.
        return kind, repr(value)
    if kind in _ATOMS or isinstance(value, Enum):
        return kind, value
    if isinstance(value, SynchronizedBase):
        return kind, read_shared(value)
    if kind in _TENSORS:
        return _digest_tensor(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _digest_array(np.asarray(value))
    if (arguments := arguments_of(value)) is not None:
        return kind, arguments
    if not (kind in _CONTAINERS or is_named_tuple(kind)) or most == 0:
        raise NotPlainError
    items = _items_of(value)
    is_atomic = set(map(type, items)) <= _ATOMS
    if is_atomic or most < len(items) <= _MOST_ITEMS:
        # marshal raises a ValueError for tensors and objects. In format 2, its output depends only
        # on the values. In later formats, the output also depends on reference counts.
        with suppress(ValueError):
            return kind, len(items), zlib.crc32(marshal.dumps(items, 2))
    step = math.ceil(len(items) / math.ceil(most / 8))
    found = items if step == 1 else [*items[::step], items[-1]]
    # Lower the limit for items at each nesting level, so that a container that contains itself is
    # refused.
    most_inside = min(most - 1, max(most // len(found), 8))
    marks = [] if len(found) == len(items) else [_mark(item) for item in items]
    return kind, len(items), [digest(item, most_inside) for item in found], marks


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return a quick fingerprint of an item in a large container."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in _CONTAINERS and depth < _DEEPEST:
        return [_mark(item, depth + 1) for item in _items_of(value)]
    is_counted = kind in _TENSORS and not value.is_inference()
    return id(value), value._version if is_counted else None


def _digest_tensor(tensor: Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        parts = tensor.detach().coalesce()
        return tensor.shape, _digest_tensor(parts.indices()), _digest_tensor(parts.values())
    if not is_plain_tensor(tensor):
        raise NotPlainError
    place = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
    values = tensor.detach().reshape(-1)
    # On the CPU, compare all elements, because changes through NumPy do not affect _version.
    most = _MOST_BYTES if tensor.device.type == "cpu" else _COMPARED_BYTES
    if values.numel() * values.element_size() <= most:
        return place, _checksum(values)
    version = None if tensor.is_inference() else tensor._version
    return place, id(tensor), version, _checksum(values[:: values.numel() // _COMPARED_ITEMS])


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and has data, so that its values can be copied."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_dense and tensor.device.type != "meta"


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which is the same for all its views."""
    return tensor.untyped_storage().data_ptr()


def shares_memory(value: Any, addresses: Collection[int]) -> bool:
    """Return whether a value is a tensor whose memory is at one of the given addresses."""
    is_plain = type(value) in _TENSORS and is_plain_tensor(value)
    return is_plain and address_of(value) in addresses


def refers_to(value: Any, ids: set[int], addresses: Collection[int] = ()) -> bool:
    """Return whether a value, such as a dict keyed by id(parameter), refers to parameters.

    Args:
        ids: The ids of the parameters.
        addresses: The memory addresses of the parameters.
    """
    keys = value if isinstance(value, dict | set) else ()
    if any(type(key) is int and key in ids for key in keys):
        return True
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return any(refers_to(item, ids, addresses) for item in islice(items, _MOST_SEARCHED))
    return shares_memory(value, addresses)


class Identity:
    """Replaces the digest of a value that is not plain. Equals only an Identity of the same object.

    If a container is not plain, its items must also be the same objects.
    """

    def __init__(self, value: Any) -> None:
        items = _items_of(value) if type(value) in _CONTAINERS else ()
        self._ids = id(value), hash(tuple(map(id, items)))
        self._reference: Any = None
        # Lists, dicts and objects of some classes with __slots__ do not support weak references.
        with suppress(TypeError):
            self._reference = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._ids != other._ids:
            return False
        # Python may use the id of a deleted object again.
        references = (self._reference, other._reference)
        return all(reference is None or reference() is not None for reference in references)


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().data)


def _digest_array(array: np.ndarray) -> Any:
    if not is_plain_dtype(array.dtype):
        raise NotPlainError
    place = (array.shape, array.dtype.str)
    if array.nbytes <= _MOST_BYTES:
        return place, zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    # An array of long strings may have few elements, so the step of the slice must be at least 1.
    step = max(array.size // _COMPARED_ITEMS, 1)
    return place, array.reshape(-1)[::step].tobytes()


def is_plain_dtype(dtype: np.dtype) -> bool:
    return not dtype.hasobject and dtype.names is None


def is_stateful(value: Any) -> bool:
    """Return whether a value has a ``state_dict``, and is neither a module nor a loader."""
    kind = type(value)
    has_methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    is_loader = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return has_methods and not is_loader and not isinstance(value, nn.Module)


# Ranges, dates and other small values


def arguments_of(value: Any) -> list[Any] | None:
    """Return the arguments that create an equal range, date, bytearray, Fraction or Decimal.

    Return None for a value of another type, and for a time with a time zone. Paths are not saved,
    because the folder of a run may have moved.
    """
    kind = type(value)
    if kind is range:
        return [value.start, value.stop, value.step]
    if kind is timedelta:
        return [value.days, value.seconds, value.microseconds]
    if kind is date:
        return [value.year, value.month, value.day]
    if kind is datetime and value.tzinfo is None:
        return [*value.timetuple()[:6], value.microsecond]
    if kind is Fraction:
        return [value.numerator, value.denominator]
    if kind is Decimal:
        return [str(value)]
    return [bytes(value)] if kind is bytearray else None


# Enums and named tuples


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def find_class(base: type, module: str, name: str) -> Any:
    """Return the subclass of ``base`` with the given name, or None.

    Search only modules that are already imported, because an import would run code.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, base) else None


# Encoding values


class Encoder:
    """Convert plain values to tuples that torch.load(weights_only=True) can read.

    If several attributes share an object, encode the object only once.

    Args:
        device: The run's device. A resumed run moves the tensors of this device to its own device.
        covered: The memory addresses and names of the tensors in the network's state_dict.
        most_bytes: The maximum size of an attribute in bytes.
    """

    def __init__(
        self, device: torch.device, covered: dict[int, str], most_bytes: int = _MOST_BYTES
    ) -> None:
        self._device, self._covered, self._most_bytes = device, covered, most_bytes
        # Hold a reference to each encoded value, so that no other value gets the same id.
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
        if kind in _TENSORS:
            encoded: Any = self._encode_tensor(value, depth)
        elif kind is np.ndarray or isinstance(value, np.generic):
            encoded = self._encode_array(value)
        elif isinstance(value, SynchronizedBase) and depth == 0:
            encoded = "shared", self._encode(read_shared(value), depth + 1)
        elif (arguments := arguments_of(value)) is not None:
            encoded = kind.__name__, arguments
        elif isinstance(value, Enum) or is_named_tuple(kind):
            encoded = self._encode_by_class(value, kind, depth)
        elif kind in _CONTAINERS and depth <= _DEEPEST:
            encoded = self._encode_container(value, kind, depth)
        else:
            raise NotPlainError
        self._known[id(value)] = (value, encoded)
        return encoded

    def _encode_by_class(self, value: Any, kind: type, depth: int) -> Any:
        """Encode an Enum member or a named tuple, together with its class name."""
        place = kind.__module__, kind.__qualname__
        if find_class(kind, *place) is not kind or depth > _DEEPEST:
            raise NotPlainError
        if isinstance(value, Enum):
            return "enum", value.name, *place
        self._count(items=len(value))
        return "named tuple", [self._encode(item, depth + 1) for item in value], *place

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

    def _encode_tensor(self, tensor: Tensor, depth: int) -> Any:
        if shares_memory(tensor, self._covered):
            # If a list or dict contains a weight of the model, save only the weight's name.
            if depth == 0:
                raise NotPlainError
            place = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
            return "weight", self._covered[address_of(tensor)], type(tensor) is nn.Parameter, *place
        if not (is_plain_tensor(tensor) or tensor.layout is torch.sparse_coo):
            raise NotPlainError
        self._count(size=tensor.numel() * tensor.element_size())
        copied = tensor.detach().to("cpu", copy=True)
        has_gradient = tensor.requires_grad and tensor.is_leaf
        kind = type(tensor).__name__.lower()
        return kind, copied, has_gradient, tensor.device == self._device

    def _encode_array(self, value: Any) -> Any:
        array = np.asarray(value)
        if not is_plain_dtype(array.dtype):
            raise NotPlainError
        self._count(size=array.nbytes)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        data = bytearray(array.tobytes())
        # Encode an empty array as None, because torch.frombuffer refuses an empty buffer.
        encoded = torch.frombuffer(data, dtype=torch.uint8) if data else None
        return kind, encoded, array.dtype.str, list(array.shape)

    def _count(self, size: int = 0, items: int = 0) -> None:
        # A reference in a list takes 8 bytes.
        self._bytes += size + 8 * items
        self._items += items
        if self._bytes > self._most_bytes or self._items > _MOST_ITEMS:
            raise TooLargeError


class Decoder:
    """Convert the tuples of an Encoder back to values.

    If several attributes share an object, decode the object only once.

    Args:
        network: The network with the weights that were encoded by name.
    """

    def __init__(
        self, device: torch.device | str = "cpu", network: nn.Module | None = None
    ) -> None:
        self._device = device
        self._weights = {} if network is None else network.state_dict(keep_vars=True)
        self.targets: dict[int, Any] = {}
        self._known: dict[int, Any] = {}

    def decode(self, encoded: Any) -> Any:
        if not isinstance(encoded, tuple | list):
            return encoded
        if id(encoded) not in self._known:
            value, target = self._decode(*encoded), self.targets.get(id(encoded))
            self._known[id(encoded)] = target if replace_content(target, value) else value
        return self._known[id(encoded)]

    def _decode(self, kind: str, content: Any, *options: Any) -> Any:
        if kind == "weight":
            is_parameter, *place = options
            weight = self._weights[content]
            return weight if is_parameter else weight.detach().as_strided(*place)
        if kind in ("tensor", "parameter"):
            has_gradient, is_on_device = options
            value = content.to(self._device if is_on_device else "cpu", copy=True)
            value = nn.Parameter(value) if kind == "parameter" else value
            return value.requires_grad_(has_gradient)
        if kind in ("array", "scalar"):
            dtype, shape = options
            data = b"" if content is None else content.numpy().tobytes()
            array = np.frombuffer(data, dtype).reshape(shape).copy()
            return array if kind == "array" else array[()]
        if kind == "enum":
            return find_class(Enum, *options).__members__[content]
        items = [self.decode(item) for item in content]
        if kind in _VALUES:
            return _VALUES[kind](*items)
        if kind == "named tuple":
            return tuple.__new__(find_class(tuple, *options), items)
        if kind in _SEQUENCES:
            # ``options`` contains the maxlen of a deque. For other types, it is empty.
            return _SEQUENCES[kind](items, *options)
        pairs = dict(zip(items[::2], items[1::2], strict=True))
        if kind == "defaultdict":
            # Restore a defaultdict's default_factory only if the factory is a built-in type, such
            # as int or list.
            return defaultdict(_FACTORIES.get(*options), pairs)
        return _DICTS[kind](pairs)


def replace_content(current: Any, value: Any) -> bool:
    """Copy a saved value into an existing object, if both have the same type and shape.

    Returns:
        Whether the value was copied.
    """
    kind = type(current)
    if kind is not type(value):
        return False
    if kind in (*_TENSORS, np.ndarray) and (current.shape, current.dtype) != (
        value.shape,
        value.dtype,
    ):
        return False
    if kind in _TENSORS and value.is_sparse:
        return False
    if kind in _TENSORS and not current.is_inference() and current.is_leaf:
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
    if isinstance(current, SynchronizedBase):
        write_shared(current, state)
        return
    if not (is_stateful(current) or isinstance(current, nn.Module)):
        raise ValueError("the saved run created an object that is missing in this run")
    if isinstance(current, torch.optim.Optimizer):
        load_optimizer(current, state)
    else:
        current.load_state_dict(state)


def load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load an optimizer's state exactly, and in place because other objects may share the dicts.

    For example, a wrapper around an optimizer often shares the optimizer's parameter groups.
    load_state_dict() alone would create new groups, and change the dtype of some tensors.
    """
    groups, state = (vars(optimizer).get(name) for name in ("param_groups", "state"))
    is_usual = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    optimizer.load_state_dict(saved)
    if is_usual and isinstance(groups, list):
        for group, loaded in zip(groups, list(optimizer.param_groups), strict=True):
            _replace_items(group, loaded)
        optimizer.param_groups = groups
    if is_usual and isinstance(state, dict):
        _replace_items(state, optimizer.state)
        optimizer.state = state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = saved.get("state") if isinstance(saved, dict) else None
    # An optimizer with its own load_state_dict may save its state in a format of its own.
    for index, values in states.items() if isinstance(states, dict) else ():
        if index not in range(len(parameters)) or not isinstance(values, dict):
            continue
        current = optimizer.state[parameters[index]]
        for name, value in values.items():
            if is_usual or (isinstance(value, Tensor) and name in current):
                current[name] = _exact_value(current[name], value)


def _replace_items(target: dict[Any, Any], source: dict[Any, Any]) -> None:
    items = dict(source)
    target.clear()
    target.update(items)


def _exact_value(loaded: Any, saved: Any) -> Any:
    """Move the tensors in a saved value to the devices of the tensors in ``loaded``."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(saved) is tuple:
        return tuple(map(_exact_value, loaded, saved))
    if isinstance(saved, dict):
        exact = copy(saved)
        exact.update((key, _exact_value(loaded[key], saved[key])) for key in saved)
        return exact
    if type(saved) is deque:
        return deque(map(_exact_value, loaded, saved), saved.maxlen)
    return [*map(_exact_value, loaded, saved)] if type(saved) is list else saved


# Values in shared memory, such as multiprocessing.Value


def read_shared(value: Any) -> Any:
    content = value.get_obj()
    return content.value if hasattr(content, "value") else list(content)


def write_shared(value: Any, saved: Any) -> None:
    """Write a saved value into an object in shared memory.

    Raise an error if the type or the length of the value does not match the object.
    """
    content = value.get_obj()
    if hasattr(content, "value"):
        content.value = saved
    else:
        content[:] = saved


# Objects


class SlotAttributes(dict[str, Any]):
    """A dict of an object's attributes, including slots.

    Setting or removing an item of this dict also sets or removes the object's attribute.
    """

    def __init__(self, instance: Any, slots: list[str]) -> None:
        self._instance, self._slots = instance, slots
        super().__init__(
            {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
        )
        self.update(getattr(instance, "__dict__", {}))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        # Do not call setattr, because loading a checkpoint must not run the setter of a property.
        if name in self._slots:
            object.__setattr__(self._instance, name, value)
        elif hasattr(self._instance, "__dict__"):
            vars(self._instance)[name] = value

    def pop(self, name: str, default: Any = None) -> Any:
        if name in self._slots and name in self:
            object.__delattr__(self._instance, name)
        getattr(self._instance, "__dict__", {}).pop(name, None)
        return super().pop(name, default)


def slots_of(kind: type) -> list[str]:
    """Return the names of a class's slots. A private name such as __x becomes _Class__x."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


@dataclass(frozen=True)
class Part:
    """An object whose random generators or attributes are saved in checkpoints.

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
        """Return a dict of the object's attributes.

        Setting or removing an item of this dict also sets or removes the object's attribute.
        """
        if isinstance(self.instance, type):
            return {}
        if isinstance(self.instance, dict):
            # Some dict subclasses expose their keys as attributes, so treat the keys as attributes.
            return self.instance
        if isinstance(self.instance, nn.Module):
            return vars(self.instance)["_buffers"] if self.has_buffers else vars(self.instance)
        slots = slots_of(type(self.instance))
        return (
            SlotAttributes(self.instance, slots)
            if slots
            else getattr(self.instance, "__dict__", {})
        )

    def attributes(self) -> dict[str, Any]:
        if not self.has_attributes:
            return {}
        # Skip keys that are not strings, because a user's dict subclass may contain them.
        values = self.namespace().items()
        return {n: v for n, v in values if isinstance(n, str) and n not in self.ignored}

    def would_hide(self, name: str) -> bool:
        """Return whether an attribute would hide a parameter, buffer or submodule of a module."""
        if not isinstance(self.instance, nn.Module) or self.has_buffers:
            return False
        kinds = ("_parameters", "_buffers", "_modules")
        return any(name in getattr(self.instance, kind) for kind in kinds)


def is_own_object(value: Any) -> bool:
    """Return whether an object, such as a replay buffer, may have attributes to save."""
    kind = type(value)
    is_known = isinstance(value, nn.Module | Tensor | Enum | tuple) or hasattr(kind, "state_dict")
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES and kind is not SimpleNamespace
    # Exclude this package's objects, even if a user has renamed a copy of the package.
    is_library = is_library or kind.__module__.startswith(f"{__package__}.")
    # Search torch's datasets, because a Subset, for example, may contain a user's dataset.
    is_library = is_library and not isinstance(value, Dataset)
    has_attributes = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return has_attributes and not (is_known or is_library)


def is_library_iterator(value: Any) -> bool:
    """Return whether a value is an iterator from Python or torch, such as iter(DataLoader(...))."""
    is_other = isinstance(value, count | io.IOBase) or is_own_object(value)
    return isinstance(value, Iterator) and not is_other


def find_iterator(value: Any) -> Any:
    """Return a value that is an iterator, or the first iterator in a container, or None."""
    if type(value) not in _CONTAINERS:
        return value if is_library_iterator(value) else None
    items = value.values() if isinstance(value, dict) else value
    return next(filter(is_library_iterator, islice(items, _MOST_CHECKED)), None)


def searched_values(part: Part) -> dict[str, Any]:
    """Return an object's attributes and, for a module or an optimizer, also its hooks."""
    values, module = part.attributes(), part.instance
    if isinstance(module, torch.optim.Optimizer):
        of_step = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        values = {name: values[name] for name in values if name not in of_step}
        return {**values, "hooks": hooks_of(module, of_step)}
    if not isinstance(module, nn.Module) or part.has_buffers:
        return values
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = hooks_of(module, kinds)
    for parameter in module._parameters.values():
        hooks += hooks_of(parameter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return {**values, "hooks": hooks}


def hooks_of(owner: Any, kinds: Iterable[str]) -> list[Any]:
    """Return the hooks of a module, parameter or optimizer.

    If a hook is a bound method, return the object that it is bound to.
    """
    hooks = [hook for kind in kinds for hook in (getattr(owner, kind, None) or {}).values()]
    return [getattr(hook, "__self__", hook) for hook in hooks]


def is_installed(kind: type) -> bool:
    """Return whether a class comes from an installed package rather than from the user's code."""
    return "-packages" in (getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


class ListItem(SimpleNamespace):
    """Holds a list item that has a state_dict, because only attributes of objects are saved."""


def find_objects(parts: dict[str, Part], known: set[int]) -> dict[str, Part]:
    """Search attributes, lists and dicts, and return the objects to save, keyed by path.

    Args:
        known: The ids of objects to skip, such as those of the network's modules.
    """
    found: dict[str, Part] = {}
    known = known | {id(part.instance) for part in parts.values() if not part.has_buffers}
    waiting = deque((path, searched_values(part), False) for path, part in parts.items())
    while waiting and len(found) <= _MOST_OBJECTS:
        path, values, is_container = waiting.popleft()
        for key, value in values.items():
            if type(value) in _ATOMS or id(value) in known:
                continue
            known.add(id(value))
            place = f"{path}.{name_of_key(key)}"
            metrics = find_metrics(place, value, known)
            found |= metrics
            known |= {id(part.instance) for part in metrics.values()}
            if type(value) in _CONTAINERS and 0 < len(value) <= _MOST_SEARCHED:
                items: Any = value if isinstance(value, dict) else dict(enumerate(value))
                waiting.append((place, items, True))
            elif is_own_object(value):
                found[place] = Part(value, has_attributes=not is_installed(type(value)))
                waiting.append((place, found[place].namespace(), False))
            elif is_container and (is_stateful(value) or isinstance(value, nn.Module)):
                found[place] = Part(ListItem(item=value))
    return found


def name_of_key(key: Any) -> str:
    """Return a dict key, an index or an attribute name as part of a path such as "model.pools.0".

    ``key_of_name`` converts the name back.
    """
    if isinstance(key, str):
        # Quote a string of digits, because digits without quotes are an int.
        return repr(key) if is_integer(key) else key
    return str(key) if type(key) is int or isinstance(key, np.integer) else f"<{key}>"


def key_of_name(name: str) -> int | str | None:
    """Return the int or the string that a part of a path stands for, or None for other keys."""
    if name.startswith("<"):
        return None
    return int(name) if is_integer(name) else name.strip("'")


def is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def find_metrics(path: str, value: Any, known: set[int]) -> dict[str, Part]:
    """Return the torchmetrics objects in a module, whose state_dict() lacks most of their state."""
    modules = value.named_modules() if isinstance(value, nn.Module) else ()
    return {
        f"{path}.{name or 'metric'}": Part(module, _OF_MODULE)
        for name, module in modules
        if (module is value or id(module) not in known)
        and all(hasattr(module, method) for method in ("update", "compute", "reset"))
    }


def digests_of_callbacks(parts: dict[str, Part]) -> dict[str, list[int]]:
    """Return a digest of the numbers and strings in each callback, keyed by the callback's class.

    A resumed run compares the digests, because it restores the callbacks of one class in order.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for name, part in parts.items():
        if name.startswith("callbacks.") and part.has_attributes and not part.has_buffers:
            values = part.attributes().items()
            atoms = sorted((key, repr(value)) for key, value in values if type(value) in _ATOMS)
            found[name.rpartition(".")[0]].append(zlib.crc32(repr(atoms).encode()))
    return dict(found)


def warn_of_callbacks(name: str, num_saved: int, num: int) -> None:
    """Warn that a class has fewer callbacks than in the saved run, or in another order."""
    # Continue training even if a warning filter turns the warning into an error.
    with suppress(Warning):
        warnings.warn(
            f"callbacks: got {num} of the class {name}, expected {num_saved} in the order of the"
            " saved run. Their attributes are restored in this order, and those of other callbacks"
            " are lost. Write state_dict(), load_state_dict() and a state_key to move callbacks.",
            stacklevel=4,
        )


class PlainState:
    """Save and restore the random generators and the changed plain attributes of several objects.

    Args:
        parts: The objects by name. Attributes that change after this call are saved.
        device: The run's device.
        network: The run's network. If it is None, objects in attributes are not saved.
    """

    is_per_process = True

    def __init__(
        self,
        parts: dict[str, Part],
        device: torch.device | None = None,
        network: nn.Module | None = None,
    ) -> None:
        # _given contains the objects that the caller passes. _parts also contains the objects in
        # the attributes of _given, such as a replay buffer.
        self._given, self._network = parts, network
        self._parts = parts
        self._device = torch.device("cpu") if device is None else device
        self._warned: set[str] = set()
        # The digests and encoded values that ``keep_start_values`` has stored.
        self._start_values: dict[Place, tuple[Any, Any]] = {}
        # Objects that are saved elsewhere, such as optimizers. The value is None until add() runs.
        self._saved: dict[int, Any] | None = None
        self._callbacks = digests_of_callbacks(parts)
        self._find_objects()
        self._at_start = self.digests()
        self._iterators: dict[Place, Any] = {}
        containers = ((p, value) for p, value in self.attributes() if type(value) in _CONTAINERS)
        self._lengths = {place: len(value) for place, value in containers}

    def add(self, parts: dict[str, Part], saved: Iterable[Any]) -> None:
        """Add objects to save, such as the optimizers.

        Args:
            saved: Objects to skip, because other checkpoint keys contain their state.
        """
        self._saved = {id(part): part for part in saved}
        self._given |= parts
        self._find_objects()
        for place, found in self.digests().items():
            if place[0] in parts:
                self._at_start[place] = found

    def _find_objects(self) -> None:
        """Search all attributes again, because hooks may have created new objects."""
        if self._network is not None:
            with self._guarded("the objects in attributes"):
                known = {*(self._saved or ()), *map(id, self._network.modules())}
                found = find_objects(self._given, known)
                self._parts = {**self._given, **found}
                if len(found) > _MOST_OBJECTS:
                    reason = f"there are more than {_MOST_OBJECTS}"
                    self._warn("the last of the objects in attributes", reason)

    def objects_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return all objects that were found in attributes of the given objects, keyed by path.

        Args:
            names: The paths of the objects in a checkpoint. If a path refers to an item of a
                defaultdict, the item is created.
        """
        for name in names:
            self._create_item(name)
        self._find_objects()
        return {n: part.instance for n, part in self._parts.items() if n not in self._given}

    def _create_item(self, name: str) -> None:
        """If a path refers to an item that a defaultdict has not created yet, create the item."""
        path, _, key_name = name.rpartition(".")
        owner, _, attribute = path.rpartition(".")
        namespace = self._parts[owner].namespace() if owner in self._parts else {}
        container: Any = namespace.get(attribute)
        key = key_of_name(key_name)
        has_factory = isinstance(container, defaultdict) and container.default_factory is not None
        if has_factory and key is not None:
            container[key]

    def generators(self) -> dict[str, Any]:
        """Return the random generators, keyed by a path such as "object.attribute".

        If several objects share a generator, return the generator only once.
        """
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
            with self._guarded(f"the generator {name}"):
                if name not in generators:
                    raise ValueError(_NOT_CREATED)
                set_generator_state(generators[name], state)

    def state_dict(self, has_attributes: bool = True) -> dict[str, Any]:
        """Return the RNG states of all generators, and the attributes that the run has changed."""
        self._find_objects()
        attributes = self.changed_attributes() if has_attributes else {}
        return {
            "generators": self.generator_states(),
            "attributes": attributes,
            "callbacks": self._callbacks,
        }

    def changed_attributes(self) -> dict[Place, Any]:
        """Return the attributes that have changed since the run started, in encoded form."""
        encoder = Encoder(self._device, self.addresses_of_network())
        attributes, network = dict(self.attributes()), self._network
        parts = [] if network is None else [*network.modules(), *network.parameters()]
        ids = set(map(id, parts))
        places = [place for place in self._at_start if place[0] in self._parts]
        changed = {place: REMOVED for place in places if place not in attributes}
        for place, value in attributes.items():
            with self._guarded(f"the attribute {'.'.join(map(str, place))}"):
                iterator = None if self._network is None else find_iterator(value)
                if iterator is not None:
                    raise TypeError(f"the position of a {type(iterator).__name__} cannot be saved")
                if self._has_new_objects(place, value):
                    raise TypeError("it contains objects that were created during training")
                is_state = self._is_saved_as_state(value)
                is_object = is_state and not isinstance(value, nn.Module)
                if not is_object and self._digest(value) == self._at_start.get(place, self):
                    continue
                if ids and refers_to(value, ids):
                    raise TypeError("it contains ids of modules or parameters, which change")
                plain = value.state_dict() if is_state else value
                encoded = encoder.encode_attribute(plain)
                changed[place] = ("state", encoded) if is_state else encoded
        return changed

    def find_iterators(self) -> None:
        """Record which attributes contain iterators, for a later call to ``warn_of_iterators``."""
        self._iterators = {
            place: value for place, value in self.attributes() if is_library_iterator(value)
        }

    def warn_of_iterators(self) -> None:
        """Warn about iterators in attributes, because a resumed run cannot restore their positions.

        Ignore attributes that got a new iterator after ``find_iterators`` was called.
        """
        for place, value in self.attributes():
            if self._iterators.get(place) is value and value is not None:
                reason = f"TypeError: the position of a {type(value).__name__} cannot be saved"
                self._warn(f"the attribute {'.'.join(place)}", reason)

    def _has_new_objects(self, place: Place, value: Any) -> bool:
        """Return whether training has added objects to a list or dict of a loader."""
        if self._network is not None or type(value) not in _CONTAINERS:
            return False
        if len(value) == self._lengths.get(place, 0):
            return False
        items = value.values() if isinstance(value, dict) else value
        return any(map(is_own_object, islice(items, _MOST_CHECKED)))

    def _is_saved_as_state(self, value: Any) -> bool:
        if self._saved is None or id(value) in self._saved:
            return False
        return is_stateful(value) or self._is_separate_module(value)

    def _is_separate_module(self, value: Any) -> bool:
        """Return whether a value is a module outside the network, such as a teacher model."""
        if self._network is None or not isinstance(value, nn.Module):
            return False
        return set(self._network.modules()).isdisjoint(value.modules())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = self._without_missing_callbacks(state)
        self.objects_of(name for name, _ in state["attributes"])
        self.load_generator_states(state["generators"])
        self.load_attributes(state["attributes"])
        for place, encoded in state["attributes"].items():
            if encoded != REMOVED:
                # Forget the attribute's initial value, so that the next checkpoint also contains
                # the attribute.
                self._at_start.pop(place, None)

    def _without_missing_callbacks(self, state: dict[str, Any]) -> dict[str, Any]:
        """Leave out the state of callbacks that this run lacks.

        Warn about these callbacks, and about callbacks of one class that were moved.
        """
        names = [*state["generators"], *(name for name, _ in state["attributes"])]
        missing: list[str] = []
        for name, old in state.get("callbacks", {}).items():
            new = self._callbacks.get(name, [])
            shared = min(len(old), len(new))
            is_moved = len(old) != len(new) or sorted(old) == sorted(new)
            is_moved &= old[:shared] != new[:shared]
            missing += [f"{name}.{index + 1}." for index in range(len(new), len(old))]
            has_state = any(saved.startswith(f"{name}.") for saved in names)
            if has_state and (is_moved or len(old) > len(new)):
                warn_of_callbacks(name.removeprefix("callbacks."), len(old), len(new))
        return {
            "generators": {
                name: value
                for name, value in state["generators"].items()
                if not name.startswith(tuple(missing))
            },
            "attributes": {
                place: value
                for place, value in state["attributes"].items()
                if not f"{place[0]}.".startswith(tuple(missing))
            },
        }

    def load_attributes(self, saved: dict[Place, Any], is_in_place: bool = True) -> None:
        """Set the objects' attributes to the values in a checkpoint.

        If two attributes shared a list or a tensor in the saved run, they share it again.

        Args:
            is_in_place: Whether to change an existing list or tensor instead of replacing it.
        """
        missing = [name for name, _ in saved if name not in self._parts]
        if missing:
            self._warn(f"the object {missing[0]}", f"ValueError: {_NOT_CREATED}")
        saved = self._without_hiding(saved)
        decoder = Decoder(self._device, self._network)
        replacements = self._find_replacements(saved)
        covered = self.addresses_of_network()
        for (name, attribute), encoded in saved.items() if is_in_place else ():
            part = self._parts.get(name)
            current = None if part is None else part.namespace().get(attribute)
            is_alone = len(replacements.get(id(current), ())) <= 1
            if is_alone and not shares_memory(current, covered):
                decoder.targets.setdefault(id(encoded), current)
        for (name, attribute), encoded in saved.items():
            if name not in self._parts:
                continue
            namespace = self._parts[name].namespace()
            if encoded == REMOVED:
                namespace.pop(attribute, None)
                continue
            with self._guarded(f"the attribute {name}.{attribute}"):
                is_object = isinstance(encoded, tuple) and encoded[0] in ("state", "shared")
                if is_object and is_in_place:
                    load_object(namespace.get(attribute), decoder.decode(encoded[1]))
                if is_object:
                    continue
                namespace[attribute] = decoder.decode(encoded)

    def _without_hiding(self, saved: dict[Place, Any]) -> dict[Place, Any]:
        """Leave out attributes that would hide a parameter, so that it is still trained."""
        parts = self._parts
        hiding = [(n, name) for n, name in saved if n in parts and parts[n].would_hide(name)]
        if hiding:
            reason = "this module has a parameter, buffer or submodule of that name"
            self._warn(f"the attribute {'.'.join(hiding[0])}", reason)
        return {place: value for place, value in saved.items() if place not in hiding}

    @contextmanager
    def replaced(self, state: dict[str, Any]) -> Iterator[None]:
        """Temporarily restore random generators and attributes from a saved state."""
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
        """Yield ((object name, attribute name), value) for each attribute of each object."""
        for name, part in self._parts.items():
            for attribute, value in part.attributes().items():
                yield (name, attribute), value

    def addresses_of_network(self) -> dict[int, str]:
        """Return the memory addresses and names of the tensors in the network's state_dict."""
        found: dict[int, str] = {}
        saved = {} if self._network is None else self._network.state_dict(keep_vars=True)
        for name, value in saved.items():
            if type(value) in _TENSORS and is_plain_tensor(value):
                found.setdefault(address_of(value), name)
        # All empty tensors have the address 0.
        found.pop(0, None)
        return found

    def _find_replacements(self, saved: dict[Place, Any]) -> dict[int, set[int]]:
        """Map the id of each attribute's current value to the ids of the saved values.

        If two attributes share a list now, but not in the checkpoint, this list has two saved
        values.
        """
        found: dict[int, set[int]] = defaultdict(set)
        for place, value in self.attributes():
            if type(value) not in _ATOMS and saved.get(place) != REMOVED:
                found[id(value)].add(id(saved.get(place)))
        return found

    def digests(self) -> dict[Place, Any]:
        """Return a digest of each attribute that can be saved, to detect changes."""
        found: dict[Place, Any] = {}
        for place, value in self.attributes():
            with suppress(Exception):
                found[place] = self._digest(value)
        return found

    def _digest(self, value: Any) -> Any:
        return digest(value.state_dict() if self._is_separate_module(value) else value)

    def keep_start_values(self) -> None:
        """Copy each attribute of at most 256 MB, for ``changed_start_values``."""
        self._start_values = self._encoded_values(self._parts, _MOST_BYTES, {})

    def drop_start_values(self) -> None:
        self._start_values = {}

    def changed_start_values(self, saved: Collection[Place]) -> dict[Place, Any]:
        """Return the start values of attributes that have changed in this run.

        A checkpoint contains only the attributes that have changed since the start of the run. In a
        resumed run, on_train_start and set_epoch() may have changed an attribute that the
        checkpoint lacks.

        Args:
            saved: The attributes in the checkpoint, which are left out.
        """
        current = self.digests() if self._start_values else {}
        # Leave out attributes whose values cannot be saved, such as functions.
        known = {*saved, *(place for place, _ in self.attributes() if place not in current)}
        changed: dict[Place, Any] = {}
        for place, (mark, value) in self._start_values.items():
            if place in known or isinstance(mark, Identity) or current.get(place) == mark:
                continue
            with self._guarded(f"the attribute {'.'.join(map(str, place))}"):
                if value == UNKNOWN:
                    raise TypeError("on_train_start or set_epoch() changed it, and it is too large")
                changed[place] = value
        return changed

    def encoded_attributes(self) -> dict[Place, tuple[Any, Any]]:
        """Return the digest and encoded value of each attribute of at most 10 MB."""
        found = self._encoded_values(self._parts, 10 * _COMPARED_BYTES, {})
        return {place: pair for place, pair in found.items() if pair[1] != UNKNOWN}

    def start_values(self, names: Collection[str]) -> dict[str, dict[str, tuple[Any, Any]]]:
        """Return the digest and the encoded value of each attribute of the given objects.

        An attribute that is larger than 1 MB or not plain is encoded as UNKNOWN. Call this method
        directly after creating the PlainState.
        """
        found: dict[str, dict[str, tuple[Any, Any]]] = {name: {} for name in names}
        values = self._encoded_values(names, _COMPARED_BYTES, self._at_start)
        for (name, attribute), pair in values.items():
            found[name][attribute] = pair
        return found

    def _encoded_values(
        self, names: Collection[str], most_bytes: int, digests: Mapping[Place, Any]
    ) -> dict[Place, tuple[Any, Any]]:
        encoder = Encoder(self._device, self.addresses_of_network(), most_bytes)
        found: dict[Place, tuple[Any, Any]] = {}
        for place, value in self.attributes():
            if place[0] not in names:
                continue
            mark = digests[place] if place in digests else self._digest_or_identity(value)
            found[place] = mark, UNKNOWN
            # The code of a user's class may raise any error.
            with suppress(Exception):
                if not isinstance(mark, Identity):
                    found[place] = mark, encoder.encode_attribute(value)
        return found

    def digests_of(self, part: Part) -> dict[str, Any]:
        """Return a digest or an Identity of each attribute of an object."""
        return {name: self._digest_or_identity(value) for name, value in part.attributes().items()}

    def _digest_or_identity(self, value: Any) -> Any:
        try:
            return self._digest(value)
        except Exception:
            return Identity(value)

    @property
    def parts(self) -> dict[str, Part]:
        """The objects whose attributes are saved, keyed by name."""
        return self._parts

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Suppress errors in a `with` block that saves or restores the object ``what``.

        Warn once about each object that causes an error, unless its type is not supported.
        """
        try:
            yield
        except (NotPlainError, RecursionError):
            pass
        except TooLargeError:
            self._warn(what, f"it has more than {_MOST_BYTES >> 20} MB or {_MOST_ITEMS:,} items")
        except Exception as error:
            self._warn(what, f"{type(error).__name__}: {error}")

    def _warn(self, what: str, reason: str) -> None:
        """Warn once that an attribute or a generator is neither saved nor restored."""
        if what in self._warned:
            return
        self._warned.add(what)
        # Continue training even if a warning filter turns the warning into an error.
        with suppress(Warning):
            warnings.warn(
                f"checkpoint: {what} is neither saved nor restored ({reason}). A resumed run may"
                " differ. Save the value in on_save_checkpoint, or as a buffer of a module.",
                stacklevel=5,
            )
