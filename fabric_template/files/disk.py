"""Disk: every touch of it by a write, in one place; whole files put in place of old ones.

A leaf: the standard library only.
"""

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: no locks, everything else works
    fcntl = None  # type: ignore[assignment]


def _call_of_os(name: str) -> Callable[..., Any]:
    """A function of the os module, looked up when it is called: one that stands in for it then is called, too."""
    return lambda *args: getattr(os, name)(*args)


# Checkpoints, logs and hparams.yaml write through nothing else: a test replaces these one by one to make the disk fail.
_NAMES = ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "rmdir")
fs = types.SimpleNamespace(**{name: _call_of_os(name) for name in _NAMES})

NEWEST = 64  # versions into which a new run of the name looks for what killed ones have left

# flags that not every system has
BINARY, NOT_A_LINK = getattr(os, "O_BINARY", 0), getattr(os, "O_NOFOLLOW", 0)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything: one call may be short, and is so above 2 GiB."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[fs.write(fd, rest) :]


def replace_file(path: str | Path, data: bytes, is_needed: bool = True) -> None:
    """Put a whole file in place of the old one: a reader sees either, never half of one.

    After a power cut it is there, or (``is_needed=False``, for what a resume writes again) whole if it is there.

    Example:
        >>> replace_file("demo.yaml", b"lr: 0.1")
        >>> Path("demo.yaml").read_text()
        'lr: 0.1'
    """
    with replacing(Path(path)) as fd:
        write_all(fd, data)
    if is_needed:
        with contextlib.suppress(OSError):  # the new name is safe once the folder is; not every system can open one
            fsync_folder(Path(path).parent)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[int]:
    """A new file, open for writing, that takes the old one's place and permissions when the block has ended well.

    It has a random name beside the target and is locked as long as this process lives and writes, see `clear_stale`.
    """
    temporary, fd = _open_beside(target)
    try:
        try:
            made = os.fstat(fd)
            yield fd
            fs.fsync(fd)
        finally:
            fs.close(fd)
        try:
            fs.replace(temporary, target)
        except OSError:  # a network file system that has lost the answer reports an error of what it has done
            if not (os.path.lexists(target) and os.path.samestat(made, os.lstat(target))):
                raise
    except BaseException:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise


def _open_beside(target: Path) -> tuple[Path, int]:
    mode = None
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(target).st_mode
        mode = stat.S_IMODE(found) if stat.S_ISREG(found) else None
    for _ in range(99):
        # The process id is for people; what makes a temporary file stale is that nobody holds its lock.
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOT_A_LINK | BINARY
        fd = fs.open(temporary, flags, 0o666 if mode is None else mode & 0o777)
        try:
            if try_lock(fd) is not False and os.path.samestat(os.fstat(fd), os.lstat(temporary)):
                if mode is not None and hasattr(os, "fchmod"):
                    with contextlib.suppress(OSError):  # it is no more open than the old one as it is
                        os.fchmod(fd, mode)
                return temporary, fd
        except FileNotFoundError:
            pass  # another run has taken it for a stale one, before it was locked
        except BaseException:
            fs.close(fd)
            with contextlib.suppress(OSError):
                fs.unlink(temporary)
            raise
        fs.close(fd)
    raise OSError(errno.EAGAIN, "its temporary files are taken away", str(target))


def clear_stale(folder: str | Path, target: str | None = None) -> None:
    """Remove the temporary files (of one target, or all) that killed processes left: those that nobody holds a lock of.

    Not by process id: in a container they all have the same.
    """
    pattern = re.compile(rf"\.{'.+' if target is None else re.escape(target)}\.\d+\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):  # tidying fails nothing
        for path in (Path(folder, name) for name in os.listdir(folder) if pattern.fullmatch(name)):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | NOT_A_LINK | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait
                try:
                    if try_lock(fd):
                        fs.unlink(path)
                finally:
                    os.close(fd)


def newest_in(home: Path) -> list[Path]:
    """The newest versions of a name: of thousands, to look into each would take longer than all else before a run.

    Example:
        >>> _ = [claim_version(Path("many")) for _ in range(11)]
        >>> newest_in(Path("many"))[-1].name
        'version_10'
    """
    with contextlib.suppress(OSError):  # only to tidy them
        return [home / name for name in sorted(os.listdir(home), key=lambda name: (len(name), name))[-NEWEST:]]
    return []


def try_lock(fd: int) -> bool | None:
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


def set_aside(path: str | Path, word: str) -> Path:
    """Give a file another name, one that is free: nothing is deleted.

    Example:
        >>> _ = Path("demo.csv").write_text("a")
        >>> set_aside("demo.csv", "before").name
        'demo.csv.before'
    """
    number = 0
    with contextlib.suppress(FileNotFoundError):  # not exists(): what cannot be looked at is not free
        while os.lstat(target := Path(f"{path}.{word}{'' if not number else f'-{number}'}")):
            number += 1
    fs.replace(path, target)
    return target


def make_folder(folder: Path, is_new: bool = False) -> None:
    """Make a folder and its parents, their names safe from a power cut.

    Raises:
        FileExistsError: with ``is_new``, if the folder is there already, or somebody else was faster.
    """
    missing = list(itertools.takewhile(lambda part: not part.exists(), itertools.chain([folder], folder.parents)))
    missing = missing or [folder] * is_new
    for new in reversed(missing):
        try:
            fs.mkdir(new)
        except FileExistsError:  # another rank was faster
            if is_new and new == folder:
                raise
    for new in missing:  # behind all of them: a file system that keeps a journal writes it once
        fsync_folder(new.parent)


def claim_version(*homes: Path) -> int:
    """Make the next ``version_<n>`` that none of these folders has, in the first; two that ask together get two numbers.

    Example:
        >>> claim_version(Path("demo")), claim_version(Path("demo"))
        (0, 1)
    """
    number = 0
    for home in homes:
        with contextlib.suppress(FileNotFoundError):
            names = [name.removeprefix("version_") for name in os.listdir(home) if name.startswith("version_")]
            number = max(number, *(int(name) + 1 for name in names if name.isdigit()), 0)
    while True:
        try:
            make_folder(homes[0] / f"version_{number}", is_new=True)
        except FileExistsError:  # somebody was faster: the next number, then
            number += 1
        else:
            return number


def fsync_folder(folder: Path) -> None:
    """Make names in the folder survive a power cut; some network file systems know no such thing (EINVAL)."""
    if os.name == "nt":
        return
    fd = fs.open(folder, os.O_RDONLY)
    try:
        fs.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        fs.close(fd)
