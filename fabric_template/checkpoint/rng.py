"""The states of the random number generators of a process, and of DataLoader workers."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch


def capture_rng_state(include_cuda: bool = True) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators, as plain values and tensors."""
    version, python_state, gauss = random.getstate()
    name, keys, *position = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(python_state), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *position],
    }
    if include_cuda and torch.cuda.is_initialized():
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


def pack_rng_state() -> bytes:
    """Return the states of this DataLoader worker as bytes. Equal states give equal bytes."""
    name, keys, *position = np.random.get_state()
    parts = (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        name,
        keys.tobytes(),
        position,
    )
    return pickle.dumps(parts)


def unpack_rng_state(packed: bytes) -> dict[str, Any]:
    """Return packed states in the form of ``capture_rng_state``."""
    torch_state, (version, python_state, gauss), name, keys, position = pickle.loads(packed)
    return {
        "torch": torch.frombuffer(bytearray(torch_state), dtype=torch.uint8),
        "python": [version, list(python_state), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.frombuffer(keys, np.uint32).astype(np.int64)),
            *position,
        ],
    }
