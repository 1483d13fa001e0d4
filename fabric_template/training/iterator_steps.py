"""Steps with a ``dataloader_iter`` argument, which fetch their batches themselves.

Trainer calls this flavor experimental. Hooks get the batch that was fetched last, and batches are not
moved to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .lr_schedulers import after_optimizer_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from .run_state import RunState


class StepIterator:
    """The iterator of a step that calls ``batch, batch_idx, dataloader_idx = next(dataloader_iter)``.

    Attributes:
        current: What was fetched last.
        num_fetched: How many batches were fetched.
        is_done: Whether nothing is left.
    """

    def __init__(self, batches: Iterator[tuple[Any, int, int]], num_batches: int | float) -> None:
        self._batches, self._num_batches = batches, num_batches
        self.num_fetched = 0
        self.current: tuple[Any, int, int] = (None, 0, 0)
        self.is_done = num_batches == 0

    def __iter__(self) -> StepIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        try:
            self.current = next(self._batches)
        except StopIteration:
            self.is_done = True
            raise
        self.num_fetched += 1
        self.is_done = self.num_fetched >= self._num_batches
        return self.current


def train_with_iterator(run: RunState, end_batch: Callable[[RunState], None]) -> None:
    """Train an epoch whose step fetches its batches."""
    progress, hooks = run.progress, run.hooks
    if run.stop.is_reached:
        return
    loaders = run.data.train
    first = progress.batches_done + loaders.extra_batches
    raw = loaders.raw_batches(progress.batches_done)
    fetched = ((batch, index, 0) for index, (batch, _) in enumerate(raw, first))
    iterator = StepIterator(fetched, loaders.num_batches - first)
    while not iterator.is_done:
        progress.start_batch(is_last=False)
        run.results.start_batch(None)
        if hooks.call("on_train_batch_start", *iterator.current[:2]) == -1:
            break
        try:
            outputs = run.optimization.train_batch(iterator, iterator.current[1])
        except StopIteration:
            break
        loaders.extra_batches = first + iterator.num_fetched - progress.batches_done
        progress.is_last_batch, progress.phase = iterator.is_done, "batch_end"
        after_optimizer_step(run)
        hooks.call("on_train_batch_end", outputs, *iterator.current[:2])
        run.results.end_batch()
        end_batch(run)
        if run.stop.is_reached:
            return
    progress.is_last_batch, progress.phase = True, None
    if not first + iterator.num_fetched:
        loaders.check_short_pass(0)


def evaluate_with_iterator(
    run: RunState,
    name: str,
    step: Callable,
    max_batches: int | float | None,
    outputs: list[list[Any]],
) -> None:
    """Run a validation, test or prediction step that fetches its batches.

    Args:
        outputs: What the step returned is added to the list of the loader.
    """
    loaders, hooks = run.data.eval_loaders, run.hooks
    iterator = StepIterator(loaders.raw_batches(max_batches), loaders.count_batches(max_batches))
    while not iterator.is_done:
        run.progress.count_eval_batch()
        hooks.call(f"on_{name}_batch_start", *_place(iterator, loaders.has_several))
        try:
            output = step(iterator)
        except StopIteration:
            break
        outputs[iterator.current[2]].append(output)
        hooks.call(f"on_{name}_batch_end", output, *_place(iterator, loaders.has_several))


def _place(iterator: StepIterator, has_several: bool) -> tuple[Any, ...]:
    return iterator.current if has_several else iterator.current[:2]
