"""Fingerprint: what a run is made of, in plain values; a resume compares it, see differences.py."""

from __future__ import annotations

import platform
from typing import Any

import torch
from lightning.fabric import __version__ as lightning_version

from .. import __version__
from ..core.inputs import length_of
from ..core.passes import INFINITE
from ..core.run import Run

VERSIONS = {
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "lightning": lightning_version,
    "fabric_template": __version__,
}


def fingerprint(run: Run) -> dict[str, Any]:
    """What the run is made of before callbacks change it: made once, as its optimizers are."""
    return {
        "accumulate_grad_batches": run.config.accumulate_grad_batches,
        "precision": str(run.fabric.strategy.precision.precision),
        "optimizers": [kin(optimizer) for optimizer in run.optimizing.optimizers],
        "schedulers": [type(config.scheduler).__name__ for config in run.optimizing.schedulers],
        "settings": settings_of(run),
        "processes": run.fabric.world_size,
        "versions": {name: ".".join(text.split(".")[:2]) for name, text in VERSIONS.items()},  # a third number mends
    }


def settings_of(run: Run) -> dict[str, str]:
    """The numbers and words that optimizers and schedulers are made with, which a resume takes from the file."""
    parts: list[tuple[Any, dict[str, Any]]] = []
    for optimizer in run.optimizing.optimizers:
        for index, group in enumerate(optimizer.param_groups):  # of which there may be hundreds
            own = {**group, "lr": group.get("initial_lr", group.get("lr")), "initial_lr": None}
            parts.append((optimizer, {key: own[key] for key in ("lr", "weight_decay") if key in own} if index else own))
    parts += [(config.scheduler, config.scheduler.state_dict()) for config in run.optimizing.schedulers]
    found: dict[str, str] = {}
    for number, (part, values) in enumerate(parts):
        name = kin(part)[0] + f" {number}" * any(type(part) is type(other) for other, _ in parts[:number])
        for key, value in values.items():
            value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(value, bool | int | float | str) or key == "betas":
                found[f"{name}.{key}"] = str(value)
    return found


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
