"""Rebuilt: a loader like another one, with other workers, pinning or batch size; or a TensorLoader of the same samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..data.tensors import TensorLoader


def rebuilt(source: Any, choice: Mapping[str, Any]) -> Any:
    """The loader, or each in a list or dict, as the choice has it: workers, pin_memory, batch_size, tensors.

    What the choice does not say, and a loader of another kind, stays as it is.

    Example:
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> rebuilt(loader, {"batch_size": 5, "workers": 0}).batch_size, rebuilt(loader, {}) is loader
        (5, True)
    """
    if type(source) in (list, tuple):
        return type(source)(rebuilt(one, choice) for one in source)
    if type(source) is dict:
        return {name: rebuilt(one, choice) for name, one in source.items()}
    if choice.get("tensors") and has_tensors(source):
        source = as_tensors(source)
    if isinstance(source, TensorLoader):
        if (size := choice.get("batch_size")) and size != source.batch_size:
            source = copy.copy(source)
            source.batch_size = size
        return source
    asked = {word for word in ("workers", "pin_memory", "batch_size") if choice.get(word) is not None}
    return _data_loader(source, choice) if asked and type(source) is DataLoader else source


def _data_loader(loader: DataLoader, choice: Mapping[str, Any]) -> DataLoader:
    workers = choice.get("workers")
    workers = loader.num_workers if workers is None else workers
    words: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": workers,
        "pin_memory": loader.pin_memory if choice.get("pin_memory") is None else choice["pin_memory"],
        "timeout": loader.timeout if workers else 0,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        "persistent_workers": workers > 0,
        "multiprocessing_context": loader.multiprocessing_context if workers else None,
        "prefetch_factor": loader.prefetch_factor if workers else None,
    }
    size = choice.get("batch_size") or loader.batch_size
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **words)
    if loader.batch_size is None:  # a batch sampler of its own, or samples that are batches
        if loader.batch_sampler is None:
            return DataLoader(loader.dataset, batch_size=None, sampler=loader.sampler, **words)
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **words)
    return DataLoader(loader.dataset, batch_size=size, sampler=loader.sampler, drop_last=loader.drop_last, **words)


def can_resize(loader: Any) -> bool:
    """Whether `rebuilt` can give it another batch size."""
    return isinstance(loader, TensorLoader) or (type(loader) is DataLoader and loader.batch_size is not None)


def as_tensors(loader: DataLoader) -> TensorLoader:
    """The same samples in the same batch size from a TensorLoader; shuffled, if they were."""
    dataset: Any = loader.dataset
    if type(dataset) is Subset:
        indices: Any = list(dataset.indices)
        whole: Any = dataset.dataset
        tensors: Any = [tensor[indices] for tensor in whole.tensors]
    else:
        tensors = dataset.tensors
    return TensorLoader(
        *tensors,
        batch_size=loader.batch_size or 1,
        shuffle=type(loader.sampler) is RandomSampler,
        drop_last=loader.drop_last,
        generator=loader.generator,
    )


def with_rebuilt(part: Any, choice: Mapping[str, Any]) -> Any:
    """A loader rebuilt; of a datamodule, or a model with its own loaders, the object whose train_dataloader gives such."""
    make: Callable[[], Any] | None = getattr(part, "train_dataloader", None)
    if not callable(make):
        return rebuilt(part, choice)
    part.train_dataloader = lambda: rebuilt(make(), choice)
    return part


def has_tensors(loader: Any) -> bool:
    """Whether a DataLoader cuts plain batches from tensors in memory, so that a TensorLoader gives the same samples.

    Example:
        >>> has_tensors(DataLoader(TensorDataset(torch.zeros(4)))), has_tensors(DataLoader(range(4)))
        (True, False)
    """
    if type(loader) is not DataLoader or loader.batch_size is None or loader.collate_fn is not default_collate:
        return False
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    dataset: Any = loader.dataset
    dataset = dataset.dataset if type(dataset) is Subset else dataset
    return plain and type(loader.batch_sampler) is BatchSampler and type(dataset) is TensorDataset
