"""Copy this package or mini.py into a project, and compare or update the copy later."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from .. import __version__

PACKAGE = Path(__file__).resolve().parents[1]
MINI = "mini.py"
README = """\
fabric_template {version} without your changes to the copy.
`fabric-template diff` and `fabric-template update` need these files. Commit them unchanged.
"""
Files = dict[str, bytes]  # Maps a path in the package to the file's content.
Changes = dict[str, bytes | None]  # Maps a path to the file's new content. None deletes the file.


class Copy:
    """A copy of this package or of mini.py in a user's project."""

    def __init__(self, path: str) -> None:
        self.target = Path(os.path.abspath(path))
        if PACKAGE in (self.target.resolve(), *self.target.resolve().parents):
            raise ValueError(
                f"got {path}, which is inside the package, expected a path outside the package."
            )
        self.is_file = self.target.suffix == ".py"
        if self.is_file:
            self.hidden = self.target.with_name(f".{self.target.stem}.fabric_template")
            self.current = {MINI: read_file(self.target)} if self.target.is_file() else {}
            licence = read_file(PACKAGE / "LICENSE").decode().splitlines()
            notice = "\n\n" + "".join(f"# {line}".rstrip() + "\n" for line in licence)
            self.upstream = {MINI: read_file(PACKAGE / MINI) + notice.encode()}
        else:
            self.hidden = self.target / ".fabric_template"
            self.current = read_files(self.target)
            self.upstream = read_files(PACKAGE)
        self.original = read_files(self.hidden)
        readme = self.hidden / "README.md"
        found = re.match(r"\S+ (\S+)", readme.read_text()) if readme.is_file() else None
        self.version = found[1] if found else None

    def path(self, name: str) -> Path:
        return self.target if self.is_file else self.target / name

    def write(self, changes: Changes) -> None:
        """Write ``changes`` to the user's copy, and store the unmodified package for `update`."""
        for name, data in changes.items():
            write_file(self.path(name), data)
        for name in {*self.original, *self.upstream}:
            write_file(self.hidden / name, self.upstream.get(name))
        write_file(self.hidden / "README.md", README.format(version=__version__).encode())


def copy_command(path: str, *, mini: bool = False) -> int:
    copy = Copy(path)
    problem = "" if copy.is_file == mini else f"expected a {'.py file' if mini else 'folder'}"
    problem = problem or find_problem(copy.target)
    if problem:
        example = "--mini src/train_loop.py" if mini or copy.is_file else "src/my_loop"
        raise ValueError(f"copy: got {path}, {problem}. Use `copy {example}`.")
    is_empty_folder = copy.target.is_dir() and not any(copy.target.iterdir())
    if copy.target.exists() and (mini or not is_empty_folder):
        text = f"copy: got {path}, which already exists, expected a new path. To update a copy, run"
        raise ValueError(f"{text} `fabric-template update {shlex.quote(path)}`.")
    copy.write(dict(copy.upstream))
    print(f"copied      {'MiniLoop' if mini else f'{len(copy.upstream)} files'} to {path}")
    print(f"use         from {copy.target.stem} import {'MiniLoop' if mini else 'FabricLoop'}")
    place = shlex.quote(path)
    print(f"compare     fabric-template diff {place}\nupdate      fabric-template update {place}")
    return 0


def find_problem(target: Path) -> str:
    """Return the reason why ``target`` is unsuitable for a copy, or "" if it is suitable."""
    name = target.stem if target.suffix == ".py" else target.name
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        return "expected a name that Python can import"
    here = (Path.cwd(), Path())
    folders = [folder for folder in sys.path if folder and Path(folder) not in here]
    spec = PathFinder.find_spec(name, folders)
    # A folder without an __init__.py is not an installed package, so ignore it.
    is_installed = spec is not None and spec.origin is not None
    if is_installed or name in (*sys.stdlib_module_names, __name__.partition(".")[0]):
        return f"which would hide the package {name}, expected another name"
    # If a folder contains a package my_loop/ and a module my_loop.py, Python imports only the
    # package.
    other = target.with_suffix("" if target.suffix == ".py" else ".py")
    is_hidden = other.exists() and not target.exists()
    return f"next to {other.name}, expected another name" if is_hidden else ""


