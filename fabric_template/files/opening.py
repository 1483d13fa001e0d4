"""Opening: a file's bytes, or the error that kept them back; what the disk did not give proves nothing of the file.

Needs `errors.py` and the standard library: the two can be copied alone.
"""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .errors import CheckpointError, MissingCheckpoint, UnreadableError, cause_of, is_passing

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


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
