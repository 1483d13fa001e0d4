"""Save the random generators and attributes that state_dict() does not contain.

Only plain attributes that have changed since the start of the run are saved. plain_values.py
describes which values are plain. Attributes that are too large are skipped with a warning.

In a checkpoint, the key of a value is the pair (object name, attribute name). If a module's
attribute is a scheduler, the scheduler's state_dict is saved. If a module's attribute is a replay
buffer, the buffer's attributes are saved.
"""

from __future__ import annotations

import io
import sys
import warnings
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count, islice
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .plain_values import (
    ATOMS,
    COMPARED_BYTES,
    CONTAINERS,
    MOST_BYTES,
    MOST_ITEMS,
    MOST_SEARCHED,
    TENSORS,
    Decoder,
    Encoder,
    NotPlainError,
    Reference,
    TooLargeError,
    address_of,
    digest,
    is_plain_tensor,
    is_stateful,
    load_object,
    refers_to,
    requires_grad_of,
    shares_memory,
)
from .rng_state import find_generators, get_generator_state, set_generator_state

_MOST_OBJECTS = 500  # The maximum number of objects whose attributes are saved.
# Long lists are slow to search, so check only this many items of a list or dict.
_MOST_CHECKED = 64
# Do not save objects from these packages, because they may hold open files or processes.
_LIBRARIES = {"lightning", "numpy", "pytorch_lightning", "torch", "torchmetrics"}
_LIBRARIES |= sys.stdlib_module_names
# The attributes that torch sets in every module.
_OF_MODULE = frozenset(vars(nn.Module()))
# In a checkpoint, this value marks a deleted attribute.
REMOVED: Any = ("removed", None)
# This value marks an attribute that is too large, or has an unsupported type.
UNKNOWN: Any = ("unknown", None)
_NOT_CREATED = "the saved run, but not this run, created it during training"

Place = tuple[str, str]


