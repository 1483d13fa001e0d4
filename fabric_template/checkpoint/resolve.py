"""Find the checkpoint that a call starts from, choose the version of a run, and lock its folders."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..distributed.launch import gather_objects, is_started_externally
from ..errors import (
    CheckpointError,
    ConfigurationError,
    ConfigurationTypeError,
    DamagedCheckpointError,
    MissingCheckpointError,
    WeightsOnlyError,
    describe,
)
from ..lightning_compat.private import last_checkpoints
from ..loggers.csv_logger import claim_version
from .checkpoint_io import read_checkpoint, sync_folder, verify_checkpoint
from .distributed import SHARDS_KEY, is_sharded_file, verify_shards
from .manager import CheckpointManager
from .state import OWN_KEY

if TYPE_CHECKING:
    from ..training.run_state import RunState

KEYWORDS = ("last", "best", "auto")


# The checkpoint that a call starts from


def read_start_checkpoint(
    run: RunState, given: dict[str, Any], weights_only: bool | None = None
) -> None:
    """Read the checkpoint that a call starts from, if the call names one.

    Args:
        given: The arguments ``resume`` (continue with optimizers and counters), ``load`` (the weights
            only) and ``ckpt_path`` (resume in fit, load elsewhere). None: it was not given.
    """
    loop, stage = run.loop, run.stage
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        values = " and ".join(f"{name}={describe(value)}" for name, value in given.items())
        raise ConfigurationError(
            f"{stage}: got {values}, expected one of them. resume= continues a run, load= takes its"
            " weights only."
        )
    name, keyword = next(iter(given.items()), ("ckpt_path", None))
    resumes = stage == "fit" and name != "load"
    check_checkpoint_argument(name, keyword, KEYWORDS if resumes else ("last", "best"))
    if keyword is None:
        keyword = loop.next_ckpt_path or default_keyword(run)
    loop.next_ckpt_path = None
    try:
        path = None if keyword is None else find_checkpoint(run, name, os.fspath(keyword))
        if path is not None:
            read_checkpoint_of_run(run, path, resumes, weights_only)
            run.resume_keyword = "auto" if resumes and keyword == "auto" else None
    except FileNotFoundError as error:
        if not is_started_externally(run.fabric):
            raise
        # Other processes may have the file and wait. check_same_checkpoint raises the error.
        run.checkpoint_error = error


def check_checkpoint_argument(name: str, value: Any, keywords: tuple[str, ...]) -> None:
    """Refuse a value that is neither a path nor a keyword of this argument."""
    expected = f"a path, {' or '.join(map(repr, keywords))}"
    if value is not None and not isinstance(value, str | os.PathLike):
        hint = " Load weights in memory with model.load_state_dict(...)." if name == "load" else ""
        raise ConfigurationTypeError(f"{name}: got {describe(value)}, expected {expected}.{hint}")
    if value in KEYWORDS and value not in keywords:
        raise ConfigurationError(
            f"{name}: got {value!r}, expected {expected}. Write fit(..., resume={value!r})."
        )


def default_keyword(run: RunState) -> str | None:
    """Return the keyword that Trainer uses if no checkpoint is given, or None."""
    loop = run.loop
    if run.stage == "fit":
        return "last" if loop.callbacks_of("OnExceptionCheckpoint") else None
    has_monitor = loop.checkpoint_callbacks or loop.config.monitor
    best = getattr(loop.checkpoint_callback, "best_model_path", None)
    if not (run.is_last_model and has_monitor and best):
        return None
    run.warn_once(
        f"`.{run.stage}(ckpt_path=None)` was called without a model. The best model of the previous `fit`"
        " call will be used."
    )
    return "best"


def read_checkpoint_of_run(
    run: RunState, path: str | Path, resumes: bool, weights_only: bool | None
) -> None:
    """Read the file that a call starts from. A resumed run keeps the file's version."""
    loop = run.loop
    run.checkpoint_path, run.resumes = str(path), resumes
    checkpoint = loop.checkpoint_io.load_checkpoint(path, weights_only=weights_only is not False)
    run.checkpoint, run.own_state = checkpoint, checkpoint.pop(OWN_KEY, None)
    if not resumes:
        return
    if "optimizer_states" not in checkpoint:
        raise WeightsOnlyError(
            "Trying to restore optimizer state but checkpoint contains only the model. This is probably"
            " due to `ModelCheckpoint.save_weights_only` being set to `True`. resume: got"
            f" '{path}', which holds weights only. Write load= to start a new run from them."
        )
    if run.own_state is not None:
        run.data.sampler_seed = run.own_state.get("sampler_seed")
    version = version_of_checkpoint(Path(path), Path(loop.default_root_dir), run.config.name)
    if run.config.version is None and version is not None:
        for logger in run.loggers.csv_loggers:
            logger.version = version


