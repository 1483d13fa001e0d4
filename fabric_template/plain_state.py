"""Save the random generators and attributes that state_dict() does not contain.

A checkpoint contains all random generators, and the plain attributes that have changed since the
start of the run. plain_values.py describes which values are plain. Attributes that are too large
are skipped with a warning.

In a checkpoint, the key of a value is the pair (object name, attribute name). If a module's
attribute is a scheduler, the scheduler's state_dict is saved. If a module's attribute is a replay
buffer, the buffer's attributes are saved.
"""

from __future__ import annotations

import io
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from .plain_values import (
    ATOMS,
    CONTAINERS,
    MOST_BYTES,
    MOST_ITEMS,
    MOST_SEARCHED,
    NotPlainError,
    TooLargeError,
    address_of,
    check_size,
    decode,
    digest,
    encode,
    is_plain_tensor,
    is_stateful,
    load_object,
    refers_to,
    replace_content,
    requires_grad_of,
    shares_memory,
    tensors_in,
)
from .rng_state import find_generators, get_generator_state, set_generator_state

# The packages whose objects are not saved, because they may hold open files or processes.
_LIBRARIES = {"lightning", "numpy", "pytorch_lightning", "torch", "torchmetrics"}
_LIBRARIES |= sys.stdlib_module_names
# Classes of torch, such as Subset, that may wrap a user's dataset. A loader may wrap a DataLoader.
_WRAPPERS: Any = (Dataset, DataLoader, Sampler)
# The attributes that torch sets in every module.
_OF_MODULE = frozenset(vars(nn.Module()))
# The dicts in which a module keeps its parameters, buffers and submodules.
_REGISTERED = ("_parameters", "_buffers", "_modules")
# The value that marks a deleted attribute in a checkpoint.
REMOVED: Any = ("removed", None)
# The value that replaces the digest of an attribute that is always saved.
ALWAYS_SAVED: Any = ("always", None)
_SMALL_BYTES = 10 * 2**20
_START_VALUE_BYTES = 100_000
_NOT_CREATED = (
    "it does not exist in the resumed run. The saved run may have created it during training"
)

Place = tuple[str, str]


@dataclass(frozen=True)
class Part:
    """An object whose random generators or attributes are saved in checkpoints.

    Args:
        instance: The object.
        ignored: The names of attributes that are not saved.
        has_attributes: Whether to save attributes. Generators are always saved.
        has_buffers: Whether to save a module's buffers instead of its attributes.
    """

    instance: Any
    ignored: Collection[str] = ()
    has_attributes: bool = True
    has_buffers: bool = False

    def namespace(self) -> dict[str, Any]:
        """Return the object's attributes as a dict, like ``vars()``."""
        if self.has_buffers:
            return vars(self.instance)["_buffers"]
        if is_hparams(type(self.instance)):
            return self.instance
        return {} if isinstance(self.instance, type) else getattr(self.instance, "__dict__", {})

    def attributes(self) -> dict[str, Any]:
        values = self.namespace() if self.has_attributes else {}
        return {n: v for n, v in values.items() if isinstance(n, str) and n not in self.ignored}

    def assign(self, name: str, value: Any, is_in_place: bool) -> None:
        """Set an attribute or a buffer to a restored value.

        Args:
            is_in_place: Whether to change the current tensor or container in place if possible.
        """
        namespace = self.namespace()
        if self.has_buffers and name not in namespace:
            # Register a buffer with persistent=False. Its value is assigned below.
            vars(self.instance).pop(name, None)
            namespace[name] = None
            self.instance._non_persistent_buffers_set.add(name)
        if any(name in namespace.get(kind, ()) for kind in _REGISTERED):
            raise ValueError("this module has a parameter, buffer or submodule of that name")
        current = namespace.get(name)
        if isinstance(value, defaultdict) and value.default_factory is None:
            value.default_factory = getattr(current, "default_factory", None)
        if not (is_in_place and replace_content(current, value)):
            namespace[name] = value


