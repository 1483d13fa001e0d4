"""Capture and restore the random generators of this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture_rng_state() -> dict[str, Any]:
    """Return the states of this process's random generators, which can be compared with ==."""
    numpy_state: Any = np.random.get_state()
    name, keys, *position = numpy_state
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": (name, keys.tobytes(), *position),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set every random generator to a captured state."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    version, words, gauss = state["python"]
    # DataLoader(pin_memory=True) has turned a worker's tuples into lists.
    random.setstate((version, tuple(words), gauss))
    name, keys, *position = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *position))
    if "cuda" in state and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(state["cuda"][:count])


@contextmanager
def unchanged_rng_state() -> Iterator[None]:
    """Restore every random generator at the end of a block."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)
