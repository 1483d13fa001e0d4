"""Draw the curves of runs, with a panel for each quantity and a color for each run."""

from __future__ import annotations

import io
import math
import numbers
import os
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..loggers.csv_formats import name_columns
from ..loggers.read_logs import read_logs
from ..metric_names import Metric, find_axis, is_metric, parse_metric
from .runs import best_mode, find_runs

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes

# The Okabe-Ito palette is color-blind safe. Dashes keep overlapping runs visible.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.")
# If there are more runs than combinations of color and dash, color only the best runs.
MOST_COLORED = len(PALETTE) * len(DASHES)
NUM_BEST = 8
# Drawing 18 panels takes about a second, so draw no more unless the user chooses the metrics.
MOST_PANELS = 18
# The maximum number of characters in a panel's label. Longer labels lose their first characters.
LONGEST_LABEL = 28
GRAY = "0.72"


@dataclass(eq=False)
class Run:
    """The logged rows and options of one run, or of several runs that differ only in the seed."""

    label: str
    tables: list[pd.DataFrame]
    options: dict[str, Any]
    color: str | None = None
    dash: str = "-"


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
    """Plot the logs of one or more runs, with a panel for each quantity.

    Args:
        logs: A path that `read_logs` accepts, or a DataFrame that `fit` returned. For several
            logs, pass a list, or a dict that maps a label to each log.
        x: "epoch", "step" (with steps.csv), "time" (of training) or a numeric column. Default:
            "step" for step-based runs, otherwise "epoch".
        metrics: Columns, or quantities such as "lr" or "f1" (train_f1 and val_f1). Default: losses
            and accuracies, or all metrics if the logs contain neither.
        ax: Draw into these Axes instead of a new figure.
        smooth: The weight of earlier points in a moving average: at least 0, below 1. By default,
            average training metrics with more than 50 steps. A pale line shows the original values.
        log: Use a logarithmic scale in panels without negative values.
        seeds: Draw the mean and range of runs that have the same name and differ only in the seed.

    Returns:
        The Axes, or an array of Axes if there are several panels.

    Example:
        >>> import pandas as pd
        >>> plot_logs(pd.DataFrame({"epoch": [0, 1], "val_loss": [2.0, 1.5]})).get_ylabel()
        'loss'
    """
    runs, x = prepare_runs(load_runs(logs, seeds), x, smooth)
    chosen = choose_metrics(runs, x, [metrics] if isinstance(metrics, str) else metrics)
    if ax is not None:
        return draw_into(ax, runs, chosen, x, smooth, log)
    return draw_panels(runs, chosen, x, smooth, log, most=MOST_PANELS if metrics is None else None)


def prepare_runs(runs: list[Run], x: str | None, smooth: float | None) -> tuple[list[Run], str]:
    """Drop runs without rows, and return the remaining runs and the name of the x axis."""
    if smooth is not None and not (isinstance(smooth, numbers.Real) and 0 <= smooth < 1):
        raise ValueError(f"smooth: got {smooth!r}, expected a number >= 0 and < 1, such as 0.9.")
    # Skip runs that were stopped before they wrote a row.
    runs = [run for run in runs if any(map(len, run.tables))]
    if not runs:
        raise ValueError(
            "plot_logs: got logs without numbers, expected at least one row with a number."
        )
    for run in runs:
        run.tables = [keep_numbers(table) for table in run.tables]
    x = choose_x([table for run in runs for table in run.tables], x)
    for run in runs:
        run.tables = [prepare_table(table, x) for table in run.tables]
    name_runs(runs)
    return runs, x


