"""Time the parts of training steps on a copy of a training."""

from __future__ import annotations

import copy
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as optim

from ..loop import FabricLoop

PARTS = ("data", "transfer", "forward", "backward", "optimizer", "logging", "hooks", "rest")
LOGGING = ("log", "log_dict", "log_metrics")
HOOKS = (
    *(
        "on_train_batch_start",
        "on_train_batch_end",
        "on_after_batch_transfer",
        "on_before_zero_grad",
    ),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
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


class _EnoughSteps(BaseException):
    """End `fit` after the last timed step, without the end of an epoch."""


class StepTimer:
    """Callback that charges each moment of a step to one part, so that the parts add up to it."""

    def __init__(self, steps: int, warm_up: int, synchronize: Callable[[], Any] | None) -> None:
        self.wanted, self.warm_up, self.synchronize = steps, warm_up, synchronize
        self.steps: list[dict[str, float]] = []
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.started = 0
        self.part = "rest"
        self.since = time.perf_counter()
        self.loader: Any = None

    def switch(self, part: str) -> str:
        """Start a part and return the one that ends."""
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        self.seconds[self.part] += now - self.since
        before, self.part, self.since = self.part, part, now
        return before

    def timed(self, method: Callable, part: str) -> Callable:
        """Return a function that calls the method and charges it to a part."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(part)
            result = method(*args, **kwargs)
            self.switch(before)
            return result

        return call

    def time_methods(self, owner: Any, names: tuple[str, ...], part: str) -> None:
        """Time what an object's class overrides. An attribute of the object hides the method."""
        for name in names:
            method = getattr(owner, name, None)
            module = str(getattr(method, "__module__", ""))
            if callable(method) and not module.endswith((".core.hooks", ".callbacks.callback")):
                vars(owner)[name] = self.timed(method, part)

    def on_train_start(self, loop: Any, module: Any, *args: Any) -> None:
        """Time what the loop has made by now: self.log, loggers and optimizers."""
        for owner in (module, *loop.loggers):
            self.time_methods(owner, LOGGING, "logging")
        for optimizer in loop.optimizers:
            optimizer.zero_grad = self.timed(optimizer.zero_grad, "optimizer")

    def on_train_batch_start(self, *args: Any) -> None:
        """Start a step. What precedes this hook belongs to the step before."""
        self.switch("forward")
        if self.started > self.warm_up:
            self.steps.append(self.seconds)
        if len(self.steps) == self.wanted:
            raise _EnoughSteps
        self.started += 1
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def on_before_backward(self, *args: Any) -> None:
        """Start the backward part."""
        self.switch("backward")

    def on_after_backward(self, *args: Any) -> None:
        """End the backward part. A step with manual optimization continues."""
        self.switch("forward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Start the optimizer part, which includes clipping."""
        self.switch("optimizer")

    def after_optimizer_step(self, *args: Any) -> None:
        """End the optimizer part."""
        self.switch("forward")

    def on_train_batch_end(self, *args: Any) -> None:
        """Charge what follows to the loop itself."""
        self.switch("rest")


class RepeatedLoader:
    """Loader that starts again when it ends, so that no epoch ends while steps are timed."""

    def __init__(self, loader: Any, timer: StepTimer) -> None:
        self.loader, self.timer = loader, timer

    def __len__(self) -> int:
        return self.timer.warm_up + self.timer.wanted + 2

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            self.timer.switch("data")
            for batch in self.loader:
                self.timer.switch("transfer")
                yield batch
                self.timer.switch("data")
        raise ValueError("profile: got a loader without batches, expected one with batches.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@dataclass
class Training:
    """A training as `fit` would start it. Only copies of its parts are trained."""

    loop: FabricLoop
    model: Any
    loader: Any
    datamodule: Any
    arguments: dict[str, Any]

    def time_steps(
        self,
        steps: int,
        warm_up: int = 5,
        *,
        synchronize: bool = False,
        change_loader: Callable[[Any], Any] | None = None,
        context: Callable[[StepTimer], AbstractContextManager] = nullcontext,
    ) -> StepTimer:
        """Train a copy until the steps are timed, with another loader or in a context.

        With `synchronize` each part waits for the GPU, so that its own work is charged to it.
        """
        timer = StepTimer(steps, warm_up, torch.cuda.synchronize if synchronize else None)

        def repeat(loader: Any) -> RepeatedLoader:
            timer.loader = loader
            loader = _copy_loader(loader)
            return RepeatedLoader(change_loader(loader) if change_loader else loader, timer)

        model, callbacks, arguments = self._copy()
        datamodule = copy.copy(self.datamodule)
        train = None if self.loader is None else repeat(self.loader)
        source = model if datamodule is None else datamodule
        if train is None and hasattr(source, "train_dataloader"):
            make_loader = source.train_dataloader
            source.train_dataloader = lambda: repeat(make_loader())
        for owner in (model, datamodule, *callbacks):
            timer.time_methods(owner, HOOKS, "hooks")
        options = {name: getattr(self.loop.config, name) for name in OPTIONS}
        with ExitStack() as stack:
            options["default_root_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
            before = optim.register_optimizer_step_pre_hook(timer.on_before_optimizer_step)
            after = optim.register_optimizer_step_post_hook(timer.after_optimizer_step)
            stack.callback(before.remove)
            stack.callback(after.remove)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(context(timer))
            stack.enter_context(suppress(_EnoughSteps))
            options.update(QUIET, logger=bool(self.loop.loggers), callbacks=[timer, *callbacks])
            loop = FabricLoop(self.loop.fabric, **options)
            loop.fit(model, train, datamodule=datamodule, **arguments)
        if len(timer.steps) < steps:
            raise ValueError(
                f"profile: got a training that ends after {timer.started} batches, expected"
                f" {warm_up + steps}. Remove what stops it early."
            )
        return timer

    def _copy(self) -> tuple[Any, list[Any], dict[str, Any]]:
        """Copy all that a training changes. The copies refer to each other as the originals do."""
        from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar

        silent = (Checkpoint, ModelSummary, ProgressBar)
        callbacks = [one for one in self.loop.callbacks if not isinstance(one, silent)]
        memo: dict[int, Any] = {id(self.loop): self.loop}
        with suppress(AttributeError, RuntimeError):
            memo[id(self.model.trainer)] = self.model.trainer
        try:
            return copy.deepcopy((self.model, callbacks, self.arguments), memo)
        except Exception as error:
            raise TypeError(
                f"profile: got a model or callback that copy.deepcopy refuses ({error}), expected one"
                " that it can copy. Open files and start threads in setup()."
            ) from error


def _copy_loader(loader: Any) -> Any:
    """Copy a loader with its sampler and generators, but not its data."""
    if hasattr(loader, "__next__") or isinstance(loader, dict):
        kind = type(loader).__name__
        raise TypeError(f"profile: got a {kind}, expected one loader. Give a DataLoader.")
    shared = [getattr(loader, "dataset", None), *getattr(loader, "tensors", ())]
    memo = {id(part): part for part in shared}
    # The running iterator of persistent workers cannot be copied. The copy starts its own.
    memo[id(getattr(loader, "_iterator", None))] = None
    return copy.deepcopy(loader, memo)
