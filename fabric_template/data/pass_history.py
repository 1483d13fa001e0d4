"""Passes of a loader whose iterators continue each other, such as slices of an endless stream.

A loader usually starts from its beginning with each ``iter()``. Some loaders and datasets hold an
iterator instead, for example ``itertools.cycle(samples)``, and each epoch takes its next items. A
resumed run gets a new iterator, which it must advance by the items of all finished passes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

# Values that hold no iterator, or too many values to look at.
_LEAVES = (
    *(str, bytes, int, float, type, FunctionType, MethodType, ModuleType, io.IOBase),
    *(torch.Tensor, torch.Generator, nn.Module, np.ndarray, np.generic),
)
_MOST_VALUES = 500


class PassHistory:
    """Counts the batches of finished passes, and reads them again in a resumed run.

    A pass that was read to its end may have read more items than its batches contain, so passes are
    counted one by one. Equal passes are one entry of the state.

    Args:
        loader: The loader. Passes are counted only if it holds an iterator.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.is_needed = holds_iterator(loader)
        # [batches, whether the pass was read to its end, number of such passes]
        self._passes: list[list[Any]] = []
        # The random states before the first batch of the first pass.
        self.at_first_batch: dict[str, Any] | None = None

    def add(self, batches: int, is_finished: bool) -> None:
        """Count a pass. A pass of which nothing was read does not count."""
        if not self.is_needed or not (batches or is_finished):
            return
        if self._passes and self._passes[-1][:2] == [batches, is_finished]:
            self._passes[-1][2] += 1
        else:
            self._passes.append([batches, is_finished, 1])

    def read_again(self) -> int:
        """Read the batches of all counted passes. Return their number."""
        total = 0
        for batches, is_finished, count in self._passes:
            for _ in range(count):
                self.read_pass(batches, is_finished)
                total += batches
        return total

    def read_pass(self, batches: int, is_finished: bool) -> None:
        """Read a number of batches from a new iterator, and also its end if the pass was finished."""
        iterator = iter(self._loader)
        for _ in islice(iterator, batches):
            pass
        if is_finished:
            next(iterator, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "passes": [list(entry) for entry in self._passes],
            "at_first_batch": self.at_first_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes = [list(entry) for entry in state["passes"]]
        self.at_first_batch = state["at_first_batch"]


def holds_iterator(loader: Any) -> bool:
    """Return whether a loader, or the stream that it reads in this process, holds an iterator."""
    if isinstance(loader, DataLoader):
        if loader.num_workers or not isinstance(loader.dataset, IterableDataset):
            return False
        loader = loader.dataset
    waiting: list[Any] = [loader]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Iterator):
            if not starts_over(value):
                return True
            # Its __iter__ has created the iterators among its attributes.
            continue
        items = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {})
        items = value if isinstance(value, dict) else items
        waiting += items.values() if isinstance(items, dict) else items
    return False


def starts_over(iterator: Iterator[Any]) -> bool:
    """Return whether ``__iter__`` of an iterator does more than return the iterator."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return code is not None and bool(code.co_names)