def keep_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Drop the columns that cannot be drawn, such as texts, dates and durations."""
    kept = table.select_dtypes("number", exclude=["timedelta", "complexfloating"])
    kept.attrs = table.attrs
    return kept


def name_runs(runs: list[Run]) -> None:
    """Give each run a different label, or no label if there is only one run."""
    labels = [run.label or f"run {number}" for number, run in enumerate(runs)]
    for number, run in enumerate(runs):
        label = labels[number]
        if labels.count(label) > 1:
            # Two folders may contain runs with the same name.
            label = f"{label} ({labels[: number + 1].count(label)})"
        run.label = "" if len(runs) == 1 else keep_in_legend(label)


def keep_in_legend(label: str) -> str:
    """Add a space to a label that the legend would omit or merge with its own entry "best"."""
    # Matplotlib's legend omits labels that start with "_".
    return f" {label}" if label.startswith("_") or label == "best" else label


def draw_into(
    ax: Axes, runs: list[Run], metrics: list[Metric], x: str, smooth: float | None, log: bool
) -> Axes:
    """Draw all lines into the user's Axes, in the colors that Matplotlib chooses."""
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        from ..errors import describe

        raise TypeError(f"ax: got {describe(ax)}, expected Axes. Write ax=pyplot.gca().")
    drawn = set()
    for run in runs:
        for metric in metrics:
            label = f"{run.label} {metric.column}" if run.label else keep_in_legend(metric.column)
            draw_line(ax, run, metric, x, smooth, label)
            drawn.add(label)
    if log:
        ax.set_yscale("log")
    for text in ax.legend(fontsize="small").get_texts():
        # A run's name may contain dollar signs, which do not mark a formula. Keep formulas in the
        # labels of lines that the user drew.
        text.set_parse_math(text.get_parse_math() and text.get_text() not in drawn)
    return ax


def draw_panels(
    runs: list[Run],
    metrics: list[Metric],
    x: str,
    smooth: float | None,
    log: bool,
    most: int | None,
) -> Axes | np.ndarray:
    """Draw a new figure with one panel per quantity.

    Args:
        most: The largest number of panels, or None for no limit.
    """
    import numpy as np

    panels: dict[str, list[Metric]] = {}
    for metric in metrics:
        panels.setdefault(metric.quantity.lower(), []).append(metric)
    drawn = [*panels.values()][:most]
    tables = [table for run in runs for table in run.tables]
    axes = make_axes([found[0].quantity for found in drawn], name_axis(tables, x))
    choose_colors(runs, metrics)
    for panel, found in zip(axes, drawn, strict=True):
        for run in runs:
            for metric in found:
                if len(runs) == 1:
                    # Use different colors for several metrics of one data split, such as the
                    # validation losses of two loaders.
                    same = [other for other in found if other.split == metric.split]
                    run.color = PALETTE[same.index(metric) % len(PALETTE)]
                draw_line(panel, run, metric, x, smooth, run.label or name_line(metric, found))
        format_axes(panel, x, log)
    has_both = {"train", "validation"} <= {metric.split for metric in metrics}
    notes = ["thin: train, bold: validation"] if has_both and len(runs) > 1 else []
    if any(len(run.tables) > 1 for run in runs):
        notes.append("band: range of the seeds")
    if len(drawn) < len(panels):
        notes.append(f"{len(drawn)} of {len(panels)} metrics, choose others with metrics=")
    add_legend(axes, ", ".join(notes))
    return axes[0] if len(axes) == 1 else np.array(axes)


def load_runs(logs: Any, seeds: bool) -> list[Run]:
    """Convert the ``logs`` argument of ``plot_logs`` to a list of runs."""
    import pandas as pd

    if isinstance(logs, str | os.PathLike):
        return read_runs(Path(logs), seeds)
    if isinstance(logs, pd.DataFrame):
        names = [str(name).strip() for name in logs.columns]
        table = logs.set_axis(name_columns(names, has_rows=False), axis=1)
        if not {"name", "version"} <= set(table.columns):
            return [Run("", [table], {})]
        groups = table.groupby(["name", "version"], sort=False, dropna=False)
        return [Run(f"{name}/{version}", [rows], {}) for (name, version), rows in groups]
    if isinstance(logs, list | tuple):
        return [run for value in logs for run in load_runs(value, seeds=False)]
    if not isinstance(logs, Mapping):
        # Import errors.py only if needed, because errors.py imports Lightning, which takes seconds.
        from ..errors import describe

        expected = "expected a path or a DataFrame. Write plot_logs('logs')."
        raise TypeError(f"plot_logs: got {describe(logs)}, {expected}")
    runs = []
    for label, value in logs.items():
        found = load_runs(value, seeds)
        for run in found:
            run.label = str(label) if len(found) == 1 else f"{label}/{run.label}"
        runs += found
    return runs


