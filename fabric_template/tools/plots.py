"""plot_logs: losses, accuracies and other metrics of one run or many, on Axes that are yours to go on with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .panels import (
    MOST_NAMED,
    Column,
    Drawn,
    choose,
    find_runs,
    judge_of,
    name_the_best,
    nan_begins,
    places_of,
    resume_points,
    sort_into_panels,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, which colour-blind people tell apart; on black with their light blue and their yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ON_BLACK = ("#56B4E9", "#E8703A", "#2BBE93", "#D98BB6", "#E69F00", "#F0E442")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.5, 1)))
GREY, RED = "#8c8c8c", "#e41a1c"
MOST_MARKED = 30  # points of a line that has a marker on each
MANY = 1_000  # points of a line that is smoothed, if nobody says otherwise
SPIKE = 8  # so many times the range of all the rest


def plot_logs(
    logs: Any,
    *,
    x: str = "epoch",
    metrics: str | Sequence[str] | None = None,
    ax: Axes | None = None,
    smooth: float | None = None,
    seeds: bool = True,
) -> Axes | np.ndarray:
    """Draw a panel per quantity: losses, accuracies, each other metric asked for, the learning rate.

    Of one colour are a run's training (thin and light), validation (bold) and test (dotted). A dot is the best epoch, a red
    cross where a metric is no number any more, a tick at the bottom where a run was resumed, an arrow a spike that would
    flatten the rest. Of more than twelve runs the best five are named.

    Args:
        logs: a path as for `read_logs`, a DataFrame (what `fit` returns), a list of these, or a dict with a label each.
        x: the column along the horizontal axis, "epoch", "step" or "time": what was trained until then.
        metrics: the columns to draw, or quantities such as "f1" (train_f1, val_f1) and "lr"; None draws losses and
            accuracies, or all metrics where there are none of these.
        ax: draw everything into these Axes, instead of into a new figure.
        smooth: how much of a point is the average before it: 0 none, 0.9 much; None smooths lines of more than 1,000
            points. What was measured stays in the background.
        seeds: draw the runs of one name that differ in their seed alone as a mean, in a band from the lowest to the highest.

    Returns:
        The Axes, or an array of them: losses, accuracies, the others as they were asked for, the learning rate.

    Example:
        >>> import pandas as pd
        >>> history = pd.DataFrame({"epoch": [0, 1], "train_loss": [2.0, 1.0], "val_loss": [2.1, 1.5]})
        >>> plot_logs(history).get_title(loc="left")
        'loss'
    """
    import numpy

    if ax is not None and not hasattr(ax, "plot"):
        raise TypeError(f"plot_logs(ax=...) takes one Axes, not {type(ax).__name__}; give one of them, e.g. ax=axes[0]")
    if smooth is not None and not 0 <= smooth < 1:
        raise ValueError(
            f"plot_logs: smooth={smooth!r} is no share: expected a number from 0 to less than 1, such as 0.9"
        )
    drawn = find_runs(logs, x, seeds)
    columns = choose(drawn, x, [metrics] if isinstance(metrics, str) else metrics)
    name_the_best(drawn, columns)
    if ax is not None:
        _Panel(ax, x, smooth, len({line.get_color() for line in ax.get_lines()})).draw(drawn, columns)
        if len(ax.get_lines()) <= 2 * MOST_NAMED and ax.get_legend_handles_labels()[1]:
            _as_they_are(ax.legend(fontsize="small"))
        return ax
    panels = sort_into_panels(columns, several_runs=len(drawn) > 1)
    figure, axes = _make_figure(len(panels))
    for one, (title, group) in zip(axes, panels.items(), strict=True):
        one.set_title(title, loc="left", parse_math=False)
        _Panel(one, x, smooth).draw(drawn, group)
    _make_legend(figure, drawn, panels)
    return axes[0] if len(axes) == 1 else numpy.array(axes)


def _make_figure(count: int) -> tuple[Figure, list[Axes]]:
    """Small multiples over one horizontal axis, beside each other as many as can be read on a small screen, too."""
    from matplotlib import pyplot

    if count <= 3:
        size = ((6.4, 4.2), (8.4, 4.1), (9.6, 3.8))[count - 1]
        figure, grid = pyplot.subplots(1, count, figsize=size, layout="constrained", sharex=True, squeeze=False)
        return figure, list(grid.flat)
    places: Any = [[f"{i}"] * 2 for i in range(count % 2)]  # an odd one, the losses, has a whole row
    places += [[f"{i}", f"{i + 1}"] for i in range(count % 2, count, 2)]
    figure, mosaic = pyplot.subplot_mosaic(places, figsize=(8.4, 2.5 * len(places)), layout="constrained", sharex=True)
    axes = [mosaic[f"{i}"] for i in range(count)]
    for one in axes[:-2]:
        one.tick_params(labelbottom=False)
    return figure, axes


def _make_legend(figure: Figure, drawn: list[Drawn], panels: dict[str, list[Column]]) -> None:
    """Below the panels: an entry for each run, or of a run that is alone for each of its lines."""
    from matplotlib.lines import Line2D

    columns = [column for group in panels.values() for column in group]
    splits = {column.split for column in columns}
    entries: dict[str, Line2D] = {}
    if len(drawn) > 1:
        named = [one for one in drawn if one.is_named]
        words = {"train": "thin: train", "val": "bold: validation", "test": "dotted: test"}
        said = [words[split] for split in words if split in splits and len(splits & {*words}) > 1]
        prefix = "" if len(named) == 1 else os.path.commonprefix([one.label for one in named]).rpartition("/")[0]
        said = [prefix, *said] if prefix else said
        for number, one in enumerate(named):
            color, dash = _color(number)
            label = one.label[len(prefix) + 1 :] if prefix else one.label
            entries[label] = Line2D([], [], color=color, linestyle=dash, linewidth=2.2)
        if rest := len(drawn) - len(named):
            entries[f"{rest} others"] = Line2D([], [], color=GREY, linewidth=1)
            said.append(f"named: the best {len(named)} by {judge_of(columns).name}")
    else:
        alike = all(len({column.quantity for column in group}) == 1 for group in panels.values())
        for group in panels.values():
            quantities = list(dict.fromkeys(column.quantity for column in group))
            for column in group if len(columns) > 1 else ():
                label = {"val": "validation"}.get(column.split, column.split) if alike else column.name
                style = _style(column.split, alone="val" not in splits)
                entries.setdefault(label, Line2D([], [], color=_color(quantities.index(column.quantity))[0], **style))
        entries.pop("", None)
        said = [f"mean of {len(one.frames)} runs" for one in drawn if len(one.frames) > 1]
    if not entries and not said:
        return
    longest = max((len(label) for label in entries), default=0)
    across = max(1, min(len(entries), int(figure.get_figwidth() * 72 / (longest * 4.8 + 40))))
    rows = -(-len(entries) // across)
    figure.set_figheight(figure.get_figheight() + 0.27 * (rows + bool(said) - 1))
    legend = figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=-(-len(entries) // max(rows, 1)), frameon=False,
        title=", ".join(said) or None, fontsize="small", title_fontsize="small", borderaxespad=0.2,
    )  # fmt: skip
    _as_they_are(legend)


def _as_they_are(legend: Any) -> None:
    """Names of runs and metrics are no formulas, whatever dollars they have."""
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)


def _color(number: int) -> tuple[str, Any]:
    """A colour, and how the line is dashed: after the last colour they come again, dashed."""
    from matplotlib import colors, rcParams

    is_dark = sum(colors.to_rgb(rcParams["axes.facecolor"])) < 1.5
    palette = ON_BLACK if is_dark else COLORS
    return palette[number % len(palette)], DASHES[number // len(palette) % len(DASHES)]


def _style(split: str, alone: bool = False) -> dict[str, Any]:
    """Training thin and light, unless nothing is beside it; the rest bold."""
    if split == "train":
        return {"linewidth": 1.6} if alone else {"linewidth": 1.0, "alpha": 0.65}
    return {"linewidth": 2.2} | ({"linestyle": ":"} if split == "test" else {})


class _Panel:
    """One Axes, and what is drawn into it."""

    def __init__(self, ax: Axes, x: str, smooth: float | None, first_color: int = 0) -> None:
        self.ax, self.x, self.smooth, self.first = ax, x, smooth, first_color
        self.lines: list[tuple[Any, Any, str]] = []  # places, values and colour of all that was drawn
        self.is_crowded = self.has_val = False
        self.unit, self.per_unit = {"epoch": "epoch", "step": "step"}.get(x, x), 1.0

    def draw(self, drawn: list[Drawn], columns: list[Column]) -> None:
        """Every run, the nameless ones first; then limits, marks and axes."""
        quantities = list(dict.fromkeys(column.quantity for column in columns))
        self.has_val = any(column.split == "val" for column in columns)
        if self.x == "time":
            self._choose_unit([frame for one in drawn for frame in one.frames])
        named = [one for one in drawn if one.is_named]
        self.is_crowded = len(named) > len(COLORS)
        for one in [one for one in drawn if not one.is_named] + named:
            for column in columns:
                if not one.is_named and self.has_val and column.split != "val":
                    continue  # of those in grey, the lines that count
                number = named.index(one) * len(quantities) + quantities.index(column.quantity) if one.is_named else 0
                self._draw_column(one, column, *(_color(self.first + number) if one.is_named else (GREY, "-")))
            if one.is_named:
                self._mark_resumes(one, _color(self.first + named.index(one) * len(quantities))[0])
        self._set_limits()
        self._dress()

    def _choose_unit(self, frames: list[pd.DataFrame]) -> None:
        longest = max((float(places_of(frame, "time").max()) for frame in frames if "time" in frame), default=0.0)
        for unit, seconds in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)):
            if longest >= 2 * seconds or seconds == 1.0:
                self.unit, self.per_unit = f"{unit} of training", seconds
                return

    def _draw_column(self, one: Drawn, column: Column, color: str, dash: Any) -> None:
        import pandas as pd

        parts = []
        for number, frame in enumerate(one.frames):
            if {self.x, column.name} <= set(frame.columns):
                places = places_of(frame, self.x) / self.per_unit
                part = pd.DataFrame({"x": places.to_numpy(), "y": frame[column.name].to_numpy(), "run": number})
                parts.append(part[part["y"].abs() < math.inf].dropna())  # measured every second epoch: still one line
                if one.is_named:
                    self._mark_nan(frame, column, places)
        points = pd.concat(parts) if parts else pd.DataFrame({"x": [], "y": [], "run": []})
        if points.empty:  # the column is another run's
            return
        if len(parts) > 1:
            points = self._mean(points, column, color)
        style = {"color": color, "linestyle": dash} | _style(column.split, alone=not self.has_val)
        style |= {} if one.is_named else {"linewidth": 0.8, "alpha": 0.45}
        if self.is_crowded and column.split == "train":
            style["alpha"] = 0.35
        if len(points) > MANY:
            style["linewidth"] = min(style["linewidth"], 0.8)
        if len(points) == 1 or (len(points) <= MOST_MARKED and one.is_named and not self.is_crowded):
            style |= {"marker": "o", "markersize": 3 if column.split == "train" else 4}
        weight = self.smooth if self.smooth is not None else 0.98 if len(points) > MANY else 0
        values = points["y"]
        if weight:
            self.ax.plot(points["x"], values, **style | {"alpha": 0.25, "linewidth": 0.6, "label": f"_{column.name}"})
            style |= {"alpha": 1.0, "linewidth": 1.6}
            values = values.ewm(alpha=1 - weight).mean()
        shown = f"{one.label} {column.name}".strip() if one.is_named else f"_{one.label}"
        self.ax.plot(points["x"], values, label=shown, **style)
        self.lines.append((points["x"].to_numpy(float), points["y"].to_numpy(float), color))
        if one.is_named and column.split in ("val", "") and column.kind != "learning rate":
            best = values.idxmin() if column.low_is_good else values.idxmax()
            self.ax.plot(
                points["x"][best], values[best], "o", color=color, markersize=8.5, markeredgecolor=self._paper(),
                markeredgewidth=1.6, zorder=5, label="_best",
            )  # fmt: skip

    def _mean(self, points: pd.DataFrame, column: Column, color: str) -> pd.DataFrame:
        """The mean over the runs, point by point; of what is validated with its band."""
        points["place"] = points.groupby("run").cumcount() if self.x == "time" else points["x"]
        mean = points.groupby("place").agg(x=("x", "mean"), y=("y", "mean"), low=("y", "min"), high=("y", "max"))
        if column.split != "train" and color != GREY:
            self.ax.fill_between(mean["x"], mean["low"], mean["high"], color=color, alpha=0.22, linewidth=0)
        return mean.reset_index(drop=True)

    def _paper(self) -> Any:
        return self.ax.get_facecolor()

    # ---- marks

    def _mark_nan(self, frame: pd.DataFrame, column: Column, places: pd.Series) -> None:
        from matplotlib.patheffects import withStroke

        begins = nan_begins(frame, column)
        if begins is None:
            return
        before = [value for value in frame[column.name].iloc[:begins] if abs(value) < math.inf]
        y, where = (before[-1], "data") if before else (0.5, "axes")
        across = self.ax.get_xaxis_transform() if where == "axes" else self.ax.transData
        self.ax.plot(
            [places.iloc[begins]], [y], "x", color=RED, markersize=8, markeredgewidth=2.2, transform=across, zorder=6,
            label="_nan",
        )  # fmt: skip
        if not any(text.get_text() == "NaN" for text in self.ax.texts):  # said once
            self.ax.annotate("NaN", (places.iloc[begins], y), xycoords=across, xytext=(7, 9), color=RED,
                             textcoords="offset points", fontsize="small", weight="bold", zorder=7,
                             path_effects=[withStroke(linewidth=3, foreground=self._paper())])  # fmt: skip

    def _mark_resumes(self, one: Drawn, color: str) -> None:
        points = [point / self.per_unit for point in resume_points(one, self.x)]
        if points:
            self.ax.plot(points, [0] * len(points), "|", color=color, markersize=14, markeredgewidth=1.6, clip_on=False,
                         transform=self.ax.get_xaxis_transform(), label="_resumed", zorder=4)  # fmt: skip

    # ---- limits

    def _set_limits(self) -> None:
        """Limits that one spike does not move: it is an arrow at the edge, with its value."""
        values = [value for _, line, _ in self.lines for value in line]
        if (
            values and len({place for places, _, _ in self.lines for place in places}) == 1
        ):  # one epoch: no axis of 1e-5
            room = 0.1 * max(abs(value) for value in values) or 1.0
            self.ax.set_ylim(min(values) - room, max(values) + room)
        low, high = limits_without_spikes([line for _, line, _ in self.lines])
        if low is None and high is None:
            return
        inside = [v for v in values if (low is None or v >= low) and (high is None or v <= high)]
        room = 0.06 * (max(inside) - min(inside)) or 1.0
        self.ax.set_ylim(min(inside) - room, max(inside) + room)
        at = self.ax.get_xaxis_transform()
        for limit, edge, mark in ((high, 1.0, "^"), (low, 0.0, "v")):
            told: list[tuple[float, float]] = []
            for place, value, color in sorted(self._beyond(limit, mark)) if limit is not None else ():
                self.ax.plot([place], [edge], mark, color=color, markersize=8, clip_on=False, zorder=6, label="_spike",
                             transform=at)  # fmt: skip
                if told and place - told[-1][0] < 0.15 * self._width():  # beside each other: the farthest out
                    value = (max if mark == "^" else min)(value, told.pop()[1])
                told.append((place, value))
            for place, value in told[:4]:
                self.ax.annotate(f"{value:.4g}", (place, edge), xycoords=at, fontsize="small", zorder=7,
                                 xytext=(9, -11 if mark == "^" else 3), textcoords="offset points")  # fmt: skip

    def _width(self) -> float:
        places = [place for places, _, _ in self.lines for place in places]
        return max(places) - min(places)

    def _beyond(self, edge: float, mark: str) -> Iterator[tuple[float, float, str]]:
        """Of each line the highest (or lowest) point of each stretch beyond the edge."""
        sign = 1 if mark == "^" else -1
        for places, values, color in self.lines:
            stretch: list[int] = []
            for i in range(len(values) + 1):
                if i < len(values) and sign * values[i] > sign * edge:
                    stretch.append(i)
                elif stretch:
                    most = max(stretch, key=lambda j: sign * values[j])
                    yield float(places[most]), float(values[most]), color
                    stretch = []

    def _dress(self) -> None:
        from matplotlib.ticker import MaxNLocator

        ax = self.ax
        if ax.xaxis.get_tick_params().get("labelbottom", True):
            ax.set_xlabel(self.unit)
        if ax.get_yscale() == "linear":
            ax.yaxis.get_major_formatter().set_useOffset(False)  # type: ignore[attr-defined]
        if self.x in ("epoch", "step"):  # there is no epoch 0.5
            ax.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)


def limits_without_spikes(lines: list[Any]) -> tuple[float | None, float | None]:
    """The lowest and the highest value that is to be seen; None: nothing stands out on that side.

    Spikes are at most one in twenty values, and stretch the axis to eight times the range of all the rest. A line that
    begins high and comes down has none.

    Example:
        >>> limits_without_spikes([[2.0, 1.0, 900.0, 0.8, 0.5]]), limits_without_spikes([[2.0, 1.0, 0.8, 0.5]])
        ((None, 2.0), (None, None))
    """
    limits: list[float | None] = []
    for sign in (-1, 1):
        points = sorted(((sign * v, i) for line in lines for i, v in enumerate(line)), reverse=True)
        most = max(1, len(points) // 20)
        rest = [value for value, _ in points[most:]]
        limits.append(None)
        if len(rest) > 2 and (span := rest[0] - rest[-1]) > 0 and points[0][0] - rest[-1] > SPIKE * span:
            beyond = [i for value, i in points[:most] if value > rest[0] + span]
            if len(beyond) == 1 or max(beyond) >= max(len(line) for line in lines) // 10:
                limits[-1] = sign * points[len(beyond)][0]
    return limits[0], limits[1]
