"""Find and read the checkpoint that fit, validate, test or predict starts from."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from ..distributed.launch import gather_objects
from ..errors import (
    CheckpointError,
    ConfigurationError,
    ConfigurationTypeError,
    DamagedCheckpointError,
    MissingCheckpointError,
    describe,
)
from ..files import list_names, read_times, version_folder, version_of
from ..lightning_compat.overrides import as_list, find_callbacks, overridden
from ..lightning_compat.private import last_checkpoints
from ..rng_state import unchanged_rng_state
from .checkpoint_io import restore_numpy
from .distributed import OWN_KEY, SHARDS_KEY, verify_shards
from .reader import read_plain
from .start_point import StartPoint

if TYPE_CHECKING:
    from lightning.fabric.plugins.io import CheckpointIO

    from ..training.plan import Plan
    from ..training.run import Run

KEYWORDS = ("last", "best", "auto")


def find_start_point(
    plan: Plan, given: dict[str, Any], weights_only: bool | None = None
) -> StartPoint:
    """Read the checkpoint that fit, validate, test or predict starts from, if there is one.

    Args:
        given: The values of the ``resume``, ``load`` and ``ckpt_path`` arguments. ``load`` restores
            only the weights. ``resume`` also restores the optimizers and the counters. In fit,
            ``ckpt_path`` acts like ``resume``. In the other methods, it acts like ``load``.
    """
    loop = plan.loop
    name, keyword = choose_argument(plan.stage, given)
    if keyword is None:
        keyword = loop.next_ckpt_path or default_keyword(plan)
    if keyword is None:
        return StartPoint()

    is_safe = weights_only is not False
    read = partial(read_file, loop.checkpoint_io, is_safe)
    try:
        path, checkpoint = find_checkpoint(plan, name, os.fspath(keyword), read)
    except FileNotFoundError as error:
        environment = getattr(loop.fabric.strategy, "cluster_environment", None)
        if not getattr(environment, "creates_processes_externally", False):
            raise
        # If only this process lacks the checkpoint, an error here would leave the other processes
        # waiting. check_same_checkpoint raises the error later, in all processes.
        return StartPoint(error=error)
    if path is None:
        return StartPoint()
    resumes = plan.stage == "fit" and name != "load"
    start = StartPoint(str(path), keyword, resumes, is_safe)
    start.load(checkpoint)
    return start


def read_file(io: CheckpointIO, is_safe: bool, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file. Execute code in it only if ``is_safe`` is False."""
    checkpoint = restore_numpy(io.load_checkpoint(path, weights_only=is_safe))
    if SHARDS_KEY in checkpoint:
        verify_shards(path, checkpoint[SHARDS_KEY])
    return checkpoint


def read_again(plan: Plan) -> None:
    """Read the checkpoint in a spawned process, which receives only the path of the checkpoint."""
    start = plan.start
    if start.path is not None and not start.is_pending:
        start.load(read_file(plan.loop.checkpoint_io, start.is_safe, start.path))


