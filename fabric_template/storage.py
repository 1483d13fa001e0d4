"""Checkpoint files: written whole or not at all, read without trusting them.

A leaf: torch, Lightning Fabric and the standard library, so that it can be copied alone.
"""

import argparse
import contextlib
import errno
import json
import os
import pickle
import pickletools
import re
import secrets
import shutil
import stat
import struct
import types
import warnings
import weakref
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import CheckpointIO

try:
    import fcntl
except ImportError:  # Windows: no locks, everything else works
    fcntl = None

# Every touch of the disk by a write, in one place: a test replaces these one by one to make the disk fail.
_fs = types.SimpleNamespace(
    open=os.open,
    write=os.write,
    fsync=os.fsync,
    close=os.close,
    replace=os.replace,
    unlink=os.unlink,
    mkdir=os.mkdir,
    free=lambda folder: shutil.disk_usage(folder).free,
)

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
_CAUSES = {  # the rest is told in the system's own words
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission to write there",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an input/output error",
}
# What `save_hyperparameters()` commonly puts into Trainer's files beyond plain values. Building these runs no code of
# the file's choice: a path holds text, a Namespace attributes. All else (omegaconf, numpy, ...) needs `trusted=True`.
_PLAIN_CLASSES = [(argparse.Namespace, "argparse.Namespace")] + [
    (type(Path()), f"pathlib{module}.{flavour}Path") for module in ("", "._local") for flavour in ("Posix", "Windows")
]
# torch calls these even with weights_only=True, and each allocates as many bytes as the file likes to say.
_ALLOCATORS = re.compile(r"(builtins|__builtin__) bytearray|torch(\.\w+)* \w*Tensor")


class CheckpointError(ValueError):
    """A checkpoint file that cannot be written, read or used; the message is one line that says what to do.

    Example:
        >>> try:
        ...     verify_checkpoint("s3://bucket/last.ckpt")
        ... except CheckpointError as error:
        ...     print(error)
        's3://bucket/last.ckpt' is a URL; only local files are opened here: download it first and give the path.
    """


