"""Draw the curves of recorded runs, with a panel for each quantity and a color for each run."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..loggers.read_logs import read_logs
from ..metric_names import NOT_METRICS
from .runs import best_mode, find_runs

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes

# The Okabe-Ito palette is color-blind safe. Dashes keep overlapping runs visible.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.")
SPLITS = {"training": "train", "val": "validation", "valid": "validation"}
_COLUMN = re.compile(
    r"(?is)(?:(train|training|val|valid|validation|test)[\W_])?(.*?)(?:_epoch|_step)?(/.*)?"
)
_KINDS = {
    "loss": re.compile(r"(?i)loss"),
    "accuracy": re.compile(r"(?i)accuracy|(^|[\W_])acc([\W_\d]|$)"),
    "learning rate": re.compile(r"(?i)^(lr|learning[_ ]rate)([\W_\d]|$)"),
}


@dataclass(eq=False)
class Run:
    """One run, or several runs that differ only in their seed."""

    label: str
    tables: list[pd.DataFrame]
    options: dict[str, Any]
    color: str | None = None
    dash: str = "-"


class Metric(NamedTuple):
    """The parts of a column name, such as the split "val" and the quantity "acc" of `val_acc`."""

    column: str
    split: str
    quantity: str
    kind: str


def parse_metric(column: str) -> Metric:
    """Split the name of a column into its parts. Column names of other loggers are accepted."""
    match = _COLUMN.fullmatch(column)
    assert match is not None
    split, quantity, loader = match.groups(default="")
    kinds = (kind for kind, pattern in _KINDS.items() if pattern.search(quantity))
    return Metric(
        column, SPLITS.get(split.lower(), split.lower()), quantity + loader, next(kinds, quantity)
    )


def plot_logs(
    logs: Any,
    *,
    x: str | None = None,
    metrics: str | Sequence[str] | None = None,
    ax: Axes | None = None,
    smooth: float | None = None,
    log: bool = False,
    seeds: bool = True,
) -> Axes | np.ndarray:
    """Draw the logs of one or several runs with a panel for each quantity.

    Args:
        logs: A path that `read_logs` reads, a DataFrame that `fit` returned, a list of these, or
            a dict of these with a label as the key.
        x: "epoch", "step" (with the rows of steps.csv) or "time" (of training). None: "step" for
            step-based runs, otherwise "epoch".
        metrics: Columns, or quantities such as "f1" (train_f1 and val_f1) and "lr". None: losses
            and accuracies, or all metrics if there are no losses and accuracies.
        ax: Draw into these Axes instead of a new figure.
        smooth: Weight of the earlier points in a moving average, from 0 to below 1. None: smooth
            training lines of more than 50 points. A pale line shows the original points.
        log: Draw the values on a logarithmic scale.
        seeds: Draw runs with the same name that differ only in the seed as a mean and a range.

    Returns:
        The Axes, or an array of them if there are several panels.

    Example:
        >>> import pandas as pd
        >>> history = pd.DataFrame({"epoch": [0, 1], "train_loss": [2, 1], "val_loss": [2.1, 1.5]})
        >>> plot_logs(history).get_ylabel()
        'loss'
    """
    import numpy as np

    if smooth is not None and not 0 <= smooth < 1:
        raise ValueError(f"smooth: got {smooth}, expected 0 to below 1. Write 0.9, for example.")
    runs = load_runs(logs, seeds)
    tables = [table for run in runs for table in run.tables]
    if x is None:
        is_by_steps = any(map(is_step_based_table, tables)) and all("step" in t for t in tables)
        x = "step" if is_by_steps else "epoch"
    for number, run in enumerate(runs):
        run.tables = [prepare_table(table, x) for table in run.tables]
        run.label = "" if len(runs) == 1 else run.label or f"run {number}"
    chosen = choose_metrics(runs, x, [metrics] if isinstance(metrics, str) else metrics)
    if ax is not None:
        # For a run without a color, matplotlib chooses the next color of these Axes.
        for run in runs:
            for metric in chosen:
                label = f"{run.label} {metric.column}".strip()
                draw_line(ax, run, metric, x, smooth, label)
        ax.legend(fontsize="small")
        return ax
    quantities = list(dict.fromkeys(metric.quantity for metric in chosen))
    axes = make_axes(quantities, x, log)
    for number, run in enumerate(runs):
        run.color = PALETTE[number % len(PALETTE)]
        run.dash = DASHES[(number + number // len(PALETTE)) % len(DASHES)]
        for metric in chosen:
            panel = axes[quantities.index(metric.quantity)]
            label = run.label or metric.split or f"_{metric.quantity}"
            draw_line(panel, run, metric, x, smooth, label)
    has_both = {"train", "validation"} <= {metric.split for metric in chosen}
    notes = ["thin: train, bold: validation"] if has_both and len(runs) > 1 else []
    if any(len(run.tables) > 1 for run in runs):
        notes.append("band: range of the seeds")
    add_legend(axes, ", ".join(notes))
    return axes[0] if len(axes) == 1 else np.array(axes)


def load_runs(logs: Any, seeds: bool) -> list[Run]:
    """Return the runs for the argument ``logs`` of ``plot_logs``."""
    import pandas as pd

    if isinstance(logs, str | os.PathLike):
        return read_runs(Path(logs), seeds)
    if isinstance(logs, pd.DataFrame):
        if not {"name", "version"} <= set(logs.columns):
            return [Run("", [logs], {})]
        groups = logs.groupby(["name", "version"], sort=False)
        return [Run(f"{name}/{version}", [rows], {}) for (name, version), rows in groups]
    if isinstance(logs, list | tuple):
        return [run for value in logs for run in load_runs(value, seeds=False)]
    if not isinstance(logs, Mapping):
        expected = "expected a path or a DataFrame. Write plot_logs('logs')."
        raise TypeError(f"plot_logs: got {type(logs).__name__}, {expected}")
    runs = []
    for label, value in logs.items():
        found = load_runs(value, seeds)
        for run in found:
            run.label = str(label) if len(found) == 1 else f"{label}/{run.label}"
        runs += found
    return runs


def read_runs(path: Path, seeds: bool) -> list[Run]:
    """Read runs from a file or folder. Join runs of the same name that differ only in the seed."""
    runs: dict[str, Run] = {}
    for found in find_runs(path.parent if path.is_file() else path):
        found["rows"].attrs["folder"] = Path(found["folder"])
        label = group = f"{found['name']}/{Path(found['folder']).name}"
        changed = dict(found["changed"])
        if seeds and changed.pop("seed", None) is not None:
            settings = [f"{option}={value}" for option, value in changed.items()]
            group = " ".join([found["name"], *settings])
        run = runs.setdefault(group, Run(label, [], found["options"]))
        run.tables.append(found["rows"])
        if len(run.tables) > 1:
            run.label = f"{group}, mean of {len(run.tables)}"
    if not runs:
        raise ValueError(f"plot_logs: got {str(path)!r}, expected a folder with a metrics.csv.")
    return list(runs.values())


def is_step_based_table(table: pd.DataFrame) -> bool:
    has_speed = "samples_per_second" in table and bool(table["samples_per_second"].notna().any())
    return has_speed or "epoch" not in table or bool(table["epoch"].duplicated().any())


def prepare_table(table: pd.DataFrame, x: str) -> pd.DataFrame:
    """Return one row per value of the x axis. For x="step", include the rows of steps.csv."""
    import pandas as pd

    folder = table.attrs.get("folder")
    if x == "step" and folder is not None and (folder / "steps.csv").is_file():
        steps = read_logs(folder, steps=True)
        # If metrics.csv and steps.csv have the same column, use steps.csv, which has more rows.
        table = pd.concat([table[["step", *table.columns.difference(steps.columns)]], steps])
    elif x == "time" and x in table:
        # The column `time` contains the seconds since the previous row.
        table = table.assign(time=table["time"].fillna(0).cumsum())
    return table.groupby(x, as_index=False).last() if x in table else table


def choose_metrics(runs: list[Run], x: str, wanted: Sequence[str] | None) -> list[Metric]:
    """Return the metrics to draw, in the order losses, accuracies, other metrics, learning rates."""
    tables = [table for run in runs for table in run.tables]
    names = list(dict.fromkeys(str(name) for table in tables for name in table))
    known = f"expected one of the columns {', '.join(names) or '(none)'}"
    if x not in names:
        raise ValueError(f"x: got {x!r}, {known}. Write x='step', for example.")
    numeric = {str(name) for table in tables for name in table.select_dtypes("number")}
    columns = [parse_metric(name) for name in names if name in numeric]
    metrics = [metric for metric in columns if metric.column not in NOT_METRICS]
    if x != "step":
        # Skip "<name>_step", which Lightning logs in addition to the mean of the epoch.
        metrics = [metric for metric in metrics if not metric.column.endswith("_step")] or metrics
    chosen = []
    for name in ["loss", "accuracy"] if wanted is None else wanted:
        found = [metric for metric in columns if metric.column == name]
        found = found or [metric for metric in metrics if name in (metric.quantity, metric.kind)]
        if wanted is not None and not found:
            raise ValueError(f"metrics: got {name!r}, {known}. Choose a numeric column.")
        chosen += found
    chosen = chosen or [metric for metric in metrics if metric.kind != "learning rate"]
    if not chosen:
        raise ValueError(f"metrics: got nothing to draw, {known}. Write metrics=['lr'].")
    order = {"loss": 0, "accuracy": 1, "learning rate": 3}
    return sorted(dict.fromkeys(chosen), key=lambda m: (order.get(m.kind, 2), m.split != "train"))


def make_axes(quantities: list[str], x: str, log: bool) -> list[Axes]:
    """Return the panels of a new figure, up to three in a row."""
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    width = len(quantities) if len(quantities) <= 3 else 2
    height = math.ceil(len(quantities) / width)
    size = (4.8 + 1.6 * width, 1.6 + 2.4 * height)
    figure = pyplot.figure(figsize=size, layout="constrained")
    axes: list[Axes] = []
    for number, quantity in enumerate(quantities, start=1):
        ax = figure.add_subplot(height, width, number, sharex=axes[0] if axes else None)
        ax.set_xlabel("seconds of training" if x == "time" else x)
        ax.set_ylabel(quantity, parse_math=False)
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=x != "time", min_n_ticks=1))
        if log:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.25)
        axes.append(ax)
    return axes


def draw_line(ax: Axes, run: Run, metric: Metric, x: str, smooth: float | None, label: str) -> None:
    """Draw a metric of a run and its best value, or the mean and range of several seeds."""
    import pandas as pd

    tables = [table for table in run.tables if {x, metric.column} <= set(table)]
    rows = [table[[x, metric.column]].set_axis(["x", "y"], axis=1) for table in tables]
    points = pd.concat(rows or [pd.DataFrame({"x": [], "y": []})])
    points = points[points["y"].abs() < math.inf]
    style: dict[str, Any] = {"linestyle": run.dash, "linewidth": 2.2}
    if metric.split == "train":
        style.update(linewidth=1.0, alpha=0.65)
    elif metric.split == "test":
        style["linestyle"] = ":"
    if len(rows) > 1:
        # Average the n-th rows of all seeds, because rows of different seeds have different times.
        groups = points.groupby(level=0)
        points, low, high = groups.mean(), groups["y"].min(), groups["y"].max()
        if metric.split != "train":
            ax.fill_between(points["x"], low, high, color=run.color, alpha=0.2, linewidth=0)
    values = points["y"]
    if smooth or (smooth is None and metric.split == "train" and len(points) > 50):
        ax.plot(points["x"], values, color=run.color, alpha=0.35, linewidth=0.8)
        values = values.ewm(alpha=1 - smooth if smooth else 25 / len(points)).mean()
    # Mark the points of short lines. Draw short lines above longer lines, to keep both visible.
    style.update(marker="." if len(points) <= 30 else "", zorder=2 + 1 / (1 + len(points)))
    (line,) = ax.plot(points["x"], values, color=run.color, label=label, **style)
    mode = best_mode(metric.column, run.options)
    if mode is not None and metric.split != "train" and len(points):
        best = values.idxmin() if mode == "min" else values.idxmax()
        style = {"color": line.get_color(), "markersize": 9, "markeredgecolor": "white"}
        ax.plot(points["x"][best], values[best], "o", label="best", zorder=4, **style)


def add_legend(axes: list[Axes], title: str) -> None:
    """Add a legend below the panels with one entry for each label."""
    entries: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if not entries:
        return
    if "best" in entries:
        entries["best"] = entries.pop("best")
    figure: Any = axes[0].figure
    # Estimate how many entries of the legend fit into a line, with 1/14 inch per letter.
    width = max(1, int(figure.get_figwidth() * 14 / (max(map(len, entries)) + 10)))
    figure.set_figheight(figure.get_figheight() + 0.27 * (len(entries) // width))
    place = {"loc": "outside lower center", "ncols": width, "title": title or None}
    legend = figure.legend(entries.values(), entries, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)


def render_picture(logs: Any, file_format: str = "png", **options: Any) -> bytes:
    """Call `plot_logs`, and return the figure as the bytes of an image file."""
    import numpy as np
    from matplotlib import pyplot

    axes: Any = plot_logs(logs, **options)
    figure = np.ravel(axes)[0].figure
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=file_format)
    # Close the figure, because a notebook would display an open figure again.
    pyplot.close(figure)
    return content.getvalue()


def save_picture(paths: Sequence[str | Path], out: Path, **options: Any) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    if not out.parent.is_dir() or out.suffix not in (".png", ".pdf", ".svg"):
        expected = "expected a .png, .pdf or .svg in a folder that exists. Write runs.png."
        raise ValueError(f"out: got {str(out)!r}, {expected}")
    logs = paths[0] if len(paths) == 1 else list(paths)
    out.write_bytes(render_picture(logs, out.suffix[1:], **options))
    return out


class LivePlot:
    """Draw the curves in a notebook while a run trains. Outside of notebooks, do nothing.

    Args:
        **options: Options of `plot_logs`, such as x="step" or metrics=["loss", "lr"].

    Example:
        >>> from fabric_template import FabricLoop, LivePlot
        >>> loop = FabricLoop(max_epochs=10, callbacks=[LivePlot(metrics=["loss"])])
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.display: Any = None
        self.next_time = 0.0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.display, self.next_time = None, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
        """Draw at most once a second, and use at most 5 % of the training time."""
        start = time.monotonic()
        if start >= self.next_time:
            self.on_fit_end(trainer, module)
            self.next_time = start + max(1.0, 20 * (time.monotonic() - start))

    def on_fit_end(self, trainer: Any, module: Any, error: BaseException | None = None) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        log = Path(trainer.log_dir or "", "metrics.csv")
        if not hasattr(shell, "kernel") or not trainer.is_global_zero or not log.is_file():
            return
        from IPython.display import Image, display

        try:
            image = Image(render_picture(log, **self.options), format="png")
        except Exception as problem:
            warnings.warn(f"LivePlot: the run is not drawn. {problem}", stacklevel=2)
            return
        if self.display is None:
            self.display = display(image, display_id=True)
        else:
            self.display.update(image)

    on_exception = on_fit_end


def plot_command(paths: Sequence[str], *, out: str | None = None, **options: Any) -> int:
    first = Path(paths[0])
    folder = first if first.is_dir() else first.parent
    picture = Path(out or Path("." if len(paths) > 1 else folder, "history.png"))
    print(f"picture     {save_picture(paths, picture, **options)}")
    return 0
