"""Storage: checkpoint files are written whole, or not at all."""

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy

from .disk import clear_stale, fsync_folder, make_folder, replacing, write_all
from .disk import fs as _fs
from .errors import CheckpointError, DamagedError, UnreadableError, cause_of, local_path
from .ordinary import NOTES, SMALL, ordinary_bytes

BUFFER = 2**20  # bytes: torch writes a small file in hundreds of pieces


class UnsyncedError(CheckpointError):
    """The file is complete under its name, but the name may not survive a power cut."""


class AtomicCheckpointIO(CheckpointIO):
    """Fabric's door to files: a save is either complete under its name, or has not happened.

    Example:
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu", plugins=[AtomicCheckpointIO()])
        >>> fabric.save("demo/last.ckpt", {"epoch": 3})
        >>> fabric.load("demo/last.ckpt")
        {'epoch': 3}
        >>> AtomicCheckpointIO().remove_checkpoint("demo/last.ckpt")
    """

    def __init__(self, trusted: bool = False, in_run: bool = False, behind: bool = False) -> None:
        self.is_proved = False  # what this run has saved is known to be readable
        self._is_sure = False  # so is the last file, by the kinds of its values
        self.behind = behind  # pieces are written by a thread, see background.py
        self.in_run = in_run  # then whoever saves says what `odd` holds
        self.trusted = trusted  # then what is no plain value is pickled as it is
        self.odd: list[tuple[str, Any]] = []  # what the last file holds that only trusted=True reads, and where
        self._tidied: set[Path] = set()  # folders in which nothing of killed processes is left

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write beside the target, fsync, rename. What fails leaves the old file and nothing else."""
        if storage_options is not None:
            raise TypeError(
                "AtomicCheckpointIO has no storage_options: leave them out, or give Fabric another CheckpointIO."
            )
        size, self.odd = ordinary_bytes(checkpoint), []
        if size is None and not self.trusted:
            from .plain import store

            plain, notes, self.odd = store(checkpoint)
            if self.in_run or not self.odd:
                checkpoint = {**plain, NOTES: notes} if notes else plain
            size = ordinary_bytes(checkpoint)
        self._is_sure = size is not None and size < SMALL
        target = local_path(path)
        if os.path.exists(target) and not os.path.isfile(target):  # a rename would take the place of a device, too
            what = "a folder has this name" if os.path.isdir(target) else "it is no regular file"
            raise CheckpointError(f"could not save '{target}': {what}. Give the path of a file.")
        try:
            make_folder(target.parent)
            with replacing(target) as fd:
                stream = Stream(fd)
                # straight to the file: no second copy of the model in memory; torch asks for no more than write and flush
                torch.save(checkpoint, stream)  # type: ignore[arg-type]
                stream.flush()
                if stream.error is not None:
                    raise stream.error
        except BaseException as error:
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise  # Ctrl-C stays Ctrl-C
            kept = "the old file is unchanged" if os.path.isfile(target) else "nothing was written"
            raise CheckpointError(
                f"could not save '{target}': {cause_of(error)}; {kept}. Mend that, or save to another folder."
            ) from error
        try:
            fsync_folder(target.parent)
        except OSError as error:
            raise UnsyncedError(
                f"saved '{target}', but its folder could not be synced: {cause_of(error)}; "
                "the file may not survive a power cut. Save again, or to another disk."
            ) from error
        if not self.in_run:
            clear_stale(target.parent, target.name)
        elif target.parent not in self._tidied:  # once, else each save is dearer than the one before where all are kept
            self._tidied.add(target.parent)
            clear_stale(target.parent)

    def complaint(self, path: str | Path, reads: bool = False) -> str | None:
        """What the last file holds that only trusted=True reads back, and what to save in its place."""
        told = None
        if self.odd:
            from .plain import describe

            where, value = self.odd[0]
            more = f", and {len(self.odd) - 1} more such values" if len(self.odd) > 1 else ""
            told = (
                f"{where} is {describe(value)}{more}: save plain values in its place, or write"
                " torch.serialization.add_safe_globals([...]) with its class where the program begins, also before resuming"
            )
        elif reads and not (self._is_sure and zipfile.is_zipfile(path)):
            from .reading import load_header

            try:
                load_header(path)
            except (DamagedError, UnreadableError):
                raise
            except CheckpointError as error:
                told = str(error)
        return told and f"'{path}' is saved, but can be read back with FabricLoop(trusted=True) only: {told}"

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read without trusting the file, unless `weights_only=False` says that it is trusted."""
        from .plain import brought_back
        from .reading import read_checkpoint

        return brought_back(read_checkpoint(path, trusted=weights_only is False, map_location=map_location or "cpu"))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove one file; one that is gone already is no error."""
        target = local_path(path)
        try:
            with contextlib.suppress(FileNotFoundError):
                _fs.unlink(target)
        except OSError as error:
            raise CheckpointError(f"could not remove '{target}': {cause_of(error)}. Remove it by hand.") from error


def inside(folder: str | Path, path: str | Path) -> Path:
    """Return the resolved path, or raise if it leaves the folder, be it by `..`, absolutely or through a symbolic link.

    Example:
        >>> inside("demo", "last.ckpt") == Path("demo/last.ckpt").resolve()
        True
    """
    try:
        base = Path(folder).resolve()
        resolved = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise CheckpointError(
            f"{str(path)!r} is not a usable path: {cause_of(error)}. Give a plain file name."
        ) from error
    if not resolved.is_relative_to(base):
        raise CheckpointError(f"'{path}' leads out of '{base}' to '{resolved}': give a path inside the folder.")
    return resolved


def door(fabric: Fabric) -> CheckpointIO:
    """What checkpoint files are written and read by: the strategy's; of one that has none, ours beside it."""
    strategy: Any = fabric.strategy
    if isinstance(strategy, ModelParallelStrategy):
        return vars(strategy).setdefault("own_checkpoint_io", AtomicCheckpointIO(in_run=True))
    return strategy.checkpoint_io


class Stream:
    """What torch.save writes to: small pieces together, large ones straight to the file.

    It never raises: torch's C++ writer would replace the disk's error with its own.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.waiting = bytearray()
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        """Take this; it may reach the file later."""
        if len(self.waiting) + len(data) > BUFFER:
            self.flush()
        if len(data) < BUFFER:
            self.waiting += data
        else:
            self._write(data)
        return len(data)

    def flush(self) -> None:
        """What waits goes to the file."""
        self._write(self.waiting)
        self.waiting = bytearray()

    def _write(self, data: bytearray | memoryview) -> None:
        try:
            if self.error is None:
                write_all(self.fd, data)
        except BaseException as error:
            self.error = error