class ListItem(SimpleNamespace):
    """Wraps a value in an object with one attribute, because only attributes are saved."""


def find_objects(
    parts: dict[str, Part], known: set[int], network: nn.Module | None = None
) -> dict[str, Part]:
    """Search the attributes of the given objects for other objects.

    Return the objects found, keyed by paths such as "model.pool".

    Args:
        known: The ids of objects to skip, such as those of the network's modules.
        network: The run's network. If it is given, modules outside the network are also found.
    """
    found: dict[str, Part] = {}
    known = known | {id(part.instance) for part in parts.values() if not part.has_buffers}
    for path, part in parts.items():
        found |= objects_in(path, part, known, network)
    return found


def objects_in(
    path: str, part: Part, known: set[int], network: nn.Module | None, depth: int = 3
) -> dict[str, Part]:
    """Return the objects in the attributes of an object, at most three levels deep."""
    found: dict[str, Part] = {}
    for key, item, is_container in items_of(part.attributes()):
        if id(item) in known:
            continue
        place = f"{path}.{key}"
        is_module = network is not None and isinstance(item, nn.Module)
        if is_container and (is_module or is_stateful(item)):
            found[place] = Part(ListItem(item=item))
        if is_module and is_separate(item, network):
            found |= parts_of_module(place, item)
            known.update(map(id, item.modules()))
        elif is_own_object(item):
            known.add(id(item))
            found[place] = Part(item, has_attributes=not is_installed(type(item)))
            if not found[place].has_attributes:
                found |= objects_in_package(place, item, known)
            elif depth > 1:
                found |= objects_in(place, found[place], known, network, depth - 1)
    return found


def objects_in_package(path: str, value: Any, known: set[int], depth: int = 5) -> dict[str, Part]:
    """Search an object of an installed package for objects whose state must be saved.

    Return the objects of the user's classes, and the objects with random generators, such as the
    random transforms in a pipeline.
    """
    found: dict[str, Part] = {}
    for key, item, _ in items_of(vars(value)):
        if id(item) in known or not is_own_object(item):
            continue
        known.add(id(item))
        place, part = f"{path}.{key}", Part(item, has_attributes=not is_installed(type(item)))
        if part.has_attributes or find_generators(part.namespace()):
            found[place] = part
        if depth > 1:
            found |= objects_in_package(place, item, known, depth - 1)
    return found


def items_of(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, value, is_in_container) for attributes and for the items of containers."""
    for name, value in attributes.items():
        items: dict[Any, Any] = {name: value}
        # Do not call methods that a subclass of list or dict overrides, because these methods may
        # draw random numbers.
        kind: Any = next((kind for kind in type(value).__mro__ if kind in CONTAINERS), None)
        is_container = kind is not None and kind.__len__(value) <= MOST_SEARCHED
        if is_container:
            is_dict = issubclass(kind, dict)
            pairs = kind.items(value) if is_dict else enumerate(kind.__iter__(value))
            items = {f"{name}.{key}": item for key, item in pairs}
            # An instance of a subclass of list or dict may also have attributes.
            items |= {} if type(value) is kind else {name: value}
        for key, item in items.items():
            if type(item) not in ATOMS:
                yield key, item, is_container


def is_own_object(value: Any) -> bool:
    """Return whether to save an object's attributes in checkpoints, as for a replay buffer."""
    kind = type(value)
    is_known = isinstance(value, nn.Module | Tensor | Enum | tuple) or hasattr(kind, "state_dict")
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES
    # Use __package__, because users may rename this package.
    is_library = is_library or kind.__module__.startswith(f"{__package__}.")
    is_searched = not is_library or isinstance(value, (*_WRAPPERS, SimpleNamespace))
    is_searched = is_searched or is_hparams(kind)
    return hasattr(value, "__dict__") and is_searched and not is_known


