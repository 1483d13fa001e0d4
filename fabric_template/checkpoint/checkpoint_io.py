"""Write checkpoint files atomically and verify them when they are read."""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO

from ..errors import CheckpointError, MissingCheckpointError
from ..files import local_path, replaced_file
from .reader import is_placeholder, kind_of, read_archive

if TYPE_CHECKING:
    from lightning.fabric import Fabric

# The checkpoint key for the original dtypes of NumPy values that were converted.
NUMPY_KEY = "fabric_template_numpy"
# Matches the NumPy dtypes that can be restored: booleans, numbers, durations, dates and text.
_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d*(\[\w+\])?")
_SEARCHED_TYPES = (dict, OrderedDict, defaultdict, Counter, list, tuple, deque)
_UNCHANGED_TYPES = (int, float, str, bool, bytes, type(None), torch.Tensor)


class AtomicCheckpointIO(CheckpointIO):
    """A CheckpointIO plugin that writes checkpoints atomically.

    A checkpoint is written to a temporary file, which is flushed to disk and then renamed. When a
    checkpoint is read, the CRC of every entry in its zip archive is checked. Code in a checkpoint
    file is executed only if ``weights_only`` is False.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp(), "last.ckpt")
        >>> AtomicCheckpointIO().save_checkpoint({"epoch": 1}, path)
        >>> AtomicCheckpointIO().load_checkpoint(path)
        {'epoch': 1}
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is"
                f" not supported for `{type(self).__name__}`."
            )
        with replaced_file(Path(local_path(path))) as file:
            torch.save(replace_numpy(checkpoint), file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path, weights_only is not False, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def find_checkpoint_io(fabric: Fabric) -> CheckpointIO:
    """Return the user's CheckpointIO plugin, or an AtomicCheckpointIO if there is none."""
    try:
        found = fabric.strategy.checkpoint_io
    except NotImplementedError:
        # Strategies that shard a model have no CheckpointIO.
        return AtomicCheckpointIO()
    while hasattr(found, "checkpoint_io"):
        # AsyncCheckpointIO returns before the file is complete, so use the CheckpointIO that it
        # wraps.
        found = found.checkpoint_io
    is_default = found is None or type(found) is TorchCheckpointIO
    return AtomicCheckpointIO() if is_default else found


def read_checkpoint(
    path: str | Path, weights_only: bool = True, map_location: Any = None
) -> dict[str, Any]:
    """Read a checkpoint file and recreate the NumPy values that were saved as other types.

    Args:
        weights_only: If True, no code in the file is executed, and reading a value that requires
            such code raises an error. If False, use ``torch.load``, which may execute this code.

    Raises:
        MissingCheckpointError: There is no such file.
        DamagedCheckpointError: The file is damaged, or was not written by torch.save.
        CheckpointError: The file cannot be read, or is not a checkpoint.
    """
    path = Path(local_path(path))
    if path.is_dir():
        raise CheckpointError(f"path: got the folder {str(path)!r}, expected a checkpoint file.")
    try:
        checkpoint = read_archive(path, map_location, is_trusted=not weights_only)
    except FileNotFoundError as error:
        raise MissingCheckpointError(
            f"Checkpoint file not found: {path}. Check the path, or pass 'last' or 'best'."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: the file could not be read: {error.strerror or error}."
            " The file may still be intact. Try again."
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{path}: got {describe_content(checkpoint)}, expected a dict. Write"
            " torch.save({'state_dict': model.state_dict()}, path)."
        )
    return restore_numpy(checkpoint)


def describe_content(content: Any) -> str:
    if is_placeholder(content):
        return f"an instance of {kind_of(content).__name__}"
    return f"a {type(content).__name__}"


# Conversion of NumPy values

# Unpickling NumPy objects is unsafe, so checkpoints contain tensors and numbers instead.


def replace_numpy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a checkpoint with Python values and tensors instead of NumPy values."""
    plain, dtypes = replace_numpy_values(checkpoint, [])
    return {**plain, NUMPY_KEY: dtypes} if dtypes else plain


def restore_numpy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Undo ``replace_numpy``, so that the checkpoint contains NumPy values again."""
    dtypes = checkpoint.pop(NUMPY_KEY, {})
    try:
        for key, dtypes_of_part in dtypes.items():
            # Do not use checkpoint[key] here, because it raises an error if the value contains an
            # object of an unknown class.
            part = dict.__getitem__(checkpoint, key)
            dict.__setitem__(checkpoint, key, to_numpy(part, dtypes_of_part))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint: got an invalid NumPy dtype under the key {NUMPY_KEY!r}: {error}. Use"
            " a different checkpoint."
        ) from error
    return checkpoint


def replace_numpy_values(value: Any, parents: list[Any]) -> tuple[Any, Any]:
    """Convert the NumPy values in nested containers to Python values and tensors.

    Args:
        parents: The containers around the value, to detect a container that contains itself.

    Returns:
        The converted value and its original dtype. For a container, the second value is a dict
        that maps keys or indices to dtypes. If nothing was converted, the second value is None.
    """
    if isinstance(value, np.generic | np.ndarray):
        return plain_value(value)
    if type(value) in (set, frozenset):
        # Each dtype is saved under an item's key or index. The items of a set have neither, so
        # convert them without saving dtypes.
        items = [plain_value(item)[0] for item in value]
        is_changed = any(isinstance(item, np.generic) for item in value)
        return (type(value)(items) if is_changed else value), None
    if type(value) not in _SEARCHED_TYPES or any(value is parent for parent in parents):
        return value, None
    replaced, dtypes, parents = {}, {}, [*parents, value]
    for key, item in items_of(value):
        if type(item) in _UNCHANGED_TYPES:
            continue
        plain, dtype = replace_numpy_values(item, parents)
        if plain is not item:
            replaced[key] = plain
        if dtype:
            dtypes[plain_value(key)[0]] = dtype
    return with_items(value, replaced), dtypes or None


def to_numpy(value: Any, dtypes: Any) -> Any:
    """Undo ``replace_numpy_values``, using the dtypes that it returned."""
    if isinstance(dtypes, str):
        return numpy_value(value, dtypes)
    replaced = {key: to_numpy(value[key], dtype) for key, dtype in dtypes.items()}
    return with_items(value, replaced)


def items_of(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)


def with_items(container: Any, replaced: dict[Any, Any]) -> Any:
    """Copy a container, replace the given items, and convert NumPy dict keys to Python values.

    Args:
        replaced: The new items, keyed by dict key or list index.
    """
    has_keys = isinstance(container, dict) and any(isinstance(k, np.generic) for k in container)
    if not replaced and not has_keys:
        # If nothing has changed, return the container itself, because replace_numpy_values() treats
        # a copy as a changed value.
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
    """Convert a NumPy value to a Python value or a tensor.

    Returns:
        The converted value and its NumPy dtype, or (value, None) if no exact conversion exists.
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
    """Convert an array of numbers to a tensor, or an array of text to a list."""
    if array.dtype.kind in "SU":
        return array.tolist()
    is_time = array.dtype.kind in "mM"
    dtype = np.dtype("i8") if is_time else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array.astype(dtype), order="C"))


def numpy_value(plain: Any, dtype: str) -> Any:
    """Convert a Python value or a tensor to a NumPy value of the given dtype, such as "<f4"."""
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"the dtype {dtype!r} is not supported")
    if isinstance(plain, torch.Tensor):
        return plain.numpy().astype(dtype)
    array = np.array(plain, dtype)
    return array if isinstance(plain, list) else array[()]
