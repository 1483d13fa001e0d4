"""Sizes: the number of samples in a batch of any shape."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..core.errors import Misuse


def batch_size_of(batch: Any, said: int | None = None) -> int:
    """The number of samples in a batch: the first dimension of the first tensor in it, however deep.

    Args:
        batch: whatever a loader gives.
        said: what it is where the tensors do not agree, or there is none; None: that of the first, with a warning.

    Raises:
        Misuse: nothing was said, and there is no tensor.

    Example:
        >>> import torch
        >>> batch_size_of({"x": torch.zeros(4, 3), "y": torch.zeros(4)})
        4
    """
    sizes = _sizes(batch)
    size = next(sizes, said)
    if size is None:
        raise Misuse(
            "We could not infer the batch_size from the batch. Either simplify its structure"
            " or provide the batch_size as `self.log(..., batch_size=batch_size)`."
        )
    if any(other != size for other in sizes):
        if said is not None:
            return said
        warnings.warn(
            "Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is"
            f" {size}. To avoid any miscalculations, use `self.log(..., batch_size=batch_size)`.", stacklevel=4,
        )  # fmt: skip
    return size


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.dim() else 1
    elif isinstance(batch, str):
        return
    elif isinstance(batch, Iterable | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _sizes(part)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from _sizes(getattr(batch, field.name))
