"""Read checkpoint files without running code from them.

``torch.save`` writes a zip archive that contains a pickle and one entry per tensor storage.
Python's unpickler calls any class or function that a file names. PlainUnpickler builds only tensors
and standard types, such as numbers, text, dates and containers, and replaces all other objects with
placeholders. PlainUnpickler does not build NumPy objects, because NumPy does not validate pickled
data.
"""

from __future__ import annotations

import datetime
import errno
import io
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import torch

from ..errors import CheckpointError, DamagedCheckpointError

# Lightning's checkpoint keys for hyperparameters, which a resumed run does not need.
_HYPERPARAMETERS = (
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)
# The bit that marks a zip entry as a folder. Reject such entries, because torch.load reads them as
# empty files.
_FOLDER = 0x10


class Placeholder:
    """Replaces a saved object that could run arbitrary code when it is loaded.

    For each unknown class or function in a file, the unpickler creates a subclass of Placeholder.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ == "builtins.getattr" and len(args) == 2:
            # A pickle calls getattr() to load a nested class or a method. Return a placeholder
            # class instead of calling getattr().
            return type(f"{kind_of(args[0]).__name__}.{args[1]}", (Placeholder,), {})
        # Pickles create many objects by calling copyreg functions, whose first argument is the
        # object's class.
        is_of_copyreg = cls.__name__.startswith("copyreg.")
        return object.__new__(kind_of(args[0]) if is_of_copyreg and args else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # The unpickler calls methods such as append() to fill an object, but a placeholder stores no
    # content.
    __setstate__ = __setitem__ = append = extend = add = __init__

    def __repr__(self) -> str:
        return f"<not built: {type(self).__name__}>"


def kind_of(value: Any) -> type[Placeholder]:
    """Return a placeholder class with the name of the original class in the pickle."""
    if isinstance(value, Placeholder):
        return type(value)
    return value if is_placeholder(value) else Placeholder


def is_placeholder(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, Placeholder)
    return is_class or isinstance(value, Placeholder)


class PartialCheckpoint(dict[Any, Any]):
    """A checkpoint that raises an error when a value with an unsupported object is read.

    Args:
        values: The checkpoint.
        unbuilt: Maps each key whose value contains a placeholder to the placeholder's description.
        path: The path of the file, for the error message.
    """

    def __init__(self, values: dict[Any, Any], unbuilt: dict[Any, str], path: str | Path) -> None:
        super().__init__(values)
        self._unbuilt, self._path = unbuilt, path

    def _check(self, key: Any) -> None:
        if key in self._unbuilt:
            raise CheckpointError(
                f"{self._path}: got {self._unbuilt[key]}, expected tensors, numbers, strings, or"
                " containers of these. Other objects are not created, because creating them could"
                " run arbitrary code. If you trust the file, pass weights_only=False."
            )

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)


def read_archive(path: str | Path, map_location: Any = None, is_trusted: bool = False) -> Any:
    """Return the content of a ``torch.save`` file, after checking the CRC of every entry.

    Args:
        is_trusted: Build every object, even if this runs code from the file.

    Raises:
        DamagedCheckpointError: The file is damaged, or was not written by torch.save.
        CheckpointError: The file has invalid content.
        OSError: The file cannot be read.
    """
    sizes: dict[str, int] = {}
    try:
        sizes = verify_archive(path)
    except CheckpointError as error:
        # The file may have the format that torch used before version 1.6. Only torch.load can read
        # this format.
        if isinstance(error, DamagedCheckpointError) or not is_trusted:
            raise
    try:
        if is_trusted:
            value = torch.load(path, map_location or "cpu", weights_only=False)
        else:
            value = read_plain(path, map_location, sizes)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception as error:
        is_damaged = "PytorchStreamReader" in str(error)
        kind = DamagedCheckpointError if is_damaged else CheckpointError
        problem = "the file is damaged" if is_damaged else "the content cannot be read"
        raise kind(f"{path}: {problem}. {type(error).__name__}: {str(error)[:200]}") from error
    unbuilt = find_unbuilt_parts(value) if isinstance(value, dict) else {}
    return PartialCheckpoint(value, unbuilt, path) if unbuilt else value


def read_plain(
    path: str | Path,
    map_location: Any = None,
    sizes: dict[str, int] | None = None,
    is_mapped: bool = False,
) -> Any:
    """Read a checkpoint without running its code and replace unknown objects with placeholders.

    Args:
        sizes: The size in bytes of each tensor storage in the archive. If the pickle contains a
            different size, an error is raised.
        is_mapped: Read a tensor's values from disk only when they are used.
    """
    # torch.load creates an instance of the Unpickler class of the given pickle_module.
    unpickler = type("Unpickler", (PlainUnpickler,), {"sizes": sizes or {}})
    module = SimpleNamespace(__name__="pickle", Unpickler=unpickler)
    # Check that the indices of sparse tensors are within bounds.
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.load(
            path,
            map_location or "cpu",
            pickle_module=module,
            weights_only=False,
            mmap=is_mapped,
        )


def find_unbuilt_parts(checkpoint: dict[Any, Any]) -> dict[Any, str]:
    """For each checkpoint key, describe the first object that the unpickler has not built."""
    parts = {key: part for key, part in checkpoint.items() if key not in _HYPERPARAMETERS}
    found = {key: find_placeholder(part, str(key)) for key, part in parts.items()}
    return {key: text for key, text in found.items() if text is not None}


def find_placeholder(value: Any, name: str) -> str | None:
    """Describe the first unsupported object in a saved value, or return None."""
    waiting, seen = [(name, value)], set()
    while waiting:
        place, item = waiting.pop()
        if is_placeholder(item):
            return f"an instance of {kind_of(item).__name__} in the part {place!r}"
        if isinstance(item, dict | list | tuple | set | frozenset | deque) and id(item) not in seen:
            seen.add(id(item))
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, part in pairs:
                # Show only the type of keys that are not strings or integers, because their repr
                # could be huge.
                part_name = key if isinstance(key, str | int) else type(key).__name__
                waiting += [(f"{place}/{part_name}", part), (place, key)]
    return None


# Checks of the zip archive


def verify_archive(path: str | Path) -> dict[str, int]:
    """Check the entries of a zip archive and their CRCs.

    Returns:
        The size in bytes of each tensor storage, keyed by the storage's name.
    """
    with open(path, "rb") as file:
        check_start(file, path)
        size = file.seek(0, io.SEEK_END)
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
                check_entries(infos, size)
                damaged = archive.testzip()
                if damaged is not None:
                    raise ValueError(f"The content of the entry {damaged} has changed.")
        except MemoryError:
            raise
        except Exception as error:
            # EINVAL means that a damaged file contains an impossible offset. An OSError with a
            # different errno is a disk failure.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise DamagedCheckpointError(f"{path}: the file is damaged. {error}") from error
    names = {info.filename.partition("/")[2]: info.file_size for info in infos}
    return {n.removeprefix("data/"): size for n, size in names.items() if n.startswith("data/")}


def check_start(file: IO[bytes], path: str | Path) -> None:
    start = file.read(4)
    if start[:1] == b"\x80":
        raise CheckpointError(
            f"{path}: got a file in the format that torch used before version 1.6, expected a zip"
            " archive. To convert the file, run torch.save(torch.load(path, weights_only=True),"
            " path)."
        )
    if start != b"PK\x03\x04":
        given = f"a file that starts with {start!r}" if start else "an empty file"
        raise DamagedCheckpointError(f"{path}: got {given}, expected a file written by torch.save.")


def check_entries(infos: list[zipfile.ZipInfo], size: int) -> None:
    """Raise an error for zip entries that torch.save does not write, such as compressed entries."""
    names = {info.filename.partition("/")[2] for info in infos}
    for info in infos:
        is_inside = info.header_offset + info.compress_size <= size
        is_plain = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not is_inside or not is_plain or info.external_attr & _FOLDER:
            raise ValueError("An entry is compressed, or extends beyond the end of the file.")
    # Reject a zip archive with overlapping entries, because reading them all could fill the memory.
    if sum(info.file_size for info in infos) > size:
        raise ValueError("The entries are larger than the file.")
    # An archive with constants.pkl is a TorchScript program, which torch.load would run.
    if len(names) < len(infos) or "data.pkl" not in names or "constants.pkl" in names:
        raise ValueError("The file has entries that torch.save does not write.")


# Unpickling


class PlainUnpickler(pickle.Unpickler):
    """Builds tensors and standard types, and replaces all other objects with placeholders.

    Attributes:
        sizes: The size in bytes of each tensor storage in the archive. The unpickler compares these
            sizes with those in the pickle, because torch does not. If the dict is empty, this check
            is skipped.
    """

    sizes: ClassVar[dict[str, int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a safe replacement for a class or function that a pickle names."""
        # A pickle can set attributes of any object that find_class() returns. Return only immutable
        # or new objects, so that a pickle cannot change existing classes or functions.
        full_name = f"{_MODULES.get(module, module)}.{name}"
        if full_name == "torch.storage.UntypedStorage":
            # torch.load uses only the dtype of a storage class, so return a simple object with a
            # dtype.
            return SimpleNamespace(dtype=torch.uint8)
        if full_name in BUILDERS:
            return Builder(BUILDERS[full_name])
        return VALUES[full_name] if full_name in VALUES else type(full_name, (Placeholder,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        # torch.load sets persistent_load to a function that reads a tensor's storage. Wrap this
        # function to check the size of the storage.
        is_reader = name == "persistent_load"
        super().__setattr__(name, partial(self._read_storage, value) if is_reader else value)

    def _read_storage(self, read: Callable[[Any], Any], saved: Any) -> Any:
        """Check the size of a tensor's storage in the archive and then read the storage."""
        _, kind, key, _, count = saved
        if is_placeholder(kind):
            return kind()
        if self.sizes and self.sizes[key] != count * kind.dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {key} has the wrong size")
        return read(saved)


class Builder:
    """Calls a function, or returns a placeholder if one of the arguments is a placeholder."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        unbuilt = next(filter(is_placeholder, args), None)
        if unbuilt is None or self._function is build_tensor_of_type:
            return self._function(*args)
        return kind_of(unbuilt)()


def build_tensor_of_type(function: Builder, kind: Any, args: Any, state: Any) -> Any:
    """Rebuild a saved tensor without any extra attributes that the user set on it."""
    return function(*args) if kind_of(kind).__name__ == "torch.Tensor" else kind_of(kind)()


def build_parameter(data: Any, requires_grad: bool, *state: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad)


def build_counter(counts: Any = None) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, counts or {})
    return counter


def encode_text(text: str, encoding: str) -> bytes:
    """Convert text to bytes, because pickle protocol 2 stores bytes as text."""
    return text.encode("latin-1")


# Some modules have different names in Python 2 or 3.13, so map these names to those in Python 3.12.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
# The types and constants that a pickle may refer to, keyed by their full names.
VALUES: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, str, tuple)
}
VALUES |= {f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, torch.dtype)}
VALUES |= {str(v): v for v in vars(torch).values() if isinstance(v, torch.qscheme)}
VALUES |= {"builtins.long": int, "builtins.unicode": str}
_BUILTINS = (bytearray, bytes, complex, frozenset, range, set, slice)
_OF_DATETIME = ("date", "datetime", "time", "timedelta", "timezone")
_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
# The functions that the unpickler calls instead of the classes and functions that a pickle names.
BUILDERS: dict[str, Callable[..., Any]] = {
    **{f"builtins.{kind.__name__}": kind for kind in _BUILTINS},
    **{f"datetime.{name}": getattr(datetime, name) for name in _OF_DATETIME},
    **{f"collections.{kind.__name__}": kind for kind in (OrderedDict, defaultdict, deque)},
    "builtins.xrange": range,
    "collections.Counter": build_counter,
    "_codecs.encode": encode_text,
    # Path() creates a PosixPath or a WindowsPath, depending on the system.
    f"pathlib.{type(Path()).__name__}": Path,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": _LAYOUTS.__getitem__,
    "torch._tensor._rebuild_from_type_v2": build_tensor_of_type,
    "torch._utils._rebuild_parameter": build_parameter,
    "torch._utils._rebuild_parameter_with_state": build_parameter,
    "torch._utils._rebuild_qtensor": torch._utils._rebuild_qtensor,
    "torch._utils._rebuild_sparse_tensor": torch._utils._rebuild_sparse_tensor,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": torch._utils._rebuild_tensor_v3,
}
