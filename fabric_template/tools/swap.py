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
    was_there, steps = folder.is_dir(), _steps(folder, writes, deletes, has_door=not place.prefix)
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
        back = known["way"] == "undo" or _is_put_back(place.folder, staging, steps)
        (_undo if back else _walk)(place.folder, staging, steps)
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


def _steps(folder: Path, writes: Mapping[str, bytes], deletes: Iterable[str], has_door: bool) -> list[dict[str, Any]]:
    """What is done, in order. Of a package that is there, the door is shut first and opened last.

    A single file in a package of yours has no door: it takes its place at once.
    """
    gate, wanted = folder / GATE, {**writes, **dict.fromkeys(deletes)}
    changed = [name for name, data in wanted.items() if _bytes(folder / name) != data]
    steps: list[dict[str, Any]] = [{"to": name, "new": wanted[name]} for name in changed if name != GATE]
    has_door = has_door and gate.is_file() and bool(steps)
    if has_door:
        steps.insert(0, {"to": GATE, "new": SHUT.encode()})
    if GATE in changed or has_door:
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
        target = folder / step["to"]
        if step["is"] is None:
            if _hash(target) == step["was"]:
                os.unlink(target)
            _clear(folder, target.parent)
        elif _waits(staging, number):
            _make_way(target, [other for other in steps if other["to"] == step["to"]])
            os.replace(staging / f"new-{number}", target)


def _undo(folder: Path, staging: Path, steps: list[dict[str, Any]]) -> None:
    """Each file as it was, from the last to the first; those that are, in a process that was killed, are passed over."""
    for number, step in reversed([*enumerate(steps)]):
        target, old = folder / step["to"], staging / f"old-{number}"
        if _waits(staging, number):
            continue  # it has not taken its place
        if old.is_file():
            _make_way(target, [other for other in steps if other["to"] == step["to"]])
            os.replace(old, target)
        elif step["was"] is None and _hash(target) == step["is"]:
            os.unlink(target)
            _clear(folder, target.parent)
    os.unlink(staging / "journal.json")


def _is_put_back(folder: Path, staging: Path, steps: list[dict[str, Any]]) -> bool:
    """Whether somebody has put back, after a kill and by git perhaps, what had changed already: then he wants the old."""
    is_open = not _waits(staging, len(steps) - 1)  # the door is as it is to be, and may be as it was
    done = [s for n, s in enumerate(steps) if s["is"] and s["was"] not in (None, s["is"]) and not _waits(staging, n)]
    return any(_hash(folder / step["to"]) == step["was"] for step in done if not (step["to"] == GATE and is_open))


def _waits(staging: Path, number: int) -> bool:
    return (staging / f"new-{number}").is_file()


def _make_way(target: Path, steps: list[dict[str, Any]]) -> None:
    """What somebody has written in a file's place since a kill, which none of its steps has, is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file() and _hash(target) not in {step[when] for step in steps for when in ("was", "is")}:
        set_aside(target, "before")


def _hash(path: Path) -> str | None:
    data = _bytes(path)
    return None if data is None else hashed(data)


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
