"""Where the time of a training step goes, and what makes it shorter."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One part of a step: its median in milliseconds, and its share of the step."""

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
    notes: list[str]

    @property
    def milliseconds(self) -> float:
        """Return the duration of a step: the sum of its parts."""
        return round(sum(row.milliseconds for row in self.rows), 3)

    def __str__(self) -> str:
        lines = [f"{'part':10}{'median':>14}{'share':>9}   of {self.steps} steps on {self.device}"]
        for row in (*self.rows, Row("step", self.milliseconds, 1.0)):
            lines.append(f"{row.part:10}{row.milliseconds:11,.3f} ms{row.share:9.1%}")
        lines += [f"faster: {text}" for text in self.suggestions]
        lines += [f"note: {text}" for text in self.notes]
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="median, ms", title=f"{self.milliseconds:,.3f} ms a step on {self.device}")
        return figure


def profile(
    loop: Any,
    model: Any,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    training_step: Callable | None = None,
    steps: int = 50,
    trace: str | os.PathLike | None = None,
) -> Profile:
    """Train a few steps on a copy; find where their time goes and what makes them faster.

    Weights, optimizers, callbacks, random numbers and loaders are unchanged afterwards, and no file
    is left. Validation, checkpoints and loggers other than the CSV logger do not run.

    Args:
        loop: Its options are those of the training.
        model: As for `fit`.
        train_dataloaders: As for `fit`, but one loader.
        datamodule: As for `fit`, in place of the loader.
        optimizer: As for `fit`.
        scheduler: As for `fit`.
        training_step: As for `fit`.
        steps: Number of timed batches.
        trace: File for a trace of three steps, for ui.perfetto.dev or chrome://tracing.
    """
    from lightning.pytorch.utilities.seed import isolate_rng
    from torch.profiler import profile as record

    from .step_timer import PARTS, Training
    from .suggestions import median_ms, suggest

    _check(loop, steps, trace)
    if hasattr(train_dataloaders, "train_dataloader"):
        train_dataloaders, datamodule = None, train_dataloaders
    arguments = {"optimizer": optimizer, "scheduler": scheduler, "training_step": training_step}
    training = Training(loop, model, train_dataloaders, datamodule, arguments)
    with isolate_rng():
        timer = training.time_steps(steps, synchronize=loop.fabric.device.type == "cuda")
        medians = {}
        for part in PARTS:
            medians[part] = round(median_ms([step[part] for step in timer.steps]), 3)
        total = sum(medians.values())
        shares = {part: value / total for part, value in medians.items()}
        suggestions, notes = suggest(shares, total, training, timer)
        if trace is not None:
            with record() as recorded:
                training.time_steps(3)
            recorded.export_chrome_trace(os.fspath(trace))
    rows = [Row(part, medians[part], shares[part]) for part in PARTS if medians[part]]
    return Profile(rows, str(loop.fabric.device), steps, suggestions, notes)


def _check(loop: Any, steps: Any, trace: Any) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"profile(steps): got {steps!r}, expected an int >= 1. Write steps=50.")
    if loop.fabric.world_size > 1:
        size = loop.fabric.world_size
        raise ValueError(f"profile(loop): got {size} processes, expected one. Write devices=1.")
    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise ValueError(f"profile(trace): got {str(trace)!r}, expected a file. Create its folder.")


def profile_command(
    loop: Any,
    model: Any,
    data: Any,
    *,
    out: str | None = None,
    trace: str | None = None,
    steps: int = 50,
) -> int:
    """Show where the time of a training step goes, and what makes it shorter.

    Args:
        loop: The loop that would fit.
        model: The model.
        data: The datamodule or loader; None if the model has its own.
        out: File for a picture of the table.
        trace: File for a trace of three steps, for ui.perfetto.dev or chrome://tracing.
        steps: Number of timed batches.
    """
    from matplotlib.figure import Figure

    if out is not None:
        formats = Figure().canvas.get_supported_filetypes()
        if Path(out).suffix[1:] not in formats or not Path(out).absolute().parent.is_dir():
            raise ValueError(f"--out: got {out}, expected a picture. Write --out profile.png.")
    found = profile(loop, model, data, steps=steps, trace=trace)
    print(found)
    if out is not None:
        found.plot().savefig(out, dpi=150)
        print(f"picture: {out}")
    return 0
