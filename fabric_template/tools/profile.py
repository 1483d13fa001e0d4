"""Show where the time of a training step goes, and what makes it shorter."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, SequentialSampler

from ..data.tensor_loader import TensorLoader
from ..loop import FabricLoop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("data", "transfer", "forward", "backward", "optimizer", "rest")
# The options that decide how long a step takes. The other options keep their defaults.
OPTIONS = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("log_every_n_steps", "compile", "deterministic", "benchmark", "detect_anomaly"),
)
OFF = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
WARM_UP = 5
# A change is suggested if it is faster by MIN_GAIN in the median of several comparisons.
MIN_GAIN, COMPARISONS = 1.1, 3
SECONDS = 0.2  # of one side of a comparison


@dataclass(frozen=True)
class Row:
    """The median of one part of a step in milliseconds, and its share of the step."""

    part: str
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Profile:
    """The parts of a step, which add up to it, and the changes that made it faster when tried."""

    rows: list[Row]
    device: str
    steps: int
    suggestions: list[str]

    @property
    def milliseconds(self) -> float:
        """Return the duration of a step, which is the sum of its parts."""
        return round(sum(row.milliseconds for row in self.rows), 3)

    def __str__(self) -> str:
        lines = [f"{'part':10}{'median':>14}{'share':>9}   of {self.steps} steps on {self.device}"]
        for row in (*self.rows, Row("step", self.milliseconds, 1.0)):
            lines.append(f"{row.part:10}{row.milliseconds:11,.3f} ms{row.share:9.1%}")
        lines += [f"faster: {text}" for text in self.suggestions]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Draw the table as one bar for each part."""
        from matplotlib import pyplot

        size = (7, 0.4 * len(self.rows) + 1.4)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        bars = axes.barh([row.part for row in self.rows], [row.milliseconds for row in self.rows])
        labels = [f"{row.milliseconds:,.3f} ms, {row.share:.1%}" for row in self.rows]
        axes.bar_label(bars, labels, padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set(xlabel="median, ms", title=f"{self.milliseconds:,.3f} ms a step on {self.device}")
        return figure


def profile(
    loop: Any,
    model: Any,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    steps: int = 50,
    **arguments: Any,
) -> Profile:
    """Train a few steps on a copy; find where their time goes and what makes them faster.

    Weights, optimizers, callbacks, random numbers and loaders are unchanged afterwards, and no file
    is left. Validation, callbacks and loggers (but the CSV logger) do not run.

    Args:
        loop: Its options are those of the training.
        model: As for `fit`.
        train_dataloaders: As for `fit`, but one loader.
        datamodule: As for `fit`, in place of the loader.
        steps: Number of timed batches.
        arguments: As for `fit`: optimizer, scheduler, training_step.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"profile(steps): got {steps!r}, expected an int >= 1. Write steps=50.")
    if loop.fabric.world_size > 1:
        size = loop.fabric.world_size
        raise ValueError(f"profile(loop): got {size} processes, expected one. Write devices=1.")
    if hasattr(train_dataloaders, "train_dataloader"):
        train_dataloaders, datamodule = None, train_dataloaders
    training = (loop, model, train_dataloaders, datamodule, arguments)
    with isolate_rng():
        timer = time_steps(training, steps, synchronize=loop.fabric.device.type == "cuda")
        medians = [round(get_median([step[part] for step in timer.steps]), 3) for part in PARTS]
        total = sum(medians)
        rows = [Row(part, ms, ms / total) for part, ms in zip(PARTS, medians, strict=True) if ms]
        suggestions = find_faster(training, timer.loader, medians[0] / total, total)
    return Profile(rows, str(loop.fabric.device), steps, suggestions)


def profile_command(loop: Any, model: Any, data: Any, *, out: str | None, steps: int) -> int:
    """Print the profile of a training, and draw it into a file."""
    found = profile(loop, model, data, steps=steps)
    print(found)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        found.plot().savefig(out, dpi=150)
        print(f"picture: {out}")
    return 0


class EnoughSteps(BaseException):
    """End `fit` after the last timed step, without the end of an epoch."""


class StepTimer:
    """Callback that charges each moment of a step to one part, so that the parts add up to it."""

    def __init__(self, steps: int, synchronize: bool) -> None:
        self.wanted, self.synchronize = steps, synchronize
        self.steps: list[dict[str, float]] = []
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.started = 0
        self.part = "rest"
        self.since = time.perf_counter()
        self.loader: Any = None

    def switch(self, part: str) -> None:
        if self.synchronize:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.part] += now - self.since
        self.part, self.since = part, now

    def on_train_batch_start(self, *args: Any) -> None:
        # The time before this hook belongs to the step before.
        self.switch("forward")
        if self.started > WARM_UP:
            self.steps.append(self.seconds)
        if len(self.steps) == self.wanted:
            raise EnoughSteps
        self.started += 1
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def on_before_zero_grad(self, *args: Any) -> None:
        self.switch("optimizer")

    def on_before_backward(self, *args: Any) -> None:
        self.switch("backward")

    def on_after_backward(self, *args: Any) -> None:
        # Clipping and the optimizer's step follow.
        self.switch("optimizer")

    def after_optimizer_step(self, *args: Any) -> None:
        # A step with manual optimization continues.
        self.switch("forward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.switch("rest")


class RepeatedLoader:
    """Loader that starts again when it ends, so that no epoch ends while steps are timed."""

    def __init__(self, loader: Any, timer: StepTimer) -> None:
        self.loader, self.timer = loader, timer
        self.iterator: Any = None

    def __len__(self) -> int:
        return WARM_UP + self.timer.wanted + 2

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            self.timer.switch("data")
            self.iterator = iter(self.loader)
            for batch in self.iterator:
                self.timer.switch("transfer")
                yield batch
                self.timer.switch("data")

    def close(self) -> None:
        """Shut the workers down, which an abandoned iterator keeps until garbage collection."""
        if hasattr(self.iterator, "_shutdown_workers"):
            self.iterator._shutdown_workers()


def time_steps(
    training: tuple,
    steps: int,
    synchronize: bool = False,
    new_loader: Any = None,
    threads: int | None = None,
) -> StepTimer:
    """Train a copy until the steps are timed, with another loader or number of threads.

    With `synchronize` each part waits for the GPU, so that its own work is charged to it.
    """
    loop, model, train, datamodule, arguments = training
    timer = StepTimer(steps, synchronize)
    model, arguments = copy.deepcopy((model, arguments))
    datamodule = copy.copy(datamodule)
    stack = ExitStack()

    def repeat(loader: Any) -> RepeatedLoader:
        timer.loader = loader
        loader = new_loader or loader
        # The data are shared, and a running iterator of persistent workers cannot be copied.
        shared = [getattr(loader, "dataset", None), *getattr(loader, "tensors", ())]
        memo = {id(part): part for part in shared} | {id(getattr(loader, "_iterator", None)): None}
        repeated = RepeatedLoader(copy.deepcopy(loader, memo), timer)
        stack.callback(repeated.close)
        return repeated

    source = model if datamodule is None else datamodule
    if train is not None:
        train = repeat(train)
    elif hasattr(source, "train_dataloader"):
        make_loader = source.train_dataloader
        source.train_dataloader = lambda: repeat(make_loader())
    options = {name: getattr(loop.config, name) for name in OPTIONS} | dict.fromkeys(OFF, False)
    options |= {"limit_val_batches": 0, "max_epochs": 1, "logger": bool(loop.loggers)}
    with stack:
        options["default_root_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(register_optimizer_step_post_hook(timer.after_optimizer_step).remove)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads or torch.get_num_threads())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(suppress(EnoughSteps))
        copied = FabricLoop(loop.fabric, callbacks=[timer], **options)
        copied.fit(model, train, datamodule=datamodule, **arguments)
    if len(timer.steps) < steps:
        expected = "expected a longer one. Give more batches, and remove what stops it"
        raise ValueError(f"profile: got a training of {timer.started} batches, {expected}.")
    return timer


def get_median(seconds: list[float]) -> float:
    """Return the median in ms of ten groups of consecutive steps. Workers deliver in bursts."""
    size = max(1, len(seconds) // 10)
    return 1e3 * median(fmean(seconds[i : i + size]) for i in range(0, len(seconds), size))


def find_faster(training: tuple, loader: Any, data_share: float, milliseconds: float) -> list[str]:
    """Try changes, and describe those that make the steps faster."""
    steps = min(max(int(1e3 * SECONDS / milliseconds), 10), 200)
    gains = {}
    for text, change in get_changes(loader, data_share):
        pairs = []
        # A change that fails here is not suggested.
        with suppress(Exception):
            for _ in range(COMPARISONS):
                timers = [time_steps(training, steps), time_steps(training, steps, **change)]
                times = [get_median([sum(step.values()) for step in t.steps]) for t in timers]
                pairs.append((times[0] / max(times[1], 0.001), *times))
            gain, before, after = sorted(pairs)[COMPARISONS // 2]
            if gain >= MIN_GAIN:
                gains[f"{gain:.1f}x ({before:.3f} to {after:.3f} ms) by {text}"] = gain
    return sorted(gains, key=gains.__getitem__, reverse=True)


def get_changes(loader: Any, data_share: float) -> Iterator[tuple[str, dict]]:
    """Yield what could make a step faster: its text, and the argument of time_steps."""
    if data_share > 0.1 and isinstance(loader, DataLoader):
        workers = min(os.cpu_count() or 1, 2 * loader.num_workers or 8)
        if hasattr(loader.dataset, "tensors"):
            size, shuffle = loader.batch_size, not isinstance(loader.sampler, SequentialSampler)
            tensors = loader.dataset.tensors
            new: Any = TensorLoader(*tensors, batch_size=size or 1, shuffle=shuffle)
            text = f"TensorLoader(x, y, batch_size={size}): the data are in memory"
            yield text, {"new_loader": new}
        elif workers > loader.num_workers:
            new = copy.copy(loader)
            # DataLoader's setter forbids to change persistent_workers.
            vars(new).update(num_workers=workers, persistent_workers=True, prefetch_factor=2)
            text = f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
            yield text, {"new_loader": new}
    threads = torch.get_num_threads()
    if data_share < 0.5 and threads > 1:
        text = f"torch.set_num_threads(1): the steps are small for {threads} threads"
        yield text, {"threads": 1}
