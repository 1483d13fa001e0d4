"""Redundancy: optimizers that keep a part of their state on each rank, where the loop cannot step them.

Imported only where there is one.
"""

from __future__ import annotations

from typing import Any

from .errors import Misuse


def check_redundancy(optimizer: Any) -> None:
    """Refuse a ZeroRedundancyOptimizer where its steps train nothing, or cannot be taken."""
    kind = type(optimizer).__name__
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise Misuse(
            f"{kind}(overlap_with_ddp=True): a hook of DDP's trains then, and the steps that the loop takes do nothing: leave"
            " overlap_with_ddp out"
        )
    if any(hasattr(parameter, "to_local") for group in optimizer.param_groups for parameter in group["params"]):
        raise Misuse(
            f"{kind} with strategy=ModelParallelStrategy(...), whose ranks have their part of each moment already: write the"
            " optimizer itself, such as torch.optim.Adam(model.parameters())"
        )
