"""Swap: files that change together: all of them, or none, also where the process is killed in between.

What is new is written beside, in a hidden folder; then a journal, from which on it is decided; then each file takes its place.
Killed before the journal, nothing has happened; after it, `finish` does the rest. In between the folder's `__init__.py`
says so: nobody imports one half of each.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files.disk import fsync_folder, replace_file, set_aside, try_lock
from .manifest import Place, hashed

GATE = "__init__.py"
SHUT = """raise ImportError(
    "an update of this folder was interrupted before its end: type `fabric-template diff` with the folder's path,"
    " which ends it first"
)
"""


def swap(place: Place, writes: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Write and delete files of a folder, all or none; in the order in which they are given.

    Args:
        place: Whose folder it is; paths are relative to that.
        writes: What each file is to be.
        deletes: Files that are to go.
    """
    folder = place.folder
    links = [name for name in (*writes, *deletes) if (folder / name).is_symlink()]
    if links:
        raise ValueError(f"'{folder / links[0]}' is a link: put a file in its place, nothing was written")
    was_there, steps = folder.is_dir(), _steps(folder, writes, deletes)
    if not steps:
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _held(place.staging) as staging:
            for number, step in enumerate(steps):
                is_opening = step["to"] == steps[0]["to"] and number > 0
                _stage(folder, staging, number, step, is_opening)
            _note(staging, steps)
            try:
                _walk(folder, staging, steps)
            except BaseException:
                os.replace(staging / "undo.json", staging / "journal.json")
                _undo(folder, staging, steps)
                raise
            _sync(folder, steps)
    except BaseException:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise


def finish(place: Place) -> bool:
    """End what a killed process has begun; whether there was anything to end.

    Raises:
        ValueError: If that process is still at it.
    """
    if not place.staging.is_dir():
        return False
    with _held(place.staging) as staging:
        journal = staging / "journal.json"
        if not journal.is_file():
            return True  # nothing had happened: what was prepared is thrown away
        known = json.loads(journal.read_text(encoding="utf-8"))
        steps = known["steps"]
        (_undo if known["way"] == "undo" else _walk)(place.folder, staging, steps)
        _sync(place.folder, steps)
        return True


@contextmanager
def _held(staging: Path) -> Iterator[Path]:
    """The hidden folder, ours alone. It goes when all is done or undone; with a journal in it, there is more to do."""
    staging.mkdir(exist_ok=True)
    lock = os.open(staging / "lock", os.O_WRONLY | os.O_CREAT, 0o666) if os.name == "posix" else None
    try:
        if lock is not None and try_lock(lock) is False:
            raise ValueError(f"'{staging.parent}' is being changed by another copy or update: wait for its end")
        try:
            yield staging
            with suppress(FileNotFoundError):
                os.unlink(staging / "journal.json")
        finally:
            if not (staging / "journal.json").is_file():
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)


def _steps(folder: Path, writes: Mapping[str, bytes], deletes: Iterable[str]) -> list[dict[str, Any]]:
    """What is done, in order. Of a package that is there, the door is shut first and opened last."""
    gate, wanted = folder / GATE, {**writes, **dict.fromkeys(deletes)}
    changed = [name for name, data in wanted.items() if _bytes(folder / name) != data]
    steps: list[dict[str, Any]] = [{"to": name, "new": wanted[name]} for name in changed if name != GATE]
    if gate.is_file() and steps:
        steps.insert(0, {"to": GATE, "new": SHUT.encode()})
    if GATE in changed or (gate.is_file() and steps):
        steps.append({"to": GATE, "new": wanted[GATE] if GATE in wanted else gate.read_bytes()})
    return steps


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _stage(folder: Path, staging: Path, number: int, step: dict[str, Any], is_opening: bool) -> None:
    """Write beside what is going to be there, and keep what is there now."""
    target, new = folder / step["to"], step.pop("new")
    old = SHUT.encode() if is_opening else _bytes(target)
    step |= {"was": None if old is None else hashed(old), "is": None if new is None else hashed(new)}
    if old is not None and not is_opening:
        shutil.copy2(target, staging / f"old-{number}")
    if new is not None:
        with open(staging / f"new-{number}", "wb") as file:
            file.write(new)
            if old is not None:  # it takes the place of one: a power cut must not leave less than there was
                file.flush()
                os.fsync(file.fileno())
        if old is not None:
            shutil.copymode(target, staging / f"new-{number}")


def _note(staging: Path, steps: list[dict[str, Any]]) -> None:
    """Both ways out; which one it is says the name, so that a full disk does not keep us from going back."""
    for way in ("undo", "journal"):
        replace_file(staging / f"{way}.json", json.dumps({"way": way, "steps": steps}).encode())


def _walk(folder: Path, staging: Path, steps: list[dict[str, Any]]) -> None:
    """Each file takes its place; those that have, in a process that was killed, are passed over."""
    for number, step in enumerate(steps):
        target, new = folder / step["to"], staging / f"new-{number}"
        is_as_it_was = (there := _bytes(target)) is None or hashed(there) == step["was"]
        if step["is"] is None:
            if there is not None and is_as_it_was:
                os.unlink(target)
            _clear(folder, target.parent)
        elif new.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not is_as_it_was:  # someone has changed it since the kill
                set_aside(target, "before")
            os.replace(new, target)


def _undo(folder: Path, staging: Path, steps: list[dict[str, Any]]) -> None:
    """Each file as it was, from the last to the first; those that are, in a process that was killed, are passed over."""
    for number, step in reversed([*enumerate(steps)]):
        target, old = folder / step["to"], staging / f"old-{number}"
        if (staging / f"new-{number}").is_file():
            continue  # it has not taken its place
        if old.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(old, target)
        elif step["was"] is None and hashed(_bytes(target) or b"") == step["is"]:
            os.unlink(target)
            _clear(folder, target.parent)
    os.unlink(staging / "journal.json")


def _clear(folder: Path, inner: Path) -> None:
    """Folders that are empty now go; what Python has compiled of their files goes with them."""
    while inner != folder and inner.is_dir():
        if [path.name for path in inner.iterdir()] == ["__pycache__"]:
            shutil.rmtree(inner / "__pycache__", ignore_errors=True)
        try:
            inner.rmdir()
        except OSError:
            return
        inner = inner.parent


def _sync(folder: Path, steps: list[dict[str, Any]]) -> None:
    """The new names are safe from a power cut before the journal goes."""
    for inner in {(folder / step["to"]).parent for step in steps if step["was"] is not None}:
        with suppress(OSError):
            fsync_folder(inner)
