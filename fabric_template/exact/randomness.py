"""Random numbers: the state of every library's, and of the generators that objects hold for themselves."""

from __future__ import annotations

import functools
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

PLAIN: frozenset[type] = frozenset((bool, int, float, str, type(None)))
HOLD_NONE = PLAIN | {torch.Tensor, nn.Parameter}  # types of which no object holds a generator
MOST_ITEMS = 100  # of a list or dict that is searched for generators: longer ones are data
LIBRARIES: dict[str, Any] = {"torch": torch.default_generator, "python": random, "numpy": numpy.random}


def rng_state(generators: Iterable[Any] = ()) -> dict[str, Any]:
    """The state of every library's random numbers on this rank, and of these generators, as tensors and plain values.

    Example:
        >>> state = rng_state(); first = torch.rand(1); set_rng_state(state); bool(torch.rand(1) == first)
        True
    """
    state = {name: generator_state(library) for name, library in LIBRARIES.items()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if own := [generator_state(generator) for generator in generators]:
        state["generators"] = own
    return state


def set_rng_state(state: Mapping[str, Any], generators: Iterable[Any] = ()) -> None:
    """Put every library's random numbers, and these generators', back where `rng_state` found them."""
    for name, library in LIBRARIES.items():
        set_generator_state(library, state[name])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda"]])
    own, generators = state.get("generators", ()), list(generators)
    if len(own) == len(generators):  # else the objects are others than those that were saved
        for generator, part in zip(generators, own, strict=True):
            set_generator_state(generator, part)


def pack_rng_state(generators: Iterable[Any] = ()) -> bytes:
    """What `rng_state` returns without CUDA's, in bytes and in half the time: for those who need it at every batch."""
    states = [_state(generator) for generator in (*LIBRARIES.values(), *generators)]
    return pickle.dumps([state.numpy() if isinstance(state, torch.Tensor) else state for state in states], 5)


def unpack_rng_state(packed: bytes) -> dict[str, Any]:
    """The `rng_state` of what this run packed; never of what lay in a file.

    Example:
        >>> packed = pack_rng_state(); first = random.random(); set_rng_state(unpack_rng_state(packed))
        >>> random.random() == first
        True
    """
    states = [torch.from_numpy(s) if isinstance(s, numpy.ndarray) else _plain(s) for s in pickle.loads(packed)]
    own = states[len(LIBRARIES) :]
    return {**dict(zip(LIBRARIES, states, strict=False)), **({"generators": own} if own else {})}


def find_generators(*owners: Any) -> list[Any]:
    """The random generators that objects hold, in their attributes or further down: torch's, NumPy's and Python's.

    Long lists and dicts are taken for data, and not searched.

    Example:
        >>> class Noisy:
        ...     def __init__(self):
        ...         self.transforms = [random.Random(3), functools.partial(torch.rand, generator=torch.Generator())]
        >>> [type(found).__name__ for found in find_generators(Noisy())]
        ['Random', 'Generator']
    """
    return list(find({str(index): owner for index, owner in enumerate(owners)}, is_generator, HOLD_NONE).values())


def find(owners: Mapping[str, Any], wanted: Callable[[Any], bool], passed: frozenset[type] = PLAIN) -> dict[str, Any]:
    """What objects hold of a kind, in their attributes or further down, by the way to it; without a look at some types.

    Example:
        >>> class Noisy:
        ...     __slots__ = ("own",)
        >>> noisy = Noisy()
        >>> noisy.own = [random.Random(3)]
        >>> list(find({"noisy": noisy}, is_generator))
        ['noisy.own.0']
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    left = list(owners.items())[::-1]
    while left:
        path, item = left.pop()
        if type(item) in passed or id(item) in seen:
            continue
        if wanted(item):
            seen.add(id(item))
            found[path] = item
        elif not isinstance(item, _LEAVES) and not _knows_the_run(path, item):
            seen.add(id(item))
            left += [(f"{path}.{name}", part) for name, part in _parts(item) if type(part) not in passed][::-1]
    return found


def _knows_the_run(path: str, item: Any) -> bool:
    """Whether an object leads to the whole run: a trainer, and what knows its trainer, but for a module's own modules."""
    kind = type(item)
    return hasattr(kind, "fit_loop") or (hasattr(kind, "trainer") and "." in path and "._modules." not in path)


def generators_of(state: Mapping[str, Any], find: Callable[[], list[Any]], datasets: Iterable[Any]) -> list[Any]:
    """The generators whose states were noted, none if they are not as many; a dataset may make its own with its first item."""
    noted = len(state.get("generators", ()))
    found = find() if noted else []
    if len(found) < noted:
        for dataset in datasets:
            with suppress(Exception):
                dataset[0]
        found = find()
    if len(found) != noted:
        warnings.warn(
            f"resume: the checkpoint has the states of {noted} random generators that a loader and its dataset hold,"
            f" {len(found)} are there now: none is put back, and what they draw is not what they would have drawn; make them"
            " in the dataset's __init__ or in worker_init_fn",
            stacklevel=2,
        )
        return []
    return found


def generator_state(generator: Any) -> Any:
    """A generator's state as a tensor, or as plain values."""
    return _plain(_state(generator))


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator back where `generator_state` found it."""
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))
    elif isinstance(state, list | tuple):  # NumPy's old one
        name, keys, *rest = state
        generator.set_state((name, keys.numpy().astype("uint32"), *rest))
    else:
        generator.set_state(state.cpu() if isinstance(state, torch.Tensor) else state)


def _state(generator: Any) -> Any:
    """A generator's state in its own words, a library's as well."""
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _plain(state: Any) -> Any:
    if isinstance(state, tuple) and len(state) == 3:  # Python's
        version, words, gauss = state
        return [version, torch.from_numpy(numpy.array(words, dtype="int64")), gauss]
    if isinstance(state, tuple):  # NumPy's old one
        name, keys, position, has_gauss, cached = state
        return [name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)]
    if isinstance(state, dict):  # a bit generator's, which it takes back with lists for arrays
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray | numpy.generic) else state


def is_generator(item: Any) -> bool:
    """Whether this is a random generator whose state can be put back."""
    return isinstance(item, _KINDS) and not isinstance(item, random.SystemRandom)


_KINDS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.Tensor)
_OF_MODULES = frozenset(vars(nn.Module()))  # mostly empty, or parameters
_OF_THE_RUN = {"trainer", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_buffers", "_modules"}


def _parts(item: Any) -> list[tuple[str, Any]]:
    """What an object is made of, by name, as far as random generators may be in it."""
    if isinstance(item, dict | list | tuple | set):
        items = item.items() if isinstance(item, dict) else enumerate(item)
        return [(str(name), part) for name, part in items] if len(item) <= MOST_ITEMS else []
    if isinstance(item, functools.partial):
        return [("func", item.func), ("args", item.args), ("keywords", item.keywords)]
    if isinstance(item, MethodType):
        return [("self", item.__self__)]
    if isinstance(item, FunctionType):
        cells = enumerate(item.__closure__ or ())  # of which some may be empty still
        return [(str(index), cell.cell_contents) for index, cell in cells if cell != CellType()]
    own = getattr(item, "__dict__", {})
    if isinstance(item, nn.Module):
        modules = [(f"_modules.{name}", part) for name, part in item._modules.items()]
        return modules + [
            (name, part)
            for name, part in own.items()
            if type(part) not in PLAIN and name not in _OF_THE_RUN and (name not in _OF_MODULES or part)
        ]
    slots = [name for kind in type(item).__mro__ for name in _slots_of(kind)]
    return [(name, part) for name, part in own.items() if name not in _OF_THE_RUN] + [
        (name, getattr(item, name)) for name in slots if hasattr(item, name)
    ]


def _slots_of(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    if not names:  # as of nearly all
        return []
    names = [names] if isinstance(names, str) else list(names)
    private = f"_{kind.__name__.lstrip('_')}"
    names = [f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Random numbers drawn inside leave no trace."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
