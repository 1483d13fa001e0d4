"""Merged: the hyperparameters of a module and its datamodule, which are logged together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .build import Plan


def check_hyperparameters(plan: Plan) -> None:
    """The module's and the datamodule's are logged together: a name that both have has one value."""
    parts = [part for part in (plan.trained.owner, plan.trained.datamodule) if getattr(part, "_log_hyperparams", False)]
    if len(parts) < 2:
        return
    ours, theirs = (dict(part.hparams_initial) for part in parts)
    both = (name for name in ours if name in theirs and name != "_class_path")  # LightningCLI's own
    if different := [name for name in both if not _are_equal(ours[name], theirs[name])]:
        raise RuntimeError(
            f"Error while merging hparams: the keys {different} are present in both the LightningModule's and"
            " LightningDataModule's hparams but have different values: rename them, or write"
            " save_hyperparameters(logger=False) in one of the two"
        )


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))
