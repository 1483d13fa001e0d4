"""Locks: one version directory has one writer; the kernel drops the lock with the process."""

import contextlib
import os
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .disk import fcntl, make_folder, try_lock
from .opening import CheckpointError, cause_of


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
        """Take the lock or raise `CheckpointError`; taking it again is no error. Without locks, one line says so."""
        if self._fd is not None:
            return self
        if fcntl is None:
            return self._without()
        try:
            make_folder(self.folder)  # its name safe from a power cut: whoever writes there finds it made
            fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CheckpointError(f"could not lock '{self.folder}': {cause_of(error)}. Use another folder.") from error
        locked = try_lock(fd)
        if locked is None:
            os.close(fd)
            return self._without()
        if locked is False:
            holder = re.match(rb"\d+", os.read(fd, 20))
            os.close(fd)
            who = f" (process {holder[0].decode()})" if holder else ""
            raise CheckpointError(
                f"'{self.folder}' is being written by another run{who}: give this one another name=... or version=..., "
                "or stop the other."
            )
        with contextlib.suppress(OSError):  # for the message above only: a full disk is no reason not to train
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd
        VersionLock._held.add(self)
        return self

    def _without(self) -> "VersionLock":
        warnings.warn(
            f"'{self.folder}' is where files cannot be locked: nothing keeps a second run from writing there; see to it that"
            " each has a name=... or version=... of its own",
            stacklevel=3,
        )
        return self

    def release(self) -> None:
        """Give the lock back; the `.lock` file stays, since removing it would race with the next holder."""
        fd, self._fd = self._fd, None
        VersionLock._held.discard(self)
        if fd is not None:
            with contextlib.suppress(OSError):  # it is closed, whatever is reported
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


@contextlib.contextmanager
def one_writer(folders: Iterable[str | Path | None]) -> Iterator[None]:
    """Within, all of these are written by nobody else; where one cannot be had, none is held.

    Example:
        >>> with one_writer(["demo/logs", "demo/checkpoints", "demo/logs", None]):
        ...     pass
    """
    different = {os.path.realpath(folder): folder for folder in folders if folder is not None}
    with contextlib.ExitStack() as held:
        for folder in different.values():
            held.enter_context(VersionLock(folder))
        yield


def _forget_locks() -> None:
    """Close inherited locks in a forked child: a data loader's worker that outlives its parent must not hold them."""
    for lock in list(VersionLock._held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
