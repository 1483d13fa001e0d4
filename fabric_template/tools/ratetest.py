"""Rate test: the loss while the learning rate grows from step to step, and which rate that suggests."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import Misuse
from ..files.disk import replace_file
from ..loop import FabricLoop
from .apart import ask
from .jobs import Job, ObjectJob

SMOOTH = 0.9  # how much of each point is what was before it
BLOWN_UP = 4.0  # times the lowest smoothed loss above which the test ends
AT_THE_ENDS = 0.1  # of the points: no advice is taken from the first ones


@dataclass
class RateTest:
    """The curve, point by point, and what it suggests."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.smoothed = smooth(self.losses)

    @property
    def steepest(self) -> float | None:
        """The rate at which the smoothed loss falls fastest, per factor of the rate; None where it falls nowhere."""
        first, last = int(AT_THE_ENDS * len(self.rates)), self._lowest()
        falls = [
            ((self.smoothed[i + 1] - self.smoothed[i - 1]) / math.log(self.rates[i + 1] / self.rates[i - 1]), i)
            for i in range(max(first, 1), min(last + 1, len(self.rates) - 1))
        ]
        fall, at = min(falls, default=(0.0, 0))
        return self.rates[at] if fall < 0 else None

    @property
    def blows_up(self) -> float | None:
        """The first rate behind the lowest loss at which the loss is above where it began, or not finite; None: it never is."""
        lowest = self._lowest()
        began = self.smoothed[min(int(AT_THE_ENDS * len(self.rates)), lowest)]
        for rate, loss in zip(self.rates[lowest:], self.smoothed[lowest:], strict=True):
            if not loss <= began:
                return rate
        return None

    def _lowest(self) -> int:
        known = [i for i, loss in enumerate(self.smoothed) if math.isfinite(loss)]
        return min(known, key=self.smoothed.__getitem__, default=0)

    @property
    def suggestion(self) -> float | None:
        """The smaller of the steepest descent and a tenth of where it blows up; None where the loss falls nowhere."""
        ways = [self.steepest, self.blows_up and self.blows_up / 10]
        return min(filter(None, ways)) if self.steepest is not None else None

    @property
    def why(self) -> str:
        """Where the suggestion is from."""
        if self.suggestion is None:
            return "the loss falls at none of these rates"
        return "steepest descent" if self.suggestion == self.steepest else "a tenth of where it blows up"

    def __str__(self) -> str:
        blown = "nowhere in this range" if self.blows_up is None else f"at {self.blows_up:.3g}"
        found = "none" if self.suggestion is None else f"{self.suggestion:.3g}"
        steep = "" if self.steepest is None else f"; falls fastest at {self.steepest:.3g}"
        return (
            f"rates       {self.rates[0]:.3g} to {self.rates[-1]:.3g} in {len(self.rates)} steps\n"
            f"loss        blows up {blown}{steep}\n"
            f"suggested   {found}: {self.why}"
        )

    def save_csv(self, path: str | Path) -> None:
        """The points as a table: lr, loss, smoothed."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([("lr", "loss", "smoothed"), *zip(self.rates, self.losses, self.smoothed, strict=True)])
        replace_file(Path(path), text.getvalue().encode())

    def save_picture(self, path: str | Path) -> None:
        """The curve over the rates, with what is suggested."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="0.75", linewidth=1, label="loss of a step")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C2", label=f"suggested: {self.suggestion:.3g} ({self.why})")
        if self.blows_up is not None:
            axes.axvline(self.blows_up, color="C3", linestyle=":", label=f"blows up: {self.blows_up:.3g}")
        known = [loss for loss in self.smoothed if math.isfinite(loss)]
        if known and (height := max(known[0], max(known[: self._lowest() + 1])) - min(known)) > 0:
            lowest = min(filter(math.isfinite, self.losses))
            axes.set_ylim(lowest - 0.1 * height, min(known) + 1.6 * height)
        axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        content = io.BytesIO()
        figure.savefig(content, dpi=150, format=Path(path).suffix[1:] or "png")
        replace_file(Path(path), content.getvalue())


def smooth(losses: Iterable[float]) -> list[float]:
    """An average that forgets, from its first value on unbiased.

    Example:
        >>> smooth([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
        True
    """
    smoothed, total = [], 0.0
    for count, loss in enumerate(losses, 1):
        total = SMOOTH * total + (1 - SMOOTH) * loss
        smoothed.append(total / (1 - SMOOTH**count))
    return smoothed