def read_runs(path: Path, seeds: bool) -> list[Run]:
    """Read the runs in a CSV file or folder."""
    if not path.exists():
        raise ValueError(f"plot_logs: got {str(path)!r}, expected a folder or a CSV file.")
    runs: dict[str, Run] = {}
    all_found = find_runs(path)
    counts = Counter(found["label"] for found in all_found)
    for found, table in zip(all_found, make_tables(all_found), strict=True):
        label = group = found["label"]
        if counts[label] > 1:
            # Two CSV files may contain runs with the same name.
            label = group = f"{label} ({found['file'].name})"
        changed = dict(found["changed"])
        if seeds and changed.pop("seed", None) is not None and len(table):
            settings = [f"{option}={value}" for option, value in changed.items()]
            group = " ".join([found["name"], *settings])
        run = runs.setdefault(group, Run(label, [], found["options"]))
        run.tables.append(table)
        if len(run.tables) > 1:
            run.label = f"{group}, mean of {len(run.tables)}"
    if not runs:
        raise ValueError(f"plot_logs: got {str(path)!r}, expected a folder with a metrics.csv.")
    return list(runs.values())


def make_tables(found: Sequence[Mapping[str, Any]]) -> list[pd.DataFrame]:
    """Return one DataFrame per run."""
    import pandas as pd

    files = Counter(run["file"] for run in found)
    tables = [pd.DataFrame(run["rows"]) for run in found]
    for run, table in zip(found, tables, strict=True):
        if files[run["file"]] == 1:
            table.attrs["file"] = run["file"]
    return tables


def choose_x(tables: list[pd.DataFrame], x: str | None) -> str:
    """Return the column to draw on the x axis."""
    if x is None:
        has = {axis: all(find_axis(table, axis) for table in tables) for axis in ("step", "epoch")}
        if has["step"] and any(map(is_step_based_table, tables)):
            return "step"
        return next((axis for axis in ("epoch", "step") if has[axis]), "row")
    if x == "row" or (isinstance(x, str) and any(find_axis(table, x) for table in tables)):
        return x
    numeric = dict.fromkeys(name for table in tables for name in table.select_dtypes("number"))
    known = f"expected one of the numeric columns {', '.join(map(str, numeric)) or '(none)'}"
    raise ValueError(f"x: got {x!r}, {known}. Write x={next(iter(numeric), 'row')!r}, for example.")


def is_step_based_table(table: pd.DataFrame) -> bool:
    """Return whether to plot a table's values by step instead of by epoch."""
    if "samples_per_second" in table and bool(table["samples_per_second"].notna().any()):
        return True
    if not has_row_per_epoch(table):
        return True
    # A single epoch would be a single point, so draw the epoch's steps.
    return len(table) == 1 and "file" in table.attrs and len(read_steps(table)) > 1


def has_row_per_epoch(table: pd.DataFrame) -> bool:
    """Return whether a table's epochs are whole numbers without duplicates."""
    column = find_axis(table, "epoch")
    if column is None or column not in table.select_dtypes("number"):
        return False
    epochs = table[column].dropna()
    return not epochs.duplicated().any() and not (epochs % 1 != 0).any()


