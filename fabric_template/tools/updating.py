"""Updating: a copy that you have changed, and a new version of the package, as one; nothing of yours is lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .licence import body, origin, split_header
from .manifest import MANIFEST, Manifest, Place, around, copied_alone, find_place, read_manifest
from .merging import marks, merged, not_committed, with_line_ends
from .swap import GATE, finish, swap
from .upstream import NAME, PACKAGE, files_of_parts, folder_files, python_files, single_file, upstream_version


@dataclass
class Update:
    """What an update does, or would do: the paths of the files in the copy, by what becomes of them.

    Attributes:
        old: The version that was copied.
        new: The one that is installed.
        replaced: You have not changed them, upstream has.
        merged: Both have; now they have both.
        conflicts: Both have changed the same lines, which stand between git's marks now: each path with its lines.
        added: They are new upstream.
        deleted: They are gone upstream, and you had not changed them.
        kept: They are gone upstream, and are yours now, for you have changed them.
        away: You have deleted them, and they stay away.
        renamed: You have given them another name: from, to.
        backed_up: Where those are that were there before, with `force`.
    """

    old: str
    new: str
    replaced: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    conflicts: dict[str, list[int]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    backed_up: str = ""
    writes: dict[str, bytes] = field(default_factory=dict, repr=False)
    base: dict[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left for you to decide."""
        return not self.conflicts and not self.kept


def update_copy(destination: str | Path, dry_run: bool = False, force: bool = False) -> Update:
    """Bring what is new upstream into a copy, beside what you have changed in it.

    Args:
        destination: The folder of a copy, or a copied file.
        dry_run: Write nothing, only say what would be.
        force: Also where git has not all of it, or to an older version; what changes is kept in `.before_<n>`.

    Raises:
        ValueError: If there is no copy with a manifest, git is not there, or files of it are not committed.
    """
    target, said = Path(destination).resolve(), f"update {destination}"
    if target == PACKAGE or PACKAGE in target.parents or target in PACKAGE.parents:
        raise ValueError(f"{said}: this is where the package itself lies: type it with the {NAME} that is installed")
    place = find_place(target)
    if finish(place):
        place = find_place(target)
    known = read_manifest(place)
    if known is None and not target.exists():
        raise ValueError(f"{said}: there is nothing: give the folder of a copy, or a copied file")
    if known is None and (whole := around(target)):
        raise ValueError(f"{said}: this is inside of a copy: give its folder, '{whole}'")
    if known is None:
        raise ValueError(
            f"{said}: there is no '{place.manifest.name}', which says what was copied: it is a copy by hand or an old one,"
            f" or none. diff {destination} shows what is other; copy --force renews it, and keeps your changes beside it"
        )
    found = plan(place, known)
    if _number(found.new) < _number(found.old) and not force:
        raise ValueError(
            f"{said}: the copy is of {found.old}, installed is {found.new}: pip install -U {NAME.replace('_', '-')};"
            " --force goes back all the same"
        )
    if not dry_run and found.writes:
        if force:
            _back_up(place, found)
        else:
            _check_clean(said, place, known, found)
        swap(place, found.writes, found.deleted)
    return found


def plan(place: Place, known: Manifest) -> Update:
    """What an update is going to do; nothing is written."""
    version = upstream_version()
    files, found = wanted(known), Update(known.version, version)
    places = known.places | moved(place, known)
    found.renamed = {name: path for name, path in places.items() if known.places.get(name) != path}
    gone = _folders_away(place, known)
    for name in sorted({*known.files, *files}):
        path, old, new = places.get(name, name), known.files.get(name), files.get(name)
        theirs = place.read(path)
        if theirs is None and old is None and _is_inside(name, gone):
            found.away.append(path)
        elif theirs is None and old is None and new is not None:
            found.added.append(path)
            found.writes[path] = new
        elif theirs is None:
            found.away += [path] if new is not None and body(old) != body(new) else []
        elif new is None:
            (found.deleted if body(theirs) == body(old) else found.kept).append(path)
        else:
            _bring(found, path, theirs, old, new)
        if new is not None:
            found.base[name] = old if old is not None and body(old) == body(new) else new
    after = Manifest(version, known.kind, known.parts, found.base, {k: v for k, v in places.items() if k in files})
    if found.base != known.files or after.places != known.places or version != known.version:
        found.writes |= after.written(place)
    return found


