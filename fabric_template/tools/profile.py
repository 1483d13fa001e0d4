"""Show where the time of a training step goes, and what makes it shorter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    steps: int = 50,
    **arguments: Any,
) -> Profile:
    """Train a few steps on a copy; find where their time goes and what makes them faster.

    Weights, optimizers, callbacks, random numbers and loaders are unchanged afterwards, and no file
    is left. Validation, callbacks and loggers other than the CSV logger do not run.

    Args:
        loop: Its options are those of the training.
        model: As for `fit`.
        train_dataloaders: As for `fit`, but one loader.
        datamodule: As for `fit`, in place of the loader.
        steps: Number of timed batches.
        arguments: As for `fit`: optimizer, scheduler, training_step.
    """
    from lightning.pytorch.utilities.seed import isolate_rng

    from .step_timer import PARTS, find_faster, get_median, time_steps

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
        reads: set[str] = set()
        time_steps(training, 2, reads=reads)
    notes = [
        f"{line} reads the value of a tensor: on a GPU each step waits there" for line in reads
    ]
    return Profile(rows, str(loop.fabric.device), steps, suggestions, notes)


def profile_command(
    loop: Any, model: Any, data: Any, *, out: str | None = None, steps: int = 50
) -> int:
    """Show where the time of a training step goes, and what makes it shorter.

    Args:
        loop: The loop that would fit.
        model: The model.
        data: The datamodule or loader; None if the model has its own.
        out: File for a picture of the table.
        steps: Number of timed batches.
    """
    found = profile(loop, model, data, steps=steps)
    print(found)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        found.plot().savefig(out, dpi=150)
        print(f"picture: {out}")
    return 0