class AtomicCheckpointIO(CheckpointIO):
    """Fabric's door to files: a save is either complete under its name, or has not happened.

    Example:
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu", plugins=[AtomicCheckpointIO()])
        >>> fabric.save("demo/last.ckpt", {"epoch": 3})
        >>> fabric.load("demo/last.ckpt")
        {'epoch': 3}
        >>> AtomicCheckpointIO().remove_checkpoint("demo/last.ckpt")
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write beside the target, fsync, rename. What fails leaves the old file and nothing else."""
        if storage_options is not None:
            raise TypeError(
                "AtomicCheckpointIO has no storage_options: leave them out, or give Fabric another CheckpointIO."
            )
        target = _local(path)
        if target.is_dir():
            raise CheckpointError(f"could not save '{target}': a folder has this name. Give the path of a file.")
        # The process id is for people; what makes a temporary file stale is that nobody holds its lock.
        temp = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            _make_folder(target.parent)
            _check_room(checkpoint, target)
            fd = _fs.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
            try:
                _try_lock(fd)
                stream = _Stream(fd)
                torch.save(checkpoint, stream)  # straight to the file: no second copy of the model in memory
                if stream.error is not None:
                    raise stream.error
                _fs.fsync(fd)
            finally:
                _fs.close(fd)
            _fs.replace(temp, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                _fs.unlink(temp)
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise  # Ctrl-C stays Ctrl-C
            kept = "the old file is unchanged" if target.is_file() else "nothing was written"
            raise CheckpointError(
                f"could not save '{target}': {_cause(error)}; {kept}. Mend that, or save to another folder."
            ) from error
        try:
            _fsync_folder(target.parent)
        except OSError as error:
            raise CheckpointError(
                f"saved '{target}', but its folder could not be synced: {_cause(error)}; "
                "the file may not survive a power cut. Save again, or to another disk."
            ) from error
        _remove_stale(target)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read without trusting the file, unless `weights_only=False` says that it is trusted."""
        return read_checkpoint(path, trusted=weights_only is False, map_location=map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove one file; one that is gone already is no error."""
        target = _local(path)
        try:
            with contextlib.suppress(FileNotFoundError):
                _fs.unlink(target)
        except OSError as error:
            raise CheckpointError(f"could not remove '{target}': {_cause(error)}. Remove it by hand.") from error


def verify_checkpoint(path: str | Path) -> None:
    """Read a file from end to end and raise `CheckpointError` unless it is a whole checkpoint.

    A torch file carries a CRC for each part, so that any flipped bit is found. A safetensors file has none: there only
    the header and the sizes are checked.

    Example:
        >>> AtomicCheckpointIO().save_checkpoint({"epoch": 3}, "demo/last.ckpt")
        >>> verify_checkpoint("demo/last.ckpt")
    """
    path = _local(path)
    with _opened(path) as file:
        _verify(file, path)


def read_checkpoint(path: str | Path, *, trusted: bool = False, map_location: Any = "cpu") -> dict[str, Any]:
    """Verify a file, then load it; nothing that the file names is imported or called.

    Args:
        path: A torch zip file with a dict in it (ours, Fabric's, Trainer's), or a `.safetensors` file, which comes back
            as `{"state_dict": ...}`.
        trusted: Also load pickles that need arbitrary classes. Such a file can run any program: only where you know
            who wrote it.
        map_location: As in `torch.load`.

    Example:
        >>> AtomicCheckpointIO().save_checkpoint({"epoch": 3}, "demo/last.ckpt")
        >>> read_checkpoint("demo/last.ckpt")
        {'epoch': 3}
    """
    path = _local(path)
    # Opened once: what was verified is what is loaded, also while another process renames a new file over the name.
    with _opened(path) as file:
        legacy = path.suffix != ".safetensors" and _is_pickle(file)
        if not (legacy and trusted):
            _verify(file, path)
        if path.suffix == ".safetensors":
            return {"state_dict": _load_safetensors(path, map_location)}
        reason = _legacy_reason(file) if legacy else None
        try:
            if reason is None:
                checkpoint, reason = _load_plain(file, map_location)
            if reason is not None and not trusted:
                raise CheckpointError(_needs_trust(path, reason))
            if reason is not None:
                warnings.warn(f"'{path}' {reason}; loaded all the same, because of trusted=True.", stacklevel=2)
                file.seek(0)
                checkpoint = torch.load(file, map_location=map_location, weights_only=False)
        except CheckpointError:
            raise
        except Exception as error:  # bytes that are no pickle make unpicklers raise anything
            raise CheckpointError(f"'{path}' could not be read: {_cause(error)}. Use another file.") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"'{path}' holds a {type(checkpoint).__name__}, not a dict: save {{'state_dict': model.state_dict()}}."
        )
    return checkpoint