def find_checkpoint(run: RunState, argument: str, keyword: str) -> str | Path | None:
    """Return the file that "best", "last" or "auto" means, or the path that was given."""
    if keyword not in KEYWORDS:
        return keyword
    if keyword == "best":
        saver = run.loop.checkpoint_callback
        best = getattr(saver, "best_model_path", None)
        if best:
            return best
        if saver is None or run.loop.checkpoint_callbacks:
            raise ValueError(
                f'`.{run.stage}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save'
                " the best model. Give an exact path, as with `fast_dev_run=True`."
            )
    files = sort_by_age(list_checkpoints(run, keyword))
    path = find_whole(files)
    if path is not None and keyword == "best":
        path = find_best(path)
    if path is None and keyword != "auto":
        report_missing(run, argument, keyword, files)
    return path


def list_checkpoints(run: RunState, keyword: str) -> list[Path]:
    """Return the checkpoints of the newest run that has any, for "last", "best" or "auto"."""
    loop, version = run.loop, run.config.version
    if not loop.checkpoint_callbacks:
        folder = Path(loop.default_root_dir, "checkpoints", run.config.name)
        files = files_of_newest_version(folder, version, "*.ckpt")
        # exception.ckpt may not be exact, so "auto" does not use it.
        return [file for file in files if keyword != "auto" or file.name != "exception.ckpt"]
    has_own_folder = all(getattr(saver, "dirpath", None) for saver in loop.checkpoint_callbacks)
    if not has_own_folder and loop.loggers and loop.loggers[0].save_dir is not None:
        # ModelCheckpoint saves beside the logs. A killed run may not have its last.ckpt yet.
        folder = Path(loop.loggers[0].save_dir, str(loop.loggers[0].name))
        name = "*.ckpt" if keyword == "auto" else "last*.ckpt"
        if files := files_of_newest_version(folder, version, f"checkpoints/{name}"):
            return files
    exceptions = [saver.ckpt_path for saver in loop.callbacks_of("OnExceptionCheckpoint")]
    savers = loop.callbacks_of("ModelCheckpoint")
    paths = exceptions + [path for saver in savers for path in last_checkpoints(saver, loop)]
    return [Path(path) for path in paths if path and os.path.exists(path)]


def files_of_newest_version(folder: Path, version: int | str | None, pattern: str) -> list[Path]:
    """Return the files of a version. None: the newest version that has any."""
    versions = versions_of(folder) if version is None else [folder / version_folder(version)]
    for path in reversed(versions):
        if files := list(path.glob(pattern)):
            return files
    return []


def sort_by_age(files: list[Path]) -> list[Path]:
    """Sort checkpoints, newest first. last.ckpt and exception.ckpt come before the best ones."""

    def age(path: Path) -> tuple[bool, int, bool]:
        is_last = path.name.startswith(("last", "exception"))
        return is_last, path.stat().st_mtime_ns, path.name == "exception.ckpt"

    return sorted(files, key=age, reverse=True)


def find_whole(files: list[Path]) -> Path | None:
    """Return the first checkpoint that is not damaged. Warn of each damaged one before it."""
    for path in files:
        try:
            verify_checkpoint(path)
            if is_sharded_file(path):
                verify_shards(path, read_checkpoint(path)[SHARDS_KEY])
            return path
        except DamagedCheckpointError as error:
            warnings.warn(f"{error} Using the previous checkpoint instead.", stacklevel=2)
    return None


def find_best(newest: Path) -> Path | None:
    """Return the best checkpoint of a version, which the newest checkpoint names."""
    best = newest.with_name("best.ckpt")
    if not best.exists():
        own = read_checkpoint(newest).get(OWN_KEY, {}).get("checkpoints", {})
        best = newest.with_name(os.path.basename(own.get("best", "")) or "best.ckpt")
    return best if best.exists() else None


def report_missing(run: RunState, argument: str, keyword: str, files: list[Path]) -> None:
    """Raise an error if a keyword has no checkpoint. Only warn for ``ckpt_path="last"``."""
    if files:
        raise DamagedCheckpointError(
            f"{argument}: got {keyword!r}, but every checkpoint in {files[0].parent} is damaged. Give"
            " another path, or train again."
        )
    if (argument, keyword) != ("ckpt_path", "last"):
        folder = Path(run.loop.default_root_dir, "checkpoints", run.config.name)
        raise MissingCheckpointError(
            f"{argument}: got {keyword!r}, expected a checkpoint under {folder}, which has none. Train"
            " first, or give a path."
        )
    run.warn_once(
        f'.{run.stage}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint'
        " will be loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
    )


# Versions


