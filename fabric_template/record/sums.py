"""Sums: those of an epoch in whose middle a checkpoint was saved, taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from .asked import Meta
from .entries import Entry


def load_sums(metrics: Any, state: Mapping[str, Any], device: torch.device) -> None:
    """Go on from these sums, and show again what was logged last."""
    parts: dict[str, Any] = {}
    if (objects := metrics._objects()) is not None:
        objects.load_state_dict(state["objects"], device)
        parts = objects.parts()
    state = move_data_to_device({**state, "objects": None}, device)
    for name in state.get("resets", ()):
        if name in parts:
            parts[name].reset()
    for part in state["train"]:
        meta = Meta(**part["meta"])
        meta.sync_dist &= metrics._distributed  # the run may have had more processes
        entry = Entry(meta, (), metrics._all_reduce, metrics.train.together)
        entry.total, entry.weight, entry.step_value = part["total"], part["weight"], part["step_value"]
        entry.metric, entry.live = parts.get(part["object"]), True
        metrics.train[(meta.fx, meta.name, meta.dataloader_idx if meta.suffix else None)] = entry
        metrics.train.any_on_step |= meta.on_step
    metrics.callback, metrics.row = dict(state["callback"]), dict(state["row"])
    metrics._in_batches, metrics._last_fx = state["in_batches"], state["last_fx"]