def wanted(known: Manifest) -> dict[str, bytes]:
    """The files that a copy of this kind is made of today, by their names."""
    if known.kind == "folder":
        return folder_files()
    if known.kind == "file":
        return {key: data for name in known.files for key, data in single_file(name).items()}
    files = files_of_parts(known.parts, also=known.files)  # what a part no longer needs may be needed by you
    return {name: data for name, data in files.items() if name != GATE or name in known.files}  # or it is yours


def _bring(found: Update, path: str, theirs: bytes, old: bytes | None, new: bytes) -> None:
    """One file that is in the copy and upstream: left, replaced, or both together."""
    (top, ours), before, (first, after) = split_header(theirs), body(old), split_header(new)
    if after == before or (after == ours and top in (first, b"")):
        return
    if old is not None and top and origin(theirs) != origin(old):
        raise ValueError(
            f"'{path}' is of {_said(theirs)} by its first line, the manifest has it of {_said(old)}: were some files put back"
            f" and others not? Put all of them back by git, {MANIFEST} too; or delete that line if all of it is meant so"
        )
    if marks(theirs):
        line = marks(theirs)[0]
        raise ValueError(
            f"'{path}' has a conflict in line {line} that is not solved yet: solve it, commit, and update then"
        )
    conflicts = 0
    if ours not in (before, after):
        labels = (f"{path} (yours)", f"{NAME} {found.old}", f"{NAME} {found.new}")
        after, conflicts = merged(ours, before or b"", after, labels)
    found.writes[path] = with_line_ends(theirs, (first if top else b"") + after)
    if conflicts:
        found.conflicts[path] = marks(found.writes[path])
    else:
        (found.replaced if ours == before else found.merged).append(path)


def _said(data: bytes) -> str:
    said = origin(data)
    return said[0] if said else "no version"


def moved(place: Place, known: Manifest) -> dict[str, str]:
    """Files with another name than when they were copied: not at their place, and known by their first line elsewhere."""
    missing = {name for name in known.files if place.read(known.path(name)) is None}
    if not missing:
        return {}
    taken = {known.path(name) for name in known.files} | copied_alone(place.folder)
    seen: dict[str, list[str]] = {}
    paths = place.folder.glob("*.py") if known.kind == "file" else python_files(place.folder).values()
    for path in paths:
        inside = path.relative_to(place.folder).as_posix()
        said = origin(path.read_bytes()) if inside not in taken else None
        if said and said[1] in missing:
            seen.setdefault(said[1], []).append(inside)
    return {name: paths[0] for name, paths in seen.items() if len(paths) == 1}


def _folders_away(place: Place, known: Manifest) -> set[str]:
    """Folders of which all that was copied is deleted: what is new in them is not wanted either."""
    folders = {name.rpartition("/")[0] for name in known.files if "/" in name}
    there = {name.rpartition("/")[0] for name in known.files if place.read(known.path(name)) is not None}
    return {folder for folder in folders if not any(_is_inside(f"{other}/", {folder}) for other in there)}


def _is_inside(name: str, folders: set[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


def _check_clean(said: str, place: Place, known: Manifest, found: Update) -> None:
    """Refuse where git could not give back what is there now."""
    paths = {known.path(name) for name in known.files} | {place.manifest.name, place.base.name}
    left = not_committed(
        place.folder, sorted(paths | {path for path in found.writes if (place.folder / path).exists()})
    )
    force = "--force, which keeps what it changes beside it, in .before_<n>"
    if left is None:
        raise ValueError(
            f"{said}: this is in no git repository, nothing was written: type git init && git add . && git commit -m 'before'"
            f" first, so that git diff shows what the update does, or {force}"
        )
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        more += "; those with !! are ignored, git add -f takes them" if any(e.startswith("!!") for e in left) else ""
        raise ValueError(
            f"{said}: git has not all of it, nothing was written ({', '.join(left[:3])}{more}): commit first, so that git diff"
            f" shows what the update does; or type {force}"
        )


def _back_up(place: Place, found: Update) -> None:
    """Beside what an update writes and deletes: what is there now."""
    there = {path: place.read(path) for path in [*found.writes, *found.deleted]}
    kept = {path: data for path, data in there.items() if data is not None}
    number = 0
    while (place.folder / f".{place.prefix}before_{number}").exists():
        number += 1
    found.backed_up = f".{place.prefix}before_{number}"
    found.writes = {f"{found.backed_up}/{path}": data for path, data in kept.items()} | found.writes


def _number(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
