"""Ready: a loader as a run needs it, and advice on it; where it draws other samples than it was given for, see sharing.py."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import suggested_max_num_workers
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ..core.inputs import length_of
from ..core.passes import INFINITE
from ..core.ranks import share_of
from ..core.said import advise


def ready(loader: Any, fabric: Fabric, stage: str, overfit: bool = False, may_be_empty: bool = False) -> Any:
    """The loader as this rank uses it; the one that was given stays as it is.

    Under several processes each rank draws its own part of the samples. In training the parts are equally long, some
    samples come twice. In evaluation each sample comes once, so that sums over the ranks are right; the ranks' parts may
    differ by one sample, their numbers of batches only where a batch is a single sample. A loader with a
    DistributedSampler of its own keeps it.

    Only DataLoaders, and loaders with a method ``distribute`` (TensorLoader), are changed. ``overfit``: the same samples each
    time, unshuffled; ``may_be_empty``: a rank may have nothing where others have something.

    Raises:
        TypeError: for a batch sampler that cannot be made again around another sampler.
        RuntimeError: for a loader that is empty on this rank only.
    """
    parts, part = share_of(fabric)
    several = parts > 1
    if several and hasattr(loader, "distribute"):
        shuffled, loader = loader.shuffle and not overfit, copy.copy(loader)  # it may be given for another stage, too
        loader.distribute(parts, part, shuffled, repeat=stage == "train")
    if isinstance(loader, DataLoader):
        shuffled = _is_shuffled(loader)
        if stage != "train" and shuffled and not overfit:
            advise(
                fabric,
                f"Your `{stage}_dataloader`'s sampler has shuffling enabled, it is strongly recommended that you turn"
                " shuffling off for val/test dataloaders.",
            )
        if several or overfit or stage == "predict":
            from .sharing import drawing_otherwise

            loader = drawing_otherwise(loader, fabric, stage, overfit, shuffled)
        _check_workers(loader, fabric, stage)
        if loader.worker_init_fn is None and os.environ.get("PL_SEED_WORKERS") == "1":
            # what seed_everything(workers=True) asks for; setup_dataloaders sets it on the loader itself
            fabric.setup_dataloaders(loader, use_distributed_sampler=False, move_to_device=False)
    _check_length(loader, fabric, may_be_empty)
    return loader


def _check_workers(loader: DataLoader, fabric: Fabric, stage: str) -> None:
    """Advise on worker processes, where there are processors for them."""
    context = loader.multiprocessing_context
    spawns = (context or torch.multiprocessing).get_start_method() == "spawn"
    most = suggested_max_num_workers(len(getattr(fabric.strategy, "parallel_devices", None) or [0]))
    if loader.num_workers > 0 and spawns and not loader.persistent_workers:
        advise(
            fabric,
            f"Consider setting `persistent_workers=True` in '{stage}_dataloader' to speed up the dataloader worker"
            " initialization.",
        )
    elif loader.num_workers < 2 and most > 1:
        advise(
            fabric,
            f"The '{stage}_dataloader' does not have many workers which may be a bottleneck. Consider increasing the value"
            f" of the `num_workers` argument` to `num_workers={most}` in the `DataLoader` to improve performance.",
        )


def _check_length(loader: Any, fabric: Fabric, may_be_empty: bool) -> None:
    """Warn of nothing on all ranks, refuse nothing on this one, where the others would wait for it."""
    length, name = length_of(loader), type(loader).__name__
    if length == INFINITE:
        return
    total = fabric.all_reduce(torch.tensor(length, device=fabric.device), reduce_op="sum")
    if total == 0:
        advise(
            fabric,
            f"Total length of `{name}` across ranks is zero. Please make sure this was your intention.",
            UserWarning,
        )
    elif length == 0 and not may_be_empty:
        raise RuntimeError(
            f"`{name}` within local rank has zero length. Please make sure that it returns at least 1 batch."
        )
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        advise(
            fabric,
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when num_workers"
            " > 1), `__len__` could be inaccurate if each worker is not configured independently to avoid having duplicate"
            " data.",
            UserWarning,
        )


def _is_shuffled(loader: DataLoader) -> bool:
    """Whether a loader draws its samples in random order, as far as PyTorch's own samplers tell."""
    owner = loader.batch_sampler if loader.batch_sampler is not None else loader
    return isinstance(getattr(owner, "sampler", None), RandomSampler)
