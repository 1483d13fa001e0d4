"""Disk: every touch of it by a write, in one place; whole files put in place of old ones.

A leaf: the standard library only.
"""

import contextlib
import errno
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _call_of_os(name: str) -> Callable[..., Any]:
    """A function of the os module, looked up when it is called: one that stands in for it then is called, too."""
    return lambda *args: getattr(os, name)(*args)


# Checkpoints, logs and hparams.yaml write through nothing else: a test replaces these one by one to make the disk fail.
fs = types.SimpleNamespace(free=lambda folder: shutil.disk_usage(folder).free)
for _name in ("open", "write", "fsync", "close", "replace", "unlink", "mkdir"):
    setattr(fs, _name, _call_of_os(_name))

# flags that not every system has
BINARY, NOT_A_LINK = getattr(os, "O_BINARY", 0), getattr(os, "O_NOFOLLOW", 0)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything: one call may be short, and is so above 2 GiB."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[fs.write(fd, rest) :]


def replace_file(path: str | Path, data: bytes) -> None:
    """Put a whole file in place of the old one: a reader sees either, never half of one.

    Example:
        >>> replace_file("demo.yaml", b"lr: 0.1")
        >>> Path("demo.yaml").read_text()
        'lr: 0.1'
    """
    temporary = f"{path}.tmp"
    try:
        fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
        try:
            write_all(fd, data)
            fs.fsync(fd)
        finally:
            fs.close(fd)
        fs.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # the new name is safe once the folder is; not every system can open one
        fsync_folder(Path(path).parent)


def set_aside(path: str | Path, word: str) -> Path:
    """Give a file another name, one that is free: nothing is deleted.

    Example:
        >>> _ = Path("demo.csv").write_text("a")
        >>> set_aside("demo.csv", "before").name
        'demo.csv.before'
    """
    number = 0
    with contextlib.suppress(FileNotFoundError):  # not exists(): what cannot be looked at is not free
        while os.lstat(target := Path(f"{path}.{word}{'' if not number else f'-{number}'}")):
            number += 1
    fs.replace(path, target)
    return target


def make_folder(folder: Path, is_new: bool = False) -> None:
    """Make a folder and its parents, their names safe from a power cut.

    Raises:
        FileExistsError: with ``is_new``, if the folder is there already, or somebody else was faster.
    """
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for new in reversed(missing or [folder] * is_new):
        try:
            fs.mkdir(new)
        except FileExistsError:  # another rank was faster
            if is_new and new == folder:
                raise
        fsync_folder(new.parent)


def fsync_folder(folder: Path) -> None:
    """Make names in the folder survive a power cut; some network file systems know no such thing (EINVAL)."""
    if os.name == "nt":
        return
    fd = fs.open(folder, os.O_RDONLY)
    try:
        fs.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        fs.close(fd)