def is_hparams(kind: type) -> bool:
    """Return whether a class is Lightning's AttributeDict, the class of ``self.hparams``."""
    return issubclass(kind, dict) and kind.__name__ == "AttributeDict"


def is_installed(kind: type) -> bool:
    """Return whether a class comes from an installed package rather than from the user's code."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return "-packages" in (file or "") and not (is_hparams(kind) or issubclass(kind, _WRAPPERS))


def is_library_iterator(value: Any) -> bool:
    """Return whether a value is an iterator from Python or torch, such as ``iter(loader)``."""
    is_other = isinstance(value, count | io.IOBase) or is_own_object(value)
    return isinstance(value, Iterator) and not is_other


def is_separate(module: nn.Module, network: nn.Module | None) -> bool:
    """Return whether a module, such as a teacher, has no submodules in common with the network."""
    return network is not None and set(network.modules()).isdisjoint(module.modules())


def parts_of_module(path: str, module: nn.Module) -> dict[str, Part]:
    """Return the submodules and buffers of a module outside the network."""
    found: dict[str, Part] = {}
    saved: dict[str, Any] = {}
    # The code of a user's class may raise any error.
    with suppress(Exception):
        saved = module.state_dict(keep_vars=True)
    for name, inner in module.named_modules():
        found[f"{path}.{name}"] = Part(inner, _OF_MODULE - {"training"})
        found[f"{path}.{name}.buffers"] = buffers_of(inner, name, saved)
    return found


def buffers_of(module: nn.Module, name: str, saved: Collection[str]) -> Part:
    """Return a submodule's buffers that are missing from ``saved``, the network's state_dict."""
    prefix = f"{name}." if name else ""
    # Use named_buffers(), because a scripted module has no plain dict of buffers.
    buffers = [buffer for buffer, _ in module.named_buffers(recurse=False)]
    persistent = [buffer for buffer in buffers if prefix + buffer in saved]
    return Part(module, persistent, has_buffers=True)


@dataclass(frozen=True)
class AttributeRestorer:
    """Decodes saved values and assigns them to attributes.

    Args:
        addresses: The memory addresses of the network's tensors, which are not changed in place.
    """

    decoded: Callable[..., Any]
    addresses: Collection[int]

    def restore(
        self, part: Part, name: str, current: Any, encoded: Any, is_rebound: bool, has_kept: bool
    ) -> None:
        """Restore one attribute.

        Args:
            current: The attribute's current value, or None.
            is_rebound: Whether to assign a new object instead of changing the current one.
            has_kept: Whether to change the tensors in a container in place.
        """
        tag = encoded[0] if isinstance(encoded, tuple) else None
        if tag == "removed":
            part.namespace().pop(name, None)
        elif tag == "state":
            load_object(current, *map(self.decoded, encoded[1:]))
        else:
            is_in_place = not (is_rebound or shares_memory(current, self.addresses))
            tensors = tensors_in(current) if has_kept else []
            known = (t if not shares_memory(t, self.addresses) else None for t in tensors)
            part.assign(name, self.decoded(encoded, known=known), is_in_place)


def make_reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference to the object if Python supports this, or else a normal one."""
    # Python supports no weak references to lists and dicts.
    with suppress(TypeError):
        return weakref.ref(value)
    return lambda: value


