"""Convert: one file of a checkpoint that lies in pieces, in Lightning's layout, as it is typed."""

from __future__ import annotations

from pathlib import Path

from ..files.errors import CheckpointError
from ..files.opening import is_file
from ..files.ordinary import SHARDS
from ..files.plain import brought_back
from ..files.reading import read_checkpoint, verify_checkpoint
from ..files.shards import whole
from ..files.storage import AtomicCheckpointIO
from .errors import UsageError

HELP = {"help": "a checkpoint in pieces: last.ckpt, best.ckpt; its folder of pieces lies beside it"}


def convert(path: Path, out: Path | None, trusted: bool = False) -> Path:
    """Write the file, whole, and read it back; returns where it is.

    Raises:
        UsageError: for a checkpoint that is one file already, and where there is a file of the new one's name.
    """
    checkpoint = read_checkpoint(path, trusted=trusted)
    if SHARDS not in checkpoint:
        raise UsageError(f"convert {path}: it is one file already, which every run reads, a sharded one too")
    target = out or Path(f"{path.stem}-whole.ckpt")
    if is_file(target):
        raise UsageError(f"convert {path}: there is a '{target}' already: type --out with another name")
    files = AtomicCheckpointIO(trusted)
    files.save_checkpoint(whole(brought_back(checkpoint), path), target)
    if (problem := files.complaint(target, reads=True)) is not None:
        raise CheckpointError(problem)
    verify_checkpoint(target)
    return target
