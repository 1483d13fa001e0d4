"""Find and read the checkpoint that fit, validate, test or predict starts from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.launch import gather_objects
from ..errors import (
    CheckpointError,
    ConfigurationError,
    ConfigurationTypeError,
    DamagedCheckpointError,
    MissingCheckpointError,
    WeightsOnlyError,
    describe,
)
from ..files import number_of, version_folder
from ..lightning_compat.private import last_checkpoints
from .distributed import SHARDS_KEY, verify_shards
from .state import OWN_KEY, check_trainer_position

if TYPE_CHECKING:
    from ..training.run_state import RunState

KEYWORDS = ("last", "best", "auto")


def read_start_checkpoint(
    run: RunState, given: dict[str, Any], weights_only: bool | None = None
) -> None:
    """Read the checkpoint that fit, validate, test or predict starts from, if there is one.

    Args:
        given: The values of ``resume`` (continue with optimizers and counters), ``load`` (read only
            the weights) and ``ckpt_path`` (resume in fit, load in other calls), or None.
    """
    loop, stage = run.loop, run.stage
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
        keyword = loop.next_ckpt_path or default_keyword(run)
    if keyword is None:
        return

    def read(path: str | Path) -> dict[str, Any]:
        io = loop.checkpoint_io
        checkpoint = io.load_checkpoint(path, weights_only=weights_only is not False)
        if SHARDS_KEY in checkpoint:
            verify_shards(path, checkpoint[SHARDS_KEY])
        return checkpoint

    try:
        path, checkpoint = find_checkpoint(run, name, os.fspath(keyword), read)
        if checkpoint is not None:
            start_from(run, str(path), checkpoint, resumes)
            run.resume_keyword = keyword
    except FileNotFoundError as error:
        environment = getattr(run.fabric.strategy, "cluster_environment", None)
        if not getattr(environment, "creates_processes_externally", False):
            raise
        # Do not raise the error yet, because processes that have the file would wait for this
        # process. check_same_checkpoint raises the error in all processes.
        run.checkpoint_error = error


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


def default_keyword(run: RunState) -> str | None:
    """Return the keyword that Trainer uses if no checkpoint is given, or None."""
    loop = run.loop
    if run.stage == "fit":
        return "last" if run.hooks.callbacks_of("OnExceptionCheckpoint") else None
    has_monitor = run.hooks.callbacks_of("Checkpoint") or loop.config.monitor
    best = getattr(loop.checkpoint_callback, "best_model_path", None)
    if not (run.is_last_model and has_monitor and best):
        return None
    run.warn_once(
        f"`.{run.stage}(ckpt_path=None)` was called without a model. The best model of the previous `fit`"
        " call will be used."
    )
    return "best"


def start_from(run: RunState, path: str, checkpoint: dict[str, Any], resumes: bool) -> None:
    """Start a run from a checkpoint. A resumed run writes into the checkpoint's version folder."""
    run.checkpoint_path, run.resumes, run.checkpoint = path, resumes, checkpoint
    # Remove OWN_KEY, so that on_load_checkpoint hooks get only the keys of Trainer's checkpoints.
    own = checkpoint.pop(OWN_KEY, None)
    if not resumes:
        return
    if "optimizer_states" not in checkpoint:
        raise WeightsOnlyError(
            "Trying to restore optimizer state but checkpoint contains only the model. This is probably"
            " due to `ModelCheckpoint.save_weights_only` being set to `True`. To start a"
            f" new run from the weights, write load='{path}'."
        )
    if own is None:
        check_trainer_position(path, checkpoint)
    else:
        run.own_state, run.data.sampler_seed = own, own.get("sampler_seed")
    version = version_of_checkpoint(run, path)
    if run.config.version is None and version is not None:
        for logger in run.loggers.csv_loggers:
            logger.version = version


def find_checkpoint(
    run: RunState, argument: str, keyword: str, read: Callable[[str | Path], dict[str, Any]]
) -> tuple[str | Path | None, dict[str, Any] | None]:
    """Return the path and the content of the checkpoint for a keyword or a path."""
    if keyword not in KEYWORDS:
        return keyword, read(keyword)
    if keyword == "best":
        saver = run.loop.checkpoint_callback
        best = getattr(saver, "best_model_path", None)
        if best:
            return best, read(best)
        if saver is None or run.hooks.callbacks_of("Checkpoint"):
            raise ValueError(
                f'`.{run.stage}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save'
                " the best model. Give an exact path, as with `fast_dev_run=True`."
            )
    files = sort_by_age(list_checkpoints(run, keyword))
    for path in files:
        try:
            checkpoint = read(path)
        except DamagedCheckpointError as error:
            warnings.warn(f"{error} Using the previous checkpoint instead.", stacklevel=2)
            continue
        if keyword != "best":
            return path, checkpoint
        # The newest checkpoint contains the name of the best checkpoint.
        kept = checkpoint.get(OWN_KEY, {}).get("checkpoints", {}).get("kept", {})
        best_path = path.with_name(os.path.basename(next(iter(kept), "best.ckpt")))
        if best_path.exists():
            return best_path, read(best_path)
        break
    if keyword != "auto":
        report_missing(run, argument, keyword, files)
    return None, None


