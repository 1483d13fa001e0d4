"""Passes: one pass over batches, handed out one by one or to the step itself; how long it is going to be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

INFINITE = float("inf")
Turn = tuple[Any, int, int, bool]  # of an evaluation: batch, batch_idx, dataloader_idx, whether it is the last
RECENT = 1024  # steps of which a handed pass knows what they began with: more than a window of accumulation has


class Pass:
    """One pass over batches that knows, when it hands out a batch, whether it is the last.

    Without a length it looks one batch ahead, as Trainer does; `note` is called before each look. `iterator` gives the
    batches that are left of `length`; `start` of them count as handed out before, and `fetched` counts on from there.

    Example:
        >>> batches = Pass(iter("ab"), length=INFINITE)
        >>> [(batch, batches.is_last) for batch in batches]
        [('a', False), ('b', True)]
    """

    def __init__(
        self, iterator: Iterator, length: int | float, start: int = 0, note: Callable[[], None] | None = None
    ) -> None:
        self._iterator, self._length, self.fetched, self._note = iterator, length, start, note
        self._ahead: list[Any] = []
        if length == INFINITE:
            self._look_ahead()
        over = start >= length or (length == INFINITE and not self._ahead)
        self.is_last = start > 0 and over

    def __iter__(self) -> Iterator:
        if self._length == INFINITE:
            while self._ahead:
                batch = self._ahead.pop()
                self._look_ahead()
                self.fetched += 1
                self.is_last = not self._ahead
                yield batch
            return
        for batch in self._iterator if self.fetched < self._length else ():
            self.fetched += 1
            self.is_last = self.fetched >= self._length
            yield batch
            if self.is_last:
                return

    def close(self, kept: Sequence[Any] = ()) -> None:
        """End the worker processes of this pass, if it is none of those that loaders keep."""
        end_workers(self._iterator, kept)
        self._iterator, self._ahead = iter(()), []

    def _look_ahead(self) -> None:
        if self._note is not None:
            self._note()
        for batch in self._iterator:
            self._ahead.append(batch)
            break


def end_workers(iterator: Any, kept: Sequence[Any] = ()) -> bool:
    """End a DataLoader's worker processes, if this is its iterator and none of those that are kept; whether it is."""
    if not callable(shut_down := getattr(iterator, "_shutdown_workers", None)) or iterator in kept:
        return False
    shut_down()
    return True


class Handed:
    """A pass that is handed to the step itself, as ``dataloader_iter``: the step takes as many batches as it likes.

    `next` gives ``(batch, batch_idx, dataloader_idx)``; the last such triple stays in `latest`.
    """

    def __init__(self, batches: Iterator[Turn], note: Callable[[Any], None] | None = None, done: bool = False) -> None:
        self._batches, self._note, self.done = batches, note, done
        self.latest: tuple[Any, int, int] = (None, 0, 0)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        self.done = True  # unless there is one more
        *latest, self.done = next(self._batches)
        self.latest = tuple(latest)
        if self._note is not None:
            self._note(self.latest[0])
        return self.latest

    def turns(self) -> Iterator[Turn]:
        """What was taken last, for each step, until nothing is left."""
        while not self.done:
            yield *self.latest, False


class HandedPass:
    """A training pass that is handed to the step itself; the loop sees what was taken before."""

    is_last = False  # nobody knows before the step

    def __init__(self, batches: Any, start: int, note: Callable[[Any], None]) -> None:
        self._batches, self._start = batches, start
        triples = ((batch, idx, 0, batches.is_last) for idx, batch in enumerate(batches, batches.fetched))
        self.handed = Handed(triples, note, done=batches.is_last)
        self._steps = 0  # begun
        self._fetched: deque[int] = deque(maxlen=RECENT)  # batches fetched before each of the last ones

    def __iter__(self) -> Iterator:
        for batch, *_ in self.handed.turns():
            self._steps += 1
            self._fetched.append(self._batches.fetched)
            yield batch

    def fetched_after(self, done: int) -> int:
        """How many batches were fetched for the first so many steps, which are all or nearly all that have begun."""
        undone = self._steps - (done - self._start)
        return self._fetched[-undone] if undone > 0 else self._batches.fetched

    def close(self, kept: Sequence[Any] = ()) -> None:
        """End the worker processes of this pass, and the pass: no step begins any more."""
        self._batches.close(kept)
        self.handed.done = True


def length_of(loader: Any) -> int | float:
    """len(loader), or infinity where it has none."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        return INFINITE
    if is_combined(loader):  # it knows its own length in a pass only
        return max(map(length_of, loader.flattened), default=0)
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return INFINITE


def is_combined(source: Any) -> bool:
    """Whether this is Lightning's CombinedLoader, of either package."""
    return hasattr(source, "flattened") and hasattr(source, "limits")
