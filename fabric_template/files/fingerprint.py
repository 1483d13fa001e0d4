"""Fingerprint: what a run is made of, in plain values; what is other at a resume is named, in one line."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric import __version__ as lightning_version

from .. import __version__
from ..core.inputs import length_of
from ..core.passes import INFINITE
from ..core.run import Run
from .opening import CheckpointError

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
        "optimizers": [_kin(optimizer) for optimizer in run.optimizing.optimizers],
        "schedulers": [type(config.scheduler).__name__ for config in run.optimizing.schedulers],
        "settings": settings_of(run),
        "processes": run.fabric.world_size,
        "versions": {name: ".".join(text.split(".")[:2]) for name, text in VERSIONS.items()},  # a third number mends
    }


def tell_differences(run: Run, now: Mapping[str, Any]) -> None:
    """Name in one line what is other than in the run that goes on."""
    before = (run.origin.pending or {}).get("fingerprint")
    if not isinstance(before, Mapping) or not run.fabric.is_global_zero:
        return
    if kept := differences(now["settings"], before.get("settings")):
        run.said.warn(
            f"resume: in the code, and otherwise in the run that goes on: {'; '.join(kept)}. It goes on with what it was; to"
            " change that, set it in on_train_start (for group in loop.optimizers[0].param_groups: group['lr'] = 0.01), or"
            " write load= in the place of resume= to start a new run from the weights"
        )
    if found := differences({name: part for name, part in now.items() if name != "settings"}, before):
        run.said.warn(
            f"resume: other than in the run that goes on: {'; '.join(found)}. It goes on with what it has now, and not with"
            " the numbers that it would have had"
        )


def settings_of(run: Run) -> dict[str, str]:
    """The numbers and words that optimizers and schedulers are made with, which a resume takes from the file."""
    parts: list[tuple[Any, dict[str, Any]]] = []
    for optimizer in run.optimizing.optimizers:
        for index, group in enumerate(optimizer.param_groups):
            own = {**group, "lr": group.get("initial_lr", group.get("lr")), "initial_lr": None}
            rates = {key: own[key] for key in ("lr", "weight_decay") if key in own}
            parts.append((optimizer, rates if index else own))  # of groups there may be hundreds
    parts += [(config.scheduler, config.scheduler.state_dict()) for config in run.optimizing.schedulers]
    found: dict[str, str] = {}
    for number, (part, values) in enumerate(parts):
        name = type(part).__name__ + f" {number}" * any(type(part) is type(other) for other, _ in parts[:number])
        for key, value in values.items():
            value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(value, bool | int | float | str) or key == "betas":
                found[f"{name}.{key}"] = str(value)
    return found


def of_data(run: Run) -> dict[str, Any]:
    """The part about the training data, as the first pass begins; nothing where loaders are made anew each epoch."""
    if run.config.reload_dataloaders_every_n_epochs:
        return {}
    batches = run.at.num_batches
    return {
        "batches": None if batches == INFINITE else batches,
        "data": [_data(part) for part in run.data.train.loaders],
    }


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


def differences(now: Mapping[str, Any], before: Any) -> list[str]:
    """What is other now, in words; what only one of them knows is no difference.

    Example:
        >>> differences({"batches": 6, "versions": {"torch": "2.9"}}, {"batches": 5, "versions": {"torch": "2.8"}})
        ['batches 6 (was 5)', 'torch 2.9 (was 2.8)']
    """
    if not isinstance(before, Mapping):
        return []
    told: list[str] = []
    for name, value in now.items():
        other = before.get(name, value)
        if isinstance(value, Mapping):
            told += differences(value, other)
        elif value and isinstance(value, list) and isinstance(value[0], Mapping) and isinstance(other, list):
            told += [f"{len(value)} loaders (were {len(other)})"] * (len(value) != len(other))
            told += [text for one, two in zip(value, other, strict=False) for text in differences(one, two)]
        elif value != other and None not in (value, other):
            told.append(f"{name} {_words(value)} (was {_words(other)})")
    return told


def check_optimizers(run: Run, before: Any) -> None:
    """Refuse the states of optimizers of another kind; a renamed or derived class takes them."""
    before = before.get("optimizers", ()) if isinstance(before, Mapping) else ()
    for optimizer, kin in zip(run.optimizing.optimizers, before, strict=False):
        own = _kin(optimizer)
        if own and kin and not set(own) & set(kin):
            raise _another(run, f"the optimizer {kin[0]}, this one has {own[0]}", kin[0])


def check_loaded(run: Run, optimizer: Any) -> None:
    """The same, once its state is loaded, for a file that says nothing of its optimizers."""
    for group in optimizer.param_groups:
        told = getattr(optimizer, "defaults", {}).keys() - {"differentiable"}  # torch adds it to those that lack it
        if missing := sorted(told - group.keys()):
            what = f"another optimizer than {type(optimizer).__name__} (no {', '.join(missing)} in it)"
            raise _another(run, what, "that one")


def _another(run: Run, what: str, instead: str) -> CheckpointError:
    return CheckpointError(
        f"resume={str(run.origin.resume_path)!r}: the file is of a run with {what}: go on with {instead}, or write load= in the"
        " place of resume= to start a new run from the weights"
    )


def _kin(optimizer: Any) -> list[str]:
    """An optimizer's class and those that it is derived from."""
    return [base.__name__ for base in type(optimizer).__mro__ if base not in (torch.optim.Optimizer, object)]


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(item[0] if isinstance(item, list) else str(item) for item in value) or "none"
    return str(value)