def list_checkpoints(run: RunState, keyword: str) -> list[Path]:
    """Return the files that the keyword "last", "best" or "auto" may select."""
    loop, version = run.loop, run.config.version
    savers = run.hooks.callbacks_of("Checkpoint")
    if not savers:
        return files_of_newest_version(run_folder(run), version, "*.ckpt")
    has_own_folder = all(getattr(saver, "dirpath", None) for saver in savers)
    if not has_own_folder and loop.loggers and loop.loggers[0].save_dir is not None:
        # ModelCheckpoint saves in the log folder. A killed run may have no last.ckpt, so "auto"
        # accepts any checkpoint.
        folder = Path(loop.loggers[0].save_dir, str(loop.loggers[0].name))
        name = "*.ckpt" if keyword == "auto" else "last*.ckpt"
        if files := files_of_newest_version(folder, version, f"checkpoints/{name}"):
            return files
    exceptions = [saver.ckpt_path for saver in run.hooks.callbacks_of("OnExceptionCheckpoint")]
    savers = run.hooks.callbacks_of("ModelCheckpoint")
    paths = exceptions + [path for saver in savers for path in last_checkpoints(saver, loop)]
    if keyword == "auto":
        default = [] if loop.loggers else [Path(loop.default_root_dir, "checkpoints")]
        for folder in [saver.dirpath for saver in savers if saver.dirpath] or default:
            paths += Path(folder).glob("*.ckpt")
    return [Path(path) for path in paths if path and os.path.exists(path)]


def files_of_newest_version(folder: Path, version: int | str | None, pattern: str) -> list[Path]:
    """Return the checkpoints of a version, or of the newest version that has checkpoints."""
    versions = versions_of(folder) if version is None else [folder / version_folder(version)]
    for path in reversed(versions):
        if files := list(path.glob(pattern)):
            return files
    return []


def versions_of(folder: Path) -> list[Path]:
    """Return a run's folders: named versions from old to new, then version_0, version_1, ..."""

    def age(path: Path) -> tuple[int, float]:
        number = number_of(path.name)
        return (-1, path.stat().st_mtime) if number is None else (number, 0.0)

    return sorted((p for p in folder.glob("*") if p.is_dir()), key=age)


def run_folder(run: RunState, kind: str = "checkpoints") -> Path:
    """Return the folder with all versions of a run, under "checkpoints" or "logs"."""
    return Path(run.loop.default_root_dir, kind, run.config.name)


def version_of_checkpoint(run: RunState, path: str) -> int | str | None:
    """Return the version of a checkpoint, or None if its path is outside of the run's folders."""
    file = Path(path).resolve()
    for kind in ("checkpoints", "logs"):
        # Look in the log folder, too, because Lightning's ModelCheckpoint saves there.
        folders = run_folder(run, kind).resolve()
        if folders in file.parents[1:]:
            folder = file.relative_to(folders).parts[0]
            number = number_of(folder)
            return folder if number is None else number
    return None


def sort_by_age(files: list[Path]) -> list[Path]:
    """Sort checkpoints, newest first. Put last.ckpt before other files."""

    def age(path: Path) -> tuple[bool, int]:
        return path.name.startswith("last"), path.stat().st_mtime_ns

    return sorted(files, key=age, reverse=True)


def report_missing(run: RunState, argument: str, keyword: str, files: list[Path]) -> None:
    """Raise an error for a missing checkpoint. For ckpt_path="last", only warn, as Trainer does."""
    if files and keyword == "last":
        raise DamagedCheckpointError(
            f"{argument}: got {keyword!r}, but every checkpoint in {files[0].parent} is damaged. Give"
            " another path, or train again."
        )
    if (argument, keyword) != ("ckpt_path", "last"):
        expected = f"a checkpoint, but there is none under {run_folder(run)}. Train first"
        if keyword == "last" and run.hooks.callbacks_of("ModelCheckpoint"):
            expected = "the last.ckpt of a ModelCheckpoint. Write ModelCheckpoint(save_last=True)"
        raise MissingCheckpointError(
            f"{argument}: got {keyword!r}, expected {expected}, or give a path."
        )
    run.warn_once(
        f'.{run.stage}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint'
        " will be loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
    )


def check_same_checkpoint(run: RunState) -> None:
    """Raise an error if the processes have found different checkpoints."""
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