def find_lr(
    loop: FabricLoop, model: Any, train_dataloaders: Any = None, *, datamodule: Any = None, optimizer: Any = None,
    training_step: Callable | None = None, low: float = 1e-7, high: float = 10.0, steps: int = 100,
    time_limit: float = 600.0,
) -> RateTest:  # fmt: skip
    """Train a copy with a learning rate that grows from step to step, until the loss blows up.

    It is done in a child process: weights, optimizer, random numbers and files here stay as they are.

    Args:
        loop: what fit would be called on.
        model: as for fit.
        train_dataloaders: as for fit.
        datamodule: as for fit.
        optimizer: as for fit. Groups that had other rates than the largest keep their share of it.
        training_step: as for fit.
        low: the first rate.
        high: the last rate.
        steps: how many optimizer steps, their rates a constant factor apart.
        time_limit: seconds after which it counts as hung.

    Raises:
        Misuse: where it fails, for several optimizers, and for manual optimization.

    Example:
        >>> import torch
        >>> from fabric_template import FabricLoop, TensorLoader
        >>> net = torch.nn.Linear(4, 1)
        >>> loader = TensorLoader(torch.ones(64, 4), torch.ones(64, 1), batch_size=8)
        >>> step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> found = find_lr(FabricLoop(accelerator="cpu"), net, loader, optimizer=optimizer, training_step=step, steps=60)
        >>> 1e-3 < found.suggestion < 1, optimizer.param_groups[0]["lr"]
        (True, 0.1)
    """
    given = {"train_dataloaders": train_dataloaders, "datamodule": datamodule, "optimizer": optimizer,
             "training_step": training_step}  # fmt: skip
    job = ObjectJob(loop, model, {word: value for word, value in given.items() if value is not None})
    return run_test(job, low, high, steps, time_limit)


def run_test(job: Job, low: float, high: float, steps: int, time_limit: float) -> RateTest:
    """The same for a job."""
    if not 0 < low < high < math.inf:
        raise Misuse(f"lr from {low:g} to {high:g}: expected two rates above 0, the smaller one first")
    if steps < 10:
        raise Misuse(f"lr_steps={steps}: expected 10 or more, a hundred for a curve that one can read")
    answer = ask(partial(_train, job, low, high, steps), time_limit)
    if answer.result is None:
        if answer.failure.startswith("Misuse: "):  # our own words need no more
            raise Misuse(f"tune: {answer.failure.partition(': ')[2]}")
        raise Misuse(
            f"tune: the test of learning rates fails ({answer.failure}); expected a training that runs: try it with fit first"
            + f". It said: {' / '.join(answer.said.splitlines())}" * bool(answer.said)
        )
    return RateTest(*answer.result)


class Climb:
    """A callback that sets the rate of each optimizer step, and notes the losses of its batches."""

    def __init__(self, low: float, high: float, steps: int) -> None:
        self.low, self.factor, self.steps = low, (high / low) ** (1 / (steps - 1)), steps
        self.rates: list[float] = []
        self.losses: list[list[float]] = []  # of each step, its batches'
        self.shares: list[float] = []

    def on_train_start(self, loop: Any) -> None:
        """What each group's rate is, beside the largest."""
        run, optimizers = loop._required("tune"), loop.optimizers
        if not run.trained.is_automatic or len(optimizers) != 1:
            raise Misuse(
                "a test of learning rates needs one optimizer, stepped by the loop: for several, find each by hand"
            )
        run.optimizing.schedulers.clear()
        groups = [float(group["lr"]) for group in optimizers[0].param_groups]
        self.shares = [rate / max(groups) if max(groups) > 0 else 1.0 for rate in groups]

    def on_train_batch_start(self, loop: Any) -> None:
        """The rate of the step that this batch belongs to."""
        if (step := loop.global_step) < len(self.rates):
            return
        self.rates.append(self.low * self.factor**step)
        self.losses.append([])
        for group, share in zip(loop.optimizers[0].param_groups, self.shares, strict=True):
            group["lr"] = self.rates[-1] * share

    def on_train_batch_end(self, loop: Any, outputs: Any) -> None:
        """The loss of this batch; whether that is enough."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses[-1].append(math.nan if loss is None else float(loss))
        curve = smooth(self.means())
        low = min(filter(math.isfinite, curve), default=math.inf)
        began = curve[0]
        is_over = not math.isfinite(curve[-1]) or curve[-1] - low > (BLOWN_UP - 1) * max(abs(low), abs(began - low))
        if loop.global_step >= self.steps or (is_over and len(curve) > 10) or math.isnan(curve[-1]):
            loop.should_stop = True

    def means(self) -> list[float]:
        """The loss of each step."""
        return [sum(losses) / len(losses) for losses in self.losses]


def _train(job: Job, low: float, high: float, steps: int, folder: str) -> tuple[list[float], list[float]]:
    climb = Climb(low, high, steps)
    loop = FabricLoop(**job.words(folder, callbacks=[climb], max_steps=steps))
    model, given = job.parts()
    loop.fit(model, **given)
    return climb.rates[: len(climb.losses)], climb.means()
