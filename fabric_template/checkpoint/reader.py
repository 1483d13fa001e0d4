"""Read checkpoint files without running code from them.

A file of ``torch.save`` is a zip archive with a pickle and an entry per storage. A pickle may name
any class or function. The unpickler below builds tensors and plain values only, and replaces all
other objects by a Placeholder. It builds no class of NumPy, because NumPy trusts the content of
pickles.
"""

from __future__ import annotations

import datetime
import errno
import io
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from ..errors import CheckpointError, DamagedCheckpointError

# Keys of Lightning's hyperparameters. A run can resume without them.
_HYPERPARAMETERS = (
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)
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
    sizes = verify_archive(path)
    # torch.load asks a module for the class Unpickler.
    unpickler = type("Unpickler", (PlainUnpickler,), {"sizes": sizes})
    options: dict[str, Any] = {
        "pickle_module": SimpleNamespace(__name__="pickle", Unpickler=unpickler)
    }
    try:
        value = torch.load(path, map_location or "cpu", weights_only=False, **options)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception as error:
        is_damaged = "PytorchStreamReader" in str(error)
        kind = DamagedCheckpointError if is_damaged else CheckpointError
        problem = "the file is damaged" if is_damaged else "the file has wrong content"
        raise kind(f"{path}: {problem}. {type(error).__name__}: {str(error)[:200]}") from error
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


def verify_archive(path: str | Path) -> dict[str, int]:
    """Check the entries of an archive and their CRC. Return the size of each storage by its key."""
    with open(path, "rb") as file:
        check_start(file, path)
        size = file.seek(0, io.SEEK_END)
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
                check_entries(infos, size)
                damaged = archive.testzip()
                if damaged is not None:
                    raise ValueError(f"The content of {damaged} has changed.")
        except MemoryError:
            raise
        except Exception as error:
            # A wrong position in a file is damage. Any other OSError is a failure of the disk.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise DamagedCheckpointError(f"{path}: the file is damaged. {error}") from error
    names = {info.filename.partition("/")[2]: info.file_size for info in infos}
    return {n.removeprefix("data/"): size for n, size in names.items() if n.startswith("data/")}


def check_start(file: IO[bytes], path: str | Path) -> None:
    start = file.read(4)
    if start[:1] == b"\x80":
        raise CheckpointError(
            f"{path}: got a file in the format of torch before 1.6, expected a zip archive. Write"
            " torch.save(torch.load(path, weights_only=True), path)."
        )
    if start != b"PK\x03\x04":
        given = f"a file that starts with {start!r}" if start else "an empty file"
        raise DamagedCheckpointError(f"{path}: got {given}, expected a file written by torch.save.")


def check_entries(infos: list[zipfile.ZipInfo], size: int) -> None:
    """Raise an error for other entries than those of torch.save, such as compressed ones."""
    names = {info.filename.partition("/")[2] for info in infos}
    for info in infos:
        is_inside = info.header_offset + info.compress_size <= size
        is_plain = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not is_inside or not is_plain or info.external_attr & _FOLDER:
            raise ValueError("An entry is compressed, or is not inside of the file.")
    # Overlapping entries could be many times larger than the file.
    if sum(info.file_size for info in infos) > size:
        raise ValueError("The entries are larger than the file.")
    # An archive with constants.pkl is a TorchScript program, which torch.load would run.
    if len(names) < len(infos) or "data.pkl" not in names or "constants.pkl" in names:
        raise ValueError("It has other entries than files of torch.save.")


# The pickle


def refuse_opcode(unpickler: Any) -> None:
    raise pickle.UnpicklingError("the pickle has an opcode that torch.save does not write")


