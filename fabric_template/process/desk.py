"""Desk: the folder in which ranks in other processes leave what is for the caller's: a result, or the error that ended them.

The launcher's queue is no way home: it is read only after a process has ended, so that more than a pipe holds (64 KB) would
block for ever, and tensors in shared memory would be gone; of an error it brings the text alone.
"""

import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DAY = 24 * 3600.0  # seconds; what lies there is taken within one


@contextmanager
def desk() -> Iterator[str]:
    """A folder for one launch; those of callers that were killed go after a day.

    Example:
        >>> with desk() as folder:
        ...     leave_error(KeyError("mine"), folder)
        ...     first_error(folder)
        KeyError('mine')
    """
    for old in Path(tempfile.gettempdir()).glob("fabric_template_*.desk"):
        with suppress(OSError):
            if old.lstat().st_mtime < time.time() - DAY:
                shutil.rmtree(old)
    folder = tempfile.mkdtemp(prefix="fabric_template_", suffix=".desk")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leave_error(error: BaseException, folder: str) -> None:
    """Leave the error itself; of one that cannot be sent (of a class within a function), the launcher tells the text."""
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)  # some are made with other arguments than they keep
        path = os.path.join(folder, f"{time.monotonic_ns():020}.{os.getpid()}")
        Path(path).write_bytes(data)
        os.rename(path, f"{path}.error")


def first_error(folder: str) -> BaseException | None:
    """The error that came first, of whichever rank: those of the others may be its consequence. None: none was left."""
    paths = sorted(Path(folder).glob("*.error"))
    return pickle.loads(paths[0].read_bytes()) if paths else None  # our own child's
