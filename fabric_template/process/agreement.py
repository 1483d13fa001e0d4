"""Agreement: how many ranks there are, who has started them, and that all of them go on from one checkpoint."""

from __future__ import annotations

import os
import socket
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from ..core.ranks import gather
from ..files.opening import CheckpointError
from ..files.reading import load_header


def come_by_themselves(fabric: Fabric) -> bool:
    """Whether somebody else starts the ranks (torchrun, fabric run, SLURM), so that they meet only when they are launched."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    return bool(getattr(environment, "creates_processes_externally", False))


def check_number(fabric: Fabric, path: str | Path, ours: Mapping[str, Any]) -> None:
    """Refuse another number of processes in the middle of an epoch; between two the fingerprint's line says what is other."""
    were = len(ours.get("ranks", ()))
    # those that there are, or will be once they are launched
    now = getattr(fabric.strategy, "num_processes", 1) * getattr(fabric.strategy, "num_nodes", 1)
    if were in (0, now) or not ours.get("batch_idx"):
        return
    raise CheckpointError(
        f"resume: '{path}' is of a run with {were} process{'es' * (were > 1)}, this one has {now}, and it is from the middle of"
        f" an epoch, after {ours['batch_idx']} batches, where each process goes on with its own samples: give {were}"
        f" (devices={were}), or resume= with a checkpoint from an epoch's end, or load= to start a new run from the weights"
    )


def from_rank_zero(fabric: Fabric, find: Callable[[], Any]) -> Any:
    """What rank zero finds, on all ranks; an error there is one on all, and nobody waits."""
    found = error = None
    if fabric.is_global_zero:
        try:
            found = find()
        except CheckpointError as caught:
            error = caught
    found, error = fabric.broadcast((found, error))
    if error is not None:
        raise error
    return found


def agree_on_file(fabric: Fabric, find: Callable[[], Any]) -> None:
    """Let each rank find its checkpoint, and compare what they have found: without a shared disk one name may be two files."""
    error = None
    try:
        found = _describe(find())
    except Exception as caught:
        found, error = str(caught).rstrip("."), caught
    all_found = gather(fabric, (found, socket.gethostname()))
    if len({found for found, _ in all_found}) > 1:
        first: dict[str, str] = {}
        for rank, (found, host) in enumerate(all_found):
            first.setdefault(found, f"rank {rank} (on {host}): {found}")
        raise CheckpointError(
            f"the ranks have not found the same checkpoint: {'; '.join(first.values())}: write default_root_dir= (or the path)"
            " with a folder that all of them share, or copy the file of one to the others"
        ) from error
    if error is not None:
        raise error


def _describe(path: str | Path | None) -> str:
    """A file by its size, its step and its checksum, for a torch file that of the checksums in its directory."""
    if path is None or not os.path.isfile(path):
        return "none" if path is None else f"'{path}'"  # a CheckpointIO plugin may read what is no file
    crc, step = 0, "unknown"
    with open(path, "rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                crc = zlib.crc32(repr([(part.filename, part.CRC) for part in archive.infolist()]).encode())
        else:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    with suppress(CheckpointError):
        step = load_header(path).get("global_step", step)
    return f"'{path}' of {os.path.getsize(path):,} bytes, step {step}, checksum {crc:08x}"
