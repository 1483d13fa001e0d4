"""Write checkpoint files atomically, and verify them when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO

from ..errors import CheckpointError, MissingCheckpointError
from ..files import local_path, replaced_file
from .numpy_values import replace_numpy, restore_numpy
from .reader import is_placeholder, kind_of, read_archive

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint to a temporary file, syncs it to the disk, and renames it.

    Reading runs no code of the file, and checks the CRC of every entry.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp(), "last.ckpt")
        >>> AtomicCheckpointIO().save_checkpoint({"epoch": 1}, path)
        >>> AtomicCheckpointIO().load_checkpoint(path)
        {'epoch': 1}
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not"
                f" supported for `{type(self).__name__}`."
            )
        with replaced_file(Path(local_path(path))) as file:
            torch.save(replace_numpy(checkpoint), file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path, weights_only is not False, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def find_checkpoint_io(fabric: Fabric) -> CheckpointIO:
    """Return the CheckpointIO among Fabric's plugins, or an AtomicCheckpointIO."""
    try:
        given = fabric.strategy.checkpoint_io
    except NotImplementedError:
        # Strategies that shard a model have no CheckpointIO.
        return AtomicCheckpointIO()
    while hasattr(given, "checkpoint_io"):
        # AsyncCheckpointIO returns before the file is complete, so use the wrapped CheckpointIO.
        given = given.checkpoint_io
    is_default = given is None or type(given) is TorchCheckpointIO
    return AtomicCheckpointIO() if is_default else given


def read_checkpoint(
    path: str | Path, weights_only: bool = True, map_location: Any = None
) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        weights_only: Run no code of the file. Reading a part of the checkpoint raises an error if the
            part holds other objects than plain values and tensors. False: read with ``torch.load``.

    Raises:
        MissingCheckpointError: There is no such file.
        DamagedCheckpointError: The file is damaged, or was not written by torch.save.
        CheckpointError: The file cannot be read, or is not a checkpoint.
    """
    path = Path(local_path(path))
    if path.is_dir():
        raise CheckpointError(f"path: got the folder {str(path)!r}, expected a checkpoint file.")
    try:
        checkpoint = read_archive(path, map_location, is_trusted=not weights_only)
    except FileNotFoundError as error:
        raise MissingCheckpointError(
            f"Checkpoint file not found: {path}. Check the path, or write 'last' or 'best'."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: the file could not be read: {error.strerror or error}. It may be undamaged."
            " Try again."
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{path}: got {describe_content(checkpoint)}, expected a dict. Save"
            " {'state_dict': model.state_dict()}."
        )
    return restore_numpy(checkpoint)


def describe_content(content: Any) -> str:
    if is_placeholder(content):
        return f"an object of {kind_of(content).__name__}"
    return f"a {type(content).__name__}"
