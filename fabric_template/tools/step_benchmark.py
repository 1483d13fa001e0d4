"""Train a copy of a model with changed settings, and time the parts of each training step."""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Generator
from contextlib import ExitStack, suppress
from statistics import fmean, median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ..data.tensor_loader import TensorLoader
from ..distributed.signals import error_of_signal

PARTS = ("data", "transfer", "forward", "backward", "optimizer", "rest")
WARM_UP = 5
# FabricLoop options that influence the duration of a training step.
OPTIONS = ["accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "compile"]
OPTIONS += ["log_every_n_steps", "deterministic", "benchmark", "detect_anomaly"]
OFF = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
Choice = dict[str, Any]  # Maps the names of settings, such as "num_workers", to values.


class EnoughSteps(BaseException):
    """Raised to end training early, after enough steps have been recorded."""


class StepTimer:
    """A callback that times the parts of each training step, such as "data" and "forward"."""

    def __init__(self, steps: int, seconds: float, is_fused: bool, synchronize: bool) -> None:
        self.limit, self.seconds = steps, seconds
        self.is_fused, self.synchronize = is_fused, synchronize
        self.steps: list[dict[str, float]] = []
        self.first_batch: Any = None
        self.current = dict.fromkeys(PARTS, 0.0)
        self.started = 0
        self.part = "rest"
        self.since = self.begin = time.perf_counter()

    def get_median(self, *parts: str) -> float:
        """Return the median time per step, in seconds, that the given parts take together."""
        # Average the times of several steps before taking the median, because DataLoader workers
        # deliver batches in bursts.
        times = [sum(step[part] for part in parts) for step in self.steps]
        size = max(1, len(times) // 10)
        return median(fmean(times[i : i + size]) for i in range(0, len(times), size))

    def switch(self, part: str) -> None:
        if self.synchronize:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.current[self.part] += now - self.since
        self.part, self.since = part, now

    def iterate(self, loader: Any) -> Generator[Any, None, None]:
        """Yield batches endlessly, and restart the loader after its last batch."""
        iterator: Any = None
        is_empty = False
        try:
            while not is_empty:
                is_empty = True
                self.switch("data")
                iterator = iter(loader)
                for batch in iterator:
                    is_empty = False
                    self.switch("transfer")
                    yield batch
                    self.switch("data")
        finally:
            # Shut down the workers, which would otherwise run until the iterator is deleted.
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers if self.is_fused else []:
            for group in optimizer.param_groups:
                group["foreach"], group["fused"] = False, True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        self.switch("forward")
        self.started += 1
        if self.started == 1:
            self.first_batch = batch
        if self.started > WARM_UP + 1:
            self.steps.append(self.current)
            if len(self.steps) == self.limit or self.since - self.begin > self.seconds:
                raise EnoughSteps
        else:
            self.begin = self.since
        self.current = dict.fromkeys(PARTS, 0.0)

    def on_before_backward(self, *args: Any) -> None:
        self.switch("backward")

    def on_after_backward(self, *args: Any) -> None:
        # Count gradient clipping as part of the optimizer step.
        self.switch("optimizer")

    on_before_zero_grad = on_after_backward

    def after_optimizer_step(self, *args: Any) -> None:
        # With manual optimization, training_step continues after an optimizer step, so add the time
        # that follows to "forward".
        self.switch("forward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.switch("rest")


def time_steps(
    loop: Any,
    parts: dict[str, Any],
    choice: Choice,
    steps: int = 10**9,
    seconds: float = float("inf"),
    synchronize: bool = False,
) -> StepTimer:
    """Train a copy of the model with the settings in ``choice``, and time each training step.

    With ``synchronize=True``, the time of each part includes its computations on the GPU.
    """
    timer = StepTimer(steps, seconds, "fused" in choice, synchronize)
    data = parts["train_dataloaders"]
    data = copy.copy(data) if hasattr(data, "train_dataloader") else data
    parts = copy.deepcopy({**parts, "train_dataloaders": None}) | {"train_dataloaders": data}
    with ExitStack() as stack, suppress(EnoughSteps):

        def repeat(loader: Any) -> Any:
            batches = timer.iterate(change_loader(copy_loader(loader), choice))
            stack.callback(batches.close)
            return batches

        source = parts["model"] if data is None else data
        if hasattr(source, "train_dataloader"):
            make_loader = source.train_dataloader
            source.train_dataloader = lambda: repeat(make_loader())
        else:
            parts["train_dataloaders"] = repeat(data)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(register_optimizer_step_post_hook(timer.after_optimizer_step).remove)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(choice.get("threads", torch.get_num_threads()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        trial = make_loop(loop, choice, timer, folder)
        trial.fit(**parts)
        if trial.run is not None and trial.run.stop.signal is not None:
            # In a notebook, fit returns after Ctrl-C.
            raise error_of_signal(trial.run.stop.signal)
    if not timer.steps:
        expected = "expected more. Pass a longer loader, and remove options that end training early"
        raise ValueError(f"profile: got a training run of {timer.started} batches, {expected}.")
    return timer


def make_loop(loop: Any, choice: Choice, timer: StepTimer, folder: str) -> Any:
    """Create a copy of a loop with changed settings and a step timer.

    The copy trains on one device, without checkpoints or printed output.
    """
    device = loop.fabric.device
    options = {name: getattr(loop.config, name) for name in OPTIONS} | dict.fromkeys(OFF, False)
    options |= {"accelerator": device.type, "devices": [device.index] if device.index else 1}
    options |= {"max_epochs": -1, "max_steps": 10**9, "limit_val_batches": 0}
    options |= {"logger": bool(loop.loggers), "default_root_dir": folder}
    options |= {"precision": loop.fabric.strategy.precision.precision}
    options |= {name: choice[name] for name in choice if name in ("precision", "compile")}
    return type(loop)(callbacks=[timer], **options)


def copy_loader(loader: Any) -> Any:
    """Copy a loader and its random generators, but not its dataset."""
    # Do not copy the loader's iterator, because an iterator with workers cannot be copied.
    shared = [getattr(loader, "dataset", None), *getattr(loader, "tensors", ())]
    memo: dict[int, Any] = {id(part): part for part in shared}
    memo[id(getattr(loader, "_iterator", None))] = None
    return copy.deepcopy(loader, memo)


def change_loader(loader: Any, choice: Choice) -> Any:
    """Return a loader with the settings in ``choice`` and the dataset of ``loader``."""
    changes = {name: choice[name] for name in choice if name in ("num_workers", "batch_size")}
    if not changes and "tensor_loader" not in choice:
        return loader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise ValueError("the loader is not a DataLoader with a batch size")
    size = changes.get("batch_size")
    if size and not loader.batch_size < size <= len(loader) * loader.batch_size // 2:
        raise ValueError(f"batch_size is not between {loader.batch_size} and half of the samples")
    names = ["batch_size", "drop_last", "generator"]
    if "tensor_loader" not in choice:
        names += ["num_workers", "sampler", "collate_fn", "pin_memory", "worker_init_fn"]
        arguments = {name: getattr(loader, name) for name in names} | changes
        has_workers = arguments["num_workers"] > 0
        return DataLoader(loader.dataset, persistent_workers=has_workers, **arguments)
    is_usual = type(loader.sampler) in (RandomSampler, SequentialSampler)
    is_usual = is_usual and loader.collate_fn is default_collate
    if type(loader.dataset) is not TensorDataset or not is_usual:
        raise ValueError("the loader does not read a TensorDataset with torch's samplers")
    arguments = {name: getattr(loader, name) for name in names} | changes
    shuffle = type(loader.sampler) is RandomSampler
    return TensorLoader(*loader.dataset.tensors, shuffle=shuffle, **arguments)
