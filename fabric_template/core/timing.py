"""Timing: batches that are fetched under a profiler, by Trainer's names for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def timed_batches(profiler: Any, batches: Iterator, action: str, is_last: Callable[[Any], bool]) -> Iterator:
    """The same batches, each fetched under the profiler."""
    over = False
    while not over:
        profiler.start(action)
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            profiler.stop(action)
        over = is_last(batch)
        yield batch


class TimedPass:
    """A pass over the training batches whose batches are fetched under the profiler."""

    def __init__(self, batches: Any, profiler: Any) -> None:
        self._batches, self._profiler = batches, profiler

    def __iter__(self) -> Iterator:
        action = "[_TrainingEpochLoop].train_dataloader_next"  # Trainer's name for it
        return timed_batches(self._profiler, iter(self._batches), action, lambda batch: self._batches.is_last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
