"""Ranks: what the processes of one run tell each other, and what they have to have in common while they train."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device

from .errors import Misuse
from .passes import INFINITE


def is_joined() -> bool:
    """Whether this process has met the others, or is in a group of its own."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def share_of(fabric: Fabric) -> tuple[int, int]:
    """Into how many parts the samples are shared, and which part is this rank's; under tensor parallelism several have one."""
    if fabric.world_size == 1:
        return 1, 0
    words = fabric.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    return words["num_replicas"], words["rank"]


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """One value of each rank, on all ranks."""
    if fabric.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(gathered, move_data_to_device(value, "cpu"))
    return gathered


def check_lengths(fabric: Fabric, stage: str, lengths: list[int | float], why: str, counted: bool = True) -> bool:
    """Refuse loaders of which one rank has more batches than another: the one would wait for the other, until a timeout.

    Returns:
        Whether the lengths can be relied on; ``counted``: whether this rank's can.
    """
    ranks = gather(fabric, (sum(lengths), counted))
    found = [length for length, _ in ranks]
    if max(found) != min(found) and max(found) != INFINITE:
        told = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(found))
        raise Misuse(
            f"the ranks have {stage} loaders of different length ({told} batches): those with more would wait {why} for ever;"
            f" give each as many, write limit_{stage}_batches={min(found)}, or leave the sampler out: the loop shares the"
            " samples itself"
        )
    return max(found) != INFINITE and all(is_counted for _, is_counted in ranks)