class PlainUnpickler(pickle._Unpickler):
    """Builds plain values and tensors, and a Placeholder for every other object.

    The unpickler in C would call methods of the built objects, such as ``__setstate__``. Therefore
    this class extends the one in Python, and replaces each opcode that calls or changes an object.

    Attributes:
        sizes: The number of bytes of each storage in the archive. torch does not compare it with
            the size that the pickle names.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    sizes: ClassVar[dict[str, int]] = {}
    stack: list[Any]
    append: Any
    pop_mark: Any
    read: Any
    persistent_load: Any

    def find_class(self, module: str, name: str) -> Any:
        """Return a plain class, or a Placeholder for any other class or function."""
        full_name = f"{_MODULES.get(module, module)}.{name}"
        return VALUES[full_name] if full_name in VALUES else Placeholder(full_name)

    def load_binpersid(self) -> None:
        """Read the storage of a tensor, if the archive has as many bytes as the pickle names."""
        _, kind, key, _, count = saved = check_type(self.stack.pop(), tuple)
        if isinstance(kind, Placeholder):
            self.append(kind)
            return
        item_size = 1 if kind is torch.UntypedStorage else kind.dtype.itemsize
        if self.sizes[check_type(key, str)] != check_type(count, int) * item_size:
            raise pickle.UnpicklingError(f"storage {key} has another size")
        self.append(self.persistent_load(saved))

    def load_reduce(self) -> None:
        args, function = check_type(self.stack.pop(), tuple), self.stack.pop()
        self.append(build_object(function, args))

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
            vars(target)["_metadata"] = check_type(state, dict).get("_metadata")

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
        # pop_mark() replaces self.append, so call pop_mark() first.
        items = self.pop_mark()
        self.append(frozenset(check_keys(items)))

    def load_bytearray8(self) -> None:
        # The original allocates a bytearray of any size before it reads.
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))

    dispatch |= {
        pickle.BINPERSID[0]: load_binpersid,
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
    }
    _REFUSED = b"".join(
        (pickle.DICT, pickle.INST, pickle.OBJ, pickle.PERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4)
    )
    dispatch |= dict.fromkeys(
        (*_REFUSED, pickle.NEXT_BUFFER[0], pickle.READONLY_BUFFER[0]), refuse_opcode
    )


def build_object(function: Any, args: tuple[Any, ...]) -> Any:
    """Return what a function of BUILDERS returns, or a Placeholder."""
    name = name_of(function)
    if name == "torch._tensor._rebuild_from_type_v2":
        # A tensor with attributes of the user, which are dropped.
        inner, kind, inner_args, _ = args
        is_tensor = kind is Tensor
        return build_object(inner, inner_args) if is_tensor else Placeholder(name_of(kind))
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


def check_keys(keys: Any) -> Any:
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


# Tensors and plain values


def build_tensor(storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> Tensor:
    """Build a tensor with torch, which checks that the storage is large enough."""
    check_type(storage, torch.storage.TypedStorage)
    requires_grad, _, *metadata = more
    return torch._utils._rebuild_tensor_v2(
        storage, offset, size, stride, requires_grad, OrderedDict(), *metadata
    )


def build_typed_tensor(storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> Tensor:
    """Build a tensor of a dtype without a storage class, such as float8."""
    check_type(storage, torch.storage.TypedStorage)
    requires_grad, _, dtype, *metadata = more
    return torch._utils._rebuild_tensor_v3(
        storage, offset, size, stride, requires_grad, OrderedDict(), dtype, *metadata
    )


def build_sparse_tensor(layout: torch.layout, data: tuple[Any, ...]) -> Tensor:
    """Build a sparse tensor, and check that its indices are inside of its size."""
    if layout is not torch.sparse_coo:
        first, second, values, size = data
        options: dict[str, Any] = {"layout": layout, "check_invariants": True}
        return torch.sparse_compressed_tensor(first, second, values, size, **options)
    indices, values, size, *is_coalesced = data
    tensor = torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    return tensor.coalesce() if any(is_coalesced) else tensor


def build_parameter(data: Tensor, requires_grad: bool, *state: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(check_type(data, Tensor), requires_grad)


def build_counter(counts: Any = None) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, check_type(counts or {}, dict))
    return counter


def encode_text(text: str, encoding: str) -> bytes:
    """Return bytes, which pickles of protocol 2 contain as a string."""
    return check_type(text, str).encode("latin-1")


def container_of(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds a container from a list or a tuple."""

    def build(items: Any = (), *more: Any) -> Any:
        items = check_type(items, tuple, list, bytes)
        if kind in (set, frozenset, OrderedDict):
            check_keys(items)
        return kind(items, *more)

    return build


# Pickles of protocol 2 contain names of Python 2.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
# The class of Path() on this system.
_PATH = f"pathlib.{type(Path()).__name__}"
_CLASSES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, slice, str, tuple),
    *(Counter, OrderedDict, defaultdict, deque, type(Path())),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(torch.Size, torch.device, Tensor, torch.nn.Parameter, torch.UntypedStorage),
)
# The values that the reader returns for the name of a class or of a constant.
VALUES: dict[str, Any] = {name_of(kind): kind for kind in _CLASSES}
VALUES |= {f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, torch.dtype)}
VALUES |= {"builtins.long": int, "builtins.unicode": str}
_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
# The functions that build objects, by the name of the class or function in the pickle.
BUILDERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": encode_text,
    **{f"builtins.{kind.__name__}": kind for kind in (complex, range, slice)},
    "builtins.xrange": range,
    **{f"builtins.{kind.__name__}": container_of(kind) for kind in (set, frozenset, bytearray)},
    "builtins.bytes": container_of(bytes),
    "collections.Counter": build_counter,
    "collections.OrderedDict": container_of(OrderedDict),
    "collections.defaultdict": defaultdict,
    "collections.deque": container_of(deque),
    **{name_of(kind): kind for kind in _CLASSES if kind.__module__ == "datetime"},
    _PATH: Path,
    "torch.Size": container_of(torch.Size),
    "torch.device": torch.device,
    "torch.serialization._get_layout": _LAYOUTS.__getitem__,
    "torch._utils._rebuild_parameter": build_parameter,
    "torch._utils._rebuild_parameter_with_state": build_parameter,
    "torch._utils._rebuild_sparse_tensor": build_sparse_tensor,
    "torch._utils._rebuild_tensor_v2": build_tensor,
    "torch._utils._rebuild_tensor_v3": build_typed_tensor,
}