class SlotAttributes(dict[str, Any]):
    """A dict like ``vars(instance)`` that also contains the attributes in ``__slots__``."""

    def __init__(self, instance: Any, slots: list[str]) -> None:
        self._instance, self._slots = instance, slots
        super().__init__(
            {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
        )
        self.update(getattr(instance, "__dict__", {}))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        # Do not call setattr, because loading a checkpoint must not run the setter of a property.
        if name in self._slots:
            object.__setattr__(self._instance, name, value)
        elif hasattr(self._instance, "__dict__"):
            vars(self._instance)[name] = value

    def pop(self, name: str, default: Any = None) -> Any:
        if name in self._slots and name in self:
            object.__delattr__(self._instance, name)
        getattr(self._instance, "__dict__", {}).pop(name, None)
        return super().pop(name, default)


def slots_of(kind: type) -> list[str]:
    """Return the names of the attributes that a class defines in ``__slots__``."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            # Python stores a private slot such as __x under the name _Class__x.
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


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
        if isinstance(self.instance, type):
            return {}
        if isinstance(self.instance, dict):
            # For an instance of a dict subclass, save the items instead of the attributes.
            return self.instance
        if isinstance(self.instance, nn.Module):
            return vars(self.instance)["_buffers"] if self.has_buffers else vars(self.instance)
        slots = slots_of(type(self.instance))
        return (
            SlotAttributes(self.instance, slots)
            if slots
            else getattr(self.instance, "__dict__", {})
        )

    def attributes(self) -> dict[str, Any]:
        if not self.has_attributes:
            return {}
        # For a dict subclass, namespace() returns the dict itself, whose keys may not be strings.
        # Skip such keys.
        values = self.namespace().items()
        return {n: v for n, v in values if isinstance(n, str) and n not in self.ignored}

    def would_hide(self, name: str) -> bool:
        """Return whether an attribute would hide a parameter, buffer or submodule of a module."""
        if not isinstance(self.instance, nn.Module) or self.has_buffers:
            return False
        kinds = ("_parameters", "_buffers", "_modules")
        return any(name in getattr(self.instance, kind) for kind in kinds)


def is_own_object(value: Any) -> bool:
    """Return whether to save an object's attributes in checkpoints, as for a replay buffer."""
    kind = type(value)
    is_known = isinstance(value, nn.Module | Tensor | Enum | tuple) or hasattr(kind, "state_dict")
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES and kind is not SimpleNamespace
    # Use __package__, because users may rename this package.
    is_library = is_library or kind.__module__.startswith(f"{__package__}.")
    is_library = is_library and not is_hparams(kind)
    # Search the attributes of torch's own dataset classes, because a Subset, for example, may wrap
    # a user's dataset.
    is_library = is_library and not isinstance(value, Dataset)
    has_attributes = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return has_attributes and not (is_known or is_library)


def is_hparams(kind: type) -> bool:
    """Return whether a class is the AttributeDict of Lightning, the class of ``self.hparams``."""
    return issubclass(kind, dict) and kind.__name__ == "AttributeDict"


def is_library_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python or torch, such as ``iter(loader)``."""
    is_other = isinstance(value, count | io.IOBase) or is_own_object(value)
    return isinstance(value, Iterator) and not is_other


def find_iterator(value: Any) -> Any:
    """Return ``value`` if it is an iterator, or its first iterator if it is a list or dict."""
    if type(value) not in CONTAINERS:
        return value if is_library_iterator(value) else None
    items = value.values() if isinstance(value, dict) else value
    return next(filter(is_library_iterator, islice(items, _MOST_CHECKED)), None)


def searched_values(part: Part) -> dict[str, Any]:
    """Return an object's attributes and, for a module or an optimizer, also its hooks."""
    values, module = part.attributes(), part.instance
    if isinstance(module, torch.optim.Optimizer):
        of_step = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        values = {name: values[name] for name in values if name not in of_step}
        return {**values, "hooks": hooks_of(module, of_step)}
    if not isinstance(module, nn.Module) or part.has_buffers:
        return values
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = hooks_of(module, kinds)
    for parameter in module._parameters.values():
        hooks += hooks_of(parameter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return {**values, "hooks": hooks}


def hooks_of(owner: Any, kinds: Iterable[str]) -> list[Any]:
    """Return the hooks of a module, parameter or optimizer."""
    # If a hook is a bound method, return its object, so that the object's attributes are saved.
    hooks = [hook for kind in kinds for hook in (getattr(owner, kind, None) or {}).values()]
    return [getattr(hook, "__self__", hook) for hook in hooks]


def is_installed(kind: type) -> bool:
    """Return whether a class comes from an installed package rather than from the user's code."""
    if is_hparams(kind):
        return False
    return "-packages" in (getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


class ListItem(SimpleNamespace):
    """Wraps a list item in an object with one attribute, because only attributes are saved."""


def find_objects(
    parts: dict[str, Part], known: set[int], network: nn.Module | None = None
) -> dict[str, Part]:
    """Return all objects nested in the given objects, keyed by a path such as "model.pools.0".

    Args:
        known: The ids of objects to skip, such as those of the network's modules.
        network: The run's network, to also find modules outside the network.
    """
    found: dict[str, Part] = {}
    modules: dict[str, Part] = {}
    known = known | {id(part.instance) for part in parts.values() if not part.has_buffers}
    waiting = deque((path, searched_values(part), False) for path, part in parts.items())
    while waiting and len(found) <= _MOST_OBJECTS:
        path, values, is_container = waiting.popleft()
        for key, value in values.items():
            if type(value) in ATOMS or id(value) in known:
                continue
            known.add(id(value))
            place = f"{path}.{name_of_key(key)}"
            new = find_modules(place, value, known, network)
            modules |= new
            known |= {id(part.instance) for part in new.values()}
            waiting.extend((name, searched_values(part), False) for name, part in new.items())
            if type(value) in CONTAINERS and 0 < len(value) <= MOST_SEARCHED:
                items: Any = value if isinstance(value, dict) else dict(enumerate(value))
                waiting.append((place, items, True))
            elif is_own_object(value):
                found[place] = Part(value, has_attributes=not is_installed(type(value)))
                waiting.append((place, found[place].namespace(), False))
            elif is_container and (is_stateful(value) or isinstance(value, nn.Module)):
                found[place] = Part(ListItem(item=value))
    return {**found, **modules}


def name_of_key(key: Any) -> str:
    """Convert a dict key, an index or an attribute name to one part of a path like "pools.0"."""
    if isinstance(key, str):
        # Quote a string of digits, because ``key_of_name`` reads digits without quotes as an int.
        return repr(key) if is_integer(key) else key
    return str(key) if type(key) is int or isinstance(key, np.integer) else f"<{key}>"


def key_of_name(name: str) -> int | str | None:
    """Convert text from ``name_of_key`` back to a dict key, or return None if not possible."""
    if name.startswith("<"):
        return None
    if is_integer(name):
        return int(name)
    is_quoted = name.startswith("'") and is_integer(name[1:-1])
    return name[1:-1] if is_quoted else name


def is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def find_modules(
    path: str, value: Any, known: set[int], network: nn.Module | None
) -> dict[str, Part]:
    """Return a module outside the network, such as a teacher model, and its submodules.

    If there is no network, return only torchmetrics objects.
    """
    found: dict[str, Part] = {}
    if not isinstance(value, nn.Module):
        return found
    # Skip wrappers of the network, such as DistributedDataParallel, because they have no state.
    is_outside = network is not None and is_separate(value, network)
    saved: dict[str, Any] = {}
    # The code of a user's class may raise any error.
    with suppress(Exception):
        saved = value.state_dict(keep_vars=True) if is_outside else {}
    for name, module in value.named_modules():
        if id(module) in known and module is not value:
            continue
        place = f"{path}.{name}"
        # By default, state_dict() does not contain a metric's state, so checkpoints contain the
        # metric's attributes.
        is_metric = all(hasattr(module, method) for method in ("update", "compute", "reset"))
        if is_outside or is_metric:
            found[place] = Part(module, _OF_MODULE - {"training"})
        if is_outside:
            found[f"{place}.buffers"] = buffers_of(module, name, saved)
    return found


def is_separate(module: nn.Module, network: nn.Module) -> bool:
    """Return whether a module shares no submodules with the network."""
    return set(network.modules()).isdisjoint(module.modules())


def buffers_of(module: nn.Module, name: str, saved: Collection[str]) -> Part:
    """Return a submodule's buffers that are missing from ``saved``, the network's state_dict."""
    prefix = f"{name}." if name else ""
    # Use named_buffers(), because a scripted module has no plain dict of buffers.
    buffers = [buffer for buffer, _ in module.named_buffers(recurse=False)]
    persistent = [buffer for buffer in buffers if prefix + buffer in saved]
    return Part(module, persistent, has_buffers=True)


def register_buffer(module: nn.Module, name: str) -> None:
    """Register a buffer with ``persistent=False``, whose value is loaded later."""
    vars(module).pop(name, None)
    module._buffers[name] = None
    module._non_persistent_buffers_set.add(name)


def digests_of_callbacks(parts: dict[str, Part]) -> dict[str, list[int]]:
    """Return a digest of each callback's attributes, grouped by the callback's class."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, part in parts.items():
        if name.startswith("callbacks.") and part.has_attributes and not part.has_buffers:
            values = part.attributes().items()
            atoms = sorted((key, repr(value)) for key, value in values if type(value) in ATOMS)
            found[name.rpartition(".")[0]].append(zlib.crc32(repr(atoms).encode()))
    return dict(found)


def warn_of_callbacks(name: str, num_saved: int, num: int) -> None:
    """Warn that the saved run had more callbacks of a class, or had them in a different order."""
    # With ``python -W error``, a warning raises an error, which must not stop training.
    with suppress(Warning):
        warnings.warn(
            f"callbacks: got {num} of the class {name}, expected {num_saved} in the order of the"
            " saved run. Their attributes are restored in this order, and those of other callbacks"
            " are lost. Write state_dict(), load_state_dict() and a state_key to move callbacks.",
            stacklevel=4,
        )


def with_factory(current: Any, value: Any) -> Any:
    """Copy a defaultdict's factory to the restored defaultdict, if the factory was not saved."""
    if isinstance(value, defaultdict) and value.default_factory is None:
        value.default_factory = getattr(current, "default_factory", None)
    return value


class PlainState:
    """Save and restore the random generators and attributes of objects such as the model.

    Args:
        parts: The objects by name. Attributes that change after this call are saved.
        device: The run's device.
        network: The run's network. If it is None, objects in attributes are not saved.
        find_parts: Returns the current modules of the network, because hooks may add modules.
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
        self._start_values: dict[Place, tuple[Any, Any]] = {}
        # Objects with their own checkpoint keys, such as optimizers.
        self._saved: dict[int, Any] | None = None
        # A resumed run compares these digests, to detect callbacks in a different order.
        self._callbacks = digests_of_callbacks(parts)
        self._at_start: dict[Place, Any] = {}
        self._find_objects()
        self._at_start = self.digests()
        # A reference to each attribute's object at the start of the run. If training assigns
        # another object, a resumed run does not change the old one, because others may use it.
        self._start_objects = self._references()
        self._iterators: dict[Place, Any] = {}
        containers = ((p, value) for p, value in self.attributes() if type(value) in CONTAINERS)
        self._lengths = {place: len(value) for place, value in containers}

    def add(self, parts: dict[str, Part], saved: Iterable[Any], is_always_saved: bool) -> None:
        """Also save the attributes of the given objects, such as optimizers.

        Args:
            saved: Objects to skip, because other checkpoint keys contain their state.
            is_always_saved: Whether to save the attributes even if they never change.
        """
        self._saved = {id(part): part for part in saved}
        self._given |= parts
        self._find_objects()
        digests, ids = self.digests(), self._ids_in_network()
        for place, value in self.attributes():
            if place[0] in parts:
                self._start_objects[place] = Reference(value)
            is_compared = place[0] in parts and not is_always_saved
            # configure_optimizers creates a dict of ids again in a resumed run, so warn only if
            # training changes this dict.
            if place in digests and (is_compared or refers_to(value, ids)):
                self._at_start[place] = digests[place]

    def _references(self) -> dict[Place, Reference]:
        return {place: Reference(value) for place, value in self.attributes()}

    @contextmanager
    def accepting_new_objects(self) -> Iterator[None]:
        """Treat objects that a hook such as on_train_start assigns as objects from the start."""
        # A resumed run calls the hook before it restores attributes, so it has these objects, too.
        before = self._references()
        yield
        self._find_objects()
        for place, value in self.attributes():
            if place not in before or not before[place].refers_to_object(value):
                self._start_objects[place] = Reference(value)

    def _find_objects(self) -> None:
        """Search attributes for objects to save, because hooks may have created new objects."""
        if self._network is not None:
            with self._guarded("the objects in attributes"):
                self._add_new_parts()
                known = {*(self._saved or ()), *map(id, self._network.modules())}
                found = find_objects(self._given, known, self._network)
                self._parts = {**self._given, **found}
                objects = [p for p in found.values() if not isinstance(p.instance, nn.Module)]
                if len(objects) > _MOST_OBJECTS:
                    reason = f"there are more than {_MOST_OBJECTS}"
                    self._warn("the last of the objects in attributes", reason)

    def _add_new_parts(self) -> None:
        """Add modules that hooks such as on_train_start registered in the network."""
        for name, part in self._find_parts():
            if name not in self._given or self._given[name].instance is not part.instance:
                # The digests from before training belong to another module. Without them, the
                # checkpoint contains all attributes of the new module.
                old = [p for p in self._at_start if f"{p[0]}.".startswith(f"{name}.")]
                for place in old:
                    del self._at_start[place]
                self._given[name] = part

    def mark_changes(self) -> None:
        """Mark what on_fit_start and on_train_start have changed, so that it is always saved.

        A resumed run calls these hooks again. If training changes a value back to its value from
        before the hooks, the checkpoint must still contain this value.
        """
        self._find_objects()
        for place, mark in self.digests().items():
            if mark != self._at_start.get(place, REMOVED):
                self._at_start[place] = UNKNOWN

    def objects_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return all objects nested in objects such as the model, as in {"model.pool": model.pool}.

        Args:
            names: The paths of the objects in a checkpoint. If a path refers to an item of a
                defaultdict, the item is created.
        """
        for name in names:
            self._create_item(name)
        self._find_objects()
        return {n: part.instance for n, part in self._parts.items() if n not in self._given}

    def _create_item(self, name: str) -> None:
        """Create a defaultdict's item, such as model.counts[0], to load its saved state later."""
        # The name of a module in a dict ends with a dot, as in "model.counts.0.".
        path, _, key_name = name.removesuffix(".").rpartition(".")
        owner, _, attribute = path.rpartition(".")
        namespace = self._parts[owner].namespace() if owner in self._parts else {}
        container: Any = namespace.get(attribute)
        key = key_of_name(key_name)
        has_factory = isinstance(container, defaultdict) and container.default_factory is not None
        if has_factory and key is not None:
            container[key]

    def generators(self) -> dict[str, Any]:
        """Return the random generators, keyed by a path such as "object.attribute".

        If several objects share a random generator, the returned dict contains that generator once.
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

    def state_dict(self, has_attributes: bool = True) -> dict[str, Any]:
        """Return the RNG states of all generators, and the attributes that the run has changed."""
        self._find_objects()
        attributes = self.changed_attributes() if has_attributes else {}
        return {
            "generators": self.generator_states(),
            "attributes": attributes,
            "rebound": self._find_rebound(attributes),
            "callbacks": self._callbacks,
        }

    def _find_rebound(self, saved: Collection[Place]) -> dict[Place, int]:
        """Return the ids of the values to which saved attributes have been rebound."""
        found: dict[Place, int] = {}
        for place, value in self.attributes() if saved else ():
            if place in saved and type(value) not in ATOMS:
                start = self._start_objects.get(place)
                if start is None or not start.refers_to_object(value):
                    found[place] = id(value)
        return found

    def changed_attributes(self) -> dict[Place, Any]:
        """Return the attributes that have changed since the run started, in encoded form."""
        encoder = Encoder(self._device, self.addresses_of_network())
        attributes, ids = dict(self.attributes()), self._ids_in_network()
        places = [place for place in self._at_start if place[0] in self._parts]
        changed = {place: REMOVED for place in places if place not in attributes}
        for place, value in attributes.items():
            with self._guarded(f"the attribute {'.'.join(map(str, place))}"):
                iterator = None if self._network is None else find_iterator(value)
                if iterator is not None:
                    raise TypeError(f"the position of a {type(iterator).__name__} cannot be saved")
                if self._has_new_objects(place, value):
                    raise TypeError("it contains objects that were created during training")
                is_state = self._is_saved_as_state(value)
                is_object = is_state and not isinstance(value, nn.Module)
                if not is_object and self._digest(value) == self._at_start.get(place, self):
                    continue
                if ids and refers_to(value, ids):
                    raise TypeError("it contains ids of modules or parameters, which change")
                plain = value.state_dict() if is_state else value
                encoded = encoder.encode_attribute(plain)
                changed[place] = ("state", encoded) if is_state else encoded
                if is_state and not is_object:
                    flags = encoder.encode_attribute(requires_grad_of(value))
                    changed[place] = ("state", encoded, flags)
        return changed

    def find_iterators(self) -> None:
        """Record which attributes contain iterators, for a later call to ``warn_of_iterators``."""
        self._iterators = {
            place: value for place, value in self.attributes() if is_library_iterator(value)
        }

    def warn_of_iterators(self) -> None:
        """Warn about iterators in attributes, because their positions are not saved."""
        for place, value in self.attributes():
            # A resumed run calls iter(loader) again. Warn only about iterators that are older than
            # the last call to iter(loader).
            if self._iterators.get(place) is value and value is not None:
                reason = f"TypeError: the position of a {type(value).__name__} cannot be saved"
                self._warn(f"the attribute {'.'.join(place)}", reason)

    def _ids_in_network(self) -> set[int]:
        """Return the ids of the network's modules and parameters."""
        network = self._network
        parts = [] if network is None else [*network.modules(), *network.parameters()]
        return set(map(id, parts))

    def _has_new_objects(self, place: Place, value: Any) -> bool:
        """Return whether training added objects to a list or dict of a loader."""
        if self._network is not None or type(value) not in CONTAINERS:
            return False
        if len(value) == self._lengths.get(place, 0):
            return False
        items = value.values() if isinstance(value, dict) else value
        return any(map(is_own_object, islice(items, _MOST_CHECKED)))

    def _is_saved_as_state(self, value: Any) -> bool:
        if self._saved is None or id(value) in self._saved:
            return False
        return is_stateful(value) or self._is_separate_module(value)

    def _is_separate_module(self, value: Any) -> bool:
        """Return whether a value is a module outside the network, such as a teacher model."""
        if self._network is None or not isinstance(value, nn.Module):
            return False
        return is_separate(value, self._network)

    def load_state_dict(
        self, state: dict[str, Any], restored: dict[int, Any] | None = None
    ) -> None:
        """Restore the random generators and the attributes.

        Args:
            restored: The objects that this resume has assigned, keyed by their ids in the saved
                run. This call adds the objects that it assigns.
        """
        state = self._without_missing_callbacks(state)
        self.objects_of(name for name, _ in state["attributes"])
        self._register_buffers(state["attributes"])
        self.load_generator_states(state["generators"])
        restored = {} if restored is None else restored
        self.load_attributes(state["attributes"], rebound=state["rebound"], restored=restored)
        # The next checkpoint must contain the restored attributes again, even if their values are
        # those from the start of this run, for example because an earlier fit has set them.
        self._at_start |= dict.fromkeys(state["attributes"], UNKNOWN)
        for place in state["rebound"]:
            self._start_objects.pop(place, None)

    def _register_buffers(self, saved: dict[Place, Any]) -> None:
        """Register the saved buffers that a module lacks, so that state_dict() leaves them out."""
        for (name, buffer), value in saved.items():
            part = self._parts.get(name)
            if part is None or not part.has_buffers or value == REMOVED:
                continue
            if buffer not in part.namespace():
                register_buffer(part.instance, buffer)

    def _without_missing_callbacks(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state without callbacks that this run does not have."""
        names = [*state["generators"], *(name for name, _ in state["attributes"])]
        missing: list[str] = []
        for name, old in state.get("callbacks", {}).items():
            new = self._callbacks.get(name, [])
            shared = min(len(old), len(new))
            is_moved = len(old) != len(new) or sorted(old) == sorted(new)
            is_moved &= old[:shared] != new[:shared]
            missing += [f"{name}.{index + 1}." for index in range(len(new), len(old))]
            has_state = any(saved.startswith(f"{name}.") for saved in names)
            if has_state and (is_moved or len(old) > len(new)):
                warn_of_callbacks(name.removeprefix("callbacks."), len(old), len(new))
        return {
            "generators": {
                name: value
                for name, value in state["generators"].items()
                if not name.startswith(tuple(missing))
            },
            "attributes": {
                place: value
                for place, value in state["attributes"].items()
                if not f"{place[0]}.".startswith(tuple(missing))
            },
            "rebound": state["rebound"],
        }

    def load_attributes(
        self,
        saved: dict[Place, Any],
        is_in_place: bool = True,
        rebound: Mapping[Place, int] = MappingProxyType({}),
        restored: dict[int, Any] | None = None,
    ) -> None:
        """Restore the attributes of objects such as the model from a checkpoint.

        Args:
            is_in_place: Whether to change an existing list or tensor instead of replacing it.
            rebound: The ids of the objects that the saved run has assigned to attributes. These
                attributes get a new object, because others may refer to the old one.
            restored: See ``load_state_dict``.
        """
        restored = {} if restored is None else restored
        self._warn_of_missing_object(saved)
        saved = self._without_hiding(saved)
        # Decode all attributes with one Decoder. Attributes that shared a list or a tensor in the
        # saved run then share it in this run.
        decoder = Decoder(self._device, self._network)
        if is_in_place:
            decoder.targets = self._find_targets(saved, rebound, restored)
        for (name, attribute), encoded in saved.items():
            if name not in self._parts:
                continue
            namespace = self._parts[name].namespace()
            if encoded == REMOVED:
                namespace.pop(attribute, None)
                continue
            with self._guarded(f"the attribute {name}.{attribute}"):
                is_object = isinstance(encoded, tuple) and encoded[0] in ("state", "shared")
                if is_object and is_in_place:
                    load_object(namespace.get(attribute), *map(decoder.decode, encoded[1:]))
                if is_object:
                    continue
                value = with_factory(namespace.get(attribute), decoder.decode(encoded))
                namespace[attribute] = value
                if (name, attribute) in rebound:
                    restored[rebound[name, attribute]] = value

    def _find_targets(
        self, saved: dict[Place, Any], rebound: Mapping[Place, int], restored: dict[int, Any]
    ) -> dict[int, Any]:
        """Map the ids of encoded values to existing objects that are changed in place."""
        targets: dict[int, Any] = {}
        values = dict(self.attributes())
        replacements = self._find_replacements(saved, rebound)
        covered = self.addresses_of_network()
        # Attributes that were not rebound come first, because their objects must not be replaced.
        for place in sorted(saved, key=rebound.__contains__):
            encoded, current = saved[place], values.get(place)
            if place in rebound:
                known = restored.get(rebound[place])
                if known is not None and (known is current or self._is_equal(known, encoded)):
                    targets.setdefault(id(encoded), known)
                continue
            # Do not change a list in place if two attributes share it, but had separate lists in
            # the saved run.
            is_alone = len(replacements.get(id(current), ())) <= 1
            start = self._start_objects.get(place)
            is_start = start is None or start.refers_to_object(current)
            if is_alone and is_start and not shares_memory(current, covered):
                targets.setdefault(id(encoded), current)
        return targets

    def _is_equal(self, value: Any, encoded: Any) -> bool:
        with suppress(Exception):
            return digest(value) == digest(Decoder(self._device, self._network).decode(encoded))
        return False

    def _warn_of_missing_object(self, saved: Iterable[Place]) -> None:
        missing = [name for name, _ in saved if name not in self._parts]
        if missing:
            self._warn(f"the object {missing[0]}", f"ValueError: {_NOT_CREATED}")

    def _without_hiding(self, saved: dict[Place, Any]) -> dict[Place, Any]:
        """Leave out saved attributes with the name of a parameter, buffer or submodule."""
        parts = self._parts
        hiding = [(n, name) for n, name in saved if n in parts and parts[n].would_hide(name)]
        if hiding:
            reason = "this module has a parameter, buffer or submodule of that name"
            self._warn(f"the attribute {'.'.join(hiding[0])}", reason)
        return {place: value for place, value in saved.items() if place not in hiding}

    @contextmanager
    def replaced(self, state: dict[str, Any]) -> Iterator[None]:
        """Temporarily restore random generators and attributes from a saved state."""
        generators = self.generator_states()
        previous = {name: dict(part.namespace()) for name, part in self._parts.items()}
        self.load_generator_states(state["generators"])
        self.load_attributes(state["attributes"], is_in_place=False)
        try:
            yield
        finally:
            self.load_generator_states(generators)
            for name, attribute in state["attributes"]:
                if attribute in previous.get(name, ()):
                    self._parts[name].namespace()[attribute] = previous[name][attribute]
                elif name in previous:
                    self._parts[name].namespace().pop(attribute, None)

    def attributes(self) -> Iterator[tuple[Place, Any]]:
        """Yield ((object name, attribute name), value) for each attribute of each object."""
        for name, part in self._parts.items():
            for attribute, value in part.attributes().items():
                yield (name, attribute), value

    def addresses_of_network(self) -> dict[int, str]:
        """Return the memory addresses and names of the tensors in the network's state_dict."""
        found: dict[int, str] = {}
        if self._network is None:
            return found
        # Leave out temporary tensors, such as the result of get_extra_state(), because another
        # tensor may get their address.
        kept = {*map(id, chain(self._network.parameters(), self._network.buffers()))}
        for name, value in self._network.state_dict(keep_vars=True).items():
            if id(value) in kept and type(value) in TENSORS and is_plain_tensor(value):
                found.setdefault(address_of(value), name)
        # All empty tensors have the address 0.
        found.pop(0, None)
        return found

    def _find_replacements(
        self, saved: dict[Place, Any], rebound: Collection[Place]
    ) -> dict[int, set[int]]:
        """Map the id of each current attribute value to the ids of saved values that replace it."""
        found: dict[int, set[int]] = defaultdict(set)
        for place, value in self.attributes():
            is_replaced = place in rebound or saved.get(place) == REMOVED
            if type(value) not in ATOMS and not is_replaced:
                found[id(value)].add(id(saved.get(place)))
        return found

    def digests(self) -> dict[Place, Any]:
        """Return a digest of each attribute that can be saved, to detect changes."""
        found: dict[Place, Any] = {}
        for place, value in self.attributes():
            with suppress(Exception):
                found[place] = self._digest(value)
        return found

    def _digest(self, value: Any) -> Any:
        if not self._is_separate_module(value):
            return digest(value)
        return digest(value.state_dict()), requires_grad_of(value)

    def keep_start_values(self) -> None:
        """Copy attributes of up to 256 MB, to undo changes by hooks such as on_train_start."""
        self._start_values = self._encoded_values(MOST_BYTES)

    def drop_start_values(self) -> None:
        self._start_values = {}

    def changed_start_values(self, saved: Collection[Place]) -> dict[Place, Any]:
        """Return original values of attributes that on_train_start or set_epoch() has changed.

        Args:
            saved: The attributes in the checkpoint, which are left out.
        """
        current = self.digests() if self._start_values else {}
        # Leave out attributes whose values cannot be saved, such as functions.
        known = {*saved, *(place for place, _ in self.attributes() if place not in current)}
        changed: dict[Place, Any] = {}
        for place, (mark, value) in self._start_values.items():
            if place in known or current.get(place) == mark:
                continue
            with self._guarded(f"the attribute {'.'.join(map(str, place))}"):
                if value == UNKNOWN:
                    raise TypeError("on_train_start or set_epoch() changed it, and it is too large")
                changed[place] = value
        return changed

    def encoded_attributes(self) -> dict[Place, tuple[Any, Any]]:
        """Return a pair (digest, encoded value) for each plain attribute of at most 10 MB."""
        found = self._encoded_values(10 * COMPARED_BYTES)
        return {place: pair for place, pair in found.items() if pair[1] != UNKNOWN}

    def _encoded_values(self, most_bytes: int) -> dict[Place, tuple[Any, Any]]:
        """Return the digest of each plain attribute, and its encoded value or UNKNOWN."""
        encoder = Encoder(self._device, self.addresses_of_network(), most_bytes)
        attributes, found = dict(self.attributes()), {}
        for place, mark in self.digests().items():
            found[place] = mark, UNKNOWN
            # The code of a user's class may raise any error.
            with suppress(Exception):
                found[place] = mark, encoder.encode_attribute(attributes[place])
        return found

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Suppress errors in a `with` block that saves or restores the object ``what``."""
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
                " differ. Save the value in on_save_checkpoint, or as a buffer of a module.",
                stacklevel=5,
            )
