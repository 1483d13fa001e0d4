"""Read checkpoint files without running code from them.

A file of ``torch.save`` is a zip archive. It contains a pickle and one entry per storage. A pickle
may name any class or function, so the reader builds tensors and plain values only. It replaces all
other objects by a Placeholder. It builds no class of NumPy, because NumPy trusts the content of
pickles.
"""

from __future__ import annotations

import datetime
import errno
import io
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedCheckpointError

# Keys of Lightning's hyperparameters. A run can resume without them.
_HYPERPARAMETERS = (
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)
_CHUNK = 1 << 24
# The bit of a zip entry that makes it a folder. torch reads such an entry as an empty file.
_FOLDER = 0x10
_MAX_KEY_SIZE = 1000


class Placeholder:
    """Stands for an object of a checkpoint that was not built, because building it could run code.

    A placeholder can be stored and copied. Any other use raises an error that names the object.

    Attributes:
        __qualname__: The full name of a class or a function, or of an object's class.
    """

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CheckpointError(
            f"checkpoint: got an object of {self.__qualname__}, expected a plain value. Reading a"
            " checkpoint runs no code, so this object was not built."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __repr__(self) -> str:
        return f"<not built: {self.__qualname__}>"

    __call__ = __iter__ = __len__ = __getitem__ = __contains__ = __bool__ = __eq__ = _refuse
    __int__ = __float__ = __index__ = _refuse
    __hash__ = object.__hash__


class PartialCheckpoint(dict[Any, Any]):
    """A checkpoint with parts that hold placeholders. Reading one of these parts raises an error.

    Args:
        values: The checkpoint.
        unbuilt: A description of the first placeholder in each of these parts, by key.
        path: The file, for the error.
    """

    def __init__(self, values: dict[Any, Any], unbuilt: dict[Any, str], path: str | Path) -> None:
        super().__init__(values)
        self._unbuilt, self._path = unbuilt, path

    def _check(self, key: Any) -> None:
        if key in self._unbuilt:
            raise CheckpointError(
                f"{self._path}: got {self._unbuilt[key]}, expected plain values and tensors. Reading a"
                " checkpoint runs no code, so this object was not built. If you trust the file, pass"
                " weights_only=False."
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


def read_archive(path: str | Path, map_location: Any = None) -> Any:
    """Return the content of a file of ``torch.save``, after a check of every entry's CRC.

    Raises:
        DamagedCheckpointError: The file is damaged, or was not written by torch.save.
        CheckpointError: The file has wrong content.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        archive = Archive(file, path)
        content = archive.read_entry("data.pkl")
        order = archive.read_entry("byteorder") if "byteorder" in archive.entries else b"little"
        if order != sys.byteorder.encode():
            raise CheckpointError(
                f"{path}: got the byte order {order!r}, expected {sys.byteorder!r}. Save the file again"
                " on a machine with this byte order."
            )
        try:
            value = PlainUnpickler(content, archive, map_location).load()
        except (CheckpointError, MemoryError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path}: the file has wrong content. {type(error).__name__}: {str(error)[:200]}"
            ) from error
        archive.verify()
    unbuilt = find_unbuilt_parts(value) if isinstance(value, dict) else {}
    return PartialCheckpoint(value, unbuilt, path) if unbuilt else value


def find_unbuilt_parts(checkpoint: dict[Any, Any]) -> dict[Any, str]:
    """Describe the first placeholder in each part of a checkpoint, except in hyperparameters."""
    unbuilt = {}
    for key, value in checkpoint.items():
        found = next(placeholders_in(value, str(key)), None)
        if found is not None and key not in _HYPERPARAMETERS:
            unbuilt[key] = f"an object of {found[1]} in the part {found[0]!r}"
    return unbuilt


def placeholders_in(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the name of each placeholder in nested containers."""
    waiting, seen = [(name, value)], set()
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, Placeholder):
            yield place, item.__qualname__
        elif isinstance(item, dict | list | tuple | set | frozenset | deque):
            if id(item) in seen:
                continue
            seen.add(id(item))
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            waiting += [(f"{place}/{key}", part) for key, part in pairs]
            if isinstance(item, dict):
                waiting += [(place, key) for key in item]


# The archive


@contextmanager
def damage_reported(path: str | Path) -> Iterator[None]:
    """Raise a DamagedCheckpointError if the code in the block cannot read an archive."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # A wrong position in a file is damage. Any other OSError is a failure of the disk.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpointError(f"{path}: the file is damaged. {error}") from error


class Archive:
    """The entries of a zip archive that ``torch.save`` has written.

    Args:
        file: The open file.
        path: The path of the file, for errors.

    Attributes:
        entries: The entries by their names without the archive's folder, such as "data/0".
    """

    def __init__(self, file: IO[bytes], path: str | Path) -> None:
        self._path = path
        start = file.read(4)
        if start[:1] == b"\x80":
            raise CheckpointError(
                f"{path}: got a file in the format of torch before 1.6, expected a zip archive. Write"
                " torch.save(torch.load(path, weights_only=True), path)."
            )
        if start != b"PK\x03\x04":
            given = f"a file that starts with {start!r}" if start else "an empty file"
            raise DamagedCheckpointError(
                f"{path}: got {given}, expected a file written by torch.save."
            )
        size = file.seek(0, io.SEEK_END)
        with damage_reported(path):
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
            self.entries = {info.filename.partition("/")[2]: info for info in infos}
            if any(not is_stored(info, size) for info in infos):
                raise ValueError("An entry is compressed, or is not inside of the file.")
            # Overlapping entries could be many times larger than the file.
            if sum(info.file_size for info in infos) > size:
                raise ValueError("The entries are larger than the file.")
            if len(self.entries) < len(infos) or "data.pkl" not in self.entries:
                raise ValueError("It has other entries than files of torch.save.")
        self._unread = set(self.entries)

    def read_chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of an entry. At its end, check the CRC."""
        self._unread.discard(name)
        with damage_reported(self._path), self._zip.open(self.entries[name]) as entry:
            while chunk := entry.read(_CHUNK):
                yield chunk

    def read_entry(self, name: str) -> bytes:
        return b"".join(self.read_chunks(name))

    def read_storage(self, key: str, size: int) -> torch.UntypedStorage:
        with damage_reported(self._path):
            found = self.entries[f"data/{key}"].file_size
            if found != size:
                raise ValueError(f"data/{key} has {found} bytes, expected {size}.")
        content, position = torch.empty(size, dtype=torch.uint8), 0
        array: Any = content.numpy()
        memory = memoryview(array)
        for chunk in self.read_chunks(f"data/{key}"):
            memory[position : position + len(chunk)] = chunk
            position += len(chunk)
        return content.untyped_storage()

    def verify(self) -> None:
        """Check the entries that have not been read."""
        for name in sorted(self._unread):
            for _ in self.read_chunks(name):
                pass


def is_stored(info: zipfile.ZipInfo, size: int) -> bool:
    """Return whether an entry is inside of a file of this size and uncompressed, as in torch.save."""
    is_inside = info.header_offset + info.compress_size <= size
    is_plain = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
    return is_inside and is_plain and not info.external_attr & _FOLDER


# The pickle


class Storage(NamedTuple):
    """The memory of a tensor, and the type of its elements."""

    untyped: torch.UntypedStorage
    dtype: torch.dtype


def refuse_opcode(unpickler: Any) -> None:
    raise pickle.UnpicklingError("the pickle has an opcode that torch.save does not write")


class PlainUnpickler(pickle._Unpickler):
    """Builds plain values and tensors, and a Placeholder for every other object.

    The unpickler in C would call methods of the built objects, such as ``__setstate__``. Therefore
    this class extends the one in Python, and replaces each opcode that calls or changes an object.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    append: Any
    pop_mark: Any
    read: Any

    def __init__(self, content: bytes, archive: Archive, map_location: Any) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._archive, self._map_location = archive, map_location
        self._storages: dict[str, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a plain class, or a Placeholder for any other class or function."""
        full_name = f"{_MODULES.get(module, module)}.{name}"
        full_name = _OLD_NAMES.get(full_name, full_name)
        return VALUES[full_name] if full_name in VALUES else Placeholder(full_name)

    def persistent_load(self, saved_id: Any) -> Storage | Placeholder:
        """Return the storage that a tensor refers to."""
        _, kind, key, location, length = saved_id
        if (dtype := STORAGES.get(name_of(kind))) is None:
            return Placeholder(name_of(kind))
        check_sizes([length])
        size = length * dtype.itemsize
        if check_type(key, str) not in self._storages:
            storage = self._archive.read_storage(key, size)
            self._storages[key] = move_storage(storage, location, self._map_location)
        if self._storages[key].nbytes() != size:
            raise pickle.UnpicklingError(f"storage {key} has two sizes")
        return Storage(self._storages[key], dtype)

    def load_reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.append(build_object(function, check_type(args, tuple)))

    def load_newobj(self) -> None:
        _, kind = self.stack.pop(), self.stack.pop()
        self.append(Placeholder(name_of(kind)))

    def load_newobj_ex(self) -> None:
        self.stack.pop()
        self.load_newobj()

    def load_build(self) -> None:
        """Ignore the state of an object, unless it is the metadata of a state_dict."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Placeholder):
            check_type(target, OrderedDict)
            target.__dict__["_metadata"] = check_type(state, dict).get("_metadata")

    def load_append(self) -> None:
        self.add_items([self.stack.pop()])

    def load_appends(self) -> None:
        self.add_items(self.pop_mark())

    def add_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is set:
            target.update(check_keys(items))
        elif not isinstance(target, Placeholder):
            check_type(target, list, deque).extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, Placeholder):
            check_type(target, dict, OrderedDict, defaultdict, Counter)
            for key, value in zip(check_keys(items[::2]), items[1::2], strict=True):
                target[key] = value

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(check_keys(items)))

    def load_bytearray8(self) -> None:
        # The original allocates a bytearray of any size before it reads.
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.ADDITEMS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.DICT[0]: refuse_opcode,
        pickle.INST[0]: refuse_opcode,
        pickle.OBJ[0]: refuse_opcode,
        pickle.PERSID[0]: refuse_opcode,
        pickle.EXT1[0]: refuse_opcode,
        pickle.EXT2[0]: refuse_opcode,
        pickle.EXT4[0]: refuse_opcode,
        pickle.NEXT_BUFFER[0]: refuse_opcode,
        pickle.READONLY_BUFFER[0]: refuse_opcode,
    }


def build_object(function: Any, args: tuple[Any, ...]) -> Any:
    """Return what a function of BUILDERS returns, or a Placeholder."""
    name = name_of(function)
    if name == _TYPED_TENSOR:
        return build_from_type(*args)
    unbuilt = [arg for arg in args if isinstance(arg, Placeholder)]
    if name == "builtins.getattr" and unbuilt:
        # The pickle has named a method of a class or of an object.
        return Placeholder(f"{name_of(unbuilt[0])}.{args[-1]}")
    if name in BUILDERS and not unbuilt:
        return BUILDERS[name](*args)
    # The functions of copyreg get the object's class as their first argument.
    is_named_by_argument = unbuilt and (name in BUILDERS or name.startswith("copyreg."))
    return Placeholder(name_of(unbuilt[0]) if is_named_by_argument else name)


def name_of(kind: Any) -> str:
    """Return the full name of a class or a function that the pickle has named."""
    if isinstance(kind, type):
        return f"{kind.__module__}.{kind.__qualname__}"
    return check_type(kind, Placeholder).__qualname__


def check_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        names = " or ".join(kind.__name__ for kind in types)
        raise pickle.UnpicklingError(f"got a {type(value).__name__}, expected a {names}")
    return value


def check_sizes(sizes: Iterable[Any]) -> None:
    for size in sizes:
        if not 0 <= check_type(size, int) < 2**63:
            raise pickle.UnpicklingError(f"got the size {size}")


def check_keys(keys: list[Any]) -> list[Any]:
    """Raise an error for deeply nested tuples, because Python cannot compute their hash."""
    for key in keys:
        waiting, count = [key], 0
        while waiting:
            item, count = waiting.pop(), count + 1
            if count > _MAX_KEY_SIZE:
                raise pickle.UnpicklingError("a key of a dict is too large")
            if isinstance(item, tuple | frozenset):
                waiting += item
    return keys


# Tensors


def move_storage(storage: Any, location: str, map_location: Any) -> Any:
    """Move a storage as ``torch.load`` does with ``map_location``. None: keep it on the CPU."""
    if callable(map_location):
        return map_location(storage, location) or storage
    if isinstance(map_location, dict):
        map_location = map_location.get(location)
    if map_location is None:
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(map_location).untyped_storage()


def view_storage(
    storage: Storage, offset: int, size: Any, stride: Any, dtype: torch.dtype
) -> Tensor:
    """Return a tensor of a part of a storage. Raise an error if the storage is too small."""
    check_type(storage, Storage)
    check_sizes([offset, *check_type(size, *_SIZES), *check_type(stride, *_SIZES)])
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > storage.untyped.nbytes():
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(size)} is larger than its storage")
    tensor = torch.empty(0, dtype=dtype, device=storage.untyped.device)
    return tensor.set_(storage.untyped, offset, tuple(size), tuple(stride))


def build_tensor(
    storage: Storage,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    return build_typed_tensor(
        storage, offset, size, stride, requires_grad, hooks, storage.dtype, metadata
    )


def build_typed_tensor(
    storage: Storage,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> Tensor:
    """Build a tensor of any dtype, such as float8, which has no storage class."""
    tensor = view_storage(storage, offset, size, stride, dtype)
    # A view of a conjugate or a negative has the memory of the original tensor.
    if metadata and metadata.get("conj"):
        tensor = tensor.conj()
    if metadata and metadata.get("neg"):
        tensor = -tensor
    return tensor.requires_grad_(requires_grad)


def build_sparse_tensor(layout: torch.layout, data: tuple[Any, ...]) -> Tensor:
    """Build a sparse tensor, and check that its indices are inside of its size."""
    is_coo = layout is torch.sparse_coo
    *parts, size = data[:3] if is_coo else data
    for part in parts:
        check_type(part, Tensor)
    check_sizes(check_type(size, *_SIZES))
    kwargs: dict[str, Any] = {"size": tuple(size), "check_invariants": True}
    if not is_coo:
        return torch.sparse_compressed_tensor(*parts, layout=layout, **kwargs)
    tensor = torch.sparse_coo_tensor(*parts, **kwargs)
    return tensor.coalesce() if len(data) == 4 and data[3] else tensor


def build_parameter(
    data: Tensor, requires_grad: bool, hooks: Any, state: Any = None
) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(check_type(data, Tensor), requires_grad)
    return set_attributes(parameter, state)


def build_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Build a tensor with attributes. Return a Placeholder for a subclass of Tensor."""
    tensor = build_object(function, check_type(args, tuple)) if kind is Tensor else None
    return (
        set_attributes(tensor, state) if isinstance(tensor, Tensor) else Placeholder(name_of(kind))
    )


def set_attributes(tensor: Tensor, state: Any) -> Any:
    """Set the attributes that a user has added to a tensor."""
    attributes = state[0] if type(state) is tuple else state
    for name, value in (attributes or {}).items():
        if not hasattr(type(tensor), check_type(name, str)):
            vars(tensor)[name] = value
    return tensor


# Plain values


def build_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    check_keys([key for key, _ in check_type(pairs, tuple, list)])
    return OrderedDict(pairs)


def build_counter(counts: Any = None) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, check_type(counts or {}, dict))
    return counter


