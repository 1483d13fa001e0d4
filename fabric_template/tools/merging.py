"""Merging: three versions of a file into one, by git; what git says of the files of a project."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

MARK = re.compile(rb"^<{7}(?: |$)", re.MULTILINE)


def merged(ours: bytes, base: bytes, new: bytes, labels: tuple[str, str, str]) -> tuple[bytes, int]:
    r"""What `ours` and `new` have made of `base`, together, and in how many places they contradict each other.

    Those stand in the result between git's marks, both of them.

    Raises:
        ValueError: If git cannot do it.

    Example:
        >>> merged(b"ONE\n\nthree\n", b"one\n\nthree\n", b"one\n\nTHREE\n", ("yours", "before", "after"))
        (b'ONE\n\nTHREE\n', 0)
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "new")]
        for path, text in zip(paths, (ours, base, new), strict=True):
            path.write_bytes(text)
        words = [word for label in labels for word in ("-L", label)]
        done = _git(Path(folder), "merge-file", "-p", *words, *map(str, paths))
    if not 0 <= done.returncode < 128:
        raise ValueError(f"{labels[0]}: {_said(done)}")
    return done.stdout, done.returncode


def with_line_ends(ours: bytes, text: bytes) -> bytes:
    r"""A text with the line ends that its lines have in `ours`; new lines end as most of those do.

    Example:
        >>> with_line_ends(b"one\r\ntwo\nthree\r\n", b"one\ntwo\nnew\n")
        b'one\r\ntwo\nnew\r\n'
    """
    if b"\r\n" not in ours:
        return text
    lines, old = lines_of(text), lines_of(ours)
    if 2 * ours.count(b"\r\n") > ours.count(b"\n"):
        found = [re.sub(rb"\n\Z", b"\r\n", line) for line in lines]
    else:
        found = list(lines)
    same = SequenceMatcher(None, [line.replace(b"\r\n", b"\n") for line in old], lines, autojunk=False)
    for before, after, length in same.get_matching_blocks():
        found[after : after + length] = old[before : before + length]
    return b"".join(found)


def lines_of(data: bytes) -> list[bytes]:
    """The lines with their ends; a lone carriage return or form feed ends none."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def marks(data: bytes) -> list[int]:
    r"""The lines at which a conflict begins.

    Example:
        >>> marks(b"a\n<<<<<<< yours\nb\n=======\nc\n>>>>>>> theirs\n")
        [2]
    """
    return [data.count(b"\n", 0, found.start()) + 1 for found in MARK.finditer(data)]


def not_committed(folder: Path, paths: list[str]) -> list[str] | None:
    """Which of these files git could not give back, with its letters; None where there is no repository.

    Raises:
        ValueError: If git is not there, or says that something is wrong.
    """
    done = _git(folder, "rev-parse", "--is-inside-work-tree")
    if done.returncode:
        if "not a git repository" in done.stderr.decode(errors="replace"):
            return None
        raise ValueError(_said(done))
    if done.stdout.strip() != b"true":
        return None
    words = ("--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--ignored=matching")
    done = _git(folder, "--literal-pathspecs", "status", *words, "--", *paths)
    if done.returncode:
        raise ValueError(_said(done))
    return [entry for entry in done.stdout.decode(errors="replace").split("\0") if entry]


def ignored(paths: list[Path]) -> list[Path]:
    """Those that git passes over, by a .gitignore; none where there is no git, or no repository."""
    if not paths:
        return []
    try:
        text = b"\0".join(os.fsencode(path) for path in paths)
        done = _git(paths[0].parent, "check-ignore", "-z", "--stdin", stdin=text)
    except ValueError:
        return []
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return f"git says: {' '.join(done.stderr.decode(errors='replace').split())}"


def _git(folder: Path, *words: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *words], cwd=folder, input=stdin, capture_output=True, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise ValueError(
            "git is not there, which merges what you and what upstream have changed: install it (apt install git,"
            " brew install git, git-scm.com); nothing was written"
        ) from error
