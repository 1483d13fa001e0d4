"""Opening: a file's bytes, or the error that kept them back; what the disk did not give proves nothing of the file.

A leaf: the standard library only, so that it can be copied alone.
"""

import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")

_CAUSES = {  # the rest is told in the system's own words
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission to write there",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an input/output error",
}


class CheckpointError(ValueError):
    """A checkpoint file that cannot be written, read or used; the message is one line that says what to do.

    Example:
        >>> try:
        ...     local_path("s3://bucket/last.ckpt")
        ... except CheckpointError as error:
        ...     print(error)
        's3://bucket/last.ckpt' is a URL; only local files are opened here: download it first and give the path.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))  # also where a name in the file has several


class DamagedError(CheckpointError):
    """A checkpoint file that is not what was written: its bytes came, and they are cut off, altered, or of another kind."""


class UnreadableError(CheckpointError):
    """The disk or the memory failed while a file was read: it may be as good as ever, nobody knows."""


class MissingCheckpoint(CheckpointError, FileNotFoundError):
    """There is no such file."""


def cause_of(error: BaseException) -> str:
    """One line for an error: the usual disk errors in words, the rest by its own first line."""
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.errno is not None:
        return _CAUSES.get(error.errno) or str(error.strerror)
    first = re.split(r"\n|\. ", str(error).strip())[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def is_passing(error: BaseException) -> bool:
    """Whether an error tells of the machine as it is now, and nothing of the bytes of a file.

    Example:
        >>> is_passing(MemoryError()), is_passing(OSError(errno.EIO, "")), is_passing(ValueError("negative seek value"))
        (True, True, False)
    """
    if isinstance(error, OSError):
        return error.errno not in (None, errno.EINVAL)  # EINVAL: a place that a damaged directory points to
    return isinstance(error, MemoryError | ImportError) or "allocate memory" in str(error)  # torch's own word for it


def local_path(path: str | Path) -> Path:
    """The path as it is; a URL is refused."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):  # two letters or more: "C:/" is a drive
        raise CheckpointError(
            f"'{path}' is a URL; only local files are opened here: download it first and give the path."
        )
    return Path(path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, open for reading.

    Raises:
        CheckpointError: of any error inside that tells of the file's content.
        UnreadableError: whatever is made inside of an error of the disk or the memory, be it nothing.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        what = f"Checkpoint file not found: {path}" if missing else f"'{path}' cannot be opened: {cause_of(error)}"
        kind = MissingCheckpoint if missing else UnreadableError if is_passing(error) else CheckpointError
        raise kind(f"{what}; {_nearby(path.parent)}.") from error
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"'{path}' is a folder, not a file; {_nearby(path)}.")
    if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
        raise CheckpointError(f"'{path}' is not a regular file: give the path of a checkpoint file.")
    watched = None
    try:
        with open(path, "rb", buffering=0) as raw, io.BufferedReader(watched := _Watched(raw)) as file:
            yield file
            if watched.failure is not None:
                raise watched.failure
    except Exception as error:
        failure = watched.failure if watched is not None else None
        if failure is None and isinstance(error, CheckpointError):
            raise
        if failure is None and not is_passing(error):
            raise CheckpointError(f"'{path}' could not be read: {cause_of(error)}. Use another file.") from error
        raise UnreadableError(
            f"'{path}' could not be read: {cause_of(failure or error)}. That proves no damage, and the file was left as it"
            " is: type the same again once that is mended, or give another file."
        ) from error


class _Watched(io.FileIO):
    """An open file that remembers the first error of reading it: zipfile and torch make other errors of it, or none."""

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # type: ignore[assignment]  # which end in readinto

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw.fileno(), closefd=False)
        self.source = raw
        self.failure: Exception | None = None

    def readinto(self, buffer: Any) -> int | None:
        try:
            count = self.source.readinto(buffer)
            if not count and memoryview(buffer).nbytes and self.tell() < os.fstat(self.fileno()).st_size:
                raise OSError(errno.EIO, "it ended before its size")
        except (OSError, MemoryError) as error:
            self.failure = self.failure or error
            raise
        return count


def is_file(path: str | Path) -> bool:
    """Whether there is a file; one that cannot be looked at is not taken for missing.

    Example:
        >>> is_file("nowhere.ckpt")
        False
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise UnreadableError(f"'{path}' cannot be looked at: {cause_of(error)}. Type the same again later.") from error


def names_in(folder: str | Path) -> list[str]:
    """The names in a folder, none where there is no such folder; one that cannot be listed is not taken for empty.

    Example:
        >>> names_in("nowhere")
        []
    """
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(f"'{folder}' cannot be listed: {cause_of(error)}. Type the same again later.") from error


def _nearby(folder: Path) -> str:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES)
    if not names:
        return f"there are no checkpoints in '{folder}': check the path"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"in '{folder}' there are: {', '.join(names[:5])}{more}"
