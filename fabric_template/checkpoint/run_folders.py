"""Choose the version of a run, lock its folders, and read the checkpoint that a call starts from."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.launch import gather_objects, is_started_externally
from ..errors import CheckpointError, ConfigurationError, MissingCheckpointError, describe
from ..loggers.csv_logger import claim_version
from ..training.hooks import is_instance_of
from .manager import CheckpointManager
from .resolve import (
    KEYWORDS,
    check_checkpoint_argument,
    checkpoint_of_callbacks,
    default_keyword,
    no_best_checkpoint,
    resolve_checkpoint,
    version_folder,
    version_of_checkpoint,
    warn_of_missing_last,
)
from .run_lock import lock_folders
from .state import OWN_KEY, check_resumable

if TYPE_CHECKING:
    from ..training.run_state import RunState


def read_start_checkpoint(
    run: RunState, given: dict[str, Any], weights_only: bool | None = None
) -> None:
    """Read the checkpoint that a call starts from, if it names one.

    Args:
        given: The arguments ``resume`` (continue with optimizers and counters), ``load`` (the weights
            only) and ``ckpt_path`` (resume in fit, load elsewhere). None for those that were not given.
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
        keyword = loop.next_ckpt_path or default_keyword(loop, run)
    elif loop.next_ckpt_path is not None:
        run.warn_once(
            f"`trainer.ckpt_path = {loop.next_ckpt_path!r}` was called but then you passed"
            f" `trainer.fit(ckpt_path={keyword!r})`. The latter will be loaded."
        )
        loop.next_ckpt_path = None
    try:
        path = None if keyword is None else find_checkpoint(run, name, os.fspath(keyword))
        if path is not None:
            read_checkpoint_of_run(run, path, resumes, keyword, weights_only)
    except FileNotFoundError as error:
        if not is_started_externally(run.fabric):
            raise
        # Other processes may have the file. They would wait for this one.
        run.checkpoint_error = error


def read_checkpoint_of_run(
    run: RunState, path: str | Path, resumes: bool, keyword: Any, weights_only: bool | None
) -> None:
    """Read the file that a call starts from. A resumed run continues its version."""
    loop = run.loop
    run.checkpoint_path = str(path)
    run.checkpoint = loop.checkpoint_io.load_checkpoint(
        path, weights_only=weights_only is not False
    )
    if resumes:
        check_resumable(run.checkpoint, path)
    run.own_state = run.checkpoint.pop(OWN_KEY, None)
    run.resumes = resumes
    if resumes and run.own_state is not None:
        run.data.sampler_seed = run.own_state.get("sampler_seed")
    run.resume_keyword = "auto" if resumes and keyword == "auto" else None
    if resumes and run.config.version is None:
        version = version_of_checkpoint(Path(path), Path(loop.default_root_dir), run.config.name)
        for logger in run.loggers.csv_loggers if version is not None else ():
            logger.version = version


def check_same_checkpoint(run: RunState) -> None:
    """Refuse to start where processes have found different checkpoints, on machines without a common folder.

    Raises:
        CheckpointError: They differ, or none has found it.
    """
    found = gather_objects(run, describe_checkpoint(run))
    different = [rank for rank, text in enumerate(found) if text != found[0]]
    if different:
        other = different[0]
        raise CheckpointError(
            f"resume: the processes have found different checkpoints. Process 0: {found[0]}. Process {other}:"
            f" {found[other]}. Write default_root_dir= with a folder that all machines share."
        )
    if run.checkpoint_error is not None:
        raise run.checkpoint_error


def describe_checkpoint(run: RunState) -> str:
    """Return the path, size and checksum of the checkpoint that this process has found."""
    if run.checkpoint_error is not None:
        return str(run.checkpoint_error)
    if run.checkpoint_path is None or not os.path.isfile(run.checkpoint_path):
        return "none"
    with open(run.checkpoint_path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 65536))
        # A checkpoint ends with the checksums of its parts.
        checksum = zlib.crc32(file.read())
    return f"{run.checkpoint_path} of {size:,} bytes, checksum {checksum:08x}"


def find_checkpoint(run: RunState, argument: str, keyword: str) -> str | Path | None:
    """Return the file that "best", "last" or "auto" means, or the path that was given."""
    loop, config = run.loop, run.config
    if keyword in ("best", "last", "auto") and loop.checkpoint_callbacks:
        return checkpoint_of_callbacks(loop, keyword, run)
    if keyword == "best":
        if not config.enable_checkpointing:
            raise no_best_checkpoint(loop, run.stage)
        if run.checkpoints.best_model_path:
            return run.checkpoints.best_model_path
    root = Path(loop.default_root_dir)
    try:
        return resolve_checkpoint(keyword, root, config.name, config.version, argument)
    except MissingCheckpointError:
        # Trainer starts a new run, so that a job script may always pass ckpt_path="last".
        if (argument, keyword) != ("ckpt_path", "last"):
            raise
        warn_of_missing_last(run)
        return None


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
    """Return the manager of a fit, which saves nothing where a Checkpoint callback does."""
    config = run.config
    has_callback = any(is_instance_of(callback, "Checkpoint") for callback in run.loop.callbacks)
    if not config.enable_checkpointing or has_callback:
        return CheckpointManager(None, config)
    runs = Path(run.loop.default_root_dir, "checkpoints", config.name)
    return CheckpointManager(runs / version_folder(choose_version(run, runs)), config)


def choose_version(run: RunState, runs: Path) -> int | str:
    """Return the version of a run, which the first process chooses for all."""
    own = run.loggers.csv_loggers
    version: Any = own[0].version if own else run.config.version
    if version is None and run.resumes:
        version = version_of_checkpoint(
            Path(str(run.checkpoint_path)), runs.parent.parent, runs.name
        )
    if version is None and run.fabric.is_global_zero:
        version = claim_version(runs)
    version = run.fabric.broadcast(version)
    for logger in own:
        logger.version = version
    return version
