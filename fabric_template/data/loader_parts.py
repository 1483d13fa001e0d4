"""Find the objects in a loader whose state belongs in a checkpoint.

In this module, a "stream" is a loader or an IterableDataset with ``state_dict`` and
``load_state_dict`` methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..lightning_compat.overrides import has_state
from ..plain_state import (
    REMOVED,
    ListItem,
    Part,
    Place,
    PlainState,
    find_objects,
    is_library_iterator,
)
from ..plain_values import decode, digest
from .tensor_loader import TensorLoader

_LIBRARIES = ("torch.", "torchdata.", "lightning.", "pytorch_lightning.")
_DRAWING_SAMPLERS: Any = (
    RandomSampler | WeightedRandomSampler | SubsetRandomSampler | DistributedSamplerWrapper
)
# DataLoader sets these attributes itself, so checkpoints do not contain them.
_ATTRIBUTES_OF_DATALOADER = frozenset(vars(DataLoader([])))  # type: ignore[arg-type]
# Do not save the epoch of torch's samplers, because the loop sets it with set_epoch().
_ATTRIBUTES_SET_BY_LOOP = ("epoch",)
# Do not save DataLoader's current iterator, because a resumed run creates a new iterator.
_DATALOADER_ITERATOR = ("_iterator",)
_NOT_SEARCHED = (nn.Module, Tensor, type)


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


def parts_of_loader(loader: Any) -> dict[str, dict[str, Part]]:
    """Return the objects that determine the order and the content of the samples."""
    dataset, collate_fn = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    samples = parts_of_samples(dataset, collate_fn, is_stateful=has_state(loader))
    samplers = samplers_of(loader)
    samplers += [part.given_sampler for part in samplers if hasattr(part, "given_sampler")]
    has_attributes = not (has_state(loader) or isinstance(loader, TensorLoader))
    instance = as_object(loader)
    parts = {"loader": Part(instance, _ATTRIBUTES_OF_DATALOADER, has_attributes)}
    for index, sampler in enumerate(samplers):
        ignored = _ATTRIBUTES_SET_BY_LOOP if is_of_library(sampler) else ()
        # A loader with a state_dict saves the states of its sampler and its dataset itself.
        is_saved = has_state(loader) and has_state(sampler)
        parts[f"sampler {index}"] = Part(as_object(sampler), ignored, has_attributes=not is_saved)
    known = {id(part.instance) for part in samples.values()}
    return {"order": {**parts, **find_objects(parts, known)}, "samples": samples}


def as_object(value: Any) -> Any:
    """Wrap a list in an object, because checkpoints store only the attributes of objects."""
    return ListItem(item=value) if isinstance(value, list) else value


def parts_of_samples(dataset: Any, collate_fn: Any, is_stateful: bool = False) -> dict[str, Part]:
    """Return the objects that create the samples and batches, such as datasets and transforms.

    Args:
        is_stateful: Whether the loader's ``state_dict`` already includes the dataset's state.
    """
    is_saved = is_stateful or isinstance(dataset, IterableDataset)
    found: dict[str, Any] = {"dataset": dataset}
    if isinstance(collate_fn, partial):
        arguments = [collate_fn.func, *collate_fn.args, *collate_fn.keywords.values()]
        found.update({f"collate_fn {index}": part for index, part in enumerate(arguments)})
    found["collate_fn"] = getattr(collate_fn, "__self__", collate_fn)
    parts = {
        name: Part(part, has_attributes=not (is_saved and has_state(part)))
        for name, part in found.items()
        if not isinstance(part, type | ModuleType)
    }
    return {**parts, **find_objects(parts, set())}


def is_of_library(part: Any) -> bool:
    return type(part).__module__.startswith(_LIBRARIES)


def samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, inner)
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def may_read_model(loader: Any) -> bool:
    """Return whether the samples may depend on the model's attributes at the start of an epoch."""
    if isinstance(loader, TensorLoader | list | tuple):
        return False
    samplers = samplers_of(loader)
    samplers += [part.given_sampler for part in samplers if hasattr(part, "given_sampler")]
    dataset = getattr(loader, "dataset", None)
    # A user's class may choose the samples based on the model's attributes.
    is_known = all(map(is_of_library, [loader, *samplers]))
    if isinstance(dataset, IterableDataset) or not is_known:
        return True
    return getattr(loader, "num_workers", 0) > 0 and refers_to_module(dataset, loader.collate_fn)


def refers_to_module(dataset: Any, collate_fn: Any) -> bool:
    """Return whether a dataset or collate_fn refers to a module, which workers then copy."""
    if getattr(collate_fn, "__closure__", None):
        # The function may use a local variable that refers to a module.
        return True
    parts = parts_of_samples(dataset, collate_fn).values()
    values = chain.from_iterable([part.instance, *part.namespace().values()] for part in parts)
    return any(isinstance(value, nn.Module) for value in values)


