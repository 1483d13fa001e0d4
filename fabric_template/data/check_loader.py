"""Check that a given loader yields batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigurationTypeError, describe


def loader_argument(call: str, stage: str) -> str:
    if call == "fit":
        return "train_dataloaders" if stage == "train" else "val_dataloaders"
    return "dataloaders"


def check_loader(loader: Any, found: str) -> None:
    """Raise an error for an object that does not yield batches.

    Args:
        found: The start of the message, with {} for the loader: "val_dataloaders: got {}, ...".
    """
    parts = loader.values() if isinstance(loader, Mapping) else loader
    holds_arrays = isinstance(loader, Mapping | tuple) and loader and all(map(_is_array, parts))
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    problem = ""
    if isinstance(loader, type | str | bytes) or not is_iterable:
        problem = "Write DataLoader(dataset, batch_size=32), which yields batches."
    elif isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        problem = "It yields single samples, not batches. Write DataLoader(dataset, batch_size=32)."
    elif holds_arrays or _is_array(loader) or hasattr(loader, "iloc"):
        problem = "It contains all samples, not batches. Write TensorLoader(x, y, batch_size=32)."
        problem += " Import TensorLoader from the same package as FabricLoop."
    if problem:
        raise ConfigurationTypeError(f"{found.format(describe(loader))} {problem}")


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__array_interface__")