def diff_command(path: str, *, yours: bool = False, upstream: bool = False) -> int:
    """Print how the copy and the installed version have changed since the copy was made."""
    copy = find_copy("diff", path)
    sides = {}
    if yours or not upstream:
        sides["yours"] = copy.current
    if upstream or not yours:
        sides[f"fabric_template-{__version__}"] = copy.upstream
    text = b""
    with tempfile.TemporaryDirectory() as folder:
        for side, files in {"original": copy.original, **sides}.items():
            Path(folder, side).mkdir()
            for name, data in files.items():
                write_file(Path(folder, side, name), data)
        for side in sides:
            args = ("diff", "--no-index", "--no-prefix", "--no-color", "original", side)
            text += run_git(folder, *args).stdout
    print(text.decode(errors="replace"), end="")
    return 1 if text else 0


def update_command(path: str, *, dry_run: bool = False) -> int:
    """Update a copy of the package or of mini.py, and keep the user's changes.

    If the user and the installed version both changed a file, git merges the changes and marks
    conflicts.

    Returns:
        1 if a file has conflicts or if the user changed a file that the new version has removed.
        0 otherwise.
    """
    copy = find_copy("update", path)
    if copy.original == copy.upstream and copy.version == __version__:
        print(f"up to date  {path} already contains version {__version__}")
        return 0
    changes: Changes = {}
    outcomes: dict[str, list[str]] = {}
    for name in sorted({*copy.original, *copy.upstream}):
        outcome, data = combine_versions(copy, name)
        if data != copy.current.get(name):
            changes[name] = data
        if outcome:
            outcomes.setdefault(outcome, []).append(copy.path(name).name if copy.is_file else name)
    if not dry_run:
        check_committed(copy, changes)
        copy.write(changes)
    print(f"{'dry run' if dry_run else 'updated':12}{path} from {copy.version} to {__version__}")
    for outcome, names in outcomes.items():
        print(f"{outcome:12}{', '.join(names)}")
    if "conflict" in outcomes and not dry_run:
        print("next        resolve the conflicts at <<<<<<<, run your tests, and commit")
    return 1 if "conflict" in outcomes or "kept" in outcomes else 0


def combine_versions(copy: Copy, name: str) -> tuple[str, bytes | None]:
    """Return the outcome of updating a file, such as "merged", and the new content of the file."""
    mine, old, new = (files.get(name) for files in (copy.current, copy.original, copy.upstream))
    if new in (mine, old):
        return "", mine
    if mine is None:
        return ("added", new) if old is None else ("left out", None)
    if new is None:
        return ("removed", None) if mine == old else ("kept", mine)
    if mine == old:
        return "replaced", new
    if b"\n<<<<<<< " in b"\n" + mine:
        raise ValueError(
            f"update: got an unresolved conflict in {name}. Resolve the conflict first."
        )
    with tempfile.TemporaryDirectory() as folder:
        versions = {"yours": mine, "original": old or b"", f"fabric_template-{__version__}": new}
        for file, data in versions.items():
            write_file(Path(folder, file), data)
        done = run_git(folder, "merge-file", "-p", *versions)
    return ("conflict" if done.returncode else "merged"), done.stdout


def check_committed(copy: Copy, names: Iterable[str]) -> None:
    """Raise an error if an update would overwrite a file that git cannot restore."""
    paths = [copy.hidden / "README.md", *(copy.path(name) for name in names)]
    existing = [str(path) for path in paths if path.exists()]
    args = ["--literal-pathspecs", "status", "--porcelain", "--ignored", "--untracked-files=all"]
    found = run_git(copy.target.parent, *args, "--", *existing).stdout.decode()
    if found:
        first = ", ".join(found.splitlines()[:3])
        text = f"update: got files that git cannot restore ({first})."
        raise ValueError(f"{text} Commit these files first.")


def find_copy(command: str, path: str) -> Copy:
    copy = Copy(path)
    if copy.version is None:
        hidden = os.path.relpath(copy.hidden)
        text = f"{command}: got {path}, expected a copy of this package ({hidden} is missing). Run"
        raise ValueError(f"{text} `fabric-template copy` first.")
    return copy


def run_git(folder: str | Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ValueError("git is not on the PATH. Install git.") from error
    # git diff and git merge-file use exit codes up to 127 for differences and conflicts, so only
    # higher exit codes are errors.
    if done.returncode > 127:
        raise ValueError(f"git: {' '.join(done.stderr.decode(errors='replace').split())}")
    return done


def read_files(folder: Path) -> Files:
    """Return the content of a folder's Python files, license and HTML pages, keyed by path.

    Skip hidden files and folders.
    """
    files = {}
    paths: list[Path] = []
    if folder.is_dir():
        patterns = ("**/*.py", "LICENSE", "tools/*.html")
        paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    for path in paths:
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            files[name.as_posix()] = read_file(path)
    return files


def read_file(path: Path) -> bytes:
    return path.read_bytes().replace(b"\r\n", b"\n")


def write_file(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
