"""Choose and lock the version folders of a run."""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..errors import CheckpointError
from ..files import (
    claim_version,
    folder_error,
    list_names,
    make_folder,
    newest_time,
    read_end,
    sync_folder,
    version_folder,
    version_of,
)
from ..loggers.csv_logger import FILES
from ..loggers.row import REPLACED_LOGS
from .distributed import remove_checkpoint
from .find_checkpoint import run_folder, version_of_checkpoint

if TYPE_CHECKING:
    from ..training.run import Run

# Matches the names of the checkpoints that FabricLoop and MiniLoop write.
_CHECKPOINT = re.compile(r"(last|best|epoch=[0-9]+-step=[0-9]+-.*)\.ckpt")


class RunFolders:
    """Locks a run's version folders and records its start and save times in .lock files.

    A new run records its start time. Every run records the time at which it saves a checkpoint.
    ``resume="last"`` continues the run with the latest start or save time. Runs with the same
    ``version=`` share a folder. A checkpoint older than the latest start time in its folder belongs
    to an earlier run.
    """

    def __init__(self) -> None:
        self._files: dict[Path, IO[str]] = {}
        self._newest = 0.0
        self._replaced: list[Path] = []
        self._replaced_logs: Path | None = None

    @contextmanager
    def locked(self, folders: Iterable[Path], log_folder: Path | None = None) -> Iterator[None]:
        """Lock the folders while the run uses them.

        Each .lock file contains the process ID and, after the run, "finished", "interrupted" or
        "failed". If the process is killed, the operating system releases its locks.

        Args:
            log_folder: The folder whose CSV files a new run replaces. The earlier run's CSV files
                are kept until the new run saves a checkpoint, because until then the user may
                still resume the earlier run.
        """
        with ExitStack() as stack:
            opened = {folder: open_lock(folder, stack) for folder in folders}
            # Do not set this attribute earlier. If another run holds the lock, this run must not
            # remove the CSV files that the other run has kept.
            self._replaced_logs = None if log_folder is None else log_folder / REPLACED_LOGS
            self._files = {folder: file for folder, file in opened.items() if file is not None}
            # The system clock may have been set back since an earlier run. Record a time later than
            # the times of all versions, so that resume="last" finds this run.
            self._newest = max((newest_time(folder.parent) for folder in self._files), default=0.0)
            _open_files.update(self._files.values())
            stack.callback(_open_files.difference_update, self._files.values())
            self._write(str(os.getpid()))
            end = "failed"
            try:
                yield
                end = "finished"
            except (KeyboardInterrupt, SystemExit, SIGTERMException):
                end = "interrupted"
                raise
            finally:
                self._write(end)
                self._files = {}

    def start_new_run(self, folder: Path | None) -> None:
        """Record the start of a new run and find the files that it replaces.

        Args:
            folder: The folder of the checkpoints, or None.
        """
        self._newest = self.save_time()
        self._write(f"started {self._newest!r}", is_synced=True)
        if folder is not None:
            names = filter(_CHECKPOINT.fullmatch, list_names(folder))
            self._replaced = [folder / name for name in names]
        if self._replaced_logs is not None:
            set_aside(self._replaced_logs.parent, self._replaced_logs)

    def save_time(self) -> float:
        """Return the current time, or a later time if the .lock files contain a later time."""
        return max(time.time(), self._newest + 0.001)

    def record_save(self, path: Path, saved_at: float) -> None:
        """Record when a checkpoint was saved, and remove the files of a replaced run."""
        # The new run has saved a checkpoint, so the CSV files of the earlier run are no longer
        # needed. Remove these files even if a ModelCheckpoint saved the checkpoint elsewhere.
        self.remove_replaced_logs()
        folders = {Path(os.path.abspath(folder)) for folder in self._files}
        if folders.isdisjoint(Path(os.path.abspath(path)).parents):
            return
        self._write(f"saved {saved_at!r}")
        replaced, self._replaced = self._replaced, []
        for old in replaced:
            if old != path:
                remove_checkpoint(old)

    def remove_replaced_logs(self) -> None:
        if self._replaced_logs is not None:
            shutil.rmtree(self._replaced_logs, ignore_errors=True)
            self._replaced_logs = None

    def _write(self, line: str, is_synced: bool = False) -> None:
        for file in self._files.values():
            # Ignore errors, because a full disk must not stop training.
            with suppress(OSError):
                file.write(f"{line}\n")
                file.flush()
                if is_synced:
                    os.fsync(file.fileno())


def open_folders(run: Run, stack: ExitStack) -> None:
    """Choose and lock the folders for a run's checkpoints and CSV files."""
    own, version = run.loop.own_logger, run.config.version
    folder = choose_checkpoint_folder(run)
    run.checkpoints.use_folder(folder, folder is not None and continues_in(run, folder))
    if not run.fabric.is_global_zero:
        return
    folders = [Path(logger.log_dir) for logger in run.loggers.csv_loggers]
    if folder is not None:
        folders.append(folder)
    elif folders and version is not None:
        # An earlier run with the same version may have saved checkpoints. Also lock the folder of
        # these checkpoints, because its .lock file must record the new run's start time.
        earlier = run_folder(run.plan) / version_folder(version)
        if earlier.is_dir():
            folders.append(earlier)
    log_folder = None if own is None or version is None else Path(own.log_dir)
    stack.enter_context(run.checkpoints.folders.locked(folders, log_folder))
    if any(continues_in(run, folder) for folder in folders):
        return
    run.checkpoints.folders.start_new_run(folder)
    if own is not None and log_folder is not None:
        # Start new CSV files, so that they contain no rows of an older run.
        own.rewind({})