def read_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Return the values that a run logged at each step."""
    import pandas as pd

    file = table.attrs.get("file")
    if file is None:
        return table
    has_own_file = file.name == "metrics.csv" and file.with_name("steps.csv").is_file()
    if not has_own_file and find_axis(table, "epoch") is None:
        # In a table without an epoch column, each row contains the values of one step.
        return table
    steps = read_logs(file, steps=True)
    if find_axis(steps, "step") != find_axis(table, "step"):
        return table
    if not has_own_file:
        return steps
    # For columns in both files, prefer steps.csv, because steps.csv has more rows.
    others = table[["step", *table.columns.difference(steps.columns)]]
    return pd.concat([others, steps])


def prepare_table(table: pd.DataFrame, x: str) -> pd.DataFrame:
    """Keep the last row per x value, and rename the column of the x axis to ``x``."""
    if x == "row":
        return table.assign(row=range(len(table)))
    if x == "step":
        table = read_steps(table)
    column = find_axis(table, x)
    if column is None:
        return table
    file = table.attrs.get("file")
    if x == "time" and (file is None or file.name == "metrics.csv"):
        # Add up the durations, because `time` contains the seconds since the previous row.
        table = table.assign(**{column: table[column].fillna(0).cumsum()})
    rows = table.groupby(column, as_index=False).last()
    rows = (
        rows if column == x else rows.drop(columns=x, errors="ignore").rename(columns={column: x})
    )
    rows.attrs["x"] = column
    return rows


def name_axis(tables: list[pd.DataFrame], x: str) -> str:
    """Return the label of the x axis, such as "epoch" or "seconds of training"."""
    names = {table.attrs.get("x", x) for table in tables}
    return "seconds of training" if x == "time" else names.pop() if len(names) == 1 else x


def find_metrics(tables: list[pd.DataFrame], x: str) -> tuple[list[Metric], list[Metric]]:
    """Return a list of all numeric columns, and a list of the columns that contain metrics."""
    names = dict.fromkeys(str(name) for table in tables for name in table)
    numeric = {
        name for table in tables for name in table.select_dtypes("number").dropna(axis=1, how="all")
    }
    columns = add_splits([parse_metric(name) for name in names if name in numeric])
    metrics = [metric for metric in columns if is_metric(metric.column) and metric.column != x]
    if x != "step":
        # Skip columns such as "loss_step", which Lightning logs in addition to the epoch's mean.
        metrics = [metric for metric in metrics if not metric.column.endswith("_step")] or metrics
    return columns, metrics


def choose_metrics(runs: list[Run], x: str, wanted: Sequence[str] | None) -> list[Metric]:
    """Return the metrics to draw, with losses and accuracies first and learning rates last."""
    columns, metrics = find_metrics([table for run in runs for table in run.tables], x)
    names = ", ".join(metric.column for metric in columns)
    known = f"expected one of the numeric columns {names or '(none)'}"
    chosen = [metric for metric in metrics if metric.kind in ("loss", "accuracy")]
    if wanted is not None:
        chosen = []
        for name in wanted if isinstance(wanted, Iterable) else [wanted]:
            # In a Keras log, let "loss" select both "loss" and "val_loss".
            found = [metric for metric in metrics if name in (metric.quantity, metric.kind)]
            found = found or [metric for metric in columns if metric.column == name]
            if not found:
                raise ValueError(f"metrics: got {name!r}, {known}.")
            chosen += found
    chosen = chosen or [metric for metric in metrics if metric.kind != "learning rate"]
    if not chosen:
        hint = "Only numbers are drawn. Log a number, such as loss.item()."
        hint = f"Write metrics=[{metrics[0].column!r}]." if metrics else hint
        raise ValueError(f"metrics: got no metric to draw, {known}. {hint}")
    return sort_metrics(chosen)


def sort_metrics(metrics: Sequence[Metric]) -> list[Metric]:
    order = {"loss": 0, "accuracy": 1, "learning rate": 3}
    return sorted(dict.fromkeys(metrics), key=lambda m: (order.get(m.kind, 2), m.split != "train"))


def add_splits(metrics: list[Metric]) -> list[Metric]:
    """Treat a column such as "f1" as a training metric if there is also a "val_f1" column."""
    splits: dict[str, set[str]] = {}
    for metric in metrics:
        splits.setdefault(metric.quantity.lower(), set()).add(metric.split)
    found = []
    for metric in metrics:
        # As in Keras logs, a "loss" column is always a training metric.
        is_loss = metric.kind == "loss" or "validation" in splits[metric.quantity.lower()]
        is_train = metric.split == "" and is_loss
        found.append(metric._replace(split="train") if is_train else metric)
    return found


def name_line(metric: Metric, others: list[Metric]) -> str:
    """Return the label of a metric's line in the legend of a plot."""
    if [other.split for other in others].count(metric.split) > 1:
        return metric.column
    # A single line needs no label if its metric has no data split such as "train". Matplotlib's
    # legend omits labels that start with "_".
    return metric.split or (metric.column if len(others) > 1 else f"_{metric.quantity}")


