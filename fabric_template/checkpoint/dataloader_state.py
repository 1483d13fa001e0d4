"""The position in a training loader, so that a resume continues with the next batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .rng import capture_rng_state, restore_rng_state


class LoaderPosition:
    """Starts the iterators of a loader, and starts one again in the middle of an epoch.

    The order of an epoch depends on the random numbers at its start. They are remembered there, and
    restored before the iterator of a resumed epoch is made.

    Args:
        loader: A DataLoader, a CombinedLoader or any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._rng_at_start: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None

    def start(self) -> Iterator[Any]:
        """Start the iterator of an epoch."""
        self._rng_at_start = capture_rng_state()
        return iter(self.loader)

    def resume(self, batches_done: int) -> Iterator[Any]:
        """Start the iterator of an epoch of which some batches are done."""
        rng_now = capture_rng_state()
        if self._rng_at_start is not None:
            restore_rng_state(self._rng_at_start)
        iterator = self._skip(batches_done)
        restore_rng_state(rng_now)
        return iterator

    def _skip(self, batches_done: int) -> Iterator[Any]:
        loader = self.loader
        if can_skip_by_index(loader):
            clone = copy.copy(loader)
            skipping = SkippingBatchSampler(loader.batch_sampler, batches_done)
            object.__setattr__(clone, "batch_sampler", skipping)
            iterator = iter(clone)
            skipping.draw_order()
            return iterator
        iterator = iter(loader)
        for _ in islice(iterator, batches_done):
            pass
        return iterator

    def state_dict(self) -> dict[str, Any]:
        return {"rng_at_start": self._rng_at_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rng_at_start = state["rng_at_start"]


def can_skip_by_index(loader: Any) -> bool:
    """Return whether batches of a loader can be skipped without reading their samples."""
    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_map_style and loader.batch_sampler is not None and loader.num_workers == 0


class SkippingBatchSampler:
    """The batches of another batch sampler without the first ones."""

    def __init__(self, batch_sampler: Any, skip: int) -> None:
        self._batch_sampler, self._skip = batch_sampler, skip
        self._iterator: Iterator[Any] | None = None

    def draw_order(self) -> None:
        """Draw the order of the epoch now, while the random numbers of its start are set."""
        self._iterator = iter(self._batch_sampler)
        for _ in islice(self._iterator, self._skip):
            pass

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that the order is drawn at the first batch, after the loader's own numbers.
        if self._iterator is None:
            self.draw_order()
        yield from self._iterator

    def __len__(self) -> int:
        return max(0, len(self._batch_sampler) - self._skip)
