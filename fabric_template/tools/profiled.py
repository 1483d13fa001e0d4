"""Profiled: where the steps of a training went: a table, a picture, and the advice that follows from the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from .stopwatch import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# of the parts, in their order: Okabe and Ito's, which colour-blind people tell apart
COLORS = ("#D55E00", "#CC79A7", "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#7A5195", "#8c8c8c")


@dataclass(frozen=True)
class Row:
    """One part of a step: its share of the time of all, and milliseconds of one step."""

    part: str
    share: float
    median: float
    low: float  # 10 % of the steps are below
    high: float  # 90 % are


@dataclass(frozen=True)
class Advice:
    """What the figures show, and what to write; how many times faster that was, where it was tried."""

    what: str
    write: str
    measured: float | None = None


@dataclass(frozen=True)
class Profile:
    """Where the steps went. Printed, it is a table.

    Example:
        >>> profile = Profile([{"data": 0.006, "forward": 0.002}] * 10, [0.008] * 10, device="cpu", samples=32)
        >>> [(row.part, round(row.share, 3), row.median) for row in profile.rows]
        [('data', 0.75, 6.0), ('forward', 0.25, 2.0)]
    """

    steps: list[dict[str, float]]  # seconds of each part, step by step; their sum is the step
    whole: list[float]  # seconds of each step, as it runs when no part is waited for
    device: str
    samples: int | None = None  # in a batch
    warm_up: int = 0
    hooks: dict[str, float] = field(default_factory=dict)  # seconds of a step, by the hook's name
    memory: dict[str, int] = field(default_factory=dict)  # bytes, at most
    trace: str | None = None
    advice: list[Advice] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of one step as it runs in a fit, the mean: what a number of steps takes, divided by it."""
        return fmean(self.whole)

    @property
    def rows(self) -> list[Row]:
        """One for each part in which anything is done, in the order of a step."""
        total = sum(map(sum, (step.values() for step in self.steps))) or 1.0
        rows = []
        for part in PARTS:
            taken = [step.get(part, 0.0) for step in self.steps]
            if any(taken):
                rows.append(Row(part, sum(taken) / total, *_spread(taken)))
        return rows

    def share(self, *parts: str) -> float:
        """How much of all time these parts have."""
        return sum(row.share for row in self.rows if row.part in parts)

    def mean(self, *parts: str) -> float:
        """Seconds of a step in these parts."""
        return fmean(sum(step.get(part, 0.0) for part in parts) for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """For programs: milliseconds, and bytes."""
        middle, low, high = _spread(self.whole)
        step = {"mean": self.seconds * 1e3, "median": middle, "low": low, "high": high}
        return {
            "device": self.device, "steps": len(self.steps), "warm_up": self.warm_up, "samples": self.samples, "step": step,
            "parts": [vars(row) for row in self.rows], "hooks": {name: 1e3 * seconds for name, seconds in self.hooks.items()},
            "memory": self.memory, "trace": self.trace, "advice": [vars(one) for one in self.advice],
        }  # fmt: skip

    def __str__(self) -> str:
        samples = f" of {self.samples} samples" if self.samples else ""
        lines = [f"profile     {len(self.steps)} steps{samples} on {self.device}, behind {self.warm_up} to warm up"]
        lines.append(f"{'':12}{'share':>7}  {'median':>10}  {'10 % to 90 % of the steps'}")
        for row in self.rows:
            lines.append(
                f"{row.part:12}{_line(row.share, row.median, row.low, row.high)}{self._about(row.part)}".rstrip()
            )
        lines.append(
            f"{'a step':12}{_line(1.0, *_spread(list(map(sum, (one.values() for one in self.steps)))))}".rstrip()
        )
        if len(self.whole) and self.device != "cpu":
            lines.append(f"as in fit   {_ms(1e3 * self.seconds)} a step, where no part waits for the one before")
        if samples and self.samples:
            lines.append(f"speed       {self.samples / self.seconds:,.0f} samples a second")
        if self.memory:
            peaks = (f"{name} {size / 2**20:,.0f} MB" for name, size in self.memory.items())
            lines.append(f"memory      {', '.join(peaks)} at most")
        lines += [f"{'consider':12}{one.what}\n{'write':12}{one.write}" for one in self.advice]
        if self.trace:
            lines.append(f"trace       {self.trace}: for chrome://tracing, ui.perfetto.dev or TensorBoard")
        return "\n".join(lines)

    def _about(self, part: str) -> str:
        if part != "hooks" or not self.hooks:
            return PARTS[part]
        name, seconds = max(self.hooks.items(), key=lambda item: item[1])
        return f"{name} {_ms(1e3 * seconds)}" + (f", and {len(self.hooks) - 1} more" if len(self.hooks) > 1 else "")

    def plot(self) -> Figure:
        """A bar for each part, and the steps one after another."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5.5), layout="constrained")
        bars, course = figure.subplots(1, 2, width_ratios=(1, 1.3))
        rows, colors = self.rows, dict(zip(PARTS, COLORS, strict=True))
        names = [row.part for row in rows]
        means = [1e3 * self.mean(row.part) for row in rows]
        drawn = bars.barh(names, means, color=[colors[name] for name in names])
        bars.bar_label(
            drawn, [f"{row.share:.0%}  {_ms(mean)}" for row, mean in zip(rows, means, strict=True)], padding=4
        )
        bars.invert_yaxis()
        bars.set_xlim(0, max(means) * 1.6)
        bars.set_xlabel("ms of a step, mean")
        bars.set_title(f"a step: {_ms(sum(means))}", loc="left")
        bottom = [0.0] * len(self.steps)
        for name in names:
            heights = [1e3 * step.get(name, 0.0) for step in self.steps]
            course.bar(range(len(heights)), heights, 1.0, bottom, color=colors[name], label=name)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        course.set_xlim(-0.5, len(self.steps) - 0.5)
        course.xaxis.get_major_locator().set_params(integer=True)
        course.set_xlabel("step")
        course.set_ylabel("ms")
        course.set_title(f"{len(self.steps)} steps", loc="left")
        course.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
        for axes in (bars, course):
            axes.spines[["top", "right"]].set_visible(False)
        return figure


def _spread(seconds: list[float]) -> tuple[float, float, float]:
    """(median, 10 %, 90 %) in milliseconds."""
    if len(seconds) < 2:
        return (1e3 * seconds[0],) * 3
    tenths = quantiles(seconds, n=10, method="inclusive")
    return 1e3 * median(seconds), 1e3 * tenths[0], 1e3 * tenths[-1]


def _line(share: float, middle: float, low: float, high: float) -> str:
    return f"{share:7.1%}  {_ms(middle):>10}  {f'{_ms(low)} to {_ms(high)}':27}"


def _ms(value: float) -> str:
    """Milliseconds with three digits, and never less than what a clock tells.

    Example:
        >>> _ms(12345.0), _ms(5.1234), _ms(0.01234), _ms(0.0)
        ('12,345 ms', '5.12 ms', '0.012 ms', '0 ms')
    """
    if value < 0.0005:
        return "0 ms"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f} ms"
