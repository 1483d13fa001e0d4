"""Write files atomically and create version folders such as version_0."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from .errors import ConfigurationError

_TIME_LINE = re.compile(rb"^(started|saved) ([0-9]+\.[0-9]+)$", re.MULTILINE)


# Atomic files


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces the file at ``path`` when the `with` block ends.

    Even after a crash or a power failure, ``path`` contains either the complete old file or the
    complete new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Delete the temporary file that a killed process with the same process ID may have left.
    temporary.unlink(missing_ok=True)
    try:
        # Mode "xb" fails if the path exists, so open() cannot write through a symbolic link.
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # If the disk is full, torch.save raises a RuntimeError with an unrelated message. Raise the
        # OSError that caused this error instead.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError) and cause.errno and cause.filename is None:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


def local_path(path: str | Path) -> str:
    """Return a local path as a string, or raise an error for a URL."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        # Import errors.py only here, because it imports Lightning and would slow down the plot
        # command.
        from .errors import CheckpointError

        raise CheckpointError(
            f"path: got {text!r}, expected a local file. Download the file and pass its local path."
        )
    return text


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk if possible, so that renamed files survive a power cut."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically."""
    with replaced_file(path) as file:
        file.write(content)


def write_yaml(path: Path, values: dict[str, Any], head: str = "") -> None:
    """Atomically write a dict of numbers, strings, lists and dicts to a YAML file."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = head + yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
    write_file(path, text.encode("utf-8", "backslashreplace"))


# Folders


def walk(root: Path, skipped: Iterable[str] = ()) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder in a tree, with the names of its files.

    Follow links to folders, but yield no folder twice. Skip hidden folders, and folders whose names
    are in ``skipped``.
    """
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        # Each folder is yielded only once. Visit symbolic links last, so that most folders are
        # yielded with their real path.
        subfolders.sort(key=lambda name: os.path.islink(os.path.join(folder, name)))
        place = os.path.realpath(folder)
        if place in seen:
            subfolders.clear()
            continue
        seen.add(place)
        subfolders[:] = [n for n in subfolders if not (n.startswith(".") or n in skipped)]
        yield Path(folder), files


# Versions


def version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else version


def version_of(name: str) -> int | str:
    """Return the number in a name such as "version_3". Return all other names unchanged."""
    text = name[8:] if name.startswith("version_") else ""
    return int(text) if text.isdecimal() and str(int(text)) == text else name


def sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "width_4" before "width_16"."""
    parts = re.split("([0-9]+)", name)
    key = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    # Also sort by the whole name, because the numbers in "run_1" and "run_01" are equal.
    return [*key, (-1, name)]


def next_version(*folders: Path) -> int:
    """Return the highest version number in the given folders, plus one."""
    versions = [version_of(name) for folder in folders for name in list_names(folder)]
    return max((version for version in versions if isinstance(version, int)), default=-1) + 1


def list_names(folder: Path) -> list[str]:
    """Return the names of all files and subfolders in a folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise folder_error(folder, error) from error


def claim_version(folder: Path, *others: Path) -> int:
    """Create a folder with the next free version number, even if several runs start at once."""
    make_folder(folder)
    version = next_version(folder, *others)
    while True:
        try:
            Path(folder, f"version_{version}").mkdir()
            return version
        except FileExistsError:
            version += 1
        except OSError as error:
            raise folder_error(folder, error) from error


def read_times(folder: Path) -> tuple[float, float]:
    """Return the Unix times of a run's last start and last save, or 0.0 if a time is unknown."""
    # A run appends lines such as "started 1764277654.5" and "saved 1764277700.25" to its .lock
    # files. Use the last "started" line and the last "saved" line.
    times = {b"started": 0.0, b"saved": 0.0}
    for event, seconds in _TIME_LINE.findall(read_end(os.path.join(folder, ".lock"))):
        times[event] = float(seconds)
    return times[b"started"], times[b"saved"]


def newest_time(folder: Path) -> float:
    """Return the latest time that any version of a run has recorded, or 0.0 if there is none."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0.0
    return max((max(read_times(folder / name)) for name in names), default=0.0)


def read_end(path: str) -> bytes:
    """Return the last 4096 bytes of a file, or b"" if the file cannot be read."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        return file.read(4096)
    return b""


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents.

    Raises:
        ConfigurationError: The folder cannot be created, for example because a parent is a file or
            a broken link.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(folder, error) from error


def folder_error(folder: Path, error: OSError) -> ConfigurationError:
    """Return a ConfigurationError with the reason why a folder cannot be read or created."""
    from .errors import ConfigurationError

    reason = f"The system reported: {error.strerror}."
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            reason = f"{str(path)!r} is a link to {os.readlink(path)!r}, which does not exist."
            break
    return ConfigurationError(
        f"default_root_dir: got {str(folder)!r}, expected a writable folder. {reason}"
        " Choose another folder, or set logger=False and enable_checkpointing=False."
    )
