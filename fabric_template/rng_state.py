"""Capture and restore the RNG states of this process."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# The global generators of the modules random and np.random.
_OF_RANDOM: Any = getattr(random.random, "__self__", None)
_OF_NUMPY: Any = getattr(np.random.get_state, "__self__", None)
_LARGEST_SEARCHED = 64


def capture_rng_state() -> dict[str, Any]:
    """Return the global RNG states of Python, NumPy and torch."""
    numpy_state: Any = np.random.get_state()
    name, keys, *position = numpy_state
    state: dict[str, Any] = {
        "torch": get_generator_state(torch.default_generator),
        "python": get_generator_state(_OF_RANDOM),
        "numpy": (name, keys.tobytes(), *position),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore the global RNG states that ``capture_rng_state`` returned."""
    set_generator_state(torch.default_generator, state["torch"])
    set_generator_state(_OF_RANDOM, state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *position))
    if "cuda" in state and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(state["cuda"][:count])


@contextmanager
def unchanged_rng_state() -> Iterator[None]:
    """Restore the global RNG states at the end of a `with` block."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)


# Generators in attributes


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator and not one of the global generators."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    is_known = isinstance(value, kinds) and not isinstance(value, random.SystemRandom)
    is_global = any(value is part for part in (torch.default_generator, _OF_RANDOM, _OF_NUMPY))
    return is_known and not is_global


def find_generators(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the random generators among an object's attributes, keyed by attribute name."""
    found = {}
    for name, value in attributes.items():
        if is_generator(value):
            found[name] = value
        elif type(value) in (list, tuple, dict) and 0 < len(value) <= _LARGEST_SEARCHED:
            items = value if type(value) is dict else dict(enumerate(value))
            found.update({f"{name}.{key}": v for key, v in items.items() if is_generator(v)})
    return found


def get_generator_state(generator: Any) -> Any:
    """Return a generator's RNG state as built-in Python values, which can be compared with ==."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        version, values, gauss = generator.getstate()
        # Convert the state's 625 numbers to bytes, because saving each number separately takes
        # longer than saving a small model.
        return version, array("I", values).tobytes(), gauss
    if isinstance(generator, np.random.RandomState):
        return _without_arrays(generator.get_state(legacy=False))
    return _without_arrays(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a generator to an RNG state that ``get_generator_state`` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, values, gauss = state
        generator.setstate((version, tuple(array("I", values)), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state))
    else:
        generator.bit_generator.state = _with_arrays(state)


def _without_arrays(state: Any) -> Any:
    """Copy a nested dict and convert each NumPy array to a tuple (dtype, bytes)."""
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return (state.dtype.str, state.tobytes()) if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _with_arrays(value) for name, value in state.items()}
    is_array = isinstance(state, tuple | list)
    return np.frombuffer(state[1], state[0]) if is_array else state
