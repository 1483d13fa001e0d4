"""From "last", "best", "auto" or a path to the checkpoint file of a run, and the version it belongs to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingCheckpointError
from .checkpoint_io import DamagedCheckpointError, local_path, read_checkpoint, verify_checkpoint

_NEWEST_NAMES = ("last.ckpt", "exception.ckpt")


def versions_of(folder: Path) -> list[Path]:
    """Return the version folders of a run, the newest number last."""

    def number(path: Path) -> tuple[int, float]:
        digits = path.name.removeprefix("version_")
        return (int(digits), 0.0) if digits.isdigit() else (-1, path.stat().st_mtime)

    return sorted((p for p in folder.glob("*") if p.is_dir()), key=number) if folder.exists() else []


def resolve_checkpoint(keyword: str, root: Path, name: str, version: int | str | None) -> Path | None:
    """Return the checkpoint that a keyword means; None for "auto" where there is none.

    Args:
        keyword: "last", "best", "auto" or a path.
        root: The folder that holds ``checkpoints/<name>/version_<n>``.

    Raises:
        MissingCheckpointError: There is no such checkpoint.
    """
    if keyword not in ("last", "best", "auto"):
        return Path(local_path(keyword))
    folder = root / "checkpoints" / name
    folders = [folder / version_folder(version)] if version is not None else versions_of(folder)
    for candidate in reversed(folders):
        path = _best_in(candidate) if keyword == "best" else _newest_in(candidate)
        if path is not None:
            return path
    if keyword == "auto":
        return None
    raise MissingCheckpointError(
        f"resume: got {keyword!r}, expected a checkpoint under {folder}, which has none. Train first, or"
        " give a path."
    )


def version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else version


def _newest_in(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole. A damaged one is named and passed over."""
    found = [folder / name for name in _NEWEST_NAMES if (folder / name).exists()]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    others = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*found, *(path for path in others if path not in found)]:
        try:
            verify_checkpoint(path)
        except DamagedCheckpointError as error:
            import warnings

            warnings.warn(f"{error} The checkpoint before it is used.", stacklevel=2)
            continue
        return path
    return None


def _best_in(folder: Path) -> Path | None:
    best = folder / "best.ckpt"
    if best.exists():
        return best
    last = folder / "last.ckpt"
    if last.exists():
        own = read_checkpoint(last).get("fabric_template", {}).get("checkpoints", {})
        name = os.path.basename(own.get("best", ""))
        if name and (folder / name).exists():
            return folder / name
    return None


def version_of_checkpoint(path: Path, root: Path, name: str) -> int | str | None:
    """Return the version that a checkpoint belongs to; None if it is not of this run."""
    try:
        parts = path.resolve().relative_to((root / "checkpoints" / name).resolve()).parts
    except ValueError:
        return None
    if len(parts) < 2:
        return None
    digits = parts[0].removeprefix("version_")
    return int(digits) if digits.isdigit() else parts[0]


def check_checkpoint_argument(name: str, value: Any, keywords: tuple[str, ...]) -> None:
    """Refuse what is neither a keyword nor a path."""
    if value is None or value in keywords or isinstance(value, str | os.PathLike):
        return
    raise CheckpointError(f"{name}: got {value!r}, expected a path or one of {', '.join(keywords)}.")
