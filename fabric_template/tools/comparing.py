"""Comparing: what you have changed in a copy, and what upstream has changed since, file by file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from .licence import body, split_header
from .manifest import Manifest, Place, around, find_place, read_manifest
from .merging import lines_of
from .swap import finish
from .updating import moved, wanted
from .upstream import NAME, PACKAGE, folder_files, python_files, single_file, upstream_version

LOOP = "loop.py"  # which every copy of the folder has


def diff_package(copy: str | Path, yours: bool = True, upstream: bool = True) -> str:
    """The unified diffs of a copy, file by file: what you have changed in it, and what upstream has since; "" for nothing.

    Without a manifest (a copy by hand, or an old one) it is one diff from the installed version to the copy.

    Args:
        copy: The folder of a copy, or a copied file.
        yours: What you have changed.
        upstream: What the installed version has changed.

    Raises:
        ValueError: If there is no copy.
    """
    target = Path(copy)
    place = find_place(target.resolve())
    if finish(place):
        place = find_place(target.resolve())
    known = read_manifest(place)
    if known is None and not target.is_dir() and (whole := around(target.resolve())):
        raise ValueError(f"diff {copy}: this is inside of a copy: give its folder, '{whole}'")
    if known is None:
        return _without_manifest(copy, target)
    root = target if target.is_dir() else target.parent
    return "".join(_with_manifest(place, known, root, yours, upstream and place.folder != PACKAGE))


def _with_manifest(place: Place, known: Manifest, root: Path, yours: bool, upstream: bool) -> Iterator[str]:
    """Of each file first yours, then upstream's."""
    places = known.places | moved(place, known)
    files = wanted(known) if upstream else {}
    paths = {places.get(name, name): name for name in {*known.files, *files}}
    added = {path: path for path in python_files(place.folder)} if known.kind == "folder" else {}
    version = upstream_version()
    for path, name in sorted((added | paths).items()):
        old, theirs, new = known.files.get(name), place.read(path), files.get(name)
        mine, before = str(root / path), f"{NAME}/{name}\t{known.version}"
        if yours and (old is not None or path in added):
            yield _diff(f"{path}: {{}} by you", old, theirs, before, mine, split_header(theirs or b"")[0])
        if upstream and path in paths:
            yield _diff(f"{path}: {{}} in {NAME} {version}", old, new, before, f"{NAME}/{name}\t{version}")


def _without_manifest(copy: str | Path, target: Path) -> str:
    if target.suffix == ".py" or target.is_file():
        if not is_mini(target):
            raise ValueError(f"diff {copy}: there is no copy of the single file there: give the path of one")
        ((name, data),) = single_file().items()
        return _diff("", data, target.read_bytes(), f"{NAME}/{name}", str(target))
    if not (target / LOOP).is_file():
        raise ValueError(f"diff {copy}: there is no copy of the package there (no {LOOP}): give the folder of one")
    ours = folder_files()
    theirs = {name: target / name for name in python_files(target)}
    theirs |= {name: target / name for name in ours if (target / name).is_file()}
    return "".join(
        _diff("", ours.get(name), path.read_bytes() if path else None, f"{NAME}/{name}", str(path))
        for name, path in ((name, theirs.get(name)) for name in sorted({*ours, *theirs}))
    )


def is_mini(path: Path) -> bool:
    """Whether it is a copy, by its class or, where that has another name by now, by what its header says of updates."""
    return path.is_file() and any(mark in path.read_bytes() for mark in (b"class MiniLoop", b"fabric-template diff"))


def _diff(said: str, old: bytes | None, new: bytes | None, before: str, after: str, top: bytes = b"") -> str:
    """The diff of one file, which may be missing on a side, below a line that says whose change it is.

    The first line of a copied file is no change; `top` is that of both sides, so that lines are counted as in the copy.
    """
    old, new = body(old), body(new)
    if old == new:
        return ""
    what = "added" if old is None else "deleted" if new is None else "changed"
    before, after = before if old is not None else "/dev/null", after if new is not None else "/dev/null"
    # no lines: an empty file
    lines = list(difflib.unified_diff(_lines(old, top), _lines(new, top), before, after))
    lines = lines or [f"--- {before}\n", f"+++ {after}\n"]
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"# {said.format(what)}\n{text}" if said else text


def _lines(data: bytes | None, top: bytes) -> list[str]:
    return [line.decode(errors="backslashreplace") for line in lines_of(b"" if data is None else top + data)]
