"""Manifest: beside a copy, what it is a copy of: the version, the kind, a hash for each file, and the files as they were.

Two files: a small one to read, `fabric_template.json`, and the files as they were written, `fabric_template.tar.gz`: what
an update merges from. (The package could ship its old versions, but grows with each; in a project's git they may not be.)
Beside a single file both have its name before theirs: `train_loop.fabric_template.json`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .licence import origin
from .upstream import NAME

MANIFEST, BASE = f"{NAME}.json", f"{NAME}.tar.gz"


def hashed(data: bytes) -> str:
    """A file's hash; its line ends may be those of another system."""
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()


@dataclass(frozen=True)
class Place:
    """Where a copy is: its folder, and what the names of its manifest begin with; "" but for a single file."""

    folder: Path
    prefix: str = ""

    @property
    def manifest(self) -> Path:
        """The file to read."""
        return self.folder / f"{self.prefix}{MANIFEST}"

    @property
    def base(self) -> Path:
        """The copied files as they were."""
        return self.folder / f"{self.prefix}{BASE}"

    @property
    def staging(self) -> Path:
        """Where changes are prepared; there only while they are made, or after a kill."""
        return self.folder / f".{self.prefix}{NAME}.swap"

    def read(self, name: str) -> bytes | None:
        """A file of the copy; None if it is not there."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None


@dataclass
class Manifest:
    """What a copy was when it was written.

    Attributes:
        version: Of the package.
        kind: "folder", "file" or "parts".
        parts: Their names, of a copy of parts.
        files: By the name in the package, the file as it was written.
        places: By the name in the package, the path in the copy, for those with another.
    """

    version: str
    kind: str
    parts: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """Where a file of the package is in the copy."""
        return self.places.get(name, name)

    def written(self, place: Place) -> dict[str, bytes]:
        """The two files that say it, by their names."""
        known = {NAME: self.version, "copy": self.kind, "parts": self.parts, "places": self.places}
        known = {key: value for key, value in known.items() if value}
        known["sha256"] = {name: hashed(data) for name, data in sorted(self.files.items())}
        text = json.dumps(known, indent=1) + "\n"
        return {place.base.name: packed(self.files), place.manifest.name: text.encode()}


def packed(files: dict[str, bytes]) -> bytes:
    """Files as one archive, which is the same for the same files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), mtime=0)


def read_manifest(place: Place) -> Manifest | None:
    """The manifest of a copy, checked against its archive; None if there is none: a copy by hand, or an old one.

    Raises:
        ValueError: If it is there and damaged.
    """
    if not place.manifest.is_file():
        return None
    way = "take it back from git, or renew the copy: copy --force keeps what you have changed beside it"
    known, files = _known(place.manifest, way), {}
    try:
        with tarfile.open(place.base, "r:gz") as archive:
            for member in archive:
                content = archive.extractfile(member)
                files[member.name] = content.read() if content else b""
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise ValueError(f"'{place.base}', the files as they were copied, cannot be read ({error}): {way}") from error
    wrong = sorted(name for name, sha in known["sha256"].items() if name not in files or hashed(files[name]) != sha)
    if wrong or files.keys() != known["sha256"].keys():
        which = ", ".join(wrong or sorted(files.keys() ^ known["sha256"].keys()))
        raise ValueError(f"'{place.manifest}' and '{place.base.name}' are not of one copy ({which}): {way}")
    return Manifest(known[NAME], known["copy"], known.get("parts", []), files, known.get("places", {}))


def _known(path: Path, way: str) -> dict:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        plain = isinstance(known[NAME], str) and known["copy"] in ("folder", "file", "parts")
        paths = [*known["sha256"].keys(), *known.get("places", {}).values()]
        inside = all(not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts for name in paths)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' is no manifest of a copy ({type(error).__name__}: {error}): {way}") from error
    if not plain or not inside:
        raise ValueError(f"'{path}' is no manifest of a copy: {way}")
    return known


def find_place(target: Path) -> Place:
    """Where the copy is that is meant by a folder or a file; its manifest may be missing.

    A folder in which single files have theirs means that file; a single file that was renamed is known by its first line.

    Raises:
        ValueError: If a folder has several.
    """
    beside = sorted(target.parent.glob(f"*.{MANIFEST}"))
    if target.is_dir():
        inside = sorted(target.glob(f"*.{MANIFEST}"))
        if (target / MANIFEST).is_file() or not inside:
            return Place(target)
        if len(inside) > 1:
            files = ", ".join(str(target / next(iter(_places(path).values()), path.name)) for path in inside)
            raise ValueError(f"'{target}' has several copies: give one of {files}")
        return _place_of(inside[0])
    for path in beside:
        if target.name in _places(path).values():
            return _place_of(path)
    said = origin(target.read_bytes()) if target.is_file() else None
    left = [path for path in beside if said and [said[1]] == list(_places(path))]
    left = [path for path in left if not (path.parent / next(iter(_places(path).values()))).exists()]
    return _place_of(left[0]) if len(left) == 1 else Place(target.parent, f"{target.stem}.")


def around(target: Path) -> Path | None:
    """The folder of the copy that a path is inside of."""
    return next((folder for folder in target.parents if (folder / MANIFEST).is_file()), None)


def _place_of(manifest: Path) -> Place:
    return Place(manifest.parent, manifest.name.removesuffix(MANIFEST))


def copied_alone(folder: Path) -> set[str]:
    """The names of the single files in a folder that a manifest is about."""
    return {name for path in folder.glob(f"*.{MANIFEST}") for name in _places(path).values()}


def _places(manifest: Path) -> dict[str, str]:
    """The single file that a manifest is about, by its name in the package; nothing of one that cannot be read."""
    try:
        places = json.loads(manifest.read_text(encoding="utf-8"))["places"]
        return {str(name): str(path) for name, path in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
