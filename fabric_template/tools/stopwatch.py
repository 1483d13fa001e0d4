"""Stopwatch: a profiler that says of each training step how long every part of it took, without a gap."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FETCH = "[_TrainingEpochLoop].train_dataloader_next"  # with it a step begins
PARTS = {  # as they are printed, and what that is
    "data": "waiting for the next batch",
    "device": "the batch, from the host to the device",
    "forward": "training_step, and what it logs",
    "backward": "the gradients",
    "optimizer": "its step, zero_grad, clipping",
    "logging": "sums of what was logged, rows of steps.csv",
    "checkpoint": "what is saved within an epoch",
    "hooks": "callbacks, and hooks of model and data",
    "rest": "the loop itself",
}
_ENDINGS = {
    ".train_dataloader_next": "data",
    ".batch_to_device": "device",
    ".training_step": "forward",
    ".backward": "backward",
    ".optimizer_step": "optimizer",
    ".optimizer_zero_grad": "optimizer",
    ".configure_gradient_clipping": "optimizer",
}
TRACED = 3  # steps, behind one that warms the tracer up


class Enough(BaseException):
    """All that was asked for is measured: the training need not go on."""


def part_of(action: str) -> str | None:
    """Which part of a step an action of the loop is; None for one that only holds others.

    Example:
        >>> part_of("[Strategy]SingleDeviceStrategy.backward"), part_of("[Callback]Mine.on_train_batch_end")
        ('backward', 'hooks')
        >>> part_of("run_training_batch") is None
        True
    """
    if action in PARTS:
        return action
    if (part := next((part for end, part in _ENDINGS.items() if action.endswith(end)), None)) is not None:
        return part
    if action.startswith("[Callback]"):
        return "checkpoint" if "Checkpoint" in action.rpartition(".")[0] else "hooks"
    return "hooks" if action.startswith(("[LightningModule]", "[LightningDataModule]")) else None


class Stopwatch:
    """What a loop takes as its profiler. Each moment of a step counts for one part: for the innermost that is on.

    On a GPU the parts can only be told apart if each waits for the one before; how long a step takes without that is measured
    first, in as many steps.

    Args:
        warm_up: steps that do not count.
        steps: steps that do.
        synchronizes: whether the parts run on a GPU.
        trace: a folder for a trace of a few steps more.

    Example:
        >>> watch = Stopwatch(warm_up=0, steps=1)
        >>> watch.start(FETCH); watch.stop(FETCH)
        >>> with watch.profile("[Strategy]SingleDeviceStrategy.backward"):
        ...     time.sleep(0.01)
        >>> try:
        ...     watch.start(FETCH)
        ... except Enough:
        ...     watch.steps[0]["backward"] > 0.009
        True
    """

    def __init__(self, warm_up: int, steps: int, synchronizes: bool = False, trace: str | None = None) -> None:
        self._first, self._synchronizes, self._trace = warm_up, synchronizes, trace
        self._second = warm_up + steps * synchronizes  # where the parts' steps begin
        self._last_one = self._second + steps
        self.whole: list[float] = []  # seconds of each step, as it runs without a stopwatch's waiting
        self.steps: list[dict[str, float]] = []  # seconds of each part, step by step
        self.hooks: dict[str, float] = defaultdict(float)  # seconds of each hook, of all of these steps together
        self._done = -1  # the first fetch ends no step
        self._began = self._before = time.perf_counter()
        self._stack: list[tuple[str, str]] = [("", "rest")]
        self._seconds: dict[str, float] = defaultdict(float)
        self._part_of: dict[str, str | None] = {}
        self._run: Any = None
        self._tracer: Any = None
        self._marks: list[Any] = []

    def watch(self, run: Any) -> None:
        """Time what no profiler of Lightning's has a name for, too."""
        self._run = run
        self._time("logging", run.metrics, "batch_ends")
        self._time("logging", run.log, "step")
        self._time("checkpoint", run.keeper, "save_step")

    def _time(self, part: str, owner: Any, name: str) -> None:
        if callable(call := getattr(owner, name, None)):
            setattr(owner, name, self._run.hooks.timed(call, part))

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Time what is done inside."""
        self.start(action)
        try:
            yield
        finally:
            self.stop(action)

    def start(self, action: str) -> None:
        """It begins.

        Raises:
            Enough: all steps are measured.
        """
        if action == FETCH:
            self._begin_step()
        if action not in self._part_of:
            self._part_of[action] = part_of(action)
        self._charge()
        self._stack.append((action, self._part_of[action] or self._stack[-1][1]))
        if self._tracer is not None:
            self._marks.append(torch.profiler.record_function(action))
            self._marks[-1].__enter__()

    def stop(self, action: str) -> None:
        """It ends."""
        if self._marks:
            self._marks.pop().__exit__(None, None, None)
        self._charge()
        if len(self._stack) > 1:
            self._stack.pop()

    def close(self) -> None:
        """Training is over: write the trace, also of fewer steps."""
        tracer, self._tracer, self._marks = self._tracer, None, []
        if tracer is not None:
            tracer.stop()

    def _charge(self) -> None:
        if self._synchronizes and self._done >= self._second:
            torch.cuda.synchronize()
        now = time.perf_counter()
        action, part = self._stack[-1]
        self._seconds[part] += now - self._before
        if part == "hooks" and self._second <= self._done < self._last_one:
            self.hooks[action] += now - self._before
        self._before = now

    def _begin_step(self) -> None:
        """The step before is over."""
        if self._synchronizes and self._done + 1 in (self._first, self._second):
            torch.cuda.synchronize()
        self._charge()
        seconds = {part: self._seconds[part] for part in PARTS}
        if self._first <= self._done < self._first + self._last_one - self._second:
            self.whole.append(self._before - self._began)
        if self._second <= self._done < self._last_one:
            self.steps.append(seconds)
        self._done += 1
        self._seconds.clear()
        if not self._done and self._run is not None:  # now it has an update, which steps by hand, too
            self._time("optimizer", self._run.update, "step_with")
        if self._done >= self._last_one:
            self._trace_step()
        self._began = self._before

    def _trace_step(self) -> None:
        traced = self._done - self._last_one
        if self._trace is None or traced > TRACED:
            self.close()
            raise Enough
        if traced:
            self._tracer.step()
            return
        known = torch.profiler.supported_activities()
        self._tracer = torch.profiler.profile(
            activities=known,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=TRACED),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(self._trace),
            profile_memory=True,
        )
        self._tracer.start()
