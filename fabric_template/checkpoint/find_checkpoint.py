"""Find and read the checkpoint that fit, validate, test or predict starts from."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.launch import gather_objects
from ..errors import (
    CheckpointError,
    ConfigurationError,
    ConfigurationTypeError,
    DamagedCheckpointError,
    MissingCheckpointError,
    describe,
)
from ..files import list_names, number_of, read_times, version_folder
from ..lightning_compat.overrides import is_instance_of
from ..lightning_compat.private import last_checkpoints
from .checkpoint_io import read_checkpoint
from .distributed import OWN_KEY, SHARDS_KEY, verify_shards
from .numpy_values import restore_numpy
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
        given: The values of ``resume`` (continue with optimizers and counters), ``load`` (read only
            the weights) and ``ckpt_path`` (resume in fit, load in other calls), or None.
    """
    loop, stage = plan.loop, plan.stage
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        values = " and ".join(f"{name}={describe(value)}" for name, value in given.items())
        raise ConfigurationError(
            f"{stage}: got {values}, expected only one argument. resume= continues a run. load="
            " reads only the weights of a checkpoint."
        )
    name, keyword = next(iter(given.items()), ("ckpt_path", None))
    resumes = stage == "fit" and name != "load"
    check_checkpoint_argument(name, keyword, KEYWORDS if resumes else ("last", "best"))
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
        # Do not raise the error yet, because processes that have the file would wait for this
        # process. check_same_checkpoint raises the error in all processes.
        return StartPoint(error=error)
    if checkpoint is None:
        return StartPoint()
    return StartPoint(str(path), checkpoint, keyword, resumes, is_safe)


