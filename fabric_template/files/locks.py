"""Locks: one version directory has one writer; the kernel drops the lock with the process."""

import contextlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from .disk import fcntl, make_folder, try_lock
from .opening import CheckpointError, cause_of

_held: set[int] = set()  # the open .lock files of this process


@contextlib.contextmanager
def one_writer(folders: Iterable[str | Path | None]) -> Iterator[None]:
    """Within, all of these are written by nobody else; where one cannot be had, none is held.

    The kernel drops a lock with its process, so no crash leaves it behind. The `.lock` files stay, since removing one would
    race with its next holder. Where files cannot be locked, one line says so.

    Raises:
        CheckpointError: another run writes there; it is named by its process.

    Example:
        >>> with one_writer(["demo/logs", "demo/checkpoints", "demo/logs", None]):
        ...     pass
    """
    different = {os.path.realpath(folder): Path(folder) for folder in folders if folder is not None}
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
        yield


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
    if locked:
        with contextlib.suppress(OSError):  # for the message below only: a full disk is no reason not to train
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd
    holder = re.match(rb"\d+", os.read(fd, 20))
    _release(fd)
    if locked is None:
        return None
    who = f" (process {holder[0].decode()})" if holder else ""
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
