"""Alike: whether the ranks have the same weights and moments, as DDP means them to, asked at each save.

Imported only under DDP. A checkpoint has rank zero's, or a part of each rank's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .ranks import gather
from .run import Run

SAMPLES = 16  # elements of each tensor that are compared
WHY = "DDP keeps them alike; local SGD, some communication hooks and a backward beside DDP do not"


def gathered(run: Run, part: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank gives to a checkpoint; where ranks have other weights than rank zero that is noted, and said once."""
    found = gather(run.fabric, (_sample(run), part))
    others = [rank for rank, (sample, _) in enumerate(found) if sample != found[0][0]]
    if run.steps.buckets is not None:
        run.steps.buckets.parted = others
    if others and run.fabric.is_global_zero:
        run.said.warn(
            f"rank {others[0]} has other weights or moments than rank 0, whose checkpoints hold: after a resume all ranks have"
            f" rank 0's, and go on with other numbers than without it ({WHY})"
        )
    return [part for _, part in found]


def _sample(run: Run) -> int:
    """A checksum of some elements of all that the ranks should have alike: read once from each device, of each dtype."""
    pieces: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in _tensors(run):
        flat = tensor.detach().flatten()[:: max(tensor.numel() // SAMPLES, 1)]
        pieces.setdefault((tensor.device, tensor.dtype), []).append(flat.contiguous())
    crc = 0
    for parts in pieces.values():
        # stacked before they are bytes: one element may have any stride, and calls itself contiguous
        crc = zlib.crc32(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes(), crc)
    return crc


def _tensors(run: Run) -> Iterator[Tensor]:
    ddp: Any = run.steps.ddp
    whole = [one for one in run.optimizing.optimizers if not hasattr(one, "consolidate_state_dict")]
    for name, parameter in ddp.module.named_parameters():
        if name in ddp.parameters_to_ignore:
            continue
        states = [state for one in whole if isinstance(state := one.state.get(parameter), Mapping)]
        for value in (parameter, *(value for state in states for value in state.values())):
            is_plain = isinstance(value, Tensor) and value.layout is torch.strided
            # not of a class of its own (moments in 8 bits), which need not be able to give single elements
            if is_plain and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and value.numel():
                yield value
