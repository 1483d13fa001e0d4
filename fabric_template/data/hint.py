"""Hint: what TensorLoader would gain over a DataLoader of tensors, measured in the first batches of a run, said once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..core.passes import INFINITE, Pass
from ..core.run import Run

MEASURED = 20  # batches behind the first one
SHARE, SECONDS = 0.1, 10.0  # of a step, and in the whole run: what is less is not worth a line


def has_tensors(loader: Any) -> bool:
    """Whether a DataLoader cuts plain batches from tensors in memory, so that a TensorLoader gives the same samples.

    Example:
        >>> has_tensors(DataLoader(TensorDataset(torch.zeros(4)))), has_tensors(DataLoader(range(4)))
        (True, False)
    """
    if type(loader) is not DataLoader or loader.batch_size is None or loader.collate_fn is not default_collate:
        return False
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    dataset: Any = loader.dataset
    dataset = dataset.dataset if type(dataset) is Subset else dataset
    return plain and type(loader.batch_sampler) is BatchSampler and type(dataset) is TensorDataset


def first_pass(run: Run, loader: Any) -> Callable[..., Pass]:
    """How a run's first pass is made: it measures where there may be something to say."""
    if loader.num_workers or not has_tensors(loader):
        return Pass
    return lambda *args: MeasuredPass(*args, tell=lambda waits, steps: _tell(run, loader, waits, steps))


class MeasuredPass(Pass):
    """A pass that looks at the clock in its first batches; then it is an ordinary one.

    It draws nothing, and asks the loader for nothing else.

    Example:
        >>> told = []
        >>> batches = MeasuredPass(iter(range(30)), 30, tell=lambda waits, steps: told.append((len(waits), len(steps))))
        >>> list(batches) == list(range(30)), told
        (True, [(20, 20)])
    """

    def __init__(self, *args: Any, tell: Callable[[list[float], list[float]], None]) -> None:
        super().__init__(*args)
        self._tell = tell

    def __iter__(self) -> Iterator:
        return chain(self._measured(), super().__iter__())  # which calls no more Python than the second alone

    def _measured(self) -> Iterator:
        if self._length - self.fetched <= MEASURED + 1 or self._length == INFINITE:
            return
        waits, steps = [], []
        began = 0.0
        for batch in self._iterator:
            self.fetched += 1
            if began:
                waits.append(time.perf_counter() - began)
            yield batch
            now = time.perf_counter()
            if began:
                steps.append(now - began)
            began = now
            if len(steps) == MEASURED:
                self._tell(waits, steps)
                return


def _tell(run: Run, loader: Any, waits: list[float], steps: list[float]) -> None:
    """One line, if it would pay in a step and in the whole run."""
    wait, step, cut = median(waits), median(steps), _time_to_cut(loader)
    epochs, most = run.stop.limits()
    batches = min(
        INFINITE if epochs == -1 else epochs * run.at.num_batches, INFINITE if most == -1 else most * run.at.window
    )
    gain = wait - cut
    if gain < SHARE * step or gain * (batches - run.at.total_batches) < SECONDS:
        return
    words = ["shuffle=True"] * (type(loader.sampler) is RandomSampler) + ["drop_last=True"] * loader.drop_last
    text = ", ".join(["x, y, ...", f"batch_size={loader.batch_size}", *words])
    run.said.line(
        f"hint: {wait / step:.0%} of a step waits for the DataLoader ({1000 * wait:.2f} of {1000 * step:.2f} ms), which"
        f" collates samples that lie in memory; TensorLoader({text}) cuts such a batch in {1000 * cut:.2f} ms:"
        f" {step / (step - gain):.1f}x"
    )


def _time_to_cut(loader: Any) -> float:
    """Seconds that TensorLoader takes for such a batch, taken from all over the samples; no random number is drawn."""
    dataset: Any = loader.dataset.dataset if type(loader.dataset) is Subset else loader.dataset
    tensors, number = dataset.tensors, len(dataset)
    order = torch.arange(min(MEASURED * loader.batch_size, number)) * 7919 % number
    took = []
    for start in range(0, len(order), loader.batch_size):
        began = time.perf_counter()
        cut = order[start : start + loader.batch_size]
        tuple(tensor[cut] for tensor in tensors)
        took.append(time.perf_counter() - began)
    return median(took)
