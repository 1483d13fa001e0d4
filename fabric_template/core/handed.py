"""Handed: a pass that is handed to the step itself, as ``dataloader_iter``: the step takes as many batches as it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .passes import Turn
from .run import Run

RECENT = 1024  # steps of which a handed pass knows what they began with: more than a window of accumulation has


class Handed:
    """What a step gets.

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


def handing_over(run: Run, train_batch: Callable) -> Callable:
    """The update, its step given the pass; a step that asks for more than there is ends the epoch."""

    def train(_: Any, batch_idx: int, last_of_window: bool) -> Any:
        handed = run.data.batches.handed
        try:
            return train_batch(handed, batch_idx, last_of_window)
        except StopIteration:
            run.hooks.enter(None)
            if not batch_idx:
                run.at.begin_again()
                run.data.ran_out()
            return {}
        finally:
            run.at.end_pass(handed.done)

    return train
