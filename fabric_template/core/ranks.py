"""Ranks: what the processes of one run tell each other while they train."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device


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
