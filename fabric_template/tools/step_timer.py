"""Time training steps on a copy of a training, and try what could make them faster."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from statistics import fmean, median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, SequentialSampler

from ..data.tensor_loader import TensorLoader
from ..loop import FabricLoop

PARTS = ("data", "transfer", "forward", "backward", "optimizer", "rest")
# The options that decide how long a step takes. The other options keep their defaults.
OPTIONS = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("log_every_n_steps", "compile", "deterministic", "benchmark", "detect_anomaly"),
)
# Timed steps write nothing but the CSV logger's rows, in a temporary folder.
QUIET = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}
WARM_UP = 5
# A change is suggested if it is faster by MIN_GAIN in the median of several comparisons.
MIN_GAIN, COMPARISONS = 1.1, 3
SECONDS = 0.2  # of one side of a comparison
READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")
LIBRARIES = ("torch", "lightning", "torchmetrics", __name__.partition(".")[0])


class _EnoughSteps(BaseException):
    """End `fit` after the last timed step, without the end of an epoch."""


class _StepTimer:
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
        # What precedes this hook belongs to the step before.
        self.switch("forward")
        if self.started > WARM_UP:
            self.steps.append(self.seconds)
        if len(self.steps) == self.wanted:
            raise _EnoughSteps
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


class _RepeatedLoader:
    """Loader that starts again when it ends, so that no epoch ends while steps are timed."""

    def __init__(self, loader: Any, timer: _StepTimer) -> None:
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


class _ReadRecorder(TorchFunctionMode):
    """Collects the lines outside of libraries at which a step reads the value of a tensor."""

    def __init__(self, timer: _StepTimer, lines: set[str]) -> None:
        super().__init__()
        self.timer, self.lines = timer, lines

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        caller = sys._getframe(1)
        library = str(caller.f_globals.get("__name__")).partition(".")[0]
        is_step = self.timer.part != "data" and self.timer.started > WARM_UP
        if function.__name__ in READS and library not in LIBRARIES and is_step:
            path = os.path.relpath(caller.f_code.co_filename)
            self.lines.add(f"{path}:{caller.f_lineno}")
        return function(*args, **(kwargs or {}))


def time_steps(
    training: tuple,
    steps: int,
    synchronize: bool = False,
    new_loader: Any = None,
    threads: int | None = None,
    reads: set[str] | None = None,
) -> _StepTimer:
    """Train a copy until the steps are timed, with another loader or number of threads.

    With `synchronize` each part waits for the GPU, so that its own work is charged to it.
    """
    loop, model, train, datamodule, arguments = training
    timer = _StepTimer(steps, synchronize)
    model, arguments = copy.deepcopy((model, arguments))
    datamodule = copy.copy(datamodule)

    stack = ExitStack()

    def repeat(loader: Any) -> _RepeatedLoader:
        timer.loader = loader
        loader = new_loader or loader
        # The data are shared, and a running iterator of persistent workers cannot be copied.
        shared = [getattr(loader, "dataset", None), *getattr(loader, "tensors", ())]
        memo = {id(part): part for part in shared} | {id(getattr(loader, "_iterator", None)): None}
        repeated = _RepeatedLoader(copy.deepcopy(loader, memo), timer)
        stack.callback(repeated.close)
        return repeated

    source = model if datamodule is None else datamodule
    if train is not None:
        train = repeat(train)
    elif hasattr(source, "train_dataloader"):
        make_loader = source.train_dataloader
        source.train_dataloader = lambda: repeat(make_loader())
    options = {name: getattr(loop.config, name) for name in OPTIONS}
    with stack:
        options["default_root_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(register_optimizer_step_post_hook(timer.after_optimizer_step).remove)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads or torch.get_num_threads())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(suppress(_EnoughSteps))
        if reads is not None:
            stack.enter_context(_ReadRecorder(timer, reads))
        options.update(QUIET, logger=bool(loop.loggers), callbacks=[timer])
        FabricLoop(loop.fabric, **options).fit(model, train, datamodule=datamodule, **arguments)
    if len(timer.steps) < steps:
        message = "expected a longer one. Give more batches, and remove what stops it."
        raise ValueError(f"profile: got a training of {timer.started} batches, {message}")
    return timer


def get_median(seconds: list[float]) -> float:
    """Return the median in ms of ten groups of consecutive steps. Workers deliver in bursts."""
    size = max(1, len(seconds) // 10)
    return 1e3 * median(fmean(seconds[i : i + size]) for i in range(0, len(seconds), size))


def find_faster(training: tuple, loader: Any, data_share: float, milliseconds: float) -> list[str]:
    """Try changes, and describe those that make the steps faster."""
    steps = min(max(int(1e3 * SECONDS / milliseconds), 10), 200)
    gains = {}
    for text, change in _get_changes(loader, data_share):
        # A change that fails here is not suggested.
        with suppress(Exception):
            pairs = [_time_pair(training, steps, change) for _ in range(COMPARISONS)]
            gain, before, after = sorted(pairs)[COMPARISONS // 2]
            if gain >= MIN_GAIN:
                gains[f"{gain:.1f}x ({before:.3f} to {after:.3f} ms) by {text}"] = gain
    return sorted(gains, key=gains.__getitem__, reverse=True)


def _time_pair(training: tuple, steps: int, change: dict) -> tuple[float, float, float]:
    """Return how many times a change is faster, and ms a step without and with it."""
    timers = [time_steps(training, steps), time_steps(training, steps, **change)]
    before, after = (get_median([sum(step.values()) for step in one.steps]) for one in timers)
    return before / max(after, 0.001), before, after


def _get_changes(loader: Any, data_share: float) -> Iterator[tuple[str, dict]]:
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