class PlainState:
    """Save and restore the random generators and attributes of objects such as the model.

    Args:
        parts: The objects, keyed by name. An attribute is saved if it changes after the PlainState
            is created.
        device: The run's device.
        network: The run's network. If it is None, objects in attributes are not saved.
        find_parts: A function that returns the network's modules, to which hooks may add modules.
    """

    is_per_process = True

    def __init__(
        self,
        parts: dict[str, Part],
        device: torch.device | None = None,
        network: nn.Module | None = None,
        find_parts: Callable[[], Iterable[tuple[str, Part]]] = tuple,
    ) -> None:
        # _parts contains the given objects and the objects found in their attributes, such as a
        # model's replay buffer.
        self._given, self._network, self._find_parts = parts, network, find_parts
        self._parts = parts
        self._device = torch.device("cpu") if device is None else device
        self._warned: set[str] = set()
        # Objects with their own checkpoint keys, such as optimizers, keyed by their ids.
        self._saved: dict[int, Any] = {}
        self._find_objects()
        self._at_start: dict[Place, Any] = self.digests()
        self._record_objects()

    def add(self, parts: dict[str, Part], saved: Iterable[Any], is_always_saved: bool) -> None:
        """Also save the attributes of the given objects, such as optimizers.

        Args:
            saved: Objects to skip, because other checkpoint keys contain their state.
            is_always_saved: Whether to save the attributes even if they never change.
        """
        self._saved = {id(part): part for part in saved if part is not None}
        self._given |= parts
        self._find_objects()
        digests, ids = self.digests(), self._ids_in_network()
        for place, value in self.attributes():
            is_compared = place[0] in parts and not is_always_saved
            # A dict with ids of parameters as keys cannot be saved. A resumed run creates it again
            # in configure_optimizers, so warn only if training changes the dict.
            if place in digests and (is_compared or refers_to(value, ids)):
                self._at_start[place] = digests[place]

    def mark_changes(self) -> None:
        """Always save the attributes that on_fit_start and on_train_start have changed.

        A resumed run calls these hooks again. Even if training later changes an attribute back to
        its value from before the hooks, the checkpoint must contain the attribute.
        """
        self._find_objects()
        digests = self.digests()
        for place in {*digests, *self._at_start}:
            if digests.get(place) != self._at_start.get(place):
                self._at_start[place] = ALWAYS_SAVED
        self._record_objects()

    def _record_objects(self) -> None:
        """Remember the objects in attributes, and the tensors in containers, to detect new ones."""
        self._start_objects: dict[Place, Callable[[], Any]] = {}
        self._start_tensors: dict[Place, list[Callable[[], Any]]] = {}
        for place, value in self.attributes():
            if type(value) not in ATOMS:
                self._start_objects[place] = make_reference(value)
                self._start_tensors[place] = [make_reference(part) for part in tensors_in(value)]

    def _is_rebound(self, place: Place, value: Any) -> bool:
        """Return whether the run has assigned a new object to an attribute."""
        start = self._start_objects.get(place)
        return type(value) not in ATOMS and (start is None or start() is not value)

    def _has_kept(self, place: Place, value: Any) -> bool:
        """Return whether a container still has the tensors that it had at the start.

        Hooks may refer to these tensors. If the saved run has changed the tensors only in place, a
        resumed run must also change its tensors in place.
        """
        start, tensors = self._start_tensors.get(place, []), tensors_in(value)
        pairs = zip(start, tensors, strict=False)
        return len(start) == len(tensors) > 0 and all(first() is last for first, last in pairs)

    def _find_objects(self) -> None:
        """Search attributes for objects to save, because hooks may have created new objects."""
        if self._network is not None:
            with self._guarded("the objects in attributes"):
                self._given |= dict(self._find_parts())
                known = {*self._saved, *map(id, self._network.modules())}
                self._parts = {**self._given, **find_objects(self._given, known, self._network)}

    def objects(self) -> dict[str, Any]:
        """Return the objects found in attributes, such as {"model.pool": model.pool}."""
        self._find_objects()
        return {n: part.instance for n, part in self._parts.items() if n not in self._given}

    def attributes(self) -> Iterator[tuple[Place, Any]]:
        """Yield ((object name, attribute name), value) for each attribute of each object."""
        for name, part in self._parts.items():
            for attribute, value in part.attributes().items():
                yield (name, attribute), value

    def generators(self) -> dict[str, Any]:
        """Return the random generators, keyed by a path such as "object.attribute".

        If several objects share a random generator, the returned dict contains it only once.
        """
        found: dict[int, tuple[str, Any]] = {}
        for name, part in self._parts.items():
            for attribute, generator in find_generators(part.namespace()).items():
                found.setdefault(id(generator), (f"{name}.{attribute}", generator))
        return dict(found.values())

    def generator_states(self) -> dict[str, Any]:
        return {name: get_generator_state(part) for name, part in self.generators().items()}

    def load_generator_states(self, states: dict[str, Any]) -> None:
        generators = self.generators()
        for name, state in states.items():
            with self._guarded(f"the generator {name}"):
                if name not in generators:
                    raise ValueError(_NOT_CREATED)
                set_generator_state(generators[name], state)

    # Saving

    def state_dict(self, has_attributes: bool = True, is_small: bool = False) -> dict[str, Any]:
        """Return the RNG states of all generators, and the attributes that the run has changed.

        Args:
            is_small: Leave out large attributes, and those with a ``state_dict``.
        """
        self._find_objects()
        saved = self.changed_attributes(is_small) if has_attributes else {}
        # List the saved attributes to which the run has assigned new objects. A resumed run must
        # also assign new objects, because other objects may refer to the old ones.
        current = [(p, v) for p, v in self.attributes() if p in saved] if saved else []
        rebound = [place for place, value in current if self._is_rebound(place, value)]
        kept = [place for place, value in current if self._has_kept(place, value)]
        generators = self.generator_states()
        return {"generators": generators, "attributes": saved, "rebound": rebound, "kept": kept}

    def changed_attributes(self, is_small: bool = False) -> dict[Place, Any]:
        """Return the attributes that have changed since the run started, in encoded form."""
        changed: dict[Place, Any] = {}
        for name, attribute in self._at_start:
            part = self._parts.get(name)
            if part is not None and attribute not in part.namespace():
                changed[name, attribute] = REMOVED
        weights, ids = self.addresses_of_network(), self._ids_in_network()
        for place, value in self.attributes():
            with self._guarded(f"the attribute {'.'.join(place)}"):
                if place[0].partition(".")[0] == "model" and is_library_iterator(value):
                    reason = "the position of an iterator cannot be read. Pass all loaders to fit"
                    raise TypeError(reason)
                is_same = self._digest(value) == self._at_start.get(place)
                if is_same or id(value) in self._saved:
                    continue
                if is_small and (self._is_state(value) or check_size(value) > _SMALL_BYTES):
                    continue
                if ids and refers_to(value, ids):
                    reason = "it contains ids of modules or parameters, which differ in each run"
                    raise TypeError(reason)
                changed[place] = self._encode(value, weights)
        # If an attribute has been saved once, always save it, even if training changes it back to
        # its initial value. Otherwise, a resumed run that has already restored an earlier value
        # from the checkpoint would keep that value.
        self._at_start |= dict.fromkeys(changed, ALWAYS_SAVED)
        return changed

    def digests(self) -> dict[Place, Any]:
        """Return a digest of each attribute that can be saved, to detect changes."""
        found: dict[Place, Any] = {}
        for place, value in self.attributes():
            # The code of a user's class may raise any error.
            with suppress(Exception):
                found[place] = self._digest(value)
        return found

    def encode_small_attributes(self) -> dict[Place, Any]:
        """Return the attributes of at most 100 kB, in encoded form."""
        found: dict[Place, Any] = {}
        for place, value in self.attributes():
            # Skip values that cannot be saved.
            with suppress(Exception):
                if check_size(value) <= _START_VALUE_BYTES:
                    found[place] = encode(value, self._device)
        return found

    def _digest(self, value: Any) -> Any:
        if not self._is_state(value):
            return digest(value)
        return digest(value.state_dict()), requires_grad_of(value)

    def _encode(self, value: Any, weights: dict[int, str]) -> Any:
        if not self._is_state(value):
            check_size(value)
            return encode(value, self._device, weights)
        state = value.state_dict()
        check_size(state)
        flags = encode(requires_grad_of(value), self._device)
        return "state", encode(state, self._device, weights), flags

    def _is_state(self, value: Any) -> bool:
        """Return whether to save an attribute's state_dict, as for a teacher model."""
        if self._network is None or id(value) in self._saved:
            return False
        is_module = isinstance(value, nn.Module)
        return is_stateful(value) or (is_module and is_separate(value, self._network))

    def _ids_in_network(self) -> set[int]:
        """Return the ids of the network's modules and parameters."""
        network = self._network
        parts = [] if network is None else [*network.modules(), *network.parameters()]
        return set(map(id, parts))

    def addresses_of_network(self) -> dict[int, str]:
        """Return the memory addresses and names of the tensors in the network's state_dict."""
        found: dict[int, str] = {}
        if self._network is None:
            return found
        # Leave out temporary tensors, such as the result of get_extra_state(), because another
        # tensor may later have the same address.
        kept = {*map(id, chain(self._network.parameters(), self._network.buffers()))}
        for name, value in self._network.state_dict(keep_vars=True).items():
            if id(value) in kept and is_plain_tensor(value):
                found.setdefault(address_of(value), name)
        # All empty tensors have the address 0.
        found.pop(0, None)
        return found

    # Restoring

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random generators and the attributes."""
        self._find_objects()
        self.load_generator_states(state["generators"])
        kept = set(state.get("kept", ()))
        self.load_attributes(state["attributes"], set(state["rebound"]), kept)
        # The next checkpoint must contain the restored attributes, even if this run started with
        # the same values, for example after an earlier call to fit.
        self._at_start |= dict.fromkeys(state["attributes"], ALWAYS_SAVED)
        for place in state["rebound"]:
            self._start_objects.pop(place, None)

    def load_attributes(
        self,
        saved: dict[Place, Any],
        rebound: Collection[Place] = (),
        kept: Collection[Place] = (),
    ) -> None:
        """Restore the attributes of objects such as the model from a checkpoint.

        Args:
            rebound: The attributes to which the saved run has assigned new objects. New objects are
                assigned again, because other objects may refer to the current ones.
            kept: The containers whose tensors the saved run changed only in place.
        """
        missing = [name for name, _ in saved if name not in self._parts]
        if missing:
            self._warn(f"the object {missing[0]}", f"ValueError: {_NOT_CREATED}")
        restorer = self.make_restorer()
        for place, encoded in saved.items():
            part, name = self._parts.get(place[0]), place[1]
            if part is None:
                continue
            with self._guarded(f"the attribute {'.'.join(place)}"):
                current = part.namespace().get(name)
                is_rebound = place in rebound or self._is_rebound(place, current)
                restorer.restore(part, name, current, encoded, is_rebound, place in kept)

    def make_restorer(self) -> AttributeRestorer:
        weights = {} if self._network is None else self._network.state_dict(keep_vars=True)
        decoded = partial(decode, device=self._device, weights=weights)
        return AttributeRestorer(decoded, self.addresses_of_network())

    # Warnings

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Turn errors into warnings in a `with` block that saves or restores ``what``."""
        try:
            yield
        except (NotPlainError, RecursionError):
            pass
        except TooLargeError:
            self._warn(what, f"it has more than {MOST_BYTES >> 20} MB or {MOST_ITEMS:,} items")
        except Exception as error:
            self._warn(what, f"{type(error).__name__}: {error}")

    def _warn(self, what: str, reason: str) -> None:
        if what in self._warned:
            return
        self._warned.add(what)
        # With ``python -W error``, a warning raises an error, which must not stop training.
        with suppress(Warning):
            warnings.warn(
                f"checkpoint: {what} is neither saved nor restored ({reason}). A resumed run may"
                " give different results. Save the value in on_save_checkpoint, or in a buffer.",
                stacklevel=5,
            )