def find_iterators(loader: Any) -> dict[str, Any]:
    """Return the iterators among a loader, its samplers, its dataset and their attributes."""
    parts = {"loader": loader}
    parts |= {f"sampler {index}": part for index, part in enumerate(samplers_of(loader))}
    if not getattr(loader, "num_workers", 0):
        # Worker processes start each epoch with a new copy of the dataset.
        parts["dataset"] = getattr(loader, "dataset", None)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, Iterator) and not is_restartable(part):
            found[name] = part
        found |= iterators_in(part, name)
    return found


def iterators_in(part: Any, path: str, depth: int = 6) -> dict[str, Any]:
    """Return the iterators in an object's attributes. Search iterable attributes recursively."""
    found: dict[str, Any] = {}
    for attribute, value in getattr(part, "__dict__", {}).items():
        place = f"{path}.{attribute}"
        if attribute in _DATALOADER_ITERATOR:
            continue
        if is_library_iterator(value):
            found[place] = value
        elif depth > 0 and isinstance(value, Iterable) and not isinstance(value, _NOT_SEARCHED):
            found |= iterators_in(value, place, depth - 1)
    return found


def is_restartable(iterator: Iterator[Any]) -> bool:
    """Return whether an iterator's ``__iter__`` does more than ``return self``."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return code is not None and bool(code.co_names)


class StreamState:
    """Saves and restores the position of a loader or dataset that has a ``state_dict``.

    After load_state_dict(), some streams start every epoch at the restored position, not only the
    resumed epoch. Therefore, ``end_pass`` resets the attributes that load_state_dict() has changed.
    They get the values that they had in the saved run.
    """

    def __init__(self, loader: Any, stream: Any) -> None:
        self._stream = stream
        owners = {"loader": loader, "dataset": getattr(loader, "dataset", None)}
        self._parts = {
            name: Part(owner, _DATALOADER_ITERATOR, has_attributes=not is_of_library(owner))
            for name, owner in owners.items()
        }
        self._plain = PlainState(self._parts)
        self._start_values = dict(self._plain.attributes())
        self._start_digests = self._plain.digests()
        self._saved_attributes: dict[Place, Any] = {}
        # Maps each attribute that load_state_dict() has changed to a digest of its new value. These
        # attributes are reset at the end of the resumed epoch.
        self._to_reset: dict[Place, Any] = {}
        # Holds the loader's saved state_dict until the first batch is requested.
        self._loaded: Any = None

    def state(self) -> Any:
        return deepcopy(self._stream.state_dict() if self._loaded is None else self._loaded)

    def start_reading(self) -> None:
        self._loaded = None

    def changed_attributes(self) -> dict[Place, Any]:
        """Return the attributes that have changed since the start of the run."""
        saved, skipped = self._saved_attributes, self._attributes_to_reset()
        changed = self._plain.changed_attributes()
        kept = {p: v for p, v in changed.items() if p not in skipped and v != REMOVED}
        return {**kept, **{place: saved[place] for place in skipped if place in saved}}

    @contextmanager
    def loaded(self, state: dict[str, Any]) -> Iterator[None]:
        """Restore the saved position for the iterator that is created in the `with` block."""
        saved = self._saved_attributes = state["attributes"]
        self._stream.load_state_dict(deepcopy(state["state"]))
        self._loaded = state["state"]
        yield
        for place, loaded in self._plain.digests().items():
            # If the initial value cannot be saved, it has no digest. In this case, keep the loaded
            # value.
            unknown = loaded if place in self._start_values else None
            expected = self._start_digests.get(place, unknown)
            with suppress(Exception):
                expected = digest(decode(saved[place])) if place in saved else expected
            if loaded != expected:
                self._to_reset[place] = loaded

    def end_pass(self) -> None:
        """Reset the loader's position, so that the next epoch starts with the first batch."""
        for place in self._attributes_to_reset():
            name, attribute = place
            namespace = self._parts[name].namespace()
            if place in self._saved_attributes:
                self._plain.load_attributes({place: self._saved_attributes[place]})
            elif place in self._start_values:
                namespace[attribute] = self._start_values[place]
            else:
                namespace.pop(attribute, None)
        self._to_reset.clear()

    def _attributes_to_reset(self) -> list[Place]:
        # Do not reset an attribute if the loader has changed it after load_state_dict().
        digests = self._plain.digests() if self._to_reset else {}
        return [place for place, mark in self._to_reset.items() if digests.get(place) == mark]