def choose_argument(stage: str, given: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the argument that selects the checkpoint.

    If ``resume``, ``load`` and ``ckpt_path`` are all None, return ("ckpt_path", None).
    """
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        values = " and ".join(f"{name}={describe(value)}" for name, value in given.items())
        raise ConfigurationError(
            f"{stage}: got {values}, expected only one of them. resume= continues a run, and"
            " load= reads only the weights of a checkpoint."
        )
    name, value = next(iter(given.items()), ("ckpt_path", None))
    has_auto = stage == "fit" and name != "load"
    expected = "a path, 'last', 'best' or 'auto'" if has_auto else "a path, 'last' or 'best'"
    if value is not None and not isinstance(value, str | os.PathLike):
        hint = " Use model.load_state_dict(...) for weights in memory." if name == "load" else ""
        raise ConfigurationTypeError(f"{name}: got {describe(value)}, expected {expected}.{hint}")
    if value == "auto" and not has_auto:
        raise ConfigurationError(
            f"{name}: got 'auto', expected {expected}. Only fit accepts 'auto', as in fit(...,"
            " resume='auto')."
        )
    return name, value


def default_keyword(plan: Plan) -> str | None:
    """Return the ckpt_path that Trainer uses by default: "last", "best" or None."""
    loop = plan.loop
    if plan.stage == "fit":
        return "last" if find_callbacks(loop.callbacks, "OnExceptionCheckpoint") else None
    has_monitor = find_callbacks(loop.callbacks, "Checkpoint") or loop.config.monitor
    best = getattr(loop.checkpoint_callback, "best_model_path", None)
    if plan.is_model_given or not has_monitor or not best:
        return None
    rank_zero_warn(
        f"`.{plan.stage}(ckpt_path=None)` was called without a model. The best model of the"
        " previous `fit` call will be used."
    )
    return "best"


def find_checkpoint(
    plan: Plan, argument: str, keyword: str, read: Callable[[str | Path], dict[str, Any]]
) -> tuple[str | Path | None, dict[str, Any]]:
    """Find and read a checkpoint, given a path or a keyword such as "last".

    Returns:
        The path and the content of the checkpoint. If ``resume="auto"``, ``ckpt_path="auto"`` or
        ``ckpt_path="last"`` finds no checkpoint, return (None, {}).

    Raises:
        MissingCheckpointError: No checkpoint was found for an argument such as ``resume="last"``.
    """
    if keyword not in KEYWORDS:
        given = os.path.expanduser(keyword)
        return given, read(given)
    callbacks = callbacks_of(plan)
    if keyword == "best" and (best := best_of_loop(plan, callbacks)):
        return best, read(best)
    versions = list_candidates(plan, keyword, callbacks)
    path, checkpoint = read_newest(argument, versions, read)
    if path is not None and keyword == "best":
        path = best_beside(path, checkpoint)
        checkpoint = {} if path is None else read(path)
    if path is None:
        report_missing(plan, argument, keyword, versions, callbacks)
    return path, checkpoint


@dataclass
class Version:
    """A version folder, such as ``version_0``, and the checkpoints in it.

    Attributes:
        name: The name of the folder, or "" for files outside of version folders.
        files: The paths of the checkpoints.
        started: The time at which the newest run in the folder started, or 0.0 if unknown.
        time: The time of the latest start or save in the folder, or 0.0 if unknown.
    """

    name: str
    files: list[Path]
    started: float = 0.0
    time: float = 0.0


def callbacks_of(plan: Plan) -> list[Any]:
    """Return the loop's callbacks and, if none of them saves checkpoints, those of the module."""
    callbacks = plan.loop.callbacks
    own = None if find_callbacks(callbacks, "Checkpoint") else plan.module
    if own is not None and overridden(own, "configure_callbacks") is not None:
        # Ignore errors in configure_callbacks, because the module has no trainer yet.
        with suppress(Exception), unchanged_rng_state():
            return [*callbacks, *as_list(own.configure_callbacks())]
    return callbacks


def best_of_loop(plan: Plan, callbacks: list[Any]) -> str:
    """Return the path of the best checkpoint that this loop has saved, or "" if there is none."""
    saver = plan.loop.checkpoint_callback
    best = getattr(saver, "best_model_path", None)
    if not best and (saver is None or find_callbacks(callbacks, "Checkpoint")):
        raise ValueError(
            f'`.{plan.stage}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to'
            " save the best model. Pass the path of a checkpoint instead."
        )
    return best or ""


def read_newest(
    argument: str, versions: list[Version], read: Callable[[str | Path], dict[str, Any]]
) -> tuple[Path | None, dict[str, Any]]:
    """Find the newest valid checkpoint in the version folders.

    Returns:
        The path and the content of the checkpoint, or (None, {}) if there is no valid checkpoint.
    """
    is_damaged = False
    for index, version in enumerate(versions):
        for path in newest_first(version.files):
            try:
                checkpoint = read(path)
            except DamagedCheckpointError as error:
                warnings.warn(f"{error} Using the previous checkpoint instead.", stacklevel=2)
                is_damaged = True
                continue
            # Skip a checkpoint that was saved before the newest run in the folder started, because
            # the checkpoint belongs to an older run.
            if time_of(checkpoint, default=version.started) >= version.started:
                if version.name and index > 0 and versions[0].time > version.time:
                    rank_zero_warn(
                        f"{argument}: {versions[0].name} is newer but has no checkpoint, so"
                        f" {version.name} is used. To use a different run, pass version= or the"
                        " path of a checkpoint."
                    )
                return path, checkpoint
        if is_damaged:
            # If all checkpoints of the newest run are damaged, do not continue an older run.
            break
    return None, {}


def best_beside(newest: Path, checkpoint: dict[str, Any]) -> Path | None:
    """Return the path of the best checkpoint in the same folder as ``newest``, or None."""
    names = ["best.ckpt"]
    if OWN_KEY in checkpoint:
        # The newest checkpoint contains the names of the best checkpoints, from best to worst.
        names = list(checkpoint[OWN_KEY]["checkpoints"]["kept"])
    path = newest.with_name(os.path.basename(names[0])) if names else None
    return path if path is not None and path.exists() else None


def list_candidates(plan: Plan, keyword: str, callbacks: list[Any]) -> list[Version]:
    """List the version folders to search for a checkpoint, from newest to oldest."""
    loop = plan.loop
    savers = find_callbacks(callbacks, "Checkpoint")
    if not savers:
        return list_versions(plan, run_folder(plan), {"*.ckpt"})
    save_dir = loop.loggers[0].save_dir if loop.loggers else None
    folder = Path(save_dir or "", str(loop.loggers[0].name if loop.loggers else ""))
    paths = [getattr(saver, "dirpath", None) for saver in savers]
    has_own_folder = all(path and not is_in_log_folder(path, folder) for path in paths)
    if not has_own_folder and save_dir is not None:
        # A run that was killed may have no last.ckpt, so resume="auto" accepts any checkpoint.
        name = "*" if keyword == "auto" else "last*"
        patterns = {f"checkpoints/{pattern_of(saver, name)}" for saver in savers}
        found = list_versions(plan, folder, patterns)
        if any(version.files for version in found):
            return found
    paths = [saver.ckpt_path for saver in find_callbacks(callbacks, "OnExceptionCheckpoint")]
    savers = find_callbacks(callbacks, "ModelCheckpoint")
    paths += [path for saver in savers for path in last_checkpoints(saver, loop)]
    if keyword == "auto":
        default = None if loop.loggers else Path(loop.default_root_dir, "checkpoints")
        has_folder = any(saver.dirpath for saver in savers)
        for saver in savers:
            if saver_folder := saver.dirpath or (None if has_folder else default):
                paths += Path(saver_folder).glob(pattern_of(saver))
    files = {Path(path) for path in paths if path}
    return [Version("", [path for path in files if path.is_file()])]


def pattern_of(saver: Any, name: str = "*") -> str:
    """Return a glob pattern for the files that a checkpoint callback saves."""
    # A slash in ModelCheckpoint's filename, as in "{val/loss:.2f}", creates subfolders. In this
    # case, the pattern must also match files in subfolders.
    is_nested = "/" in str(getattr(saver, "filename", None))
    extension = getattr(saver, "FILE_EXTENSION", ".ckpt")
    return f"**/{name}{extension}" if is_nested else f"{name}{extension}"


def is_in_log_folder(path: str | Path, folder: Path) -> bool:
    """Return whether ``path`` has the form ``folder/version_0/checkpoints``."""
    # In a run with a logger, a ModelCheckpoint without dirpath= saves to the log folder's
    # subfolder "checkpoints".
    path = Path(path).resolve()
    return path.name == "checkpoints" and path.parent.parent == folder.resolve()


def list_versions(plan: Plan, folder: Path, patterns: Collection[str]) -> list[Version]:
    """List a run's version folders, with the most recently used folder first."""
    given = plan.config.version
    names = list_names(folder) if given is None else [version_folder(given)]
    found = []
    for name in names:
        # Read the times of run starts and checkpoint saves from the .lock file, because copying a
        # checkpoint changes the file's modification time.
        started, saved = read_times(folder / name)
        version = Version(name, list_files(folder / name, patterns), started)
        if started == saved == 0.0 and len(names) > 1:
            newest = next(newest_first(version.files), None)
            saved = 0.0 if newest is None else read_age(newest)[0]
        version.time = max(started, saved)
        found.append(version)

    def age(version: Version) -> tuple[float, int, str]:
        number = version_of(version.name)
        return version.time, number if isinstance(number, int) else -1, version.name

    return sorted(found, key=age, reverse=True)


def list_files(folder: Path, patterns: Collection[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def newest_first(files: list[Path]) -> Iterator[Path]:
    """Yield the ``last*`` files first, then all other files, each group from newest to oldest."""
    last = [path for path in files if path.name.startswith("last")]
    others = [path for path in files if path not in last]
    for group in (last, others):
        # Sort only two or more files, because sorting opens each file to read its save time.
        yield from sorted(group, key=read_age, reverse=True) if len(group) > 1 else group


def read_age(path: Path) -> tuple[float, int, str]:
    """Return a checkpoint's save time, step and file name, without reading its tensors."""
    time, step = 0.0, 0
    # Ignore errors here, because loading the checkpoint will report them.
    with suppress(Exception):
        checkpoint = read_plain(path, is_mapped=True)
        time = time_of(checkpoint, 0.0)
        step = int(checkpoint["global_step"])
    return time, step, path.name


def time_of(checkpoint: dict[str, Any], default: float) -> float:
    """Return a checkpoint's save time, or ``default`` for a checkpoint from Trainer."""
    own = checkpoint.get(OWN_KEY)
    time = own.get("saved_at") if isinstance(own, dict) else None
    return time if isinstance(time, float) and math.isfinite(time) else default


def run_folder(plan: Plan, kind: str = "checkpoints") -> Path:
    """Return ``default_root_dir/kind/name``, the folder that contains all versions of a run."""
    return Path(plan.loop.default_root_dir, kind, plan.config.name)


def version_of_checkpoint(plan: Plan, path: str) -> int | str | None:
    """Return the version whose folder contains a checkpoint, such as 0 for version_0, or None."""
    file = Path(path).resolve()
    for kind in ("checkpoints", "logs"):
        # Lightning's ModelCheckpoint saves checkpoints to the log folder by default.
        folders = run_folder(plan, kind).resolve()
        if folders in file.parents[1:]:
            return version_of(file.relative_to(folders).parts[0])
    return None


def report_missing(
    plan: Plan, argument: str, keyword: str, versions: list[Version], callbacks: list[Any]
) -> None:
    """Raise an error if no checkpoint was found, but only warn for "auto" and ckpt_path="last"."""
    if keyword == "auto":
        # An earlier run with a ModelCheckpoint callback may have saved checkpoints in ``logs``.
        found = next(run_folder(plan, "logs").glob("*/checkpoints/**/*.ckpt"), None)
        if found is not None and not find_callbacks(callbacks, "Checkpoint"):
            rank_zero_warn(
                f"{argument}: a new run starts. To continue the run that saved {found}, pass its"
                " ModelCheckpoint in callbacks=, or pass the path of the file."
            )
    elif (argument, keyword) == ("ckpt_path", "last"):
        # Like Trainer, only warn if ckpt_path="last" finds no checkpoint.
        rank_zero_warn(
            f'.{plan.stage}(ckpt_path="last") is set, but there is no last checkpoint available. No'
            " checkpoint will be loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
        )
    else:
        folders = [version.files[0].parent for version in versions if version.files]
        folder = folders[0] if folders else run_folder(plan)
        advice = "Train first" if keyword == "last" else "Train with monitor='val_loss'"
        raise MissingCheckpointError(
            f"{argument}: got {keyword!r}, but the newest run has no readable {keyword}"
            f" checkpoint in {folder}. {advice}, or pass the path of a checkpoint."
        )


def check_same_checkpoint(run: Run) -> None:
    """Raise an error if the processes found different checkpoints."""
    start = run.plan.start
    step = start.checkpoint.get("global_step") if start.checkpoint is not None else None
    text = f"{start.error or start.path}, step {step}"
    # Compare the paths without default_root_dir, which may differ between machines.
    found = gather_objects(run, text.replace(run.loop.default_root_dir, "."))
    for rank, text in enumerate(found):
        if text != found[0]:
            raise CheckpointError(
                f"resume: the processes found different checkpoints. Process 0: {found[0]}. Process"
                f" {rank}: {text}. Set default_root_dir= to a folder that all machines share."
            )
    if start.error is not None:
        raise start.error