def find_weights(checkpoint: dict[str, Any], expected: Iterable[str] = ()) -> dict[str, Any]:
    """Return the state dict inside a checkpoint, without the prefixes of the wrappers it was saved from.

    Understands Lightning's layout (`state_dict`), what `fabric.save({"model": ...})` writes, and a bare state dict. The
    prefixes of DDP (`module.`) and Fabric (`_forward_module.`) go where all keys have them, `torch.compile`'s
    (`_orig_mod.`) goes everywhere.

    Args:
        checkpoint: What `read_checkpoint` returned.
        expected: The model's own keys. They are left alone, should the model itself have a child called `module`.

    Example:
        >>> find_weights({"model": {"module.weight": torch.ones(1)}})
        {'weight': tensor([1.])}
    """
    for key in ("state_dict", "model", "model_state_dict"):
        weights = checkpoint.get(key)
        if isinstance(weights, dict) and all(isinstance(name, str) for name in weights):
            break
    else:
        weights = checkpoint
        if not weights or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in weights.items()):
            keys = ", ".join(str(key)[:40] for key in list(checkpoint)[:8]) or "nothing"
            raise CheckpointError(
                f"no weights found: the checkpoint's keys are {keys}. Expected a dict of tensors under 'state_dict' or "
                "'model', or nothing but tensors: save {'state_dict': model.state_dict()}."
            )
    expected = set(expected)
    plain = {k if k in expected else k.replace("_orig_mod.", ""): v for k, v in weights.items()}
    weights = plain if len(plain) == len(weights) else dict(weights)  # two keys that would become one stay apart
    while weights and not (expected and expected.issuperset(weights)):
        prefix = next((p for p in ("module.", "_forward_module.") if all(k.startswith(p) for k in weights)), None)
        if prefix is None:
            break
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def explain_mismatch(expected: dict[str, Any], found: dict[str, Any], limit: int = 3) -> str | None:
    """Say in one line how two state dicts differ in keys and shapes; None if they do not.

    Example:
        >>> explain_mismatch({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(3)})
        "2 differences: missing 'b'; 'a' has shape (3,) in the file, (2,) in the model"
    """
    differences = [f"missing '{key}'" for key in expected if key not in found]
    differences += [f"unexpected '{key}'" for key in found if key not in expected]
    for key in expected:
        ours, theirs = (getattr(side.get(key), "shape", None) for side in (expected, found))
        if ours is not None and theirs is not None and ours != theirs:
            differences.append(f"'{key}' has shape {tuple(theirs)} in the file, {tuple(ours)} in the model")
    if not differences:
        return None
    count, more = len(differences), len(differences) - limit
    end = f"; and {more} more" if more > 0 else ""
    return f"{count} difference{'s' * (count > 1)}: {'; '.join(differences[:limit])}{end}"


def safe_name(text: Any) -> str:
    """Make a metric's name or value fit to be part of a file name.

    Example:
        >>> safe_name("val/acc=0.93"), safe_name("../../etc")
        ('val_acc=0.93', '_.._etc')
    """
    return re.sub(r"[^A-Za-z0-9._=+-]", "_", str(text)).lstrip(".")[:100] or "_"


def inside(folder: str | Path, path: str | Path) -> Path:
    """Return the resolved path, or raise if it leaves the folder, be it by `..`, absolutely or through a symbolic link.

    Example:
        >>> inside("demo", "last.ckpt") == Path("demo/last.ckpt").resolve()
        True
    """
    try:
        base = Path(folder).resolve()
        resolved = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise CheckpointError(
            f"{str(path)!r} is not a usable path: {_cause(error)}. Give a plain file name."
        ) from error
    if not resolved.is_relative_to(base):
        raise CheckpointError(f"'{path}' leads out of '{base}' to '{resolved}': give a path inside the folder.")
    return resolved


class VersionLock:
    """One version directory has one writer. The kernel drops the lock with the process, so no crash leaves it behind.

    Example:
        >>> lock = VersionLock("demo/version_0").acquire()
        >>> lock.release()  # or: with VersionLock(...):
    """

    _held: "weakref.WeakSet[VersionLock]" = weakref.WeakSet()

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._fd: int | None = None

    def acquire(self) -> "VersionLock":
        """Take the lock or raise `CheckpointError`; taking it again is no error."""
        if self._fd is not None or fcntl is None:
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CheckpointError(f"could not lock '{self.folder}': {_cause(error)}. Use another folder.") from error
        if _try_lock(fd) is False:
            holder = re.match(rb"\d+", os.read(fd, 20))
            os.close(fd)
            who = f" (process {holder[0].decode()})" if holder else ""
            raise CheckpointError(
                f"'{self.folder}' is being written by another run{who}: give this one another name=... or version=..., "
                "or stop the other."
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)  # for the message above only
        self._fd = fd
        VersionLock._held.add(self)
        return self

    def release(self) -> None:
        """Give the lock back; the `.lock` file stays, since removing it would race with the next holder."""
        fd, self._fd = self._fd, None
        VersionLock._held.discard(self)
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> "VersionLock":
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_fd": None}  # a copy or an unpickled one holds nothing

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            self.release()


