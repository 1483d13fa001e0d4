"""Give a DataLoader the sampler that a run needs, seed its workers, and warn of what is likely a mistake."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import suggested_max_num_workers
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from .distributed_samplers import (
    needs_shares,
    remake_batch_sampler,
    share_samples,
    share_tensors,
)

if TYPE_CHECKING:
    from ..training.run_state import RunState


def prepare_loader(run: RunState, loader: Any, stage: str) -> Any:
    """Return a loader with the sampler that this run needs."""
    has_shares = needs_shares(run, stage)
    if callable(getattr(loader, "for_rank", None)):
        return share_tensors(run, loader, stage) if has_shares else loader
    if not isinstance(loader, DataLoader):
        return loader
    warn_of_loader(run, loader, stage)
    if run.config.overfit_batches and run.stage == "fit":
        loader = _without_shuffling(run, loader, stage)
    prepare_workers(run, loader, stage)
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    is_distributed = isinstance(loader.sampler, DistributedSampler)
    if has_shares and is_map_style and not is_distributed:
        loader = with_sampler(loader, *share_samples(run, loader, stage))
    if stage == "predict" and is_map_style and loader.batch_sampler is not None:
        batch_sampler = loader.batch_sampler
        if type(batch_sampler) is BatchSampler:
            # As Trainer: no sample is dropped, and a BatchSampler of the user's own loses its order.
            batch_sampler = BatchSampler(loader.sampler, batch_sampler.batch_size, False)
        loader = with_batch_sampler(loader, TrackingBatchSampler(batch_sampler))
    return loader


def prepare_workers(run: RunState, loader: DataLoader, stage: str) -> None:
    """Seed the workers of a loader as Trainer does, and warn where there are few."""
    most = suggested_max_num_workers(run.loop.num_devices)
    if loader.num_workers < 2 and most > 1:
        run.warn_once(
            f"The '{stage}_dataloader' does not have many workers which may be a bottleneck. Consider"
            f" increasing the value of the `num_workers` argument` to `num_workers={most}` in the"
            " `DataLoader` to improve performance.",
            PossibleUserWarning,
        )
    if os.environ.get("PL_SEED_WORKERS") == "1" and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=run.fabric.global_rank)


def warn_of_loader(run: RunState, loader: DataLoader, stage: str) -> None:
    """Warn of evaluations in random order, and of streams whose length may be wrong."""
    if run.stage != "fit" and isinstance(loader.sampler, RandomSampler):
        run.warn_once(
            f"Your `{stage}_dataloader`'s sampler has shuffling enabled, it is strongly recommended that you"
            " turn shuffling off for val/test dataloaders.",
            PossibleUserWarning,
        )
    if isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
        run.warn_once(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading"
            " (when num_workers > 1), `__len__` could be inaccurate if each worker is not configured"
            " independently to avoid having duplicate data."
        )


def _without_shuffling(run: RunState, loader: DataLoader, stage: str) -> DataLoader:
    if isinstance(loader.sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset):
        return loader
    run.warn_once(
        f"You requested to overfit but enabled {stage} dataloader shuffling. We are turning off the"
        f" {stage} dataloader shuffling for you."
    )
    dataset: Any = loader.dataset
    sampler = SequentialSampler(dataset)
    return with_sampler(loader, sampler, remake_batch_sampler(loader.batch_sampler, sampler))


def with_sampler(loader: DataLoader, sampler: Any, batch_sampler: Any) -> DataLoader:
    """Return a copy of a loader that takes its samples in another order."""
    clone = with_batch_sampler(loader, batch_sampler)
    object.__setattr__(clone, "sampler", sampler)
    return clone


def with_batch_sampler(loader: DataLoader, batch_sampler: Any) -> DataLoader:
    """Return a copy of a loader with other batches of indices.

    A copy keeps the class of the loader and its attributes, also those of subclasses that cannot be
    constructed again. A DataLoader refuses to change its samplers through its own ``__setattr__``.
    """
    clone = copy.copy(loader)
    object.__setattr__(clone, "batch_sampler", batch_sampler)
    object.__setattr__(clone, "_iterator", None)
    return clone


class TrackingBatchSampler(BatchSampler):
    """A batch sampler that remembers the indices of each batch that it gave, for predictions."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.seen: list[list[int]] = []

    def __iter__(self) -> Iterator[Any]:
        self.seen = []
        for indices in self.batch_sampler:
            self.seen.append(list(indices))
            yield indices

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)
