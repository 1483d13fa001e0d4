"""Compare, encode and restore the values of attributes.

A value is plain if it is None, a number, a string, a tensor, a NumPy array, a member of an Enum, or
a container of plain values. An array, a tensor or a container is encoded as a tuple
(kind, content, ...), which torch.load(weights_only=True) can read.
"""

from __future__ import annotations

import marshal
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
TENSORS = (Tensor, nn.Parameter)
_SEQUENCES = (list, tuple, set, frozenset, torch.Size, deque)
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (*_SEQUENCES, dict, OrderedDict, Counter, defaultdict)
}
CONTAINERS = frozenset(_KINDS.values())
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}
# Limits that keep checkpoints small and quick to save.
MOST_BYTES = 256 * 2**20  # The maximum size of a saved attribute in bytes.
MOST_ITEMS = 1_000_000  # The maximum number of items in a saved list or dict.
_DEEPEST = 12  # The maximum nesting depth of a saved container.
MOST_SEARCHED = 500


class NotPlainError(Exception):
    """Raised if a value cannot be saved because its type is not supported."""


class TooLargeError(Exception):
    """Raised if an attribute is too large to be saved."""


# Comparing values


def digest(value: Any, most: int = 10_000) -> Any:
    """Return a digest of a value, to detect later changes to it.

    For GPU tensors above 1 MB, arrays and tensors above 256 MB, and long lists of tensors, the
    digest covers only a sample of the elements.

    Args:
        most: The approximate number of items in the sample of a list.
    """
    kind = type(value)
    if kind in (float, complex):
        # Compare the text of the number, because NaN does not equal NaN.
        return kind, repr(value)
    if kind in ATOMS or isinstance(value, Enum):
        return kind, value
    if kind in TENSORS:
        return _digest_tensor(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _digest_array(np.asarray(value))
    if not is_container(value):
        raise NotPlainError
    items = _items_of(value)
    if _is_simple(items):
        # marshal rejects types such as deque. Use format 2, because equal lists can give different
        # bytes in later formats.
        with suppress(ValueError):
            return kind, len(items), zlib.crc32(marshal.dumps(items, 2))
    # Use an odd step. In the items of a dict, keys and values alternate, so an even step would
    # select only keys.
    step = 1 + len(items) // most // 2 * 2
    marks = [item if type(item) in ATOMS else id(item) for item in items if step > 1]
    order = zlib.crc32(marshal.dumps(marks, 2))
    sample = items[::step]
    most_inside = max(most // len(sample), 10)
    return kind, len(items), order, [digest(item, most_inside) for item in sample]


def _is_simple(items: list[Any], depth: int = 3) -> bool:
    """Return whether all items are numbers, strings, or containers of these."""
    # Limit the depth, because marshal could run for hours on a list that contains itself.
    if ATOMS.issuperset(map(type, items)):
        return True
    return depth > 0 and all(
        type(item) in ATOMS or (type(item) in CONTAINERS and _is_simple(_items_of(item), depth - 1))
        for item in items
    )


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _digest_tensor(tensor: Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        parts = tensor.detach().coalesce()
        return tensor.shape, _digest_tensor(parts.indices()), _digest_tensor(parts.values())
    if not is_plain_tensor(tensor):
        raise NotPlainError
    most = MOST_BYTES if tensor.device.type == "cpu" else 2**20
    values = tensor.detach().reshape(-1)
    sample = values[:: 1 if tensor.nbytes <= most else 1 + tensor.numel() // 10_000]
    content = sample.cpu().contiguous().view(torch.uint8).numpy().data
    place = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
    return place, zlib.crc32(content)


def _digest_array(array: np.ndarray) -> Any:
    if not is_plain_dtype(array.dtype):
        raise NotPlainError
    sample = array.reshape(-1)[:: 1 if array.nbytes <= MOST_BYTES else 1 + array.size // 10_000]
    content = np.ascontiguousarray(sample).view(np.uint8).data
    return array.shape, array.dtype.str, zlib.crc32(content)


def is_plain_tensor(value: Any) -> bool:
    """Return whether a value is a dense tensor with data, so that its elements can be copied."""
    if type(value) not in TENSORS or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_quantized or value.device.type == "meta")


def to_plain_tensor(tensor: Tensor) -> Tensor:
    """Convert subclasses of Tensor, such as MONAI's MetaTensor, which a checkpoint cannot contain.

    Keep classes with their own ``__torch_dispatch__``, such as DTensor, because their data is not
    that of a single tensor.
    """
    kind = type(tensor)
    is_subclass = kind not in TENSORS and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return tensor.detach().as_subclass(Tensor) if is_subclass else tensor


def is_plain_dtype(dtype: np.dtype) -> bool:
    return not dtype.hasobject and dtype.names is None


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_container(value: Any) -> bool:
    """Return whether iterating over a value runs no code of a user's class."""
    return type(value) in CONTAINERS or is_named_tuple(type(value))


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which is the same for all its views."""
    return tensor.untyped_storage().data_ptr()


def shares_memory(value: Any, addresses: Collection[int]) -> bool:
    """Return whether a value is a tensor whose memory is at one of the given addresses."""
    return is_plain_tensor(value) and address_of(value) in addresses


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


# Encoding values


def check_size(value: Any) -> int:
    """Return the approximate number of bytes that a plain value takes in a checkpoint.

    Raises:
        TooLargeError: The value is too large for a checkpoint.
    """
    size = num_items = 0
    if isinstance(value, np.ndarray) or is_plain_tensor(value):
        size = value.nbytes
    elif is_container(value):
        items, num_items = _items_of(value), len(value)
        is_simple = ATOMS.issuperset(map(type, items))
        # A reference in a list takes 8 bytes.
        size = 8 * num_items + sum(map(check_size, () if is_simple else items))
    if size > MOST_BYTES or num_items > MOST_ITEMS:
        raise TooLargeError
    return size


def encode(
    value: Any,
    device: torch.device,
    weights: Mapping[int, str] = MappingProxyType({}),
    depth: int = 0,
) -> Any:
    """Encode a value as a tuple such as ("list", [1, 2]).

    Args:
        device: The run's device. A resumed run moves tensors that were on it to its own device.
        weights: The memory addresses and names of the tensors in the network's state_dict.

    Raises:
        NotPlainError: The type of the value is not supported.
    """
    kind, name = type(value), type(value).__name__
    if kind in ATOMS:
        return value
    if kind in TENSORS:
        return _encode_tensor(value, device, weights, depth)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _encode_array(np.asarray(value), "array" if kind is np.ndarray else "scalar")
    names = kind.__module__, kind.__qualname__
    is_by_name = find_class(*names) is kind
    # A combination of flags such as A | B has no name.
    if isinstance(value, Enum) and is_by_name and value.name in kind.__members__:
        return "enum", value.name, *names
    is_container = kind in CONTAINERS or (is_by_name and is_named_tuple(kind))
    if not is_container or depth > _DEEPEST:
        raise NotPlainError
    items = _items_of(value)
    if not ATOMS.issuperset(map(type, items)):
        items = [encode(item, device, weights, depth + 1) for item in items]
    if kind not in CONTAINERS:
        return "named tuple", items, *names
    if kind is deque:
        return name, items, value.maxlen
    if kind is defaultdict:
        return name, items, getattr(value.default_factory, "__name__", None)
    return name, items


def _encode_tensor(
    tensor: Tensor, device: torch.device, weights: Mapping[int, str], depth: int
) -> Any:
    if shares_memory(tensor, weights):
        # If a list or dict contains a weight of the model, save only the weight's name.
        if depth == 0:
            raise NotPlainError
        place = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        return "weight", weights[address_of(tensor)], type(tensor) is nn.Parameter, *place
    if not (is_plain_tensor(tensor) or tensor.layout is torch.sparse_coo):
        raise NotPlainError
    copied = tensor.detach().to("cpu", copy=True)
    has_gradient = tensor.requires_grad and tensor.is_leaf
    return type(tensor).__name__.lower(), copied, has_gradient, tensor.device == device


def _encode_array(array: np.ndarray, kind: str) -> Any:
    if not is_plain_dtype(array.dtype):
        raise NotPlainError
    data = torch.from_numpy(np.frombuffer(bytearray(array.tobytes()), np.uint8))
    return kind, data, array.dtype.str, list(array.shape)


def find_class(module: str, name: str) -> Any:
    """Return an already imported Enum or named tuple class by its name, or None."""
    # Do not import modules, because a damaged checkpoint could name any module.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, Enum | tuple) else None


# Restoring values


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a container in the order in which they are encoded, or []."""
    found: list[Any] = []
    return found if is_container(value) and collect_tensors(value, found) else []


def collect_tensors(value: Any, found: list[Any], depth: int = 0) -> bool:
    """Add the tensors in a container to a list. Return False if the container is too large."""
    if isinstance(value, Tensor):
        found.append(value)
    if not is_container(value):
        return True
    if len(value) > MOST_SEARCHED or depth == _DEEPEST:
        return False
    if isinstance(value, set | frozenset):
        # The order of tensors in a set differs between processes.
        return not any(isinstance(item, Tensor) for item in value)
    items = chain.from_iterable(value.items()) if isinstance(value, dict) else value
    return all(collect_tensors(item, found, depth + 1) for item in items)


def decode(
    encoded: Any,
    device: torch.device | str = "cpu",
    weights: Mapping[str, Any] = MappingProxyType({}),
    known: Iterator[Any] | None = None,
) -> Any:
    """Convert an encoded value back to the original value.

    Args:
        weights: The network's state_dict, to look up the weights that were encoded by name.
        known: The current tensors, to copy the encoded values into them if possible.
    """
    if not isinstance(encoded, tuple | list):
        return encoded
    kind, content, *options = encoded
    is_tensor = kind in ("weight", "tensor", "parameter")
    current = next(known, None) if is_tensor and known is not None else None
    if kind == "weight":
        is_parameter, *place = options
        weight = weights[content]
        return weight if is_parameter else weight.detach().as_strided(*place)
    if kind in ("tensor", "parameter"):
        has_gradient, is_on_device = options
        value = content.to(device if is_on_device else "cpu", copy=True)
        value = nn.Parameter(value) if kind == "parameter" else value
        value.requires_grad_(has_gradient)
        return current if replace_content(current, value) else value
    if kind in ("array", "scalar"):
        dtype, shape = options
        array = np.frombuffer(content.numpy().tobytes(), dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind == "enum":
        return find_class(*options).__members__[content]
    items = [decode(item, device, weights, known) for item in content]
    if kind == "named tuple":
        return tuple.__new__(find_class(*options), items)
    made = _KINDS[kind]
    if made in _SEQUENCES:
        # ``options`` contains the maxlen of a deque. For other types, it is empty.
        return made(items, *options)
    pairs = dict(zip(items[::2], items[1::2], strict=True))
    # Restore the default_factory of a defaultdict only if it is a built-in type, such as int.
    return made(*map(_FACTORIES.get, options), pairs)


def replace_content(current: Any, value: Any) -> bool:
    """Copy a saved value into an existing tensor or container.

    Returns:
        True if the existing object was changed in place to hold the value.
    """
    names = ("shape", "dtype", "requires_grad", "maxlen")
    if any(getattr(current, name, None) != getattr(value, name, None) for name in names):
        return False
    if type(current) is not type(value):
        return False
    # Some tensors and arrays, such as expanded or read-only ones, cannot be changed in place. If
    # such a tensor or array is a view of another attribute, it may already have the value.
    with suppress(RuntimeError, ValueError):
        if isinstance(current, Tensor):
            if not torch.equal(current, value):
                current.detach().copy_(value.detach())
        elif isinstance(current, np.ndarray):
            if not np.array_equal(current, value):
                current[...] = value
        elif isinstance(current, list | deque):
            current.clear()
            current.extend(value)
        elif isinstance(current, dict | set):
            current.clear()
            current.update(value)
        else:
            return False
        return True
    return False


# Tensor metadata


def collect_metadata(network: nn.Module) -> dict[str, Any]:
    """Return the dtype, shape and strides of each parameter and buffer, keyed by its name."""
    tensors = chain(network.named_parameters(), network.named_buffers())
    return {name: metadata_of(tensor) for name, tensor in tensors}


def metadata_of(tensor: Tensor) -> Any:
    if is_lazy(tensor) or tensor.is_nested:
        return "no shape"
    strides = list(tensor.stride()) if tensor.layout is torch.strided else []
    return [str(tensor.dtype), list(tensor.shape), strides]


# The modes of torch, and the states of objects that have a state_dict method


class TorchModes:
    """The global settings of torch that affect results and that a hook may change."""

    def state_dict(self) -> dict[str, Any]:
        state = {
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        }
        # get_float32_matmul_precision() may raise an error if the user has set
        # torch.backends.fp32_precision.
        with suppress(RuntimeError):
            state["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_default_dtype(getattr(torch, state["default_dtype"]))
        torch.set_num_threads(state["num_threads"])
        torch.set_deterministic_debug_mode(state["deterministic_debug_mode"])
        if "float32_matmul_precision" in state:
            torch.set_float32_matmul_precision(state["float32_matmul_precision"])


def is_stateful(value: Any) -> bool:
    """Return whether a value has a ``state_dict`` method but is not a module or a loader."""
    kind = type(value)
    has_methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    is_loader = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return has_methods and not is_loader and not isinstance(value, nn.Module)


def requires_grad_of(value: Any) -> dict[str, bool]:
    """Return the requires_grad flag of each parameter, or {} if the value is not a module."""
    parameters = value.named_parameters() if isinstance(value, nn.Module) else ()
    return {name: parameter.requires_grad for name, parameter in parameters}


def load_object(
    current: Any, state: Any, requires_grad: Mapping[str, bool] = MappingProxyType({})
) -> None:
    """Load a saved state into an existing object.

    Args:
        requires_grad: The saved requires_grad flags of a module's parameters, keyed by name.
    """
    if not (is_stateful(current) or isinstance(current, nn.Module)):
        raise ValueError("the saved value has a state_dict, but the current value has none")
    if isinstance(current, torch.optim.Optimizer):
        load_optimizer(current, state)
    else:
        current.load_state_dict(state)
    for name, parameter in current.named_parameters() if requires_grad else ():
        parameter.requires_grad = requires_grad.get(name, parameter.requires_grad)


def load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load an optimizer's state without replacing its ``param_groups`` and ``state`` objects.

    Raises:
        ValueError: The saved optimizer has a different class, and lacks options of this optimizer.
    """
    options = {*getattr(optimizer, "defaults", ())}.intersection(*optimizer.param_groups)
    # load_state_dict() creates new lists and dicts, but a wrapper of the optimizer may refer to the
    # old ones. Copy the loaded content into the old lists and dicts.
    groups, state = (vars(optimizer).get(name) for name in ("param_groups", "state"))
    is_usual = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    # Leave out NumPy arrays, which torch cannot load. The end of this function restores them.
    without_arrays = apply_to_collection(saved, np.ndarray, lambda array: None)
    try:
        optimizer.load_state_dict(without_arrays if is_usual else saved)
        if missing := sorted(options.difference(*optimizer.param_groups[:1])):
            raise ValueError(
                f"the saved optimizer has no {', '.join(missing)}, which {type(optimizer).__name__}"
                " needs, so it had a different class, or a hook replaced it"
            )
    except Exception:
        # Undo the change, because step() would raise a KeyError for the missing options.
        if is_usual and groups is not None and state is not None:
            optimizer.param_groups, optimizer.state = groups, state
        raise
    if is_usual and isinstance(groups, list) and isinstance(state, dict):
        pairs: Any = zip(groups, optimizer.param_groups, strict=True)
        for current, loaded in [*pairs, (state, optimizer.state)]:
            current.clear()
            current.update(loaded)
        optimizer.param_groups, optimizer.state = groups, state
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
                # load_state_dict() casts some tensors to the parameter's dtype, and converts some
                # containers. Use the saved values, on the device that load_state_dict() has chosen.
                device = getattr(current.get(name), "device", parameters[index].device)
                moved = move_data_to_device(value, device)
                is_deque = type(value) is deque
                current[name] = deque(moved, value.maxlen) if is_deque else moved
