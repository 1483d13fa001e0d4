"""Transfer: what brings a batch to its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor


def make_transfer(fabric: Fabric, convert: Callable | None, hooks: list[Callable | None]) -> Callable | None:
    """What brings a batch to its device: precision, ``on_before_batch_transfer``, the move, ``on_after_batch_transfer``.

    None when there is nothing to do.
    """
    before, move, after = hooks
    device = fabric.device

    moves_only = convert is None and before is None and move is None and after is None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if moves_only and type(batch) is tuple and all(type(x) is Tensor and x.device == device for x in batch):
            return batch  # a TensorLoader's: to look for what there is to move costs as much as a launch
        if convert is not None:
            batch = convert(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = move(batch, device, dataloader_idx) if move is not None else fabric.to_device(batch)
        return after(batch, dataloader_idx) if after is not None else batch

    needless = device.type == "cpu" and moves_only
    return None if needless else transfer
