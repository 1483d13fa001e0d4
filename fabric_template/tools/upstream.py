"""Upstream: the package that is installed, as the files that a copy of it gets."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from .licence import LICENCE, header, notice, split_header
from .parts import MINI, part_files

PACKAGE = Path(__file__).resolve().parents[1]
NAME = "fabric_template"  # also where this is a copy under another name
LICENSE = "LICENSE"


def upstream_version() -> str:
    """The version of what is installed, read and not imported."""
    text = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = [\"']([^\"']+)", text, re.MULTILINE)
    if not found:
        raise ValueError(f"'{PACKAGE / '__init__.py'}' says no __version__: install {NAME} anew")
    return found[1]


def python_files(folder: Path) -> dict[str, Path]:
    """A folder's Python files by their paths inside it; what Python, editors and we leave behind is none of them."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    return {name: path for name, path in found.items() if not any(part.startswith(".") for part in name.split("/"))}


def sources() -> dict[str, bytes]:
    """The package's files by their names, without the first line that a copy has."""
    return {name: split_header(path.read_bytes())[1] for name, path in python_files(PACKAGE).items()}


def folder_files() -> dict[str, bytes]:
    """What a copy of the folder is made of, by name: each file with its first line, and the licence."""
    version = upstream_version()
    files = {name: header(version, name) + data for name, data in sources().items()}
    return {LICENSE: LICENCE.encode(), **files}


def single_file(name: str = MINI) -> dict[str, bytes]:
    """One file that goes on alone: the licence is its end.

    Raises:
        ValueError: If the package no longer has it.
    """
    if not (PACKAGE / name).is_file():
        raise ValueError(f"{NAME} {upstream_version()} has no {name}: what you have of it goes on as it is")
    alone = header(upstream_version(), name, "the end of this file")
    return {name: alone + split_header((PACKAGE / name).read_bytes())[1] + notice()}


def files_of_parts(parts: list[str], also: Collection[str] = ()) -> dict[str, bytes]:
    """What these parts are made of: their files, an `__init__.py` for each folder, and the licence.

    Args:
        parts: Their names.
        also: Other files that are in the copy; those that the package has.
    """
    version, found = upstream_version(), sources()
    names = ({*part_files(parts, found), *also} & found.keys()) - {"__init__.py"}
    folders = {name.rpartition("/")[0] for name in names if "/" in name}
    names |= {f"{folder}/__init__.py" for folder in folders} & found.keys()
    first = f'"""Parts of {NAME}, by {NAME.replace("_", "-")} copy --parts."""\n\n__version__ = "{version}"\n'.encode()
    files = {"__init__.py": first, **{name: found[name] for name in sorted(names)}}
    return {LICENSE: LICENCE.encode(), **{name: header(version, name) + data for name, data in files.items()}}
