"""Find the objects of a loader that have a state: samplers, datasets, collate functions."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ..lightning_compat.overrides import has_state
from ..plain_state import Part
from .tensor_loader import TensorLoader

# Values that hold no iterator, or too many values to look at.
_LEAVES = (
    *(str, bytes, int, float, type, FunctionType, MethodType, ModuleType, io.IOBase),
    *(torch.Tensor, torch.Generator, nn.Module, np.ndarray, np.generic),
)
_MOST_VALUES = 500
_LIBRARIES = ("torch.", "torchdata.", "lightning.", "pytorch_lightning.")
# DataLoader sets these attributes itself.
_OF_LOADER = frozenset(vars(DataLoader([])))  # type: ignore[arg-type]


def find_stateful_part(loader: Any) -> Any:
    """Return the object that saves the position: the loader, or an iterable dataset, or None."""
    samplers = samplers_of(loader)
    is_wrapped = any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers)
    if is_wrapped or not all(has_state(part) or is_of_library(part) for part in samplers):
        # The state of a loader does not contain the order that such a sampler has drawn.
        return None
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset) and not getattr(loader, "num_workers", 0)
    parts = [loader, dataset] if is_stream else [loader]
    return next(filter(has_state, parts), None)


def parts_of_order(loader: Any) -> dict[str, Part]:
    """Return the objects that decide about the order of samples: the loader and its samplers."""
    samplers = {f"sampler {index}": part for index, part in enumerate(samplers_of(loader))}
    for name, sampler in list(samplers.items()):
        if hasattr(sampler, "given_sampler"):
            samplers[f"{name}, given"] = sampler.given_sampler
    parts = {
        name: Part(part, has_attributes=not (has_state(part) or is_of_library(part)))
        for name, part in samplers.items()
    }
    has_attributes = not (has_state(loader) or isinstance(loader, TensorLoader))
    return {"loader": Part(loader, _OF_LOADER, has_attributes), **parts}


def parts_of_samples(loader: Any) -> dict[str, Part]:
    """Return the objects that make batches: the dataset and the object of the collate_fn."""
    found = objects_of_samples(
        getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    )
    return {name: Part(part, has_attributes=not has_state(part)) for name, part in found.items()}


def generators_of_samples(dataset: Any, collate_fn: Any) -> dict[str, Part]:
    """Return the parts of ``parts_of_samples`` in a worker, where only generators are saved."""
    found = objects_of_samples(dataset, collate_fn)
    return {name: Part(part, has_attributes=False) for name, part in found.items()}


def objects_of_samples(dataset: Any, collate_fn: Any) -> dict[str, Any]:
    """Return the dataset with the datasets inside it, and the objects of the collate_fn."""
    found, inside = {"dataset": dataset}, list(datasets_in(dataset))
    found.update({f"dataset {index}": part for index, part in enumerate(inside)})
    if isinstance(collate_fn, partial):
        arguments = [collate_fn.func, *collate_fn.args, *collate_fn.keywords.values()]
        found.update({f"collate_fn {index}": part for index, part in enumerate(arguments)})
    found["collate_fn"] = getattr(collate_fn, "__self__", collate_fn)
    return {name: part for name, part in found.items() if not isinstance(part, type | ModuleType)}


def datasets_in(dataset: Any) -> Iterator[Any]:
    """Yield the datasets inside a Subset, a ConcatDataset or another dataset of torch."""
    if not is_of_library(dataset):
        return
    datasets = getattr(dataset, "datasets", ())
    inner = datasets.values() if isinstance(datasets, dict) else datasets
    for part in (getattr(dataset, "dataset", None), *inner):
        if part is not None:
            yield part
            yield from datasets_in(part)


def is_of_library(part: Any) -> bool:
    """Return whether an object is of a class of torch or Lightning, whose attributes are known."""
    return type(part).__module__.startswith(_LIBRARIES)


def samplers_of(loader: Any) -> list[Any]:
    """Return a loader's samplers without duplicates."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, inner)
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def holds_iterator(loader: Any) -> bool:
    """Return whether a loader, or the stream that it reads in this process, holds an iterator."""
    if isinstance(loader, DataLoader):
        if loader.num_workers or not isinstance(loader.dataset, IterableDataset):
            return False
        loader = loader.dataset
    waiting: list[Any] = [loader]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Iterator):
            if not starts_over(value):
                return True
            # Its __iter__ has created the iterators among its attributes.
            continue
        items = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {})
        items = value if isinstance(value, dict) else items
        waiting += items.values() if isinstance(items, dict) else items
    return False


def starts_over(iterator: Iterator[Any]) -> bool:
    """Return whether ``__iter__`` of an iterator does more than return the iterator."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return code is not None and bool(code.co_names)
