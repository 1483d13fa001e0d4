"""Replace the NumPy values of a checkpoint by plain values and tensors, and restore them.

The reader builds no class of NumPy. Therefore a file contains Python numbers and tensors, which
Trainer can read, too. NUMPY_KEY contains the dtypes of the values that were replaced.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

NUMPY_KEY = "fabric_template_numpy"
# Booleans, numbers, durations, dates and text.
_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d*(\[\w+\])?")
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, tuple, deque)


def replace_numpy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without NumPy values. NUMPY_KEY describes where they were."""
    plain, dtypes = to_plain(checkpoint, [])
    return {**plain, NUMPY_KEY: dtypes} if dtypes else plain


def restore_numpy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Put the NumPy values back into a checkpoint that ``replace_numpy`` has returned."""
    dtypes = checkpoint.pop(NUMPY_KEY, {})
    try:
        for key, dtypes_of_part in dtypes.items():
            # Do not use checkpoint[key], which is an error for a part with placeholders.
            part = dict.__getitem__(checkpoint, key)
            dict.__setitem__(checkpoint, key, to_numpy(part, dtypes_of_part))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint: got wrong dtypes of NumPy values in its part {NUMPY_KEY!r}. {error}"
        ) from error
    return checkpoint


def to_plain(value: Any, parents: list[Any]) -> tuple[Any, Any]:
    """Return a value without NumPy, and the dtypes of the replaced values.

    Args:
        parents: The containers around the value. A container is not converted again inside its own items.

    Returns:
        dtypes: The dtype of a NumPy value, or a dict of dtypes by key or index, or None.
    """
    if isinstance(value, np.generic | np.ndarray):
        return plain_value(value)
    if type(value) in (set, frozenset):
        # A NumPy number and the Python number of the same value are the same item of a set.
        items = [plain_value(item)[0] for item in value]
        is_changed = any(isinstance(item, np.generic) for item in value)
        return (type(value)(items) if is_changed else value), None
    if type(value) not in _CONTAINERS or any(value is parent for parent in parents):
        return value, None
    replaced, dtypes, parents = {}, {}, [*parents, value]
    for key, item in items_of(value):
        plain, dtype = to_plain(item, parents)
        if plain is not item:
            replaced[key] = plain
        if dtype:
            dtypes[plain_value(key)[0]] = dtype
    return with_items(value, replaced), dtypes or None


def to_numpy(value: Any, dtypes: Any) -> Any:
    """Return a value with NumPy values where ``dtypes`` has a dtype."""
    if isinstance(dtypes, str):
        return numpy_value(value, dtypes)
    replaced = {key: to_numpy(value[key], dtype) for key, dtype in dtypes.items()}
    return with_items(value, replaced)


def items_of(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)


def with_items(container: Any, replaced: dict[Any, Any]) -> Any:
    """Return a copy of a container with other items at some keys, and with plain keys."""
    has_keys = isinstance(container, dict) and any(isinstance(k, np.generic) for k in container)
    if not replaced and not has_keys:
        return container
    items = [(key, replaced.get(key, item)) for key, item in items_of(container)]
    if isinstance(container, dict):
        copied = copy.copy(container)
        copied.clear()
        copied.update({plain_value(key)[0]: item for key, item in items})
        return copied
    values = [item for _, item in items]
    return (
        deque(values, container.maxlen) if isinstance(container, deque) else type(container)(values)
    )


def plain_value(value: Any) -> tuple[Any, str | None]:
    """Return a plain value in place of a NumPy value, and the dtype with which to restore it.

    A value that cannot be restored bit for bit is returned unchanged, as a structured array.
    """
    if not isinstance(value, np.generic) and type(value) is not np.ndarray:
        return value, None
    name = value.dtype.str
    try:
        plain = plain_array(value) if isinstance(value, np.ndarray) else value.item()
        restored = numpy_value(plain, name)
    except (TypeError, ValueError):
        return value, None
    is_same = type(restored) is type(value) and restored.shape == value.shape
    return (plain, name) if is_same and restored.tobytes() == value.tobytes() else (value, None)


def plain_array(array: np.ndarray) -> Any:
    """Return a tensor of numbers, or a list of texts."""
    if array.dtype.kind in "SU":
        return array.tolist()
    is_time = array.dtype.kind in "mM"
    dtype = np.dtype("i8") if is_time else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array.astype(dtype), order="C"))


def numpy_value(plain: Any, dtype: str) -> Any:
    """Return the NumPy value of a dtype such as "<f4"."""
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"got the dtype {dtype!r}")
    if isinstance(plain, torch.Tensor):
        return plain.numpy().astype(dtype)
    array = np.array(plain, dtype)
    return array if isinstance(plain, list) else array[()]
