"""Measure how long each part of a training step takes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.overrides import TorchFunctionMode

from .step_benchmark import PARTS, time_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Methods that read a tensor's value, which makes the CPU wait for the GPU.
READS = (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.cpu, torch.Tensor.tolist)
LIBRARIES = (f"{__package__.rpartition('.')[0]}.", "torch.", "lightning.", "torchmetrics.")


@dataclass(frozen=True)
class Profile:
    """The median time of each part of a step in ms, and the code lines that wait for the GPU."""

    parts: dict[str, float]
    device: str
    steps: int
    reads: list[str]

    @property
    def milliseconds(self) -> float:
        """Return the duration of a training step in milliseconds."""
        return round(sum(self.parts.values()), 3)

    def __str__(self) -> str:
        lines = [f"{'part':10}{'median':>14}{'share':>9}   of {self.steps} steps on {self.device}"]
        for part, ms in {**self.parts, "step": self.milliseconds}.items():
            lines.append(f"{part:10}{ms:11,.3f} ms{ms / self.milliseconds:9.1%}")
        lines += [
            f"wait: {line} reads a value from the GPU, so the step waits for the GPU."
            for line in self.reads
        ]
        return "\n".join(lines)

    def plot(self) -> Figure:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        bars = axes.barh(list(self.parts), list(self.parts.values()))
        shares = [ms / self.milliseconds for ms in self.parts.values()]
        axes.bar_label(bars, [f"{share:.1%}" for share in shares], padding=4)
        # Leave space for the percentage to the right of the longest bar.
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(
            xlabel="median, ms", title=f"{self.milliseconds:,.3f} ms per step on {self.device}"
        )
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
    """Time the parts of a training step.

    Profiling does not change the model, optimizers, random generators or loaders, and creates
    only temporary files. Profiling disables validation, callbacks and all loggers except the CSV
    logger.

    Args:
        loop: The loop with the training options.
        model: The `model` argument of `fit`.
        train_dataloaders: One loader, such as a DataLoader.
        datamodule: A datamodule to use instead of the loader.
        steps: The number of timed batches.
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


def profile_command(loop: Any, model: Any, data: Any, *, out: str | None, steps: int) -> int:
    found = profile(loop, model, data, steps=steps)
    print(found)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        found.plot().savefig(out, dpi=150)
        print(f"picture: {out}")
    return 0


class ValueReadRecorder(TorchFunctionMode):
    """Collect the lines of the user's code that read a tensor's value, such as loss.item()."""

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
