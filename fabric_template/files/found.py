"""Found: where a run's checkpoints lie, by its name and version, and which of them is the last and the best."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import OURS
from .opening import is_file, names_in
from .reading import read_checkpoint
from .schema import check_resumable
from .storage import inside


def find_checkpoint(word: str, root: Path, name: str, version: int | str | None, mode: str = "min") -> Path | None:
    """The file that ``"last"`` or ``"best"`` means: of this version, or of the newest version that has one."""
    for folder in folders_of(root, name, version):
        for name in ("last.ckpt", "exception.ckpt") if word == "last" else ("best.ckpt",):
            if is_file(folder / name):
                inside(folder, name)  # not through a symbolic link to somewhere else
                return folder / name
        others = {name for name in names_in(folder) if name.endswith(".ckpt")} - {"last.ckpt", "exception.ckpt"}
        if word == "best" and others and is_file(last := folder / "last.ckpt"):
            check_resumable(checkpoint := read_checkpoint(last), last)
            kept = (checkpoint.get(OURS) or {}).get("kept", {}).get("best", {})
            if existing := {name: score for name, score in kept.items() if name in others}:
                return folder / (min if mode == "min" else max)(existing, key=existing.__getitem__)
    return None


def folders_of(root: Path, name: str, version: int | str | None) -> list[Path]:
    """The folders of this version, or of all, the newest first."""
    folder = root / name
    if version is not None:
        return [folder / (version if isinstance(version, str) else f"version_{version}")]
    numbered = [(int(one[8:]), one) for one in names_in(folder) if one.startswith("version_") and one[8:].isdigit()]
    return [folder / one for _, one in sorted(numbered, reverse=True)]
