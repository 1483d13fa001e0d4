"""Choose the version folders of a run, and lock them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..errors import CheckpointError
from ..files import claim_version, folder_error, make_folder, sync_folder, version_folder
from .find_checkpoint import run_folder, version_of_checkpoint
from .manager import CheckpointManager

if TYPE_CHECKING:
    from ..training.run_state import RunState


def open_folders(run: RunState, stack: ExitStack) -> None:
    """Choose and lock the folders of a fit. Unless the fit resumes, empty their CSV files."""
    loop, version = run.loop, run.config.version
    own = loop.own_logger
    if own is not None and version is None and loop.has_fitted and not run.resumes:
        own.version = None
    loop.has_fitted = True
    run.checkpoints = make_checkpoint_manager(run)
    if not run.fabric.is_global_zero:
        return
    folders = [Path(logger.log_dir) for logger in run.loggers.csv_loggers]
    if run.checkpoints.folder is not None:
        folders.append(run.checkpoints.folder)
    stack.enter_context(lock_folders(folders))
    if own is not None and version is not None and not run.resumes:
        own.rewind({})


def make_checkpoint_manager(run: RunState) -> CheckpointManager:
    """Return a CheckpointManager, which saves nothing if the loop has a Checkpoint callback."""
    config, loggers = run.config, run.loggers.csv_loggers
    if not config.enable_checkpointing or run.loop.checkpoint_callbacks:
        return CheckpointManager(None, config)
    folder = run_folder(run)
    version: Any = loggers[0].version if loggers else config.version
    if version is None and run.resumes:
        version = version_of_checkpoint(run, str(run.checkpoint_path))
    if version is None and run.fabric.is_global_zero:
        version = claim_version(folder)
    version = run.fabric.broadcast(version)
    for logger in loggers:
        logger.version = version
    return CheckpointManager(folder / version_folder(version), config)


# Locks

_open_files: set[IO[str]] = set()


def _close_in_child() -> None:
    for file in _open_files:
        file.close()


if hasattr(os, "register_at_fork"):
    # Close lock files in forked processes. DataLoader workers outlive a killed run by seconds, and
    # would keep the run's folders locked.
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_folders(folders: Iterable[Path]) -> Iterator[None]:
    """Make this process the only writer of some folders, and record how the run ends.

    The system releases the lock of a killed process. Each .lock file contains the process id. At
    the end of a run, "finished", "interrupted" or "failed" is appended to the .lock file.
    """
    with ExitStack() as stack:
        opened = [open_lock(folder, stack) for folder in folders]
        files = [file for file in opened if file is not None]
        _open_files.update(files)
        stack.callback(_open_files.difference_update, files)
        add_line(files, str(os.getpid()))
        end = "failed"
        try:
            yield
            end = "finished"
        except (KeyboardInterrupt, SystemExit, SIGTERMException):
            end = "interrupted"
            raise
        finally:
            add_line(files, end)


def open_lock(folder: Path, stack: ExitStack) -> IO[str] | None:
    """Lock a folder and remove a killed run's temporary files. Returns the lock file or None."""
    make_folder(folder)
    for parent in folder.parents[:3]:
        sync_folder(parent)
    path = folder / ".lock"
    try:
        file = open(path, "a+", errors="replace", opener=open_without_links)  # noqa: SIM115
        stack.enter_context(file)
    except OSError as error:
        if not os.path.lexists(path):
            raise folder_error(folder, error) from error
        warnings.warn(
            f"{folder}: the folder cannot be locked ({error}). Give each run its own folder.",
            stacklevel=2,
        )
        return None
    # Windows and some network drives cannot lock files. The run continues without a lock.
    with suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            numbers = [line for line in file.read().splitlines() if line.isdigit()]
            raise CheckpointError(
                f"{folder}: another run (process {numbers[-1] if numbers else '?'}) writes there, expected"
                " a free folder. Give this run another name or version, or stop the other one."
            ) from None
        # Also clean the folder "checkpoints" in the logs, where Lightning's ModelCheckpoint saves.
        for path in [*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")]:
            path.unlink(missing_ok=True)
    return file


def open_without_links(path: str, flags: int) -> int:
    """Open a file, but raise an OSError for a symbolic link, whose target could be any file."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def add_line(files: Iterable[IO[str]], line: str) -> None:
    for file in files:
        # If the disk is full, continue without a record of how the run ends.
        with suppress(OSError):
            file.write(f"{line}\n")
            file.flush()