def _forget_locks() -> None:
    """Close inherited locks in a forked child: a data loader's worker that outlives its parent must not hold them."""
    for lock in list(VersionLock._held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


class _Stream:
    """What torch.save writes to. It never raises: torch's C++ writer would replace the disk's error with its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        rest = memoryview(data)
        try:
            while self.error is None and len(rest):
                rest = rest[_fs.write(self.fd, rest) :]  # a write may be short, and is so above 2 GiB
        except BaseException as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        pass


def _cause(error: BaseException) -> str:
    """One line for an error: the usual disk errors in words, the rest by its own first line."""
    if isinstance(error, OSError) and error.errno is not None:
        return _CAUSES.get(error.errno) or str(error.strerror)
    first = re.split(r"\n|\. ", str(error).strip())[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _local(path: str | Path) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):  # two letters or more: "C:/" is a drive
        raise CheckpointError(
            f"'{path}' is a URL; only local files are opened here: download it first and give the path."
        )
    return Path(path)


def _make_folder(folder: Path) -> None:
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was faster
            _fs.mkdir(new)
        _fsync_folder(new.parent)


def _fsync_folder(folder: Path) -> None:
    """Make names in the folder survive a power cut; some network file systems know no such thing (EINVAL)."""
    if os.name == "nt":
        return
    fd = _fs.open(folder, os.O_RDONLY)
    try:
        _fs.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        _fs.close(fd)


def _check_room(checkpoint: Any, target: Path) -> None:
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [checkpoint]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse and the like: an estimate is enough
                storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, dict) else item)
    needed, free = sum(storages.values()) + 2**20, _fs.free(target.parent)
    if needed > free:
        raise CheckpointError(
            f"not enough room to save '{target}': it needs about {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free. "
            "Free some, or save to another folder."
        )


def _try_lock(fd: int) -> bool | None:
    """Return True: ours now. False: another holds it. None: this machine or file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_stale(target: Path) -> None:
    """Remove what killed processes left of earlier saves. Not by process id: in a container they all have the same."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):  # tidying never fails a save
        for name in filter(pattern.fullmatch, os.listdir(target.parent)):
            fd = os.open(target.with_name(name), os.O_RDONLY)
            try:
                if _try_lock(fd):
                    _fs.unlink(target.with_name(name))
            finally:
                os.close(fd)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened: {_cause(error)}"
        raise CheckpointError(f"'{path}' {what}; {_nearby(path.parent)}.") from error
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"'{path}' is a folder, not a file; {_nearby(path)}.")
    if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
        raise CheckpointError(f"'{path}' is not a regular file: give the path of a checkpoint file.")
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be opened: {_cause(error)}. Check its permissions.") from error
    with file:
        yield file


def _nearby(folder: Path) -> str:
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in _SUFFIXES)
    except OSError:
        return f"there is no folder '{folder}' either: check the path"
    if not names:
        return f"there are no checkpoints in '{folder}': check the path"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"in '{folder}' there are: {', '.join(names[:5])}{more}"


def _verify(file: IO[bytes], path: Path) -> None:
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise CheckpointError(f"'{path}' is empty: use another file.")
    if path.suffix == ".safetensors":
        damage = _safetensors_damage(file, size)
    elif _is_pickle(file):
        raise CheckpointError(_needs_trust(path, _legacy_reason(file)))
    else:
        damage = _zip_damage(file, size)
    file.seek(0)
    if damage:
        raise CheckpointError(f"'{path}' is damaged or no checkpoint: {damage}. Use another file, or save it again.")


def _zip_damage(file: IO[bytes], size: int) -> str | None:
    file.seek(0)
    start = file.read(4)
    if start != b"PK\x03\x04":
        return f"it starts with {start!r}, a torch file with b'PK\\x03\\x04'"
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            # All from the directory alone, before any part is read: torch stores, and never compresses.
            if any(m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size for m in members):
                return "it has compressed parts, which torch.save never writes (torch.jit.save does)"
            if sum(m.file_size for m in members) > size:
                return f"its parts claim to be larger than the file's {size} bytes"
            names = [m.filename for m in members]
            # Twice a name, a prefix, a "folder" with content: zipfile and torch's own reader would see different bytes.
            odd = len(set(names)) < len(names) or archive.comment or any(m.external_attr & 0x10 for m in members)
            if odd or not members or min(m.header_offset for m in members) != 0:
                return "its directory is not one that torch.save writes"
            if not any(name.endswith("/data.pkl") or name == "data.pkl" for name in names):
                return "it is a zip file without a data.pkl"
            if bad := archive.testzip():  # reads everything, 1 MiB at a time
                return f"the checksum of its part '{bad}' is wrong"
        file.seek(0)
        with contextlib.suppress(pickle.UnpicklingError):  # torch's own reader looks at fields that zipfile ignores
            torch.serialization.get_unsafe_globals_in_checkpoint(file)
        return None
    except Exception as error:  # a damaged directory makes zipfile raise anything
        return f"it is cut off or altered ({_cause(error)})"


def _safetensors_damage(file: IO[bytes], size: int) -> str | None:
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
    if not 2 <= length <= size - 8:
        return f"its header claims {length} bytes, the file has {size}"
    try:
        header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except Exception as error:
        return f"its header cannot be read ({_cause(error)})"
    return None if 8 + length + end == size else f"its tensors need {8 + length + end} bytes, the file has {size}"


def _load_safetensors(path: Path, map_location: Any) -> dict[str, torch.Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"'{path}' needs the safetensors package: pip install safetensors.") from error
    device = str(map_location) if isinstance(map_location, str | torch.device) else "cpu"
    try:
        return load_file(path, device=device)
    except Exception as error:
        raise CheckpointError(f"'{path}' could not be read: {_cause(error)}. Use another file.") from error


def _is_pickle(file: IO[bytes]) -> bool:
    file.seek(0)
    start = file.read(2)
    file.seek(0)
    return len(start) == 2 and start[0] == 0x80 and start[1] <= pickle.HIGHEST_PROTOCOL


def _legacy_reason(file: IO[bytes]) -> str:
    """Why an old pickle is not loaded, with the first names that it would import (read, not run)."""
    names: list[str] = []
    file.seek(0)
    with contextlib.suppress(Exception):
        for _ in range(4):  # old torch files are a few pickles in a row: magic number, version, system, the object
            texts: list[str] = []
            for op, arg, _ in pickletools.genops(file):
                if "UNICODE" in op.name:
                    texts.append(arg)
                elif op.name in ("GLOBAL", "INST"):
                    names.append(arg.replace(" ", "."))
                elif op.name == "STACK_GLOBAL":
                    names.append(".".join(texts[-2:]))
    file.seek(0)
    wants = f" that imports {', '.join(dict.fromkeys(names[:3]))}" if names else ""
    return f"is an old-style pickle{wants}, which can run any program"


def _needs_trust(path: Path, reason: str) -> str:
    return f"'{path}' {reason}; refused. If you know who wrote it, give trusted=True, and save it again from there."


def _load_plain(file: IO[bytes], map_location: Any) -> tuple[Any, str | None]:
    """Return the content, or the reason why it takes more than plain values to load it."""
    with zipfile.ZipFile(file) as archive:
        data = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl") or n == "data.pkl"))
    for op, arg, _ in pickletools.genops(data):
        if op.name == "GLOBAL" and _ALLOCATORS.fullmatch(arg):
            return None, f"wants to call {arg.replace(' ', '.')}, which can take any amount of memory"
    del data
    file.seek(0)
    # The context would also take away, at its end, what the user had allowed before.
    mine = [entry for entry in _PLAIN_CLASSES if entry not in torch.serialization.get_safe_globals()]
    try:
        with torch.serialization.safe_globals(mine), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of here (a newer pickle protocol) ends as our complaint
            return torch.load(file, map_location=map_location, weights_only=True), None
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+) ", str(error))
        last = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()
        what = f"the class or function {name[1]}" if name else f"more than plain values ({last[0] if last else error})"
        return None, f"wants {what}, which can run any program"