def build_defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
    return defaultdict(factory)


def build_deque(items: Any = (), maxlen: int | None = None) -> deque[Any]:
    return deque(check_type(items, tuple, list), maxlen)


def build_set(items: Any = ()) -> set[Any]:
    return set(check_keys(check_type(items, tuple, list)))


def build_frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(build_set(items))


def build_bytes() -> bytes:
    return b""


def build_bytearray(content: bytes = b"") -> bytearray:
    return bytearray(check_type(content, bytes))


def encode_text(text: str, encoding: str) -> bytes:
    """Return bytes, which pickles of protocol 2 contain as a string."""
    return check_type(text, str).encode("latin-1")


def build_size(size: Any) -> torch.Size:
    return torch.Size(check_type(size, tuple, list))


def build_path(*parts: str) -> Path:
    return Path(*(check_type(part, str) for part in parts))


# Pickles of protocol 2 contain names of Python 2.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
_OLD_NAMES = {
    "builtins.long": "builtins.int",
    "builtins.unicode": "builtins.str",
    "builtins.xrange": "builtins.range",
}
_SIZES = (tuple, torch.Size, list)
_TYPED_TENSOR = "torch._tensor._rebuild_from_type_v2"
# The class of Path() on this system.
_PATH = f"pathlib.{type(Path()).__name__}"
_CLASSES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, slice, str, tuple),
    *(Counter, OrderedDict, defaultdict, deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(torch.Size, torch.device, Tensor, torch.nn.Parameter),
)
# The values that the reader returns for the name of a class or of a constant.
VALUES: dict[str, Any] = {name_of(kind): kind for kind in _CLASSES} | {_PATH: type(Path())}
VALUES |= {f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, torch.dtype)}
_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
# The type of the elements in each class of storage.
STORAGES = {
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
}
# The functions that build objects, by the name of the class or function in the pickle.
BUILDERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": encode_text,
    "builtins.bytearray": build_bytearray,
    "builtins.bytes": build_bytes,
    "builtins.complex": complex,
    "builtins.frozenset": build_frozenset,
    "builtins.range": range,
    "builtins.set": build_set,
    "builtins.slice": slice,
    "collections.Counter": build_counter,
    "collections.OrderedDict": build_dict,
    "collections.defaultdict": build_defaultdict,
    "collections.deque": build_deque,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    _PATH: build_path,
    "torch.Size": build_size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": _LAYOUTS.__getitem__,
    "torch._utils._rebuild_parameter": build_parameter,
    "torch._utils._rebuild_parameter_with_state": build_parameter,
    "torch._utils._rebuild_sparse_tensor": build_sparse_tensor,
    "torch._utils._rebuild_tensor": build_tensor,
    "torch._utils._rebuild_tensor_v2": build_tensor,
    "torch._utils._rebuild_tensor_v3": build_typed_tensor,
}
