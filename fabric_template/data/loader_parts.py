"""Find the objects in a loader whose state belongs in a checkpoint.

In this module, a "stream" is a loader or an IterableDataset with ``state_dict`` and
``load_state_dict`` methods.
"""

from __future__ import annotations

import io
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from logging import Logger
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..lightning_compat.overrides import has_state
from ..plain_state import REMOVED, Part, Place, PlainState, find_objects
from ..plain_values import decode, digest
from .tensor_loader import TensorLoader

# The search for objects inside a loader skips these types.
_TYPES_NOT_SEARCHED = (
    *(str, bytes, int, float, type, FunctionType, MethodType, ModuleType, io.IOBase, type(None)),
    *(torch.Tensor, torch.Generator, nn.Module, np.ndarray, np.generic, Logger),
)
# A checkpoint contains the attributes of a run's modules, datamodules and callbacks.
_OF_RUN = (nn.Module, LightningDataModule, Callback)
_MOST_VALUES = 500
_LIGHTNING = ("lightning.", "pytorch_lightning.")
_LIBRARIES = ("torch.", "torchdata.", *_LIGHTNING)
# A search for objects inside a loader skips objects whose classes are defined in these packages.
_PACKAGES_NOT_SEARCHED = (str(__package__).rpartition(".")[0] + ".", *_LIGHTNING)
_DRAWING_SAMPLERS: Any = (
    RandomSampler | WeightedRandomSampler | SubsetRandomSampler | DistributedSamplerWrapper
)
# DataLoader sets these attributes itself, so checkpoints do not contain them.
_ATTRIBUTES_OF_DATALOADER = frozenset(vars(DataLoader([])))  # type: ignore[arg-type]
# Do not save the epoch of torch's samplers, because the loop sets it with set_epoch().
_ATTRIBUTES_SET_BY_LOOP = ("epoch",)
# Do not save DataLoader's current iterator, because a resumed run creates a new iterator.
_DATALOADER_ITERATOR = ("_iterator",)


def find_stateful_part(loader: Any) -> Any:
    """Return the loader or IterableDataset that can save its own position, or None."""
    for sampler in samplers_of(loader):
        is_known = has_state(sampler) or is_of_library(sampler)
        if isinstance(sampler, _DRAWING_SAMPLERS) or not is_known:
            # The loader's state_dict() does not save the order in which the sampler yields indices.
            return None
    dataset, has_workers = getattr(loader, "dataset", None), getattr(loader, "num_workers", 0) > 0
    is_stream = isinstance(dataset, IterableDataset)
    if has_workers and not is_stream:
        # StatefulDataLoader.state_dict() does not contain the RNG states of the workers.
        return None
    parts = [loader, dataset] if is_stream and not has_workers else [loader]
    return next(filter(has_state, parts), None)


def parts_of_order(loader: Any) -> dict[str, Part]:
    """Return the objects that determine the order of the samples: the loader and its samplers."""
    samplers = samplers_of(loader)
    samplers += [part.given_sampler for part in samplers if hasattr(part, "given_sampler")]
    has_attributes = not (has_state(loader) or isinstance(loader, TensorLoader))
    parts = {"loader": Part(wrap_list(loader), _ATTRIBUTES_OF_DATALOADER, has_attributes)}
    for index, sampler in enumerate(samplers):
        ignored = _ATTRIBUTES_SET_BY_LOOP if is_of_library(sampler) else ()
        part = Part(wrap_list(sampler), ignored, has_attributes=not has_state(sampler))
        parts[f"sampler {index}"] = part
    known = {id(part.instance) for part in parts_of_samples(loader).values()}
    return {**parts, **find_objects(parts, known)}


def wrap_list(part: Any) -> Any:
    """Put a list into an attribute of a new object, because PlainState saves only attributes."""
    return SimpleNamespace(items=part) if type(part) is list else part


def parts_of_samples(loader: Any) -> dict[str, Part]:
    """Return the objects that create the samples and batches, such as the dataset."""
    found = objects_of_samples(
        getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    )
    return {name: Part(part, has_attributes=not has_state(part)) for name, part in found.items()}


