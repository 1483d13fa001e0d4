"""Copying: the package's folder, or its single file, into a project of yours; what has changed in a copy since."""

from __future__ import annotations

import difflib
import shutil
from itertools import count
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
MINI = PACKAGE / "mini.py"


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
    if target.suffix == ".py":
        raise ValueError(
            f"copy {destination}: the package is a folder: for the single file type copy --mini {destination}"
        )
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


def copy_mini(destination: str | Path, force: bool = False) -> Path | None:
    """Copy MiniLoop's file to a path of yours; with `force` an older copy is renewed.

    Returns:
        Where the file is kept that was there and other; None for none.

    Raises:
        ValueError: If another file is there already, or its name cannot be imported.
    """
    target, said = Path(destination).resolve(), f"copy --mini {destination}"
    if target.is_dir():
        raise ValueError(
            f"{said}: this is a folder: give the file to write, such as {Path(destination, 'train_loop.py')}"
        )
    if target.suffix != ".py" or not target.stem.isidentifier():
        raise ValueError(f"{said}: {target.name!r} cannot be imported: expected a name such as train_loop.py")
    if PACKAGE in target.parents:
        raise ValueError(f"{said}: this is where the package itself lies ('{PACKAGE}'): give another folder")
    if target.exists() and not _is_mini(target):
        raise ValueError(f"{said}: a file that is no copy of it is there, nothing was written: give another name")
    differs = target.exists() and _diff(MINI, target, _notice()) != ""
    if differs and not force:
        raise ValueError(
            f"{said}: a copy that differs is there, nothing was written: give another name, or type {said} --force, which"
            f" renews it and keeps the old one beside it; diff {destination} shows what that one has changed"
        )
    kept = next(f for n in count() if not (f := target.with_name(f"{target.name}.before_{n}")).exists())
    if differs:
        shutil.copy2(target, kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(_lines(MINI, _notice())), encoding="utf-8", newline="\n")
    return kept if differs else None


def _is_mini(path: Path) -> bool:
    """Whether it is a copy, by its class or, where that has another name by now, by what its header says of updates."""
    return path.is_file() and any(mark in path.read_bytes() for mark in (b"class MiniLoop", b"fabric-template diff"))


def diff_package(copy: str | Path) -> str:
    """The unified diff from the installed package to a copy: lines with + are the copy's; empty if nothing differs.

    Args:
        copy: The folder of a copy, or a copy of the single file.

    Raises:
        ValueError: If there is no copy.
    """
    target = Path(copy)
    if target.suffix == ".py" or target.is_file():
        if not _is_mini(target):
            raise ValueError(f"diff {copy}: there is no copy of the single file there: give the path of one")
        return _diff(MINI, target, _notice())
    if not (target / "loop.py").is_file():
        raise ValueError(f"diff {copy}: there is no copy of the package there (no loop.py): give the folder of one")
    ours, theirs = package_files(PACKAGE), package_files(target)
    return "".join(_diff(ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs}))


def _notice() -> str:
    """The licence, as comments for the end of a file that goes on alone: it asks to be in each copy."""
    lines = (PACKAGE / "LICENSE").read_text("utf-8").splitlines()
    return "\n\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _lines(path: Path | None, behind: str = "") -> list[str]:
    return (path.read_text("utf-8") + behind).splitlines(keepends=True) if path else []


def _diff(ours: Path | None, theirs: Path | None, behind: str = "") -> str:
    """The diff of one file, which may be missing on a side; `behind` ours stands what each copy has there."""
    before, after = _lines(ours, behind), _lines(theirs)
    if before == after and ours and theirs:
        return ""
    old = f"{PACKAGE.name}/{ours.relative_to(PACKAGE).as_posix()}" if ours else "/dev/null"
    new = str(theirs) if theirs else "/dev/null"
    # no lines: an empty file
    lines = list(difflib.unified_diff(before, after, old, new)) or [f"--- {old}\n", f"+++ {new}\n"]
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
