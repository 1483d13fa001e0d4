"""Passes: one pass over batches, handed out one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

INFINITE = float("inf")
Turn = tuple[Any, int, int, bool]  # of an evaluation: batch, batch_idx, dataloader_idx, whether it is the last


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
