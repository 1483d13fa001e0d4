"""The states of the random number generators of a process, and of DataLoader workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture_rng_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators, as plain values and tensors."""
    state = _as_plain_values(torch.get_rng_state(), random.getstate(), np.random.get_state())
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set every generator to a captured state."""
    torch.set_rng_state(state["torch"])
    version, python_state, gauss = state["python"]
    random.setstate((version, tuple(python_state), gauss))
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    if "cuda" in state and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(state["cuda"][:count])


@contextmanager
def unchanged_rng_state() -> Iterator[None]:
    """Restore every generator at the end of a block."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)


def pack_rng_state() -> tuple[Any, ...]:
    """Return the states of this DataLoader worker in a form that is fast to compare and to send."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *position = numpy_state
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), (name, keys.tobytes(), *position)


def unpack_rng_state(packed: Any) -> Any:
    """Return packed states in the form of ``capture_rng_state``. Return other values unchanged."""
    if not isinstance(packed, tuple):
        return packed
    torch_state, python_state, (name, keys, *position) = packed
    return _as_plain_values(
        torch.frombuffer(bytearray(torch_state), dtype=torch.uint8),
        python_state,
        (name, np.frombuffer(keys, np.uint32), *position),
    )


def _as_plain_values(
    torch_state: torch.Tensor, python_state: Any, numpy_state: Any
) -> dict[str, Any]:
    """Convert the states to values that torch.load reads with ``weights_only=True``."""
    version, numbers, gauss = python_state
    name, keys, *position = numpy_state
    return {
        "torch": torch_state,
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *position],
    }


def seed_new_process(rank: int) -> None:
    """Reseed this process, so that it differs from the process whose random states it restored."""
    seed = int(torch.randint(2**31, ())) + rank
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