def objects_of_samples(dataset: Any, collate_fn: Any) -> dict[str, Any]:
    """Find the dataset, the dataset's attributes, the collate_fn and the collate_fn's arguments."""
    found: dict[str, Any] = {"dataset": dataset}
    if not has_state(dataset):
        found.update(objects_in(dataset))
    if isinstance(collate_fn, partial):
        arguments = [collate_fn.func, *collate_fn.args, *collate_fn.keywords.values()]
        found.update({f"collate_fn {index}": part for index, part in enumerate(arguments)})
    found["collate_fn"] = getattr(collate_fn, "__self__", collate_fn)
    return {name: part for name, part in found.items() if not isinstance(part, type | ModuleType)}


def objects_in(dataset: Any) -> dict[str, Any]:
    """Return the objects inside a dataset, such as a transform or a Subset's dataset."""
    values = find_values(dataset, enters_data=False)
    values.pop("stream", None)
    return {f"dataset {name}": v for name, v in values.items() if hasattr(v, "__dict__")}


def is_of_library(part: Any) -> bool:
    return type(part).__module__.startswith(_LIBRARIES)


def samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, inner)
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def referenced_objects(parts: Iterable[Part]) -> list[Any]:
    """Return the modules, datamodules and callbacks that samplers or datasets refer to."""
    values = (islice(part.namespace().values(), _MOST_VALUES) for part in parts)
    found = (item for value in chain.from_iterable(values) for item in referenced_values(value))
    return [item for item in found if isinstance(item, _OF_RUN)]


def refers_to_model(loader: Any) -> bool:
    """Return whether the loader or a part of it refers to a module, datamodule or callback."""
    parts = {**parts_of_order(loader), **parts_of_samples(loader)}
    return bool(referenced_objects(parts.values()))


def warn_of_weights(loader: Any) -> None:
    """Warn if a sampler refers to a module whose weights may affect the sample order."""
    parts = [part for name, part in parts_of_order(loader).items() if name.startswith("sampler")]
    for module in referenced_objects(parts):
        if isinstance(module, nn.Module) and has_weights(module):
            warnings.warn(
                f"resume: a sampler refers to a {type(module).__name__}. If the sampler reads its"
                " weights or buffers, the rest of this epoch may have different samples, because"
                " the resumed run has their values from the checkpoint, and not from the start of"
                " the epoch. Other attributes are restored exactly.",
                stacklevel=2,
            )
            return


def has_weights(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers()))


