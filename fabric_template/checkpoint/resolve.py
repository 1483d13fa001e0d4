"""From "last", "best", "auto" or a path to a checkpoint file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from ..errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DamagedCheckpointError,
    MissingCheckpointError,
    describe,
)
from .checkpoint_io import local_path, read_checkpoint, verify_checkpoint

KEYWORDS = ("last", "best", "auto")


def resolve_checkpoint(
    keyword: str, root: Path, name: str, version: int | str | None, argument: str = "resume"
) -> Path | None:
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
        return Path(local_path(keyword))
    folder = root / "checkpoints" / name
    folders = [folder / version_folder(version)] if version is not None else versions_of(folder)
    for candidate in reversed(folders):
        path = find_best(candidate) if keyword == "best" else find_newest(candidate)
        if path is not None:
            return path
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


def find_newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole. A damaged one is named and passed over."""

    def age(path: Path) -> tuple[bool, int]:
        return path.name in ("last.ckpt", "exception.ckpt"), path.stat().st_mtime_ns

    for path in sorted(folder.glob("*.ckpt"), key=age, reverse=True):
        try:
            verify_checkpoint(path)
        except DamagedCheckpointError as error:
            warnings.warn(f"{error} The checkpoint before it is used.", stacklevel=2)
            continue
        return path
    return None


def find_best(folder: Path) -> Path | None:
    """Return the best checkpoint of a version."""
    if (folder / "best.ckpt").exists():
        return folder / "best.ckpt"
    if (last := folder / "last.ckpt").exists():
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
