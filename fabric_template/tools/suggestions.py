"""Try changes that could make training steps faster, and suggest those that do."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, SequentialSampler

from ..data.tensors import TensorLoader
from .step_timer import StepTimer, Training

# A change is suggested if it is faster by MIN_GAIN in the median of several comparisons.
MIN_GAIN, COMPARISONS = 1.1, 3
SECONDS = 0.2  # of one side of a comparison
READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")
LIBRARIES = ("torch", "lightning", "torchmetrics", __name__.partition(".")[0])


def median_ms(seconds: list[float]) -> float:
    """Return the median in ms of ten groups of consecutive steps. Workers deliver in bursts."""
    size = max(1, len(seconds) // 10)
    return 1e3 * median(fmean(seconds[i : i + size]) for i in range(0, len(seconds), size))


def suggest(
    shares: dict[str, float], milliseconds: float, training: Training, timer: StepTimer
) -> tuple[list[str], list[str]]:
    """Return up to three changes that made the steps faster, and notes on what slows a GPU down."""
    steps = min(max(int(1e3 * SECONDS / milliseconds), 10), 200)
    lines: set[str] = set()
    replay = partial(_replay_reads, lines)
    training.time_steps(2, context=replay)
    reads = f"{', '.join(sorted(lines)[:3])} reads the value of a tensor in each step"
    changes = list(_possible_changes(shares, timer.loader))
    if lines:
        changes.append((f"not reading tensors: {reads}; log the tensor", {"context": replay}))
    gains = {}
    for text, change in changes:
        before, after = _compare(training, steps, change)
        if before / after >= MIN_GAIN:
            text = f"{before / after:.1f}x ({before:.3f} to {after:.3f} ms) by {text}"
            gains[text] = before / after
    notes = []
    if lines and training.loop.fabric.device.type == "cpu":
        notes.append(f"{reads}: free on a CPU, but on a GPU each step waits for it")
    return sorted(gains, key=gains.__getitem__, reverse=True)[:3], notes


def _compare(training: Training, steps: int, change: dict[str, Any]) -> tuple[float, float]:
    """Return ms a step without and with a change, of the comparison with the median gain."""
    pairs = []
    for _ in range(COMPARISONS):
        # A change that fails here is not suggested.
        try:
            timers = [training.time_steps(steps, 20, **words) for words in ({}, change)]
        except Exception:
            return 1.0, 1.0
        totals = [[sum(step.values()) for step in one.steps] for one in timers]
        pairs.append((median_ms(totals[0]), max(median_ms(totals[1]), 0.001)))
    pairs.sort(key=lambda pair: pair[0] / pair[1])
    return pairs[len(pairs) // 2]


def _possible_changes(shares: dict[str, float], loader: Any) -> Iterator[tuple[str, dict]]:
    """Yield what could make a large part faster: its text, and the argument of time_steps."""
    threads = torch.get_num_threads()
    if shares["data"] > 0.1 and isinstance(loader, DataLoader):
        workers = min(os.cpu_count() or 1, 2 * loader.num_workers or 8)
        if hasattr(loader.dataset, "tensors"):
            text = f"TensorLoader(x, y, batch_size={loader.batch_size}): the data are in memory"
            yield text, {"change_loader": _as_tensor_loader}
        elif workers > loader.num_workers:
            text = f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
            yield text, {"change_loader": partial(_with_workers, workers=workers)}
    if shares["data"] < 0.5 and threads > 1:
        text = f"torch.set_num_threads(1): the steps are small for {threads} threads"
        yield text, {"context": _one_thread}


def _as_tensor_loader(loader: Any) -> TensorLoader:
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    return TensorLoader(*loader.dataset.tensors, batch_size=loader.batch_size, shuffle=shuffle)


def _with_workers(loader: Any, workers: int) -> Any:
    """Give workers to a copied loader. DataLoader's setter forbids persistent_workers."""
    prefetch = loader.prefetch_factor or 2
    vars(loader).update(num_workers=workers, persistent_workers=True, prefetch_factor=prefetch)
    return loader


@contextmanager
def _one_thread(timer: StepTimer) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _replay_reads(lines: set[str], timer: StepTimer) -> Iterator[None]:
    """Read tensors in one step only, and collect the lines. Later steps use the values of it."""
    values: dict[tuple[str, int], Any] = {}
    counts: Counter[tuple[str, int]] = Counter()

    def replayed(method: Callable) -> Callable:
        def read(tensor: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            library = str(caller.f_globals.get("__name__")).partition(".")[0]
            if library in LIBRARIES or timer.part == "data" or not timer.started:
                return method(tensor, *args)
            line = f"{os.path.relpath(caller.f_code.co_filename)}:{caller.f_lineno}"
            lines.add(line)
            counts[line, timer.started] += 1
            key = (line, counts[line, timer.started])
            if key not in values:
                values[key] = method(tensor, *args)
            return values[key]

        return read

    with ExitStack() as stack:
        for name in READS:
            method = getattr(torch.Tensor, name)
            stack.enter_context(patch.object(torch.Tensor, name, replayed(method)))
        yield