def set_aside(folder: Path, target: Path) -> None:
    """Move the CSV files in ``folder`` to ``target``, unless ``target`` already exists."""
    names = [name for name in FILES if (folder / name).exists()]
    with suppress(OSError):
        if names and not target.exists():
            target.mkdir()
            for name in names:
                os.replace(folder / name, target / name)


def continues_in(run: Run, folder: Path) -> bool:
    """Return whether the run resumes from a checkpoint that was saved in ``folder``."""
    if not run.plan.start.resumes:
        return False
    if folder.resolve() in Path(str(run.plan.start.path)).resolve().parents:
        return True
    # The user may have moved the checkpoint. Search for its save time in the .lock file, which
    # lists the save times of the folder's checkpoints.
    line = f"saved {run.plan.start.own.get('saved_at')!r}"
    return line.encode() in read_end(str(folder / ".lock")).splitlines()


def choose_version(run: Run) -> None:
    """Choose the version of a run if the user has not passed ``version=``.

    A resumed run uses the version folder that contains the checkpoint. A second ``fit`` call
    that does not resume a run starts a new version folder.
    """
    loop, start = run.loop, run.plan.start
    if run.config.version is not None:
        return
    if start.resumes:
        version = version_of_checkpoint(run.plan, str(start.path))
        if version is None and start.keyword in ("last", "auto"):
            # A ModelCheckpoint callback may save checkpoints outside of the run's folders.
            version = saved_version(run)
        if version is not None:
            run.loggers.use_version(version)
    elif loop.has_fitted and loop.own_logger is not None:
        loop.own_logger.start_new_version()


def saved_version(run: Run) -> int | str | None:
    """Return the version that the checkpoint names, or None if its log folder does not exist."""
    saved = Path(run.plan.start.own.get("row", {}).get("folder", ""))
    folders = run_folder(run.plan, "logs")
    is_own = saved.parts == (run.config.name, saved.name) and saved.name in list_names(folders)
    return version_of(saved.name) if is_own else None


def choose_checkpoint_folder(run: Run) -> Path | None:
    """Return the folder in which FabricLoop saves checkpoints, or None if it saves none."""
    config, loggers = run.config, run.loggers.csv_loggers
    if not config.enable_checkpointing or run.loop.checkpoint_callbacks:
        return None
    folder = run_folder(run.plan)
    version: Any = loggers[0].version if loggers else config.version
    if version is None and run.plan.start.resumes:
        version = version_of_checkpoint(run.plan, str(run.plan.start.path))
    if version is None and run.fabric.is_global_zero:
        version = claim_version(folder)
    version = run.fabric.broadcast(version)
    run.loggers.use_version(version)
    return folder / version_folder(version)


# Lock files

_open_files: set[IO[str]] = set()


def _close_in_child() -> None:
    for file in _open_files:
        file.close()


if hasattr(os, "register_at_fork"):
    # Close lock files in forked processes, such as DataLoader workers. Workers outlive a killed run
    # by a few seconds and would keep its folders locked.
    os.register_at_fork(after_in_child=_close_in_child)


def open_lock(folder: Path, stack: ExitStack) -> IO[str] | None:
    """Lock a folder and remove the temporary files that a killed run left there.

    Returns:
        The open lock file, or None if it could not be opened.
    """
    make_folder(folder)
    for parent in folder.parents[:3]:
        sync_folder(parent)
    path = folder / ".lock"
    try:
        file = open(path, "a+", errors="replace", opener=open_without_links)  # noqa: SIM115
        stack.callback(close_file, file)
    except OSError as error:
        if not os.path.lexists(path):
            raise folder_error(folder, error) from error
        warnings.warn(
            f"{folder}: this folder cannot be locked ({error}), so a second run could overwrite its"
            " files. Set a different name or version for each run.",
            stacklevel=2,
        )
        return None
    # Continue without a lock on Windows, which lacks fcntl, and on network drives without locks.
    with suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            numbers = [line for line in file.read().splitlines() if line.isdigit()]
            raise CheckpointError(
                f"{folder}: another run is writing to this folder (process"
                f" {numbers[-1] if numbers else '?'}). Set a different name or version, or stop"
                " the other run."
            ) from None
        # Lightning's ModelCheckpoint saves to the "checkpoints" subfolder of the log folder.
        for path in [*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")]:
            path.unlink(missing_ok=True)
    return file


def close_file(file: IO[str]) -> None:
    """Close a .lock file. On a full disk, its last lines may be lost, but the run is complete."""
    with suppress(OSError):
        file.close()


def open_without_links(path: str, flags: int) -> int:
    """Open a file. Raise an error for a symbolic link, because its target could be any file."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