def choose_colors(runs: list[Run], metrics: list[Metric]) -> None:
    """Give each run a color and a dash pattern."""
    colored = runs
    if len(runs) > MOST_COLORED:
        colored = rank_runs(runs, metrics)[:NUM_BEST]
        for run in runs:
            if run not in colored:
                run.color, run.label = GRAY, f"{len(runs) - NUM_BEST} other runs"
    for number, run in enumerate(colored):
        run.color = PALETTE[number % len(PALETTE)]
        run.dash = DASHES[(number + number // len(PALETTE)) % len(DASHES)]


def rank_runs(runs: list[Run], metrics: list[Metric]) -> list[Run]:
    """Sort runs from best to worst, preferably by a validation metric."""
    ranking = min(metrics, key=lambda metric: metric.split == "train")
    mode = best_mode(ranking.column, runs[0].options)

    def best_value(run: Run) -> float:
        tables = [table for table in run.tables if ranking.column in table]
        values = [float(y) for table in tables for y in table[ranking.column] if abs(y) < math.inf]
        if not values:
            return math.inf
        return -max(values) if mode == "max" else min(values)

    return sorted(runs, key=best_value)


def make_axes(quantities: list[str], x_label: str) -> list[Axes]:
    """Create a figure with at most four Axes per row, and return a list of the Axes."""
    from matplotlib import pyplot

    count = len(quantities)
    width = min(count, 3) if count != 4 else 2
    width = 4 if count > 9 else width
    height = math.ceil(count / width)
    size = (4.8 + 1.6 * width, 1.6 + (2.4 if height < 3 else 1.9) * height)
    figure = pyplot.figure(figsize=size, layout="constrained")
    axes: list[Axes] = []
    for number, quantity in enumerate(quantities, start=1):
        ax = figure.add_subplot(height, width, number, sharex=axes[0] if axes else None)
        if number + width > count:
            ax.set_xlabel(x_label, parse_math=False)
        is_long = len(quantity) > LONGEST_LABEL
        label = f"…{quantity[-LONGEST_LABEL:]}" if is_long else quantity
        ax.set_ylabel(label, parse_math=False)
        ax.grid(alpha=0.25)
        axes.append(ax)
    return axes


def format_axes(ax: Axes, x: str, log: bool) -> None:
    """Choose the scale and ticks of a panel to suit the drawn values."""
    import numpy as np
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    first, last = ax.get_xlim()
    drawn = [np.asarray(line.get_xydata(), float).T for line in ax.get_lines()]
    is_integer = x != "time" and all((xs % 1 == 0).all() for xs, _ in drawn)
    # Draw at least three ticks, or one per epoch if there are only one or two epochs.
    count = min(3, max(1, math.floor(last) - math.ceil(first) + 1))
    steps = {"integer": is_integer, "steps": [1, 2, 5, 10]}
    ax.xaxis.set_major_locator(MaxNLocator("auto", min_n_ticks=count, **steps))
    largest = max(abs(first), abs(last))
    units = ((1e10, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0, 1, ""))
    _, unit, letter = next(found for found in units if largest >= found[0])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}{letter if value else ''}")
    values = [float(y) for _, line in drawn for y in line[line > 0]]
    if not log or not values or any((line < 0).any() for _, line in drawn):
        # Keep a linear scale if there are negative values, because a logarithmic scale would hide
        # them.
        ax.ticklabel_format(axis="y", useOffset=False)
        return
    ax.set_yscale("log")
    decades = math.log10(max(values) / min(values))
    subs = (1, 2, 5) if decades <= 3.3 else (1,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=15 if decades <= 3.3 else 8))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def draw_line(ax: Axes, run: Run, metric: Metric, x: str, smooth: float | None, label: str) -> None:
    """Draw one metric of a run as a curve, and mark the best value."""
    import pandas as pd

    tables = [table for table in run.tables if {x, metric.column} <= set(table)]
    rows = [table[[x, metric.column]].set_axis(["x", "y"], axis=1) for table in tables]
    rows = [table[table["y"].abs() < math.inf] for table in rows]
    if not any(map(len, rows)):
        return
    points = pd.concat(rows)
    style: dict[str, Any] = {"linestyle": run.dash, "linewidth": 2.2}
    if metric.split == "train":
        style.update(linewidth=1.0, alpha=0.65)
    elif metric.split == "test":
        style["linestyle"] = ":"
    if len(rows) > 1:
        # On an epoch axis, average the values of each epoch. Other x values, such as times, may
        # differ between the runs, so average the values of each row.
        groups = points.groupby((points["x"] if x == "epoch" else points.index).to_numpy())
        points, low, high = groups.mean(), groups["y"].min(), groups["y"].max()
        if metric.split != "train":
            ax.fill_between(points["x"], low, high, color=run.color, alpha=0.2, linewidth=0)
    values = points["y"]
    is_raw = all(has_raw_steps(table, metric, x) for table in tables)
    if smooth or (smooth is None and is_raw and len(points) > 50):
        ax.plot(points["x"], values, color=run.color, alpha=0.35, linewidth=0.8)
        values = values.ewm(alpha=1 - smooth).mean() if smooth else average_steps(values)
    # If a line has few points, mark these points, and draw the line on top of longer lines.
    style.update(marker="." if len(points) <= 30 else "", zorder=2 + 1 / (1 + len(points)))
    if run.color == GRAY:
        style.update(linewidth=0.6, marker="", linestyle="-", zorder=1.5)
    (line,) = ax.plot(points["x"], values, color=run.color, label=label, **style)
    mode = best_mode(metric.column, run.options)
    if mode is not None and metric.split != "train" and run.color != GRAY:
        best = points["y"].idxmin() if mode == "min" else points["y"].idxmax()
        style = {"color": line.get_color(), "markersize": 9, "markeredgecolor": "white"}
        ax.plot(points["x"][best], points["y"][best], "o", label="best", zorder=4, **style)


