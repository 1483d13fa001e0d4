"""Write checkpoint files atomically, and verify them when they are read."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from pkgutil import resolve_name
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO

from ..errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError
from ..files import local_path, replaced_file

if TYPE_CHECKING:
    from lightning.fabric import Fabric

# Classes of hyperparameters, by module. weights_only=True may read them, because these classes
# only hold values and run no code.
_SAFE_NAMES = {
    "argparse": "Namespace",
    "builtins": "bool dict float int list str tuple",
    "collections": "defaultdict deque",
    "datetime": "timedelta",
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.dtypes": "Float32DType Float64DType Int32DType Int64DType BoolDType",
    "omegaconf": "dictconfig.DictConfig listconfig.ListConfig",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.nodes": "AnyNode IntegerNode FloatNode StringNode BooleanNode PathNode",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath",
    "typing": "Any",
}
SAFE_CLASSES = {f"{m}.{name}" for m, names in _SAFE_NAMES.items() for name in names.split()}


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint to a temporary file, syncs it to the disk, and renames it.

    Reading checks the CRC of every part, because ``torch.load`` does not notice a flipped bit.

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
            torch.save(checkpoint, file)

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
        weights_only: Refuse classes that could run code. Plain values, tensors and SAFE_CLASSES are read.

    Raises:
        MissingCheckpointError: There is no such file.
        DamagedCheckpointError: The file is damaged, or was not written by torch.save.
        CheckpointError: The file holds objects that weights_only refuses, or cannot be read.
    """
    path = Path(local_path(path))
    if path.is_dir():
        raise CheckpointError(f"path: got the folder {str(path)!r}, expected a checkpoint file.")
    classes: list[str] = []
    try:
        verify_checkpoint(path)
        if weights_only:
            classes = unusual_classes(path)
        safe: list[Any] = [(resolve_name(name), name) for name in classes if name in SAFE_CLASSES]
        with torch.serialization.safe_globals(safe):
            checkpoint = torch.load(path, map_location or "cpu", weights_only=weights_only)
    except FileNotFoundError as error:
        raise MissingCheckpointError(
            f"Checkpoint file not found: {path}. Check the path, or write 'last' or 'best'."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: the file could not be read: {error.strerror or error}. It may be undamaged."
            " Try again."
        ) from error
    except pickle.UnpicklingError as error:
        refused = ", ".join(name for name in classes if name not in SAFE_CLASSES)
        raise CheckpointError(
            f"{path}: the file holds objects that could run code ({refused or 'an old format'}). If you"
            " trust its source, pass weights_only=False."
        ) from error
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: the file cannot be read. {shorten(str(error), 200)}"
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{path}: got a {type(checkpoint).__name__}, expected a dict. Save"
            " {'state_dict': model.state_dict()}."
        )
    return checkpoint


def unusual_classes(path: str | Path) -> list[str]:
    """List the classes that torch.load(weights_only=True) refuses to read from a file."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        # The file has an old format or is damaged. torch.load reports the error.
        return []


def verify_checkpoint(path: str | Path) -> None:
    """Check the CRC of every part of a checkpoint file.

    Raises:
        DamagedCheckpointError: The file is not from torch.save, or a CRC does not match.
    """
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:1] == b"\x80":
        # Versions of torch before 1.6 wrote pickles, which have no checksums.
        return
    if start != b"PK\x03\x04":
        given = f"a file that starts with {start!r}" if start else "an empty file"
        raise DamagedCheckpointError(f"{path}: got {given}, expected a file written by torch.save.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise DamagedCheckpointError(f"{path}: the file is damaged. {error}") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"{path}: the file is damaged, in {damaged}.")