def read_file(io: CheckpointIO, is_safe: bool, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint. A safe read runs no code of the file."""
    checkpoint = restore_numpy(io.load_checkpoint(path, weights_only=is_safe))
    if SHARDS_KEY in checkpoint:
        verify_shards(path, checkpoint[SHARDS_KEY])
    return checkpoint


def read_again(plan: Plan) -> None:
    """Read the checkpoint in a spawned process, which gets only its path."""
    start = plan.start
    if start.path is not None and not start.is_pending:
        start.load(read_file(plan.loop.checkpoint_io, start.is_safe, start.path))


def check_checkpoint_argument(name: str, value: Any, keywords: tuple[str, ...]) -> None:
    """Raise an error unless the value is None, a path or one of ``keywords``."""
    expected = f"a path, {', '.join(map(repr, keywords[:-1]))} or {keywords[-1]!r}"
    if value is not None and not isinstance(value, str | os.PathLike):
        hint = " Use model.load_state_dict(...) for weights in memory." if name == "load" else ""
        raise ConfigurationTypeError(f"{name}: got {describe(value)}, expected {expected}.{hint}")
    if value in KEYWORDS and value not in keywords:
        raise ConfigurationError(
            f"{name}: got {value!r}, expected {expected}. Only fit(..., resume={value!r}) accepts {value!r}."
        )


def callbacks_of(plan: Plan, kind: str) -> list[Any]:
    return [callback for callback in plan.loop.callbacks if is_instance_of(callback, kind)]


def default_keyword(plan: Plan) -> str | None:
    """Return the keyword that Trainer uses if no checkpoint is given, or None."""
    loop = plan.loop
    if plan.stage == "fit":
        return "last" if callbacks_of(plan, "OnExceptionCheckpoint") else None
    has_monitor = callbacks_of(plan, "Checkpoint") or loop.config.monitor
    best = getattr(loop.checkpoint_callback, "best_model_path", None)
    if plan.is_model_given or not has_monitor or not best:
        return None
    plan.warn(
        f"`.{plan.stage}(ckpt_path=None)` was called without a model. The best model of the previous `fit`"
        " call will be used."
    )
    return "best"


def find_checkpoint(
    plan: Plan, argument: str, keyword: str, read: Callable[[str | Path], dict[str, Any]]
) -> tuple[str | Path | None, dict[str, Any] | None]:
    """Return the path and the content of the checkpoint for a keyword or a path."""
    if keyword not in KEYWORDS:
        return keyword, read(keyword)
    if keyword == "best" and (best := best_of_loop(plan)):
        return best, read(best)
    candidates = list_candidates(plan, keyword)
    newest = read_newest(candidates, read)
    if newest is not None:
        warn_of_newer_runs(plan, argument, candidates, newest[0])
        newest = read_best(*newest, read) if keyword == "best" else newest
    if newest is not None:
        return newest[0].path, newest[1]
    if keyword != "auto":
        report_missing(plan, argument, keyword, candidates)
    return None, None


@dataclass
class Candidate:
    """A checkpoint that a keyword may select.

    Attributes:
        path: The file. None: the version has no checkpoint.
        folder: The version folder, or None for a file elsewhere.
        started: The time at which the newest run of the version started, or 0.0.
        time: The time at which the version last started or saved a checkpoint, or 0.0.
        problem: Why the file is not used, after it was read: "damaged", or "replaced" by a newer run
            of the version.
    """

    path: Path | None
    folder: Path | None = None
    started: float = 0.0
    time: float = 0.0
    problem: str = ""


def best_of_loop(plan: Plan) -> str:
    """Return the best checkpoint of the loop's last run, or "" if it has not saved one."""
    saver = plan.loop.checkpoint_callback
    best = getattr(saver, "best_model_path", None)
    if not best and (saver is None or callbacks_of(plan, "Checkpoint")):
        raise ValueError(
            f'`.{plan.stage}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save'
            " the best model. Give an exact path, as with `fast_dev_run=True`."
        )
    return best or ""


def read_newest(
    candidates: list[Candidate], read: Callable[[str | Path], dict[str, Any]]
) -> tuple[Candidate, dict[str, Any]] | None:
    """Return the first candidate that is not damaged and not replaced, with its content, or None."""
    damaged: Candidate | None = None
    for candidate in candidates:
        if damaged is not None and candidate.folder != damaged.folder:
            # Do not use an older run instead.
            break
        if candidate.path is None:
            continue
        try:
            checkpoint = read(candidate.path)
        except DamagedCheckpointError as error:
            warnings.warn(f"{error} Using the previous checkpoint instead.", stacklevel=2)
            damaged, candidate.problem = candidate, "damaged"
            continue
        if time_of(checkpoint, default=candidate.started) >= candidate.started:
            return candidate, checkpoint
        candidate.problem = "replaced"
    return None


def read_best(
    newest: Candidate, content: dict[str, Any], read: Callable[[str | Path], dict[str, Any]]
) -> tuple[Candidate, dict[str, Any]] | None:
    """Return the best checkpoint of a version. The newest checkpoint contains its name."""
    kept = content[OWN_KEY]["checkpoints"]["kept"] if OWN_KEY in content else ["best.ckpt"]
    for name in list(kept)[:1]:
        best = Path(newest.path or "").with_name(os.path.basename(name))
        if best.exists():
            return Candidate(best, newest.folder), read(best)
    return None


def warn_of_newer_runs(
    plan: Plan, argument: str, candidates: list[Candidate], used: Candidate
) -> None:
    """Warn if a run without a checkpoint is newer than the run that is used."""
    newer = [other.folder.name for other in candidates if other.folder and other.time > used.time]
    if newer and used.folder is not None:
        plan.warn(
            f"{argument}: {newer[0]} was started later and has no checkpoint. Continuing"
            f" {used.folder.name}. To continue another run, write version= or its path."
        )


def list_candidates(plan: Plan, keyword: str) -> list[Candidate]:
    """Return the files that the keyword "last", "best" or "auto" may select, newest run first."""
    loop = plan.loop
    savers = callbacks_of(plan, "Checkpoint")
    if not savers:
        return list_versions(plan, run_folder(plan), "*.ckpt")
    has_own_folder = all(getattr(saver, "dirpath", None) for saver in savers)
    if not has_own_folder and loop.loggers and loop.loggers[0].save_dir is not None:
        # ModelCheckpoint saves in the log folder. A killed run may have no last.ckpt, so "auto"
        # accepts any checkpoint.
        folder = Path(loop.loggers[0].save_dir, str(loop.loggers[0].name))
        name = "*.ckpt" if keyword == "auto" else "last*.ckpt"
        found = list_versions(plan, folder, f"checkpoints/{name}")
        if any(candidate.path for candidate in found):
            return found
    exceptions = [saver.ckpt_path for saver in callbacks_of(plan, "OnExceptionCheckpoint")]
    savers = callbacks_of(plan, "ModelCheckpoint")
    paths = exceptions + [path for saver in savers for path in last_checkpoints(saver, loop)]
    if keyword == "auto":
        default = [] if loop.loggers else [Path(loop.default_root_dir, "checkpoints")]
        for folder in [saver.dirpath for saver in savers if saver.dirpath] or default:
            paths += Path(folder).glob("*.ckpt")
    files = [Path(path) for path in paths if path and os.path.exists(path)]
    return [Candidate(path) for path in newest_first(files)]


def list_versions(plan: Plan, folder: Path, pattern: str) -> list[Candidate]:
    """Return the checkpoints of the versions in a folder. The run that started or saved last is first.

    Each run records its times in its own folder. The times of files change when files are copied.
    """
    version = plan.config.version
    names = list_names(folder) if version is None else [version_folder(version)]
    found: list[Candidate] = []
    for name in names:
        files = newest_first(path for path in (folder / name).glob(pattern) if path.is_file())
        started, saved = read_times(folder / name)
        if started == saved == 0.0 and len(names) > 1:
            saved = max(map(read_saved_at, files[:1]), default=0.0)
        time = max(started, saved)
        paths: list[Path | None] = [*files] or [None]
        found += [Candidate(path, folder / name, started, time) for path in paths]

    def age(candidate: Candidate) -> tuple[float, int, str]:
        name = candidate.folder.name if candidate.folder else ""
        number = number_of(name)
        return candidate.time, -1 if number is None else number, name

    return sorted(found, key=age, reverse=True)


def read_saved_at(path: Path) -> float:
    """Return the time inside a checkpoint, without reading its tensors. 0.0: it has no time."""
    # The resume reports a damaged file.
    with suppress(Exception):
        return time_of(torch.load(path, map_location="cpu", mmap=True, weights_only=True), 0.0)
    # torch refuses files with classes among their hyperparameters.
    with suppress(Exception):
        return time_of(read_checkpoint(path), 0.0)
    return 0.0


def time_of(checkpoint: dict[str, Any], default: float) -> float:
    """Return the time that a checkpoint contains. Lightning's Trainer saves none."""
    own = checkpoint.get(OWN_KEY)
    time = own.get("saved_at") if isinstance(own, dict) else None
    return time if isinstance(time, float) and math.isfinite(time) else default


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort the checkpoints of a version: first last.ckpt, then by the step in the file name."""
    files = list(paths)
    lasts = [path for path in files if path.name.startswith("last")]
    times = {path: read_saved_at(path) for path in lasts} if len(lasts) > 1 else {}

    def age(path: Path) -> tuple[bool, float, int, int]:
        step = re.search(r"(?:^|-)step=([0-9]+)", path.stem)
        number = int(step[1]) if step else -1
        return path in lasts, times.get(path, 0.0), number, path.stat().st_mtime_ns

    return sorted(files, key=age, reverse=True)


def run_folder(plan: Plan, kind: str = "checkpoints") -> Path:
    """Return the folder with all versions of a run, under "checkpoints" or "logs"."""
    return Path(plan.loop.default_root_dir, kind, plan.config.name)


def version_of_checkpoint(plan: Plan, path: str) -> int | str | None:
    """Return the version of a checkpoint, or None if its path is outside of the run's folders."""
    file = Path(path).resolve()
    for kind in ("checkpoints", "logs"):
        # Look in the log folder, too, because Lightning's ModelCheckpoint saves there.
        folders = run_folder(plan, kind).resolve()
        if folders in file.parents[1:]:
            folder = file.relative_to(folders).parts[0]
            number = number_of(folder)
            return folder if number is None else number
    return None


def report_missing(plan: Plan, argument: str, keyword: str, candidates: list[Candidate]) -> None:
    """Raise an error for a missing checkpoint. For ckpt_path="last", only warn, as Trainer does."""
    damaged = [other.path for other in candidates if other.path and other.problem == "damaged"]
    replaced = [other.path for other in candidates if other.path and other.problem == "replaced"]
    if damaged:
        raise DamagedCheckpointError(
            f"{argument}: got {keyword!r}, but every checkpoint in {damaged[0].parent} is damaged. Give"
            " another path, or train again."
        )
    if replaced:
        raise MissingCheckpointError(
            f"{argument}: got {keyword!r}, expected a checkpoint of the newest run in {replaced[0].parent},"
            " which has none. Train again. To continue the run that it replaced, write"
            f" {argument}={str(replaced[0])!r}."
        )
    if (argument, keyword) != ("ckpt_path", "last"):
        expected = f"a checkpoint, but there is none under {run_folder(plan)}. Train first"
        if keyword == "last" and callbacks_of(plan, "ModelCheckpoint"):
            expected = "the last.ckpt of a ModelCheckpoint. Write ModelCheckpoint(save_last=True)"
        raise MissingCheckpointError(
            f"{argument}: got {keyword!r}, expected {expected}, or give a path."
        )
    plan.warn(
        f'.{plan.stage}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint'
        " will be loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
    )


def check_same_checkpoint(run: Run) -> None:
    """Raise an error if the processes have found different checkpoints."""
    start = run.plan.start
    step = start.checkpoint.get("global_step") if start.checkpoint is not None else None
    found = gather_objects(run, f"{start.error or start.path}, step {step}")
    for rank, text in enumerate(found):
        if text != found[0]:
            raise CheckpointError(
                f"resume: the processes have found different checkpoints. Process 0: {found[0]}. Process"
                f" {rank}: {text}. Write default_root_dir= with a folder that all machines share."
            )
    if start.error is not None:
        raise start.error