def has_raw_steps(table: pd.DataFrame, metric: Metric, x: str) -> bool:
    """Return whether a metric was logged at individual training steps rather than as an average."""
    if x == "row" or metric.split != "train" or has_row_per_epoch(table):
        return False
    counts = table.notna().sum()
    validations = [name for name in table if parse_metric(str(name)).split == "validation"]
    return bool(counts[metric.column] > 2 * counts[validations].max()) if validations else True


def average_steps(values: pd.Series) -> Any:
    """Smooth the curve of a metric with a moving average."""
    import numpy as np

    # Use longdouble, because large losses at the start would make a float64 sum too imprecise for
    # the small losses that follow.
    sums = np.concatenate([[0.0], np.cumsum(values.to_numpy(np.longdouble))])
    ends = np.arange(1, len(sums))
    # Average fewer values at the start of the curve, because the loss often falls fast there.
    sizes = np.clip(ends // 4, 1, max(1, len(values) // 25))
    return ((sums[ends] - sums[ends - sizes]) / sizes).astype(float)


def add_legend(axes: list[Axes], title: str) -> None:
    """Add a shared legend below the panels, and list each label only once."""
    entries: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if not entries:
        return
    # At the end of the legend, list the gray "other runs", and then the markers of the best values.
    names = sorted(entries, key=lambda name: (name == "best", name.endswith(" other runs")))
    figure: Any = axes[0].figure
    # Estimate how many legend entries fit on a line. A letter is about 1/14 inch wide.
    letters = int(figure.get_figwidth() * 14)
    labels = [textwrap.fill(name, int(0.7 * letters)) for name in names]
    width = max(1, letters // (max(map(len, names)) + 10))
    lines = len(labels) // width + sum(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.27 * lines)
    layout = {"loc": "outside lower center", "ncols": width, "title": title or None}
    legend = figure.legend([entries[name] for name in names], labels, **layout)
    for text in legend.get_texts():
        text.set_parse_math(False)


def render_picture(logs: Any, file_format: str = "png", **options: Any) -> bytes:
    """Draw the logs with `plot_logs`, and return the image as bytes."""
    import numpy as np
    from matplotlib import pyplot

    axes: Any = plot_logs(logs, **options)
    figure = np.ravel(axes)[0].figure
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=file_format)
    # Close the figure, which a notebook would otherwise display a second time.
    pyplot.close(figure)
    return content.getvalue()


def save_picture(paths: Sequence[str | Path], out: Path, **options: Any) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    if not out.parent.is_dir() or out.suffix not in (".png", ".pdf", ".svg"):
        expected = "expected a .png, .pdf or .svg file in an existing folder, such as runs.png."
        raise ValueError(f"out: got {str(out)!r}, {expected}")
    logs = paths[0] if len(paths) == 1 else list(paths)
    out.write_bytes(render_picture(logs, out.suffix[1:], **options))
    return out


class LivePlot:
    """Show the curves of a run in a notebook during training.

    Args:
        **options: Options of `plot_logs`, such as x="step" or metrics=["loss", "lr"].

    Example:
        >>> from fabric_template import FabricLoop, LivePlot
        >>> loop = FabricLoop(max_epochs=10, callbacks=[LivePlot(metrics=["loss"])])
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.display: Any = None
        # The folder of the CSV files, or None in all processes except the main process.
        self.folder: Path | None = None
        self.next_time = 0.0
        # The sizes of the CSV files when the curves were last drawn.
        self.sizes: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Save no state in checkpoints, because a resumed run draws a new plot."""
        return {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.display, self.next_time, self.sizes = None, 0.0, []
        # Reading log_dir synchronizes all processes, so a process must never read it alone.
        folder = trainer.log_dir
        self.folder = Path(folder) if folder and trainer.is_global_zero else None

    def on_train_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
        """Redraw the curves, but spend at most 5% of the training time on drawing."""
        start = time.monotonic()
        if self.folder is None or start < self.next_time:
            return
        self.next_time = start + 0.1
        files = sorted(self.folder.glob("*.csv"))
        sizes, drawn = [file.stat().st_size for file in files], self.sizes
        if sizes != drawn:
            self.sizes = sizes
            self.on_fit_end(trainer, module)
            seconds = time.monotonic() - start
            if not drawn:
                # Later plots take less time, because only the first plot imports matplotlib.
                seconds = min(seconds, 0.1)
            self.next_time = start + max(1.0, 20 * seconds)

    def on_fit_end(self, trainer: Any, module: Any, error: BaseException | None = None) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if self.folder is None or not hasattr(shell, "kernel"):
            return
        log = self.folder / "metrics.csv"
        if not log.is_file():
            return
        from IPython.display import Image, display

        try:
            image = Image(render_picture(log, **self.options), format="png")
        except Exception as problem:
            warnings.warn(f"LivePlot: the run could not be drawn: {problem}", stacklevel=2)
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
