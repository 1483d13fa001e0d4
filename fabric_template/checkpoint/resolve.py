"""From "last", "best", "auto" or a path to a checkpoint file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DamagedCheckpointError,
    MissingCheckpointError,
    describe,
)
from ..lightning_compat.private import last_checkpoints
from ..training.hooks import is_instance_of
from .checkpoint_io import read_checkpoint, verify_checkpoint
from .distributed import SHARDS_KEY, is_sharded_file, verify_shards

if TYPE_CHECKING:
    from ..training.run_state import RunState

KEYWORDS = ("last", "best", "auto")


def resolve_checkpoint(
    keyword: str, root: Path, name: str, version: int | str | None, argument: str = "resume"
) -> str | Path | None:
    """Return the checkpoint that a keyword means; None for "auto" where there is none.

    Args:
        keyword: "last", "best", "auto" or a path.
        root: The folder that holds ``checkpoints/<name>/version_<n>``.
        version: None: the newest version that has a checkpoint.
        argument: The argument that has the keyword, for messages.

    Raises:
        MissingCheckpointError: There is no such checkpoint.
    """
    if keyword not in KEYWORDS:
        return keyword
    folder = root / "checkpoints" / name
    folders = [folder / version_folder(version)] if version is not None else versions_of(folder)
    for candidate in reversed(folders):
        if not any(candidates_for(keyword, candidate)):
            continue
        path = find_best(candidate) if keyword == "best" else find_newest(candidate, keyword)
        if path is not None or keyword == "auto":
            # An older version is another run. Where all files of this one are damaged, "auto" starts a new run.
            return path
        raise DamagedCheckpointError(
            f"{argument}: got {keyword!r}, but every checkpoint in {candidate} is damaged. Give another"
            " path, or train again."
        )
    if keyword == "auto":
        return None
    raise MissingCheckpointError(
        f"{argument}: got {keyword!r}, expected a checkpoint under {folder}, which has none. Train"
        " first, or give a path."
    )


def versions_of(folder: Path) -> list[Path]:
    """Return the version folders of a run, the newest number last. Named versions come first, by age."""

    def number(path: Path) -> tuple[int, float]:
        digits = path.name.removeprefix("version_")
        return (int(digits), 0.0) if digits.isdigit() else (-1, path.stat().st_mtime)

    return sorted((p for p in folder.glob("*") if p.is_dir()), key=number)


def version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else version


def candidates_for(keyword: str, folder: Path) -> Iterator[Path]:
    """Yield the checkpoints of a version. "auto" does not continue from exception.ckpt, which is not exact."""
    for path in folder.glob("*.ckpt"):
        if keyword != "auto" or path.name != "exception.ckpt":
            yield path


def find_newest(folder: Path, keyword: str = "last") -> Path | None:
    """Return the newest checkpoint that is whole. A damaged one is named and passed over."""

    def age(path: Path) -> tuple[bool, int, bool]:
        is_last = path.name in ("last.ckpt", "exception.ckpt")
        return is_last, path.stat().st_mtime_ns, path.name == "exception.ckpt"

    for path in sorted(candidates_for(keyword, folder), key=age, reverse=True):
        try:
            verify_checkpoint(path)
            if is_sharded_file(path):
                verify_shards(path, read_checkpoint(path)[SHARDS_KEY])
        except DamagedCheckpointError as error:
            warnings.warn(f"{error} The checkpoint before it is used.", stacklevel=2)
            continue
        return path
    return None


def find_best(folder: Path) -> Path | None:
    """Return the best checkpoint of a version, which its newest one names."""
    if (folder / "best.ckpt").exists():
        return folder / "best.ckpt"
    newest = find_newest(folder)
    if newest is None:
        return None
    own = read_checkpoint(newest).get("fabric_template", {}).get("checkpoints", {})
    name = os.path.basename(own.get("best", ""))
    return folder / name if name and (folder / name).exists() else None


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


def check_checkpoint_argument(name: str, value: Any, keywords: tuple[str, ...]) -> None:
    """Refuse what is neither a keyword nor a path.

    Raises:
        ConfigurationTypeError: It is no text and no path.
        ConfigurationError: It is a keyword of another argument.
    """
    expected = f"a path, {' or '.join(map(repr, keywords))}"
    if value is not None and not isinstance(value, str | os.PathLike):
        hint = " Load weights in memory with model.load_state_dict(...)." if name == "load" else ""
        raise ConfigurationTypeError(f"{name}: got {describe(value)}, expected {expected}.{hint}")
    if value in KEYWORDS and value not in keywords:
        raise ConfigurationError(
            f"{name}: got {value!r}, expected {expected}. Write fit(..., resume={value!r})."
        )


# Where Lightning's checkpoint callbacks save


def default_keyword(loop: Any, run: RunState) -> str | None:
    """Return the keyword of a call without checkpoint: None, or what Trainer chooses by itself."""
    name = run.stage
    on_exception = [c for c in loop.callbacks if is_instance_of(c, "OnExceptionCheckpoint")]
    if name == "fit":
        if on_exception:
            run.warn_once(
                f"`.{name}(ckpt_path=None)` was called without a model. The last model of the previous `fit`"
                f" call will be used. You can pass `{name}(ckpt_path='best')` to use the best model or"
                f" `{name}(ckpt_path='last')` to use the last model. If you pass a value, this warning will"
                " be silenced."
            )
        return "last" if on_exception else None
    chooses = loop.checkpoint_callbacks or loop.config.monitor
    best = getattr(loop.checkpoint_callback, "best_model_path", None)
    if not run.is_last_model or not chooses or not best:
        return None
    tip = "There is also an on-exception checkpoint available, however it is used by default only when fitting."
    run.warn_once(
        f"`.{name}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call"
        f" will be used. {tip + ' ' if on_exception else ''}You can pass `.{name}(ckpt_path='best')` to use"
        f" the best model or `.{name}(ckpt_path='last')` to use the last model. If you pass a value, this"
        " warning will be silenced."
    )
    return "best"


def checkpoint_of_callbacks(loop: Any, keyword: str, run: RunState) -> str | None:
    """Return the path that a keyword means for the checkpoint callbacks; None where there is none yet."""
    name = run.stage
    if keyword == "best":
        callbacks = loop.checkpoint_callbacks
        if len(callbacks) > 1:
            run.warn_once(
                f'`.{name}(ckpt_path="best")` is called with Trainer configured with multiple'
                " `ModelCheckpoint` callbacks. It will use the best checkpoint path from first checkpoint"
                " callback."
            )
        best = getattr(callbacks[0], "best_model_path", None)
        if not best:
            raise no_best_checkpoint(loop, name)
        return best
    found = find_last_beside_logs(loop)
    if not found:
        found = [path for path in find_last_checkpoints(loop) if os.path.exists(path)]
    if not found and keyword == "last":
        warn_of_missing_last(run)
    return max(found, key=os.path.getmtime, default=None)


def warn_of_missing_last(run: RunState) -> None:
    run.warn_once(
        f'.{run.stage}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint'
        " will be loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."
    )


def find_last_checkpoints(loop: Any) -> list[str]:
    """Return the candidates for "last"."""
    found: set[str] = set()
    for callback in loop.callbacks:
        if is_instance_of(callback, "OnExceptionCheckpoint"):
            found.add(callback.ckpt_path)
        elif is_instance_of(callback, "ModelCheckpoint"):
            found |= last_checkpoints(callback, loop)
    return sorted(path for path in found if path)


def find_last_beside_logs(loop: Any) -> list[str]:
    """Return what ModelCheckpoint saved last beside the logs of the newest earlier run.

    Without a dirpath it saves in the folder of the first logger, whose version is new in each process.
    """
    has_own_folder = all(getattr(saver, "dirpath", None) for saver in loop.checkpoint_callbacks)
    if has_own_folder or not loop.loggers or loop.loggers[0].save_dir is None:
        return []
    logger, version = loop.loggers[0], loop.config.version
    runs = Path(logger.save_dir, str(logger.name))
    folders = versions_of(runs) if version is None else [runs / version_folder(version)]
    for folder in reversed(folders):
        if found := [str(path) for path in folder.glob("checkpoints/last*.ckpt")]:
            return found
    return []


def no_best_checkpoint(loop: Any, name: str) -> ValueError:
    """Return the error for "best" where nothing keeps a best checkpoint."""
    if loop.config.fast_dev_run:
        return ValueError(
            f'You cannot execute `.{name}(ckpt_path="best")` with `fast_dev_run=True`. Please pass an exact'
            f" checkpoint path to `.{name}(ckpt_path=...)`"
        )
    why = " to save the best model" if loop.checkpoint_callbacks else ""
    return ValueError(
        f'`.{name}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured{why}.'
    )
