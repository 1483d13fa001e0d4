"""Lock the folders of a run for one writer. The .lock file also records how the run ended."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..errors import CheckpointError
from .checkpoint_io import sync_folder

_open_files: set[IO[str]] = set()


def _close_in_child() -> None:
    for file in _open_files:
        file.close()


if hasattr(os, "register_at_fork"):
    # Dataloader workers outlive a killed run by seconds, and would keep its locks.
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_folders(folders: Iterable[Path], resumed_from: str | None = None) -> Iterator[None]:
    """Make this process the only writer of some folders, and record how the run ends.

    The system releases the lock of a killed process. Each .lock file has the process id, a line if the
    run was resumed, and "finished", "interrupted" or "failed" at the end. ``fabric-template runs`` reads it.

    Args:
        folders: The folders. They are created.
        resumed_from: The step and the file that the run continues from.

    Raises:
        CheckpointError: Another run writes there.
    """
    with ExitStack() as stack:
        files = []
        for folder in folders:
            file = open_lock(folder)
            if file is not None:
                files.append(stack.enter_context(file))
        _open_files.update(files)
        stack.callback(_open_files.difference_update, files)
        add_line(files, str(os.getpid()))
        if resumed_from is not None:
            add_line(files, f"resumed after {resumed_from}")
        try:
            yield
        except (KeyboardInterrupt, SystemExit, SIGTERMException):
            add_line(files, "interrupted")
            raise
        except BaseException:
            add_line(files, "failed")
            raise
        add_line(files, "finished")


def open_lock(folder: Path) -> IO[str] | None:
    """Lock a folder. Returns the open file, None where the system cannot lock.

    Raises:
        CheckpointError: Another run has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for parent in folder.parents[:3]:
            sync_folder(parent)
        file = Path(folder, ".lock").open("a+", errors="replace")  # noqa: SIM115
    except OSError as error:
        warnings.warn(
            f"{folder}: it cannot be locked ({error}). Give each run a folder of its own.",
            stacklevel=2,
        )
        return None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        numbers = [line for line in file.read().splitlines() if line.isdigit()]
        file.close()
        process = f" (process {numbers[-1]})" if numbers else ""
        raise CheckpointError(
            f"{folder}: another run{process} writes there, expected a free folder. Give this run another"
            " name or version, or stop the other one."
        ) from None
    except (ImportError, OSError):
        # Windows has no fcntl, and some network drives have no locks. The file still records the state.
        return file
    remove_unfinished(folder)
    return file


def add_line(files: Iterable[IO[str]], line: str) -> None:
    for file in files:
        # A full disk costs the record of the state only.
        with suppress(OSError):
            file.write(f"{line}\n")
            file.flush()


def remove_unfinished(folder: Path) -> None:
    """Remove files that a killed run had not finished. Nobody else writes here."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