def referenced_values(value: Any) -> list[Any]:
    """Return ``value`` itself, and the objects that it contains, such as the items of a list."""
    found = [value]
    # Do not iterate over subclasses of list, because their __iter__ may draw random numbers.
    if type(value) in (dict, list, tuple) and len(value) <= _MOST_VALUES:
        found += value.values() if type(value) is dict else value
    if isinstance(value, partial):
        found += [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        found += value.__defaults__ or ()
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                # Reading an empty closure cell raises a ValueError.
                found.append(cell.cell_contents)
    return [*found, *(item.__self__ for item in found if isinstance(item, MethodType))]


def find_restart_problem(loader: Any, hides_workers: bool) -> str:
    """Return an error text if the loader supports resuming only in the first epoch.

    Args:
        hides_workers: Whether the loader has workers whose RNG states are not saved.
    """
    kind = type(loader).__name__
    if hides_workers and getattr(loader, "persistent_workers", False):
        return (
            f"{kind} has persistent workers, whose RNG states are not saved. Write"
            " persistent_workers=False"
        )
    if holds_iterator(loader):
        return (
            f"{kind} contains an iterator that continues in each epoch, and the iterator's position"
            " is not saved. Define state_dict() and load_state_dict() in the loader or its dataset"
        )
    return ""


def holds_iterator(loader: Any) -> bool:
    """Return whether a loader uses the same iterator, such as a generator, in every epoch."""
    if isinstance(loader, DataLoader):
        if loader.num_workers or not isinstance(loader.dataset, IterableDataset):
            return False
        loader = loader.dataset
    values = find_values(loader, enters_iterators=False).values()
    return any(isinstance(value, Iterator) and not is_restartable(value) for value in values)


def is_restartable(iterator: Iterator[Any]) -> bool:
    """Return whether an iterator's ``__iter__`` does more than ``return self``."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return code is not None and bool(code.co_names)


def find_values(
    owner: Any, enters_iterators: bool = True, enters_data: bool = True
) -> dict[str, Any]:
    """Return an object and the objects inside it, keyed by paths such as "stream.dataset".

    Args:
        enters_iterators: Also search the attributes of iterators.
        enters_data: Also search the first items of long containers.
    """
    found: dict[str, Any] = {}
    waiting, seen = deque([("stream", owner)]), set()
    while waiting and len(found) < _MOST_VALUES:
        name, value = waiting.popleft()
        if isinstance(value, _TYPES_NOT_SEARCHED) or id(value) in seen:
            continue
        seen.add(id(value))
        if value is not owner and type(value).__module__.startswith(_PACKAGES_NOT_SEARCHED):
            continue
        found[name] = value
        if isinstance(value, Iterator) and not enters_iterators:
            continue
        items: Any = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        if isinstance(value, list | tuple):
            items = dict(enumerate(value[:_MOST_VALUES]))
        is_long = isinstance(value, dict | list | tuple) and len(value) > _MOST_VALUES
        if is_long and not enters_data:
            continue
        for key, item in islice(items.items(), _MOST_VALUES):
            if key not in _DATALOADER_ITERATOR:
                waiting.append((f"{name}.{key}", item))
    return found


# Loaders and datasets with a state_dict


class StreamState:
    """Saves and restores the position of a loader or dataset that has a ``state_dict``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        parts = {
            name: Part(owner, _DATALOADER_ITERATOR, has_attributes=not is_of_library(owner))
            for name, owner in find_values(stream).items()
        }
        self._plain = PlainState(parts)
        # The attributes that load_state_dict() has changed, and that are reset after the resumed
        # epoch. Each entry holds the digest after load_state_dict(), and the value to restore.
        self._attributes_to_reset: dict[Place, tuple[Any, Any]] = {}
        # Holds the loader's saved state_dict until the first batch is requested.
        self._loaded: Any = None

    def state(self) -> Any:
        return deepcopy(self._stream.state_dict() if self._loaded is None else self._loaded)

    def start_reading(self) -> None:
        self._loaded = None

    def changed_attributes(self) -> dict[Place, Any]:
        """Return the loader attributes that have changed since the start of the run."""
        attributes = {**self._plain.changed_attributes(), **self._values_to_reset()}
        return {place: value for place, value in attributes.items() if value != REMOVED}

    @contextmanager
    def loaded(self, state: dict[str, Any]) -> Iterator[None]:
        """Restore the saved position for the iterator that is created in the `with` block."""
        # A checkpoint contains only loader attributes that the saved run changed. All other loader
        # attributes keep their current values.
        expected: dict[Place, Any] = dict.fromkeys(place for place, _ in self._plain.attributes())
        expected.update(self._plain.encoded_attributes())
        for place, value in state["attributes"].items():
            expected[place] = None
            with suppress(Exception):
                expected[place] = digest(decode(value)), value
        self._stream.load_state_dict(deepcopy(state["state"]))
        self._loaded = state["state"]
        yield
        for place, loaded in self._plain.digests().items():
            # If an attribute cannot be encoded or decoded, keep the value set by load_state_dict().
            saved = expected.get(place, (None, REMOVED))
            if saved is not None and saved[0] != loaded:
                self._attributes_to_reset[place] = loaded, saved[1]

    def end_pass(self) -> None:
        """Reset the loader's position, so that the next epoch starts with the first batch."""
        self._plain.load_attributes(self._values_to_reset())
        self._attributes_to_reset.clear()

    def _values_to_reset(self) -> dict[Place, Any]:
        # Do not reset an attribute if the loader has changed it after load_state_dict().
        digests = self._plain.digests() if self._attributes_to_reset else {}
        return {
            place: value
            for place, (loaded, value) in self._attributes_to_reset.items()
            if digests.get(place) == loaded
        }
