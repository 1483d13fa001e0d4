"""Errors: what is wrong with a checkpoint file, or with the disk that it is on, in one line that says what to do.

A leaf: the standard library only, so that it can be copied alone.
"""

import errno
import os
import re
from pathlib import Path

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
