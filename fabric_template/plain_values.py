"""Compare, encode and restore the values of attributes.

A value is plain if it is None, a number, a string, a tensor, a NumPy array, or a container of plain
values. An array, a tensor or a container is encoded as a tuple (kind, content, ...), which
torch.load(weights_only=True) can read.
"""

from __future__ import annotations

import marshal
import math
import sys
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import copy
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_SEQUENCES: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, deque)
}
_DICTS: dict[str, type] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)
}
TENSORS = (Tensor, nn.Parameter)
CONTAINERS = frozenset((*_SEQUENCES.values(), *_DICTS.values()))
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}
_VALUES: dict[str, Any] = {
    kind.__name__: kind for kind in (range, timedelta, date, datetime, Fraction, Decimal, bytearray)
}
# Limits that keep checkpoints small and quick to save.
MOST_BYTES = 256 * 2**20  # The maximum size of a saved attribute in bytes.
MOST_ITEMS = 1_000_000  # The maximum number of items in a saved attribute.
# The digest of a GPU tensor above this size covers only some elements.
COMPARED_BYTES = 2**20
# To detect changes in a large tensor or list, compare about this many elements.
_COMPARED_ITEMS = 50_000
_DEEPEST = 12  # The maximum nesting depth of a saved container.
MOST_SEARCHED = 500


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
        # Compare the text of the number, because NaN does not equal NaN.
        return kind, repr(value)
    if kind in ATOMS or isinstance(value, Enum):
        return kind, value
    if isinstance(value, SynchronizedBase):
        return kind, read_shared(value)
    if kind in TENSORS:
        return _digest_tensor(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _digest_array(np.asarray(value))
    if (arguments := arguments_of(value)) is not None:
        return kind, arguments
    if not (kind in CONTAINERS or is_named_tuple(kind)) or most == 0:
        raise NotPlainError
    items = _items_of(value)
    is_atomic = set(map(type, items)) <= ATOMS
    if is_atomic or most < len(items) <= MOST_ITEMS:
        # Use marshal's format 2. In later formats, equal lists can give different bytes.
        with suppress(ValueError):
            return kind, len(items), zlib.crc32(marshal.dumps(items, 2))
    # In the items of a dict, keys and values alternate, so a slice with an even step would contain
    # only keys.
    step = math.ceil(len(items) / math.ceil(most / 8)) | 1
    found = items if step == 1 else [*items[::step], items[-1]]
    # A list may contain itself, so lower the item limit at each level to end the recursion.
    most_inside = min(most - 1, max(most // len(found), 8))
    marks = [] if len(found) == len(items) else [_mark(item) for item in items]
    return kind, len(items), [digest(item, most_inside) for item in found], marks


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return a fingerprint of a container item without reading the data of tensors."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind in CONTAINERS and depth < _DEEPEST:
        return [_mark(item, depth + 1) for item in _items_of(value)]
    is_counted = kind in TENSORS and not value.is_inference()
    # A new object can have the id of a deleted object, so also compare weak references.
    reference = weakref.ref(value) if kind.__weakrefoffset__ else None
    return id(value), reference, value._version if is_counted else None


def _digest_tensor(tensor: Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        parts = tensor.detach().coalesce()
        return tensor.shape, _digest_tensor(parts.indices()), _digest_tensor(parts.values())
    if not is_plain_tensor(tensor):
        raise NotPlainError
    place = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
    values = tensor.detach().reshape(-1)
    # On the CPU, compare all elements, because changes through NumPy do not affect _version.
    most = MOST_BYTES if tensor.device.type == "cpu" else COMPARED_BYTES
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
    is_plain = type(value) in TENSORS and is_plain_tensor(value)
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
        return any(refers_to(item, ids, addresses) for item in islice(items, MOST_SEARCHED))
    return shares_memory(value, addresses)


class Reference:
    """Recognizes an object, even if its content has changed, without keeping it in memory."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        # A new tensor may get the id of a deleted one whose views still exist.
        self._reference = weakref.ref(value) if type(value).__weakrefoffset__ else None

    def refers_to_object(self, value: Any) -> bool:
        is_alive = self._reference is None or self._reference() is value
        return id(value) == self._id and is_alive


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().data)


def _digest_array(array: np.ndarray) -> Any:
    if not is_plain_dtype(array.dtype):
        raise NotPlainError
    place = (array.shape, array.dtype.str)
    if array.nbytes <= MOST_BYTES:
        return place, zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    # Select about 50,000 elements of the array, or all elements if it has fewer.
    step = max(array.size // _COMPARED_ITEMS, 1)
    return place, array.reshape(-1)[::step].tobytes()


def is_plain_dtype(dtype: np.dtype) -> bool:
    return not dtype.hasobject and dtype.names is None


def is_stateful(value: Any) -> bool:
    """Return whether a value has a ``state_dict`` method but is not a module or a loader."""
    kind = type(value)
    has_methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    is_loader = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return has_methods and not is_loader and not isinstance(value, nn.Module)


# Encoding ranges, dates and fractions


def arguments_of(value: Any) -> list[Any] | None:
    """Return the arguments for creating a copy of a range, date, bytearray, Fraction or Decimal.

    Returns:
        The arguments for the value's class, or None if the value is not supported, such as a
        datetime with a time zone.
    """
    # Do not support Path objects, because a saved path may be wrong after the run's folder moved.
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


# Classes of Enums and named tuples


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def find_class(base: type, module: str, name: str) -> Any:
    """Return the subclass of ``base`` with the given name, or None."""
    # Use only modules that are already imported, because an import could run any code.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, base) else None


# Encoding values


class Encoder:
    """Encode attribute values as tuples that torch.load(weights_only=True) can read.

    Args:
        device: The run's device. A resumed run moves the tensors of this device to its own device.
        covered: The memory addresses and names of the tensors in the network's state_dict.
        most_bytes: The maximum size of an attribute in bytes.
    """

    def __init__(
        self, device: torch.device, covered: dict[int, str], most_bytes: int = MOST_BYTES
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
        if kind in ATOMS:
            return value
        # If several attributes share an object, encode the object only once.
        if id(value) in self._known:
            return self._known[id(value)][1]
        if kind in TENSORS:
            encoded: Any = self._encode_tensor(value, depth)
        elif kind is np.ndarray or isinstance(value, np.generic):
            encoded = self._encode_array(value)
        elif isinstance(value, SynchronizedBase) and depth == 0:
            encoded = "shared", self._encode(read_shared(value), depth + 1)
        elif (arguments := arguments_of(value)) is not None:
            encoded = kind.__name__, arguments
        elif isinstance(value, Enum) or is_named_tuple(kind):
            encoded = self._encode_by_class(value, kind, depth)
        elif kind in CONTAINERS and depth <= _DEEPEST:
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
            return "enum", value.name if value.name in kind.__members__ else value.value, *place
        self._count(items=len(value))
        return "named tuple", [self._encode(item, depth + 1) for item in value], *place

    def _encode_container(self, value: Any, kind: type, depth: int) -> Any:
        self._count(items=len(value))
        items = _items_of(value)
        if not set(map(type, items)) <= ATOMS:
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
        if self._bytes > self._most_bytes or self._items > MOST_ITEMS:
            raise TooLargeError


class Decoder:
    """Restore the attribute values that an Encoder has converted to tuples.

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
        # If several attributes shared an object in the saved run, decode the object only once.
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
        if kind == "enum" and isinstance(content, str):
            return find_class(Enum, *options).__members__[content]
        if kind == "enum":
            # A combination of flags such as A | B has no name, so a checkpoint contains its value.
            return find_class(Flag, *options)(content)
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
        Whether the value was copied into the existing object.
    """
    kind = type(current)
    if kind is not type(value):
        return False
    if kind in (*TENSORS, np.ndarray) and (current.shape, current.dtype) != (
        value.shape,
        value.dtype,
    ):
        return False
    if kind in TENSORS and value.is_sparse:
        return False
    if kind is np.ndarray or (kind in TENSORS and current.is_leaf):
        with suppress(RuntimeError, ValueError):
            return _replace_elements(current, value)
        return False
    elif kind is set or kind in _DICTS.values():
        current.clear()
        current.update(value)
    elif kind is list or (kind is deque and current.maxlen == value.maxlen):
        current.clear()
        current.extend(value)
    else:
        return False
    return True


def _replace_elements(current: Any, value: Any) -> bool:
    """Copy a tensor or an array into another one in place.

    Returns:
        Whether the values were copied. If the memory is read-only, a RuntimeError or a ValueError
        is raised.
    """
    is_tensor = isinstance(current, Tensor)
    strides = current.stride() if is_tensor else current.strides
    # In an expanded tensor, elements share their place in memory. Write to each place only once.
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    if 0 in strides and not bool((value[index] == value).all()):
        return False
    if is_tensor:
        with torch.inference_mode(current.is_inference()):
            current.detach()[index].copy_(value[index].detach())
            current.requires_grad_(value.requires_grad)
        return True
    is_writeable = current.flags.writeable
    # A read-only view of an array changes with the array.
    current.flags.writeable = is_writeable or current.base is not None
    try:
        current[index] = value[index]
    finally:
        current.flags.writeable = is_writeable
    return True


def requires_grad_of(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def load_object(
    current: Any, state: Any, requires_grad: Mapping[str, bool] = MappingProxyType({})
) -> None:
    """Load a saved state into an existing object.

    Args:
        requires_grad: For a module, whether each parameter requires a gradient.
    """
    if isinstance(current, SynchronizedBase):
        write_shared(current, state)
        return
    if not (is_stateful(current) or isinstance(current, nn.Module)):
        raise ValueError("the saved run created an object that is missing in this run")
    if isinstance(current, torch.optim.Optimizer):
        load_optimizer(current, state)
    else:
        current.load_state_dict(state)
    for name, parameter in current.named_parameters() if requires_grad else ():
        parameter.requires_grad = requires_grad.get(name, parameter.requires_grad)


def load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load an optimizer's state without replacing its ``param_groups`` and ``state`` objects."""
    # load_state_dict() creates new lists and dicts, but a wrapper of the optimizer may refer to the
    # old ones. Copy the loaded content into the old lists and dicts.
    groups, state = (vars(optimizer).get(name) for name in ("param_groups", "state"))
    is_usual = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    # torch cannot load NumPy arrays. The end of this function restores them.
    without_arrays = apply_to_collection(saved, np.ndarray, lambda array: None)
    optimizer.load_state_dict(without_arrays if is_usual else saved)
    if is_usual and isinstance(groups, list):
        for group, loaded in zip(groups, list(optimizer.param_groups), strict=True):
            _replace_items(group, loaded)
        optimizer.param_groups = groups
    if is_usual and isinstance(state, dict):
        _replace_items(state, optimizer.state)
        optimizer.state = state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = saved.get("state") if isinstance(saved, dict) else None
    # A custom optimizer's state_dict() may have a different format, so check that its entries are
    # dicts.
    for index, values in states.items() if isinstance(states, dict) else ():
        if index not in range(len(parameters)) or not isinstance(values, dict):
            continue
        current = optimizer.state[parameters[index]]
        for name, value in values.items():
            if is_usual or (isinstance(value, Tensor) and name in current):
                # load_state_dict() casts some tensors to the parameter's dtype. Restore their saved
                # dtypes.
                current[name] = _exact_value(current[name], value)


def _replace_items(target: dict[Any, Any], source: dict[Any, Any]) -> None:
    items = dict(source)
    target.clear()
    target.update(items)


def _exact_value(loaded: Any, saved: Any) -> Any:
    """Change the dtypes of loaded optimizer state back to the dtypes in the checkpoint."""
    if isinstance(saved, Tensor):
        # Move the saved tensor to the device that load_state_dict() has chosen.
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
    """Write a saved value into an object in shared memory."""
    content = value.get_obj()
    if hasattr(content, "value"):
        content.value = saved
    else:
        content[:] = saved
