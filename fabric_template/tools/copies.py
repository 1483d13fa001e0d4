"""Copies: new, copy, diff and update as they are typed, and what they answer."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .comparing import diff_package
from .copying import copy_mini, copy_package, copy_parts
from .errors import UsageError
from .manifest import find_place, read_manifest
from .merging import ignored
from .new import make_project
from .parts import PARTS, ROOMS
from .typed import program, shown
from .updating import Update, update_copy

MEND = "all is as it was: mend it, and type it again"
DIFF = """Lines with - are the version's that was copied, those with + yours, or a newer version's. The exit code is 1 if
something differs. A copy without a manifest (by hand, or an old one) is compared with the installed version, in one."""
UPDATE = """Files that you have not changed are replaced; those that both have changed are merged by git (git merge-file).
Where both have changed the same lines, these stand in the file, between git's marks, and the exit code is 1. What you have
added, deleted or renamed stays so. All of it is written, or nothing."""


def _arguments(prog: str, line: str, argv: list[str], end: str = "", **options: dict[str, Any]) -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog, description=line, epilog=end, formatter_class=kind, allow_abbrev=False)
    for name, option in options.items():
        parser.add_argument(name.replace("__", "--").replace("_", "-"), **option)
    return parser.parse_args(argv)


@contextmanager
def _writing(said: str, way: str = "give another place") -> Iterator[None]:
    """What the disk refuses is one line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{said}: cannot be written: {error.strerror}; {way}") from error


def new_verb(prog: str, line: str, argv: list[str]) -> tuple[str, int]:
    """Make a project; say what to type there."""
    given = _arguments(prog, line, argv, NAME={"help": "the folder to make, such as my_digits; its runs have its name"})
    with _writing(f"new {given.NAME}"):
        files = make_project(given.NAME)
    there = f"cd {shlex.quote(given.NAME)} && python"
    return (
        f"made        {given.NAME}: {', '.join(files)}\n"
        f"train       {there} train.py\n"
        f"test        {there} -m pytest\n"
        f"update      {program()} update {shlex.quote(given.NAME)}"
    ), 0


def copy_verb(prog: str, line: str, argv: list[str]) -> tuple[str, int]:
    """Copy the folder, the single file or parts; say how they are used, compared and updated."""
    rows = {name: what for name, (what, _) in PARTS.items()} | {
        ", ".join(ROOMS): "a room, with those below that it needs"
    }
    end = "parts:\n" + "\n".join(f"  {name:12}{what}" for name, what in rows.items())
    given = _arguments(
        prog, line, argv, end,
        DEST={"help": "the folder to make, such as src/my_loop, or with --mini the file, such as src/train_loop.py"},
        __mini={"action": "store_true", "help": "MiniLoop, the single file, instead of the folder"},
        __parts={"metavar": "A,B", "help": "of the folder only these parts, see below, with all that they import"},
        __force={"action": "store_true", "help": "renew an older copy; what you have changed is kept in .before_<n>"},
    )  # fmt: skip
    if given.mini and given.parts is not None:
        raise UsageError("copy --mini --parts: expected one of them: the single file is whole")
    target, kept_as, start = Path(given.DEST), "has those that were other before", ""
    name, is_file = target.resolve().stem, given.mini or target.suffix == ".py"
    with _writing(f"copy {target}"):
        if given.mini:
            what, loop, kept = "MiniLoop", f"from {name} import MiniLoop", copy_mini(target, given.force)
        elif given.parts is not None:
            files, kept = copy_parts([part for part in given.parts.split(",") if part], target, given.force)
            what, inner = _parts_said(given.parts.split(","), files)
            loop = f"import {name}{'' if is_file else inner}"
        else:
            files, kept = copy_package(target, given.force)
            what, loop = f"{len(files)} files", f"from {name} import FabricLoop"
            start = f"try         {'' if target.parent == Path() else f'cd {target.parent} && '}python -m {name} fit\n"
    if is_file:
        kept_as = "is what was there before"
    return (
        f"copied      {what} to {target}; {'it is' if is_file else 'they are'} yours now\n"
        f"{f'kept        {shown(kept)} {kept_as}{chr(10)}' if kept else ''}"
        f"use         {loop}\n"
        f"{start}compare     {program()} diff {shlex.quote(str(target))}\n"
        f"update      {program()} update {shlex.quote(str(target))}{_ignored(target)}"
    ), 0


