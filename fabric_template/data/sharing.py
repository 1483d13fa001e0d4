"""Sharing: a DataLoader that draws other samples: this rank's part of them, unshuffled to overfit, noted to predict."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from lightning.fabric import Fabric

# Lightning's own way to make a custom batch sampler again around another sampler has no public name.
# tests/contract/test_private_names.py says so in a line if it goes.
from lightning.fabric.utilities.data import _dataloader_init_kwargs_resolve_sampler
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ..core.ranks import share_of
from ..core.said import advise
from ..core.steps import is_shared_out
from .tensors import count_cuts, cuts, global_seed, longest_share, without_repeats


def drawing_otherwise(loader: Any, fabric: Fabric, stage: str, overfit: bool, shuffled: bool) -> DataLoader:
    """A copy of the loader that draws what this rank is to see, or the loader itself; for what `ready` says."""
    several = share_of(fabric)[0] > 1
    if isinstance(loader.dataset, IterableDataset):
        if overfit:
            loader = _with_batches(loader, loader.batch_sampler)  # as Trainer's copy, with workers of its own
        if several and not _shares_itself(loader.dataset):
            advise(
                fabric,
                f"{type(loader.dataset).__name__} is iterable, and nothing in it tells one rank from another: each of the"
                f" {fabric.world_size} processes gets every sample of the {stage} loader; share them in its __iter__, by"
                " torch.distributed.get_rank() and get_world_size(), or give a map-style dataset, which the loop shares",
            )
        return loader
    if overfit and not isinstance(loader.sampler, SequentialSampler):
        advise(
            fabric,
            f"You requested to overfit but enabled {stage} dataloader shuffling. We are turning off the {stage}"
            " dataloader shuffling for you.",
        )
        loader = _drawing_from(loader, SequentialSampler(loader.dataset))
    if several and not isinstance(loader.sampler, DistributedSampler):
        loader = _share(loader, fabric, stage, shuffle=not overfit and (stage == "train" or shuffled))
    if stage == "predict" and loader.batch_sampler is not None:
        is_made = isinstance(loader.batch_sampler, _AsManyBatches)
        if not is_made and all(hasattr(loader.batch_sampler, name) for name in ("batch_size", "drop_last")):
            loader = _drawing_from(loader, loader.sampler)  # in the order of the samples, as Trainer
        loader = _with_batches(loader, NotedBatches(loader.batch_sampler))
    return loader


def _shares_itself(dataset: Any) -> bool:
    """Whether an iterable dataset may give each rank a part: its own code or what it holds speaks of ranks or shards."""
    words = ("rank", "world_size", "shard", "replica", "split", "sampler", "distributed")
    try:
        code = inspect.getsource(type(dataset)).lower()
    except (OSError, TypeError):  # of a library, or typed: nobody knows
        return True
    return any(word in code or any(word in str(name) for name in getattr(dataset, "__dict__", ())) for word in words)


class NotedBatches:
    """A batch sampler that notes the indices it hands out, and leaves no sample out: for predictions.

    Example:
        >>> batches = NotedBatches(BatchSampler(SequentialSampler("abc"), batch_size=2, drop_last=True))
        >>> list(batches) == batches.seen_batch_indices == [[0, 1], [2]]
        True
    """

    def __init__(self, batch_sampler: Any) -> None:
        if getattr(batch_sampler, "drop_last", False):
            batch_sampler = copy.copy(batch_sampler)
            batch_sampler.drop_last = False
        self.batch_sampler = batch_sampler
        self.seen_batch_indices: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.seen_batch_indices = []
        for indices in self.batch_sampler:
            self.seen_batch_indices.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batch_sampler":  # asked while it is copied
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class _AsManyBatches(BatchSampler):
    """Batches of which every rank has the same number, though not every rank has the same number of samples."""

    sampler: DistributedSampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        return (indices[cut] for cut in cuts(len(indices), self.batch_size, longest_share(self.sampler)))

    def __len__(self) -> int:
        return count_cuts(len(self.sampler), self.batch_size, longest_share(self.sampler))


class _DrawnOnce(DistributedSamplerWrapper):
    """Draws again only when something was taken: a StatefulDataLoader begins the pass three times that it goes on with."""

    dataset: Any
    unused = False

    def __iter__(self) -> Iterator[Any]:
        if not self.unused:
            self.dataset.reset()
        self.unused = True
        return self._taken(DistributedSampler.__iter__(self))

    def _taken(self, order: Iterator[int]) -> Iterator[Any]:
        for index in order:
            self.unused = False
            yield self.dataset[index]


def _share(loader: DataLoader, fabric: Fabric, stage: str, shuffle: bool) -> DataLoader:
    parts, part = share_of(fabric)
    words: dict[str, Any] = {"num_replicas": parts, "rank": part}
    words |= {"shuffle": shuffle, "seed": global_seed()}
    if isinstance(loader.sampler, RandomSampler | SequentialSampler):
        sampler: Any = DistributedSampler(loader.dataset, **words)
    else:
        sampler = (_DrawnOnce if hasattr(loader, "state_dict") else DistributedSamplerWrapper)(loader.sampler, **words)
    batches = loader.batch_sampler
    if stage == "predict" and not (is_shared_out(fabric) and type(batches) is BatchSampler):
        return _drawing_from(loader, without_repeats(sampler))
    plain = batches if type(batches) is BatchSampler and (stage == "predict" or not batches.drop_last) else None
    if stage == "train" or (plain is None and batches is not None):
        # or cut or dropped by a rule of their own: equally many on all ranks
        return _drawing_from(loader, sampler)
    loader = _drawing_from(loader, without_repeats(sampler))
    return loader if plain is None else _with_batches(loader, _AsManyBatches(sampler, plain.batch_size, False))


def _drawing_from(loader: DataLoader, sampler: Sampler) -> DataLoader:
    """A copy of the loader with another sampler, and its batch sampler made again around that."""
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is BatchSampler:
        batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
    elif batch_sampler is not None:
        batch_sampler = _dataloader_init_kwargs_resolve_sampler(loader, sampler)["batch_sampler"]
    loader = _with_batches(loader, batch_sampler)
    vars(loader)["sampler"] = sampler
    return loader


def _with_batches(loader: DataLoader, batch_sampler: Any) -> DataLoader:
    """A copy with another batch sampler: a DataLoader refuses to have its own set, but reads it anew for each pass."""
    other = copy.copy(loader)
    vars(other).update(batch_sampler=batch_sampler, _iterator=None)
    return other
