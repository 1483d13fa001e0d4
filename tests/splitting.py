"""Write a checkpoint that is one file as pieces for several ranks, as a sharded save writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fabric_template.files.ordinary import SHARDS
from fabric_template.files.shards import ELSEWHERE, make_fresh, put, shares, write_piece
from torch import Tensor

from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO


def split_file(source: Path, target: Path, ranks: int) -> None:
    """Write the pieces into a folder beside `target`, and `target`, the small file that names them."""
    checkpoint = torch.load(source, weights_only=True)
    found = list(_tensors(checkpoint))
    cut = [shares(tensor, ranks) for _, tensor in found]
    entries: list[dict[str, Any]] = [
        {"at": way, "dtype": str(tensor.dtype).removeprefix("torch."), "size": list(tensor.shape), "chunks": []}
        for way, tensor in found
    ]
    pieces, folder = {}, make_fresh(target.parent, int(checkpoint.get("global_step", 0)))
    for rank in range(ranks):
        name, parts = f"__{rank}_0.distcp", [parts[rank] for _, parts in cut]
        ends, crc = write_piece(folder / name, parts)
        pieces[name] = [ends[-1] if ends else 0, crc]
        for entry, (dim, all_parts), part, begin in zip(entries, cut, parts, [0, *ends], strict=False):
            offsets = [0] * part.dim()
            offsets[dim] = sum(before.shape[dim] for before in all_parts[:rank])
            entry["chunks"].append([name, begin, part.nbytes, offsets, list(part.shape)])
    for way, _ in found:
        put(checkpoint, way, ELSEWHERE)
    checkpoint[SHARDS] = {"folder": folder.name, "pieces": pieces, "tensors": entries}
    AtomicCheckpointIO().save_checkpoint(checkpoint, target)


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
