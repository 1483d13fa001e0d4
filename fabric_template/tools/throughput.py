"""Throughput: how many samples a second a training takes with some choices, measured by the loop itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from ..core.net import net_of
from ..loop import FabricLoop
from ..record.sizes import batch_size_of
from .jobs import Job
from .rebuilt import can_resize, has_tensors, with_rebuilt

WINDOWS = 5
WARM = 3  # batches, at least, that are not measured, beside the first
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass
class Facts:
    """What a trial has found: how its parts really were, and what could be tried with them."""

    device: str = "cpu"
    cores: int = 1
    threads: int = 1
    workers: int | None = None  # None: not a DataLoader that can be rebuilt
    pin_memory: bool = False
    batch_size: int | None = None  # None: it cannot be another
    samples: int | None = None
    has_tensors: bool = False
    has_convolutions: bool = False
    precision: str = "32-true"
    is_compiled: bool = False
    is_prefetched: bool = False
    matmul_precision: str = "highest"
    is_fused: bool | None = None  # None: an optimizer that has no such way


@dataclass
class Speed:
    """Samples per second, window by window; how long the start took, and with what."""

    windows: list[float]
    start: float  # seconds until the end of the first batch: imports aside, all that comes once
    facts: Facts = field(default_factory=Facts)

    @property
    def rate(self) -> float:
        """The median of the windows, in samples per second."""
        return median(self.windows)

    @property
    def spread(self) -> float:
        """Half of what lies between the quartiles.

        Example:
            >>> Speed([90, 98, 100, 102, 200], start=0.1).spread
            4.0
        """
        if len(self.windows) < 2:
            return 0.0
        first, _, third = quantiles(self.windows, n=4, method="inclusive")
        return (third - first) / 2 if len(self.windows) < 4 else float(third - first)

    def pays(self, beside: Speed, least: float = 0.03) -> bool:
        """Whether it is faster by more than both spreads together, and by more than three in a hundred.

        Example:
            >>> slow, fast = Speed([99, 100, 101], 0.1), Speed([109, 110, 111], 0.1)
            >>> fast.pays(slow), Speed([101, 102, 103], 0.1).pays(slow)
            (True, False)
        """
        return self.rate - beside.rate > max(self.spread + beside.spread, least * beside.rate)


class Meter:
    """A callback that counts samples in windows of time, and stops the fit when it has enough of them.

    Where an epoch is short, windows are whole epochs: what an epoch's beginning costs is in them.
    """

    def __init__(self, seconds: float, time_limit: float, is_fused: bool | None = None) -> None:
        self.each, self.is_fused = seconds / WINDOWS, is_fused
        self.began = time.perf_counter()
        self.gives_up = self.began + 0.8 * time_limit  # with fewer windows, before it counts as hung
        self.rates: list[float] = []
        self.facts = Facts()
        self.first: float | None = None  # when the first batch was done
        self.since: float | None = None  # when the window at hand began
        self.batches, self.samples, self.by_epoch = 0, 0, False

    def on_train_start(self, loop: Any) -> None:
        """The optimizers are made, and have no state yet."""
        if self.is_fused is not None:
            for optimizer in loop.optimizers:
                for group in optimizer.param_groups:
                    group.update(fused=self.is_fused, foreach=False if self.is_fused else group.get("foreach"))
        run = loop._required("tune")
        if run.trained.is_automatic:  # nothing is validated here, so there may be no score to follow
            run.optimizing.schedulers[:] = [one for one in run.optimizing.schedulers if not one.reduce_on_plateau]
        self.facts = facts_of(loop)

    def on_train_batch_end(self, loop: Any, batch: Any) -> None:
        """A batch more."""
        self.batches += 1
        self.samples += 1 if batch is None else batch_size_of(batch)
        now = time.perf_counter()
        is_last = bool(loop.is_last_batch)
        if self.first is None:
            self.first = self._now(loop)
        if self.since is None:
            self.by_epoch |= is_last
            if now - self.first >= self.each and self.batches > WARM and (is_last or not self.by_epoch):
                self._begin(loop)
        elif now - self.since >= self.each and (is_last or not self.by_epoch):
            self.rates.append(self.samples / (self._now(loop) - self.since))
            self._begin(loop)
        if len(self.rates) == WINDOWS or (self.rates and now > self.gives_up):
            loop.should_stop = True

    def _begin(self, loop: Any) -> None:
        self.since, self.samples = self._now(loop), 0

    def _now(self, loop: Any) -> float:
        if loop.fabric.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def facts_of(loop: Any) -> Facts:
    """What the parts of the run that is on are like."""
    loader = loop.train_dataloader
    while isinstance(loader, list | tuple | dict) and loader:
        loader = next(iter(loader.values() if isinstance(loader, dict) else loader))
    run, optimizers = loop._required("tune"), loop.optimizers
    fused = [bool(group.get("fused")) for optimizer in optimizers for group in optimizer.param_groups]
    dataset = getattr(loader, "dataset", None)
    tensors = getattr(loader, "tensors", None)
    sized = dataset if hasattr(dataset, "__len__") else tensors[0] if tensors else None
    return Facts(
        device=loop.fabric.device.type,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        workers=loader.num_workers if type(loader) is torch.utils.data.DataLoader else None,
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        batch_size=loader.batch_size if can_resize(loader) else None,
        samples=None if sized is None else len(sized),
        has_tensors=has_tensors(loader),
        has_convolutions=any(isinstance(part, nn.Conv2d) for part in run.trained.net.modules()),
        precision=str(loop.fabric.strategy.precision.precision),
        is_compiled=bool(run.config.compile),
        is_prefetched=run.config.prefetch,
        matmul_precision=torch.get_float32_matmul_precision(),
        is_fused=all(fused) if fused and all(type(one) in FUSED for one in optimizers) else None,
    )


def measure(job: Job, choice: Mapping[str, Any], seconds: float, time_limit: float, folder: str) -> Speed:
    """Train with these choices as long as it takes, and say how fast that was."""
    if choice.get("threads"):
        torch.set_num_threads(choice["threads"])
    if choice.get("matmul_precision"):
        torch.set_float32_matmul_precision(choice["matmul_precision"])
    meter = Meter(seconds, time_limit, choice.get("fused"))
    words = {word: choice[word] for word in ("precision", "prefetch", "compile") if choice.get(word) is not None}
    loop = FabricLoop(**job.words(folder, callbacks=[meter], **words))
    model, given = job.parts()
    if choice.get("channels_last"):
        net_of(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    place = next((word for word in ("datamodule", "train_dataloaders") if given.get(word) is not None), None)
    if place is None:
        with_rebuilt(model, choice)
    else:
        given[place] = with_rebuilt(given[place], choice)
    meter.began = time.perf_counter()
    loop.fit(model, **given)
    if not meter.rates:
        raise RuntimeError(f"the training ended after {meter.batches} batches, before there was anything to measure")
    assert meter.first is not None
    return Speed(meter.rates, meter.first - meter.began, meter.facts)