def _parts_said(parts: list[str], files: list[str]) -> tuple[str, str]:
    """What was copied, and the module that is imported first."""
    modules = [file for file in files if file.endswith(".py") and not file.endswith("__init__.py")]
    first = [PARTS[part][1] for part in parts if part in PARTS] + modules
    what = f"{len(files)} files" if len(modules) > 8 else ", ".join(modules) or "nothing new"
    return what, "".join(f".{name.removesuffix('.py').replace('/', '.')}" for name in first[:1])


def _ignored(target: Path) -> str:
    """A line about what would not come into the project's repository: `data/` often stands in a .gitignore."""
    place = find_place(target.resolve())
    known = read_manifest(place)
    names = [known.path(name) for name in known.files] if known else []
    found = ignored([place.folder / name for name in (*names, place.manifest.name, place.base.name)])
    if not found:
        return ""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"\nignored     {', '.join(map(shown, found[:3]))}{more}: by a .gitignore; git add -f takes them"


def diff_verb(prog: str, line: str, argv: list[str]) -> tuple[str, int]:
    """Print what differs; returns the exit code."""
    given = _arguments(
        prog, line, argv, DIFF,
        DEST={"help": "the folder of a copy, or a copied file"},
        __yours={"action": "store_true", "help": "only what you have changed"},
        __upstream={"action": "store_true", "help": "only what the installed version has changed since"},
    )  # fmt: skip
    both = given.yours == given.upstream
    with _writing(f"diff {given.DEST}", MEND):
        text = diff_package(given.DEST, yours=both or given.yours, upstream=both or given.upstream)
    return text.removesuffix("\n"), 1 if text else 0


def update_verb(prog: str, line: str, argv: list[str]) -> tuple[str, int]:
    """Bring what is new into a copy; returns the exit code: 1 where something is left to decide."""
    given = _arguments(
        prog, line, argv, UPDATE,
        DEST={"help": "the folder of a copy, or a copied file"},
        __dry_run={"action": "store_true", "help": "write nothing, only say what would be"},
        __force={"action": "store_true", "help": "also where git has not all of it; what changes is kept in .before_<n>"},
    )  # fmt: skip
    with _writing(f"update {given.DEST}", MEND):
        found = update_copy(given.DEST, given.dry_run, given.force)
    return _said(given.DEST, found, given.dry_run), 0 if found.is_clean else 1


def _said(copy: str, found: Update, dry_run: bool) -> str:
    """What an update has done, or would do, a line for each kind of it."""
    if not found.writes:
        return f"the same    {copy} has all of {found.new}"
    rows = [
        ("dry run" if dry_run else "updated", f"{copy} from {found.old} to {found.new}"),
        ("replaced", _named(found.replaced)),
        ("merged", _named(found.merged)),
        ("added", _named(found.added)),
        ("deleted", _named(found.deleted)),
        ("renamed", ", ".join(f"{name} is {path} here" for name, path in found.renamed.items())),
        ("stays away", _named(found.away)),
        ("backup", found.backed_up and f"{found.backed_up} has what was there before"),
        *(("kept", f"{path}: gone from {found.new}, but you have changed it: it is yours") for path in found.kept),
        *(
            ("conflict", f"{path}: {_lines(lines)}: changed by you and upstream")
            for path, lines in found.conflicts.items()
        ),
        (
            "next",
            "choose between the lines at <<<<<<<, run your tests, commit" if found.conflicts and not dry_run else "",
        ),
    ]
    return "\n".join(f"{word:12}{text}" for word, text in rows if text)


def _named(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _lines(lines: list[int]) -> str:
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"


COPIES = {"new": new_verb, "copy": copy_verb, "diff": diff_verb, "update": update_verb}
