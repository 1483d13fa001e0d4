"""Copying: the package's folder into a project of yours, and what has changed in a copy since."""

from __future__ import annotations

import difflib
import shutil
from itertools import count
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def package_files(folder: Path) -> dict[str, Path]:
    """The files that make a package, by their path inside it; what Python and editors leave behind is none of it."""
    paths = [*sorted(folder.rglob("*.py")), *folder.glob("LICENSE")]
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in found.items() if not any(part.startswith(".") for part in Path(name).parts)}


def copy_package(destination: str | Path, force: bool = False) -> tuple[list[str], Path | None]:
    """Copy the package to a folder whose name becomes the copy's name; with `force` an older copy is renewed.

    Returns:
        The names of the files, and the folder in which those are kept that were there and other; None for none.

    Raises:
        ValueError: If the folder is there already, or its name cannot be imported.
    """
    target = Path(destination).resolve()
    if not target.name.isidentifier():
        raise ValueError(f"copy {destination}: {target.name!r} cannot be imported: expected a name such as my_loop")
    if target == PACKAGE or PACKAGE in target.parents or target in PACKAGE.parents:
        raise ValueError(
            f"copy {destination}: this is where the package itself lies ('{PACKAGE}'): give another folder"
        )
    if target.exists() and not target.is_dir():
        raise ValueError(f"copy {destination}: a file has this name: give another folder")
    if target.is_dir() and not force:
        raise ValueError(
            f"copy {destination}: the folder is there already, nothing was written: give another one; --force renews"
            " a copy, and keeps what it has changed beside it: diff shows that"
        )
    if target.is_dir() and any(target.iterdir()) and not (target / "loop.py").is_file():
        raise ValueError(f"copy {destination} --force: this folder is no copy of the package (it has no loop.py)")
    files, kept = package_files(PACKAGE), next(f for n in count() if not (f := target / f".before_{n}").exists())
    for name, path in files.items():
        old = target / name
        if old.is_file() and old.read_bytes() != path.read_bytes():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            old.replace(kept / name)
        old.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, old)
    return list(files), kept if kept.exists() else None


def diff_package(copy: str | Path) -> str:
    """The unified diff from the installed package to a copy: lines with + are the copy's; empty if nothing differs.

    Raises:
        ValueError: If there is no copy.
    """
    target = Path(copy)
    if not (target / "loop.py").is_file():
        raise ValueError(f"diff {copy}: there is no copy of the package there (no loop.py): give the folder of one")
    ours, theirs = package_files(PACKAGE), package_files(target)
    parts = []
    for name in sorted({*ours, *theirs}):
        before, after = (
            side[name].read_text("utf-8").splitlines(keepends=True) if name in side else [] for side in (ours, theirs)
        )
        if before == after and name in ours and name in theirs:
            continue
        old = f"{PACKAGE.name}/{name}" if name in ours else "/dev/null"
        new = str(target / name) if name in theirs else "/dev/null"
        # no lines: an empty file
        lines = list(difflib.unified_diff(before, after, old, new)) or [f"--- {old}\n", f"+++ {new}\n"]
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)
