"""Indices: a loader's sampler that begins behind what is done."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler

_LAZY = (
    "resume: {} draws a batch as it is sent to a worker, from random numbers that training draws from, too: those that were"
    " sent already are the same, the others only if each batch is drawn by itself; with a generator of its own it is exact"
)


class Indices:
    """A loader's sampler that begins behind the indices of the batches that are done, once; then it is as it was."""

    def __init__(self, sampler: Any, source: Any = None, done: int = 0, instead: Any = (), began: Any = None):
        self.sampler, self.source, self.done, self.instead, self.began = sampler, source, done, instead, began
        self.sent: deque[Any] = deque(maxlen=0)  # what was drawn last, for workers that are sent it ahead,
        self.number = 0  # and how many in all
        self.ahead: list[Any] | None = None  # what another process had drawn ahead, which is given first
        self.drawn: Iterator[Any] = iter(())  # what the sampler's pass draws from,
        self.size = 1  # and how much of it makes a batch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator:
        drawn = self._draw()
        indices = drawn if self.source is None else chain.from_iterable(self._behind(drawn))
        return self._kept(indices) if self.sent.maxlen else indices

    def _draw(self) -> Iterator:
        """The sampler's pass. A plain batch sampler's goes on from indices, so that none are put together to be dropped.

        It asks its sampler with the first batch only: some draw the whole pass when they are asked.
        """
        sampler, is_plain = self.sampler, type(self.sampler) is BatchSampler
        self.drawn, self.size = (_when_needed(sampler.sampler), sampler.batch_size) if is_plain else (iter(sampler), 1)
        return iter(BatchSampler(self.drawn, self.size, sampler.drop_last)) if is_plain else self.drawn

    def drop(self, done: int) -> None:
        """Leave out the first so many."""
        drop(self.drawn, done * self.size)

    def _kept(self, indices: Iterator) -> Iterator[Any]:
        self.sent.clear()
        self.number = 0 if self.source is None else self.done
        for item in indices:
            if item != []:  # which stands for a batch that is done
                self.sent.append(item)
                self.number += 1
            yield item

    def _behind(self, indices: Iterator) -> Iterator[Any]:
        source, self.source = self.source, None
        if self.began is not None:
            source.put_back(self.began)
            indices = self._draw()
        self.drop(self.done)
        yield self.instead
        if ahead := self.ahead:
            if list(islice(indices, len(ahead))) != ahead:
                warnings.warn(_LAZY.format(type(self.sampler).__name__), stacklevel=2)
            yield ahead
        yield indices


def _when_needed(indices: Any) -> Iterator[Any]:
    yield from indices


def drop(iterator: Iterator, number: int) -> None:
    """Leave out so many."""
    deque(islice(iterator, number), maxlen=0)


@contextmanager
def replaced(loader: Any, **parts: Any) -> Iterator[None]:
    """Within, a loader has other parts; DataLoader's own way to set them refuses some."""
    own = {name: vars(loader)[name] for name in parts}
    vars(loader).update(parts)
    try:
        yield
    finally:
        vars(loader).update(own)
