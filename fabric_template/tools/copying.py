"""Copying: the package's folder, its single file, or parts of it, into a project of yours."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from .comparing import LOOP, is_mini
from .licence import body, origin
from .manifest import Manifest, Place, find_place, read_manifest
from .parts import MINI, PARTS, ROOMS, part_files
from .swap import GATE, finish, swap
from .updating import moved
from .upstream import PACKAGE, files_of_parts, folder_files, single_file, sources, upstream_version


def copy_package(destination: str | Path, force: bool = False) -> tuple[list[str], Path | None]:
    """Copy the package to a folder whose name becomes the copy's name; with `force` an older copy is renewed.

    Returns:
        The names of the files, and the folder in which those are kept that were there and other; None for none.

    Raises:
        ValueError: If another folder is there already, or its name cannot be imported.
    """
    target, said = Path(destination).resolve(), f"copy {destination}"
    if target.suffix == ".py":
        raise ValueError(f"{said}: the package is a folder: for the single file type copy --mini {destination}")
    _check_folder(said, target)
    files = folder_files()
    if _is_used(target) and not force and not _is_same(target, files):
        raise ValueError(
            f"{said}: the folder is there already, nothing was written: give another one; --force renews"
            f" a copy, and keeps what it has changed beside it: diff shows that; update brings what is new into it"
        )
    if _is_used(target) and not (target / LOOP).is_file():
        raise ValueError(f"{said} --force: this folder is no copy of the package (it has no {LOOP})")
    return list(files), _write(Place(target), Manifest(upstream_version(), "folder", files=files))


def copy_parts(parts: list[str], destination: str | Path, force: bool = False) -> tuple[list[str], Path | None]:
    """Copy parts of the package, with all that they import, to a folder; or one that is a single file to a file.

    A folder that has parts already has these, too, then; into a package of yours they go where no file is in their way.

    Returns:
        The names of the files, and where those are kept that were there and other; None for none.

    Raises:
        ValueError: If there is no such part, or something is in the way.
    """
    target, said = Path(destination).resolve(), f"copy --parts {','.join(parts)} {destination}"
    names = part_files(parts, sources())
    if not names:
        raise ValueError(f"{said}: no part is named: expected {', '.join(PARTS)}, or a room: {', '.join(ROOMS)}")
    if target.suffix == ".py":
        if len(names) > 1:
            raise ValueError(
                f"{said}: these are {len(names)} files: give a folder, such as {Path(destination).with_suffix('')}"
            )
        return names, _copy_file(names[0], destination, said, force)
    _check_folder(said, target)
    known = _known(Place(target), force)
    if known is not None and known.kind != "parts":
        raise ValueError(f"{said}: a copy of the whole folder is there: it has them already")
    after, leave = _with_parts(Place(target), known, parts, names, force)
    new = {name: data for name, data in after.files.items() if known is None or name not in known.files}
    in_the_way = [name for name, data in new.items() if _differs(target / name, data)]
    if in_the_way and not force:
        raise ValueError(
            f"{said}: {', '.join(in_the_way)}: there already, nothing was written: give a folder of its own, such as"
            f" {Path(destination, 'parts')}; --force keeps what is there beside it, in .before_<n>"
        )
    if known is not None and not force:
        _check_same_version(said, destination, known, files_of_parts(known.parts))
    return [name for name in after.files if name not in leave], _write(Place(target), after, leave)


def _with_parts(
    place: Place, known: Manifest | None, parts: list[str], names: list[str], force: bool
) -> tuple[Manifest, set[str]]:
    """What a folder is to have with these parts, and which of its files are left: as you have changed or deleted them."""
    mine, places = (known.files, known.places | moved(place, known)) if known else ({}, {})
    parts = sorted({*parts, *known.parts}) if known else parts
    after = Manifest(upstream_version(), "parts", parts, files_of_parts(parts, also=mine), places)
    if _is_yours(place.folder / GATE) if known is None else GATE not in mine:
        del after.files[GATE]
    leave = {name for name in mine if name not in names or place.read(after.path(name)) is not None}
    leave = set() if force else leave
    after.files |= {name: mine[name] for name in leave}
    return after, leave


def copy_mini(destination: str | Path, force: bool = False) -> Path | None:
    """Copy MiniLoop's file to a path of yours; with `force` an older copy is renewed.

    Returns:
        Where the file is kept that was there and other; None for none.

    Raises:
        ValueError: If another file is there already, or its name cannot be imported.
    """
    return _copy_file(MINI, destination, f"copy --mini {destination}", force)


def _copy_file(name: str, destination: str | Path, said: str, force: bool) -> Path | None:
    """One file that goes on alone."""
    target, such_as = Path(destination).resolve(), "train_loop.py" if name == MINI else f"my_{Path(name).name}"
    if target.is_dir():
        raise ValueError(f"{said}: this is a folder: give the file to write, such as {Path(destination, such_as)}")
    if target.suffix != ".py" or not target.stem.isidentifier():
        raise ValueError(f"{said}: {target.name!r} cannot be imported: expected a name such as {such_as}")
    if PACKAGE in target.parents:
        raise ValueError(f"{said}: this is where the package itself lies ('{PACKAGE}'): give another folder")
    finish(place := find_place(target))
    files, known = single_file(name), read_manifest(place) if not force else None
    is_copy = name in known.files if known else (name == MINI and is_mini(target)) or place.manifest.is_file()
    if target.exists() and not is_copy:
        raise ValueError(f"{said}: a file that is no copy of it is there, nothing was written: give another name")
    if _differs(target, files[name]) and not force:
        raise ValueError(
            f"{said}: a copy that differs is there, nothing was written: give another name, or type {said} --force, which"
            f" renews it and keeps the old one beside it; diff {destination} shows what that one has changed,"
            f" update {destination} brings what is new into it"
        )
    return _write(place, Manifest(upstream_version(), "file", files=files, places={name: target.name}))


def _check_folder(said: str, target: Path) -> None:
    if not target.name.isidentifier():
        raise ValueError(f"{said}: {target.name!r} cannot be imported: expected a name such as my_loop")
    if target == PACKAGE or PACKAGE in target.parents or target in PACKAGE.parents:
        raise ValueError(f"{said}: this is where the package itself lies ('{PACKAGE}'): give another folder")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{said}: a file has this name: give another folder")
    finish(Place(target))


def _check_same_version(said: str, destination: str | Path, known: Manifest, today: dict[str, bytes]) -> None:
    """Files of two versions do not go together."""
    if any(body(known.files[name]) != body(today[name]) for name in known.files.keys() & today):
        raise ValueError(
            f"{said}: the parts that are there are of {known.version}, these are of {upstream_version()}, nothing was written:"
            f" type update {destination} first"
        )


def _known(place: Place, force: bool) -> Manifest | None:
    """The manifest; with `force` one that is damaged is none."""
    try:
        return read_manifest(place)
    except ValueError:
        if not force:
            raise
        return None


def _is_yours(path: Path) -> bool:
    return path.is_file() and origin(path.read_bytes()) is None


def _is_used(target: Path) -> bool:
    return target.is_dir() and any(target.iterdir())


def _is_same(target: Path, files: dict[str, bytes]) -> bool:
    """Whether it is this very copy of the folder, with nothing changed."""
    known = read_manifest(Place(target))
    is_whole = known is not None and known.kind == "folder" and all((target / name).is_file() for name in files)
    return is_whole and not any(_differs(target / name, files[name]) for name in files)


def _differs(path: Path, data: bytes) -> bool:
    """Whether a file is there that is other than its first line."""
    return path.is_file() and body(path.read_bytes()) != body(data)


def _write(place: Place, after: Manifest, leave: set[str] | None = None) -> Path | None:
    """Write the files and their manifest; what was there and other is kept beside.

    Returns:
        Where it is kept; None for nothing.
    """
    files = {after.path(name): data for name, data in after.files.items() if name not in (leave or ())}
    old = {path: (place.folder / path).read_bytes() for path in files if _differs(place.folder / path, files[path])}
    names = (f"{next(iter(files)) if place.prefix else ''}.before_{n}" for n in count())
    kept = next(path for name in names if not (path := place.folder / name).exists())
    writes = {kept.name if place.prefix else f"{kept.name}/{path}": data for path, data in old.items()}
    swap(place, {**writes, **files, **after.written(place)})
    return kept if old else None
