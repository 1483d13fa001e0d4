"""Upstream: the package that is installed, as the files that a copy of it gets."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from .licence import LICENCE, header, notice, split_header
from .parts import MINI, needed, part_files

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
    """A folder's Python files by their paths inside it.

    What editors and we leave behind (.before_0) is none of them, nor what is in another copy inside of this one.
    """
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    others = {f"{path.parent.relative_to(folder).as_posix()}/" for path in folder.rglob(f"*/{NAME}.json")}
    found = {name: path for name, path in found.items() if not name.startswith(tuple(others))}
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
        ValueError: If the package no longer has it, or no longer as one file.
    """
    version, found = upstream_version(), sources()
    if name not in found:
        raise ValueError(f"{NAME} {version} has no {name}: what you have of it goes on as it is")
    if len(names := needed([name], found)) > 1:
        raise ValueError(
            f"{name} of {NAME} {version} needs others ({', '.join(names)}): take it as a folder, copy --parts"
        )
    return {name: header(version, name, "the end of this file") + found[name] + notice()}


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
