"""Convert: a checkpoint that lies in pieces as one file, in Lightning's layout, and one file as pieces, as it is typed."""

from __future__ import annotations

from pathlib import Path

from ..files.errors import CheckpointError
from ..files.opening import is_file
from ..files.ordinary import SHARDS
from ..files.plain import brought_back
from ..files.reading import looking_at, read_checkpoint, verify_checkpoint
from ..files.shards import check_file, remove, whole
from ..files.storage import AtomicCheckpointIO
from .errors import UsageError

HELP = {"help": "a checkpoint; the folder of pieces that it names lies beside it"}


def convert(path: Path, out: Path | None, trusted: bool = False, pieces: int | None = None) -> Path:
    """Write the file, whole, and read it back; returns where it is.

    Args:
        path: a checkpoint; to be one file it lies in pieces.
        out: the new one; by default in the folder where this is typed.
        trusted: also where it holds more than plain values.
        pieces: write so many, for so many ranks; None: one file.

    Raises:
        UsageError: for a checkpoint that is one file already, and where there is a file of the new one's name.
    """
    checkpoint = read_checkpoint(path, trusted=trusted, mapped=True)
    if pieces is None and SHARDS not in checkpoint:
        raise UsageError(
            f"convert {path}: it is one file already, which every run reads; type --pieces 4 for four pieces"
        )
    if pieces is not None and pieces < 1:
        raise UsageError(f"convert {path}: --pieces {pieces}: expected a number of ranks >= 1")
    target = out or Path(f"{path.stem}-{'whole' if pieces is None else 'pieces'}.ckpt")
    if is_file(target):
        raise UsageError(f"convert {path}: there is a '{target}' already: type --out with another name")
    files, made = AtomicCheckpointIO(trusted), whole(brought_back(checkpoint), path)
    if pieces is not None:
        from ..files.splitting import split

        with looking_at(path):
            made = split(made, target.parent, pieces)
    try:
        with looking_at(path):
            files.save_checkpoint(made, target)
    except BaseException:
        if is_file(target):  # there was none before
            files.remove_checkpoint(target)
        if pieces is not None:
            remove(target.parent / made[SHARDS]["folder"])
        raise
    if (problem := files.complaint(target, reads=True)) is not None:
        raise CheckpointError(problem)
    verify_checkpoint(target)
    check_file(target)
    return target
