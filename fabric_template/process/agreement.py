"""Agreement: that all ranks go on from one checkpoint, or end together."""

from __future__ import annotations

import os
import socket
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from ..core.ranks import gather
from ..files.errors import CheckpointError
from ..files.reading import load_header


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
