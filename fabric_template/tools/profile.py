"""Measure the parts of a training step."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.overrides import TorchFunctionMode

from .step_benchmark import PARTS, time_steps

# In these methods, the CPU waits until the GPU has computed the tensor's value.
READS = (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.cpu, torch.Tensor.tolist)
LIBRARIES = (f"{__package__.rpartition('.')[0]}.", "torch.", "lightning.", "torchmetrics.")


@dataclass(frozen=True)
class Profile:
    """The median milliseconds of each part of a step, and the lines that wait for the GPU."""

    parts: dict[str, float]
    device: str
    steps: int
    reads: list[str]

    @property
    def milliseconds(self) -> float:
        """Return the duration of a step, which is the sum of its parts."""
        return round(sum(self.parts.values()), 3)

    def __str__(self) -> str:
        lines = [f"{'part':10}{'median':>14}{'share':>9}   of {self.steps} steps on {self.device}"]
        for part, ms in {**self.parts, "step": self.milliseconds}.items():
            lines.append(f"{part:10}{ms:11,.3f} ms{ms / self.milliseconds:9.1%}")
        lines += [
            f"wait: {line} reads a value. The step waits there for the GPU." for line in self.reads
        ]
        return "\n".join(lines)


def profile(
    loop: Any,
    model: Any,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    steps: int = 50,
    **arguments: Any,
) -> Profile:
    """Train a copy of the model for a few steps, and time each part of a step.

    Weights, optimizers, callbacks, random generators and loaders stay unchanged, and no files
    remain. Validation, callbacks and loggers except the CSV logger do not run.

    Args:
        loop: The loop with the options of the training.
        model: The argument `model` of `fit`.
        train_dataloaders: One loader, such as a DataLoader.
        datamodule: A datamodule, in place of the loader.
        steps: Number of timed batches.
        arguments: Other arguments of `fit`, such as optimizer, scheduler and training_step.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"profile(steps): got {steps!r}, expected an int >= 1. Write steps=50.")
    if loop.fabric.world_size > 1:
        size = loop.fabric.world_size
        raise ValueError(f"profile(loop): got {size} processes, expected one. Write devices=1.")
    data = train_dataloaders if datamodule is None else datamodule
    parts = {"model": model, "train_dataloaders": data, **arguments}
    with isolate_rng():
        timer = time_steps(loop, parts, {}, steps, synchronize=loop.fabric.device.type == "cuda")
        medians = {part: round(1e3 * timer.get_median(part), 3) for part in PARTS}
        medians = {part: ms for part, ms in medians.items() if ms}
        with ValueReadRecorder() as reads:
            time_steps(loop, parts, {}, steps=1)
    return Profile(medians, str(loop.fabric.device), steps, sorted(reads.lines))


def profile_command(loop: Any, model: Any, data: Any, *, steps: int) -> int:
    print(profile(loop, model, data, steps=steps))
    return 0


class ValueReadRecorder(TorchFunctionMode):
    """Collect the user's lines that read the value of a tensor, such as loss.item()."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if function in READS and not module.startswith(LIBRARIES):
            self.lines.add(f"{os.path.relpath(caller.f_code.co_filename)}:{caller.f_lineno}")
        return function(*args, **(kwargs or {}))
