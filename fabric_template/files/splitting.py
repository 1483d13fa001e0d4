"""Splitting: a checkpoint in one file as pieces for so many ranks, without a run; what a sharded save would have left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .disk import fsync_folder
from .errors import CheckpointError, cause_of
from .ordinary import SHARDS
from .shards import ELSEWHERE, make_fresh, put, remove, shares, write_piece


def split(checkpoint: dict[str, Any], beside: Path, ranks: int) -> dict[str, Any]:
    """What a small file in this folder is to hold, once the pieces are on the disk; the checkpoint is changed into it.

    Weights, and what optimizers hold of each, are cut along their first dimension, as FSDP2 cuts them: each of so many ranks
    finds its part in one piece.

    Raises:
        CheckpointError: nothing is left of it.
    """
    found = list(_tensors(checkpoint))
    cut = [shares(tensor, ranks) for _, tensor in found]
    entries: list[dict[str, Any]] = [
        {"at": way, "dtype": str(tensor.dtype).removeprefix("torch."), "size": list(tensor.shape), "chunks": []}
        for way, tensor in found
    ]
    pieces, folder = {}, make_fresh(beside, int(checkpoint.get("global_step", 0)), clears=False)
    try:
        for rank in range(ranks):
            name, parts = f"__{rank}_0.distcp", [parts[rank] for _, parts in cut]
            ends, crc = write_piece(folder / name, parts)
            pieces[name] = [ends[-1] if ends else 0, crc]
            for entry, (dim, all_parts), part, begin in zip(entries, cut, parts, [0, *ends], strict=False):
                offsets = [0] * part.dim()
                offsets[dim] = sum(before.shape[dim] for before in all_parts[:rank])
                entry["chunks"].append([name, begin, part.nbytes, offsets, list(part.shape)])
        fsync_folder(folder)
    except BaseException as error:
        remove(folder)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"could not write '{folder}': {cause_of(error)}; nothing is left of it") from error
    for way, _ in found:
        put(checkpoint, way, ELSEWHERE)
    return {**checkpoint, SHARDS: {"folder": folder.name, "pieces": pieces, "tensors": entries}}


def _tensors(checkpoint: dict[str, Any]) -> Iterator[tuple[list[Any], Tensor]]:
    """The plain tensors of weights and optimizers, and the ways to them; numbers stay where they are."""
    left: list[tuple[list[Any], Any]] = [
        ([key], checkpoint[key]) for key in ("optimizer_states", "state_dict") if key in checkpoint
    ]
    while left:
        way, item = left.pop()
        if type(item) is Tensor and item.layout is torch.strided and item.dim():
            yield way, item
        elif isinstance(item, dict | list):
            inside = list(item.items() if isinstance(item, dict) else enumerate(item))
            left += [([*way, key], value) for key, value in reversed(inside)]
