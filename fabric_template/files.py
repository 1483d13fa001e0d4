"""Write files atomically, and choose the version folders of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from .errors import CheckpointError, ConfigurationError

# Atomic files


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, which is synced and replaces the target at the end of the block.

    After an error, a kill or a power cut, the target is the old file or the complete new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def local_path(path: str | Path) -> str:
    """Return a local path as a string. Raise an error for a URL."""
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise CheckpointError(
            f"path: got {text!r}, expected a local file. Download it and give its path."
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
    """Write a file atomically."""
    with replaced_file(path) as file:
        file.write(content)


def write_yaml(path: Path, values: dict[str, Any], head: str = "") -> None:
    """Write plain values into a YAML file atomically."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = head + yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
    write_file(path, text.encode("utf-8", "backslashreplace"))


# Versions


def version_folder(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else version


def next_version(*folders: Path) -> int:
    """Return the highest version number in the given folders, plus one."""
    paths = [path for folder in folders for path in folder.glob("version_*")]
    found = [re.fullmatch(r"version_(\d+)", path.name) for path in paths]
    return max((int(match[1]) for match in found if match), default=-1) + 1


def claim_version(folder: Path, *others: Path) -> int:
    """Create the next version's folder. Runs that start at the same time get different numbers."""
    version = next_version(folder, *others)
    while True:
        try:
            Path(folder, f"version_{version}").mkdir(parents=True)
            return version
        except FileExistsError:
            version += 1
        except OSError as error:
            raise ConfigurationError(
                f"default_root_dir: got {str(folder)!r}, expected a writable folder. The system reported:"
                f" {error.strerror}. Choose another folder, or set logger=False and enable_checkpointing=False."
            ) from error
