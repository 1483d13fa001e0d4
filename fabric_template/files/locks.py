"""Locks: one version directory has one writer; the kernel drops the lock with the process."""

import contextlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from .disk import fcntl, make_folder, try_lock
from .errors import CheckpointError, cause_of

MOMENT = 0.05  # seconds that who lists the runs may hold a lock
_held: set[int] = set()  # the open .lock files of this process


@contextlib.contextmanager
def one_writer(folders: Iterable[str | Path | None]) -> Iterator[Callable[[str], None]]:
    """Within, all of these are written by nobody else; where one cannot be had, none is held.

    The kernel drops a lock with its process, so no crash leaves it behind. The `.lock` files stay, since removing one would
    race with its next holder. Where files cannot be locked, one line says so.

    Each keeps a line for each of its writers, and what these have noted: how a run ended is known where none is left to say.

    Yields:
        What notes a line.

    Raises:
        CheckpointError: another run writes there; it is named by its process.

    Example:
        >>> with one_writer(["demo/logs", "demo/checkpoints", "demo/logs", None]) as note:
        ...     note("finished")
    """
    different = {os.path.realpath(folder): Path(folder) for folder in folders if folder is not None}
    files: list[int] = []
    with contextlib.ExitStack() as held:
        for folder in different.values():
            if (fd := _lock(folder)) is None:
                warnings.warn(
                    f"'{folder}' is where files cannot be locked: nothing keeps a second run from writing there; see to it"
                    " that each has a name=... or version=... of its own",
                    stacklevel=3,
                )
            else:
                held.callback(_release, fd)
                files.append(fd)
        yield partial(_note, files)


def is_first(folder: Path, *others: Path) -> bool:
    """Whether nobody has had any of these folders before; of several that ask together, they are one's from now on."""
    if any((other / ".lock").exists() for other in others):
        return False
    make_folder(folder)
    try:
        os.close(os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True


def _note(files: list[int], line: str) -> None:
    """For who looks later: a full disk is no reason not to train."""
    for fd in files:
        with contextlib.suppress(OSError):
            os.lseek(fd, 0, os.SEEK_END)
            os.write(fd, " ".join(line.splitlines()).encode("utf-8", "replace") + b"\n")


def _lock(folder: Path) -> int | None:
    """The folder's locked file; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        make_folder(folder)  # its name safe from a power cut: whoever writes there finds it made
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise CheckpointError(f"could not lock '{folder}': {cause_of(error)}. Use another folder.") from error
    _held.add(fd)
    locked = try_lock(fd)
    if not locked:
        time.sleep(MOMENT)
        locked = try_lock(fd)
    if locked:
        _note([fd], str(os.getpid()))
        return fd
    holder = re.findall(rb"^\d{1,9}$", os.read(fd, 100_000), re.MULTILINE)
    _release(fd)
    if locked is None:
        return None
    who = f" (process {holder[-1].decode()})" if holder else ""
    raise CheckpointError(
        f"'{folder}' is being written by another run{who}: give this one another name=... or version=..., or stop the other."
    )


def _release(fd: int) -> None:
    if fd in _held:
        _held.discard(fd)
        with contextlib.suppress(OSError):  # it is closed, whatever is reported
            os.close(fd)


def _forget_locks() -> None:
    """Close inherited locks in a forked child: a data loader's worker that outlives its parent must not hold them."""
    for fd in list(_held):
        _release(fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