def versions_of(folder: Path) -> list[Path]:
    """Return the version folders of a run, the newest number last. Named versions come first, by age."""

    def number(path: Path) -> tuple[int, float]:
        digits = path.name.removeprefix("version_")
        return (int(digits), 0.0) if digits.isdigit() else (-1, path.stat().st_mtime)

    return sorted((p for p in folder.glob("*") if p.is_dir()), key=number)


def version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else version


def version_of_checkpoint(path: Path, root: Path, name: str) -> int | str | None:
    """Return the version that a checkpoint belongs to; None if it is not of this run."""
    for kind in ("checkpoints", "logs"):
        # Lightning's ModelCheckpoint saves in the folder of the logs.
        runs = (root / kind / name).resolve()
        if runs in path.resolve().parents[1:]:
            folder = path.resolve().relative_to(runs).parts[0]
            digits = folder.removeprefix("version_")
            return int(digits) if digits.isdigit() else folder
    return None


def check_same_checkpoint(run: RunState) -> None:
    """Refuse to start if the processes have found different checkpoints."""
    step = run.checkpoint.get("global_step") if run.checkpoint is not None else None
    found = gather_objects(run, f"{run.checkpoint_error or run.checkpoint_path}, step {step}")
    for rank, text in enumerate(found):
        if text != found[0]:
            raise CheckpointError(
                f"resume: the processes have found different checkpoints. Process 0: {found[0]}. Process"
                f" {rank}: {text}. Write default_root_dir= with a folder that all machines share."
            )
    if run.checkpoint_error is not None:
        raise run.checkpoint_error


def open_folders(run: RunState, stack: ExitStack) -> None:
    """Choose the version of a fit and lock its folders. A new run starts with empty files."""
    loop, version = run.loop, run.config.version
    own = loop.own_logger
    if own is not None and version is None and loop.has_fitted and not run.resumes:
        own.version = None
    loop.has_fitted = True
    run.checkpoints = make_checkpoint_manager(run)
    if not run.fabric.is_global_zero:
        return
    resumed_from = None
    if run.resumes and run.checkpoint is not None:
        resumed_from = f"step {run.checkpoint['global_step']} from {run.checkpoint_path}"
    folders = [Path(logger.log_dir) for logger in run.loggers.csv_loggers]
    if run.checkpoints.folder is not None:
        folders.append(run.checkpoints.folder)
    stack.enter_context(lock_folders(folders, resumed_from))
    if own is not None and version is not None and not run.resumes:
        own.rewind({})


def make_checkpoint_manager(run: RunState) -> CheckpointManager:
    """Return the manager of a fit. It saves nothing if there is a Checkpoint callback."""
    config, loggers = run.config, run.loggers.csv_loggers
    if not config.enable_checkpointing or run.loop.checkpoint_callbacks:
        return CheckpointManager(None, config)
    root = Path(run.loop.default_root_dir)
    folder = root / "checkpoints" / config.name
    version: Any = loggers[0].version if loggers else config.version
    if version is None and run.resumes:
        version = version_of_checkpoint(Path(str(run.checkpoint_path)), root, config.name)
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
    # Dataloader workers outlive a killed run by seconds, and would keep its locks.
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_folders(folders: Iterable[Path], resumed_from: str | None = None) -> Iterator[None]:
    """Make this process the only writer of some folders, and record how the run ends.

    The system releases the lock of a killed process. Each .lock file has the process id, a line if the
    run was resumed, and "finished", "interrupted" or "failed" at the end. ``fabric-template runs`` reads it.

    Raises:
        CheckpointError: Another run writes to one of the folders.
    """
    with ExitStack() as stack:
        opened = [open_lock(folder, stack) for folder in folders]
        files = [file for file in opened if file is not None]
        _open_files.update(files)
        stack.callback(_open_files.difference_update, files)
        add_line(files, str(os.getpid()))
        if resumed_from is not None:
            add_line(files, f"resumed after {resumed_from}")
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for parent in folder.parents[:3]:
            sync_folder(parent)
        file = open(folder / ".lock", "a+", errors="replace")  # noqa: SIM115
        stack.enter_context(file)
    except OSError as error:
        warnings.warn(
            f"{folder}: the folder cannot be locked ({error}). Give each run its own folder.",
            stacklevel=2,
        )
        return None
    # Windows has no fcntl, and some network drives have no locks. The file still has the state.
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
        # ModelCheckpoint saves in a folder of the logs.
        for path in [*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")]:
            path.unlink(missing_ok=True)
    return file


def add_line(files: Iterable[IO[str]], line: str) -> None:
    for file in files:
        # If the disk is full, only the record of the run's state is lost.
        with suppress(OSError):
            file.write(f"{line}\n")
            file.flush()
