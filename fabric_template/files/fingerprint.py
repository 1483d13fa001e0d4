"""Fingerprint: what a run is made of, in plain values; a resume compares it, see differences.py."""

from __future__ import annotations

from typing import Any

import torch

from ..core.inputs import length_of
from ..core.passes import INFINITE
from ..core.run import Run


def fingerprint(run: Run) -> dict[str, Any]:
    """Return the classes of the optimizers and the number of processes, which a resume compares."""
    return {
        "optimizers": [kin(optimizer) for optimizer in run.optimizing.optimizers],
        "processes": run.fabric.world_size,
    }


def of_data(run: Run) -> dict[str, Any]:
    """The part about the training data, as the first pass begins; nothing where loaders are made anew each epoch."""
    if run.config.reload_dataloaders_every_n_epochs:
        return {}
    batches = None if run.at.num_batches == INFINITE else run.at.num_batches
    return {"batches": batches, "data": [_data(part) for part in run.data.train.loaders]}


def _data(loader: Any) -> dict[str, Any]:
    dataset, batch_sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    samples = INFINITE if dataset is None else length_of(dataset)
    if (tensors := getattr(loader, "tensors", None)) is not None:
        samples = len(tensors[0])
    sizes = getattr(loader, "batch_size", None), getattr(batch_sampler, "batch_size", None)
    parts = [part for part in (dataset, getattr(loader, "sampler", None)) if part is not None]
    return {
        "loader": f"{type(loader).__name__}({', '.join(type(part).__name__ for part in parts)})",
        "samples": None if samples == INFINITE else samples,
        "batch_size": next((size for size in sizes if isinstance(size, int)), None),
    }


def kin(optimizer: Any) -> list[str]:
    """An optimizer's class and those that it is derived from."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer = optimizer.optim  # whose states it shares out
    return [base.__name__ for base in type(optimizer).__mro__ if base not in (torch.optim.Optimizer, object)]
