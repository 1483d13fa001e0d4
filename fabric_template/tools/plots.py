"""plot_logs: losses and accuracies of one run or many, on Axes that are yours to go on with."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..record.logger import read_logs

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes

# What a metric is, by its name: train/val/test, the quantity, and what Lightning puts behind it.
_NAME = re.compile(r"(?:(train|val|valid|validation|test)[_/.-])?(.*?)(?:_epoch|_step)?(/dataloader_idx_\d+)?")
_LOSS = re.compile(r"loss(/dataloader_idx_\d+)?$", re.IGNORECASE)
_ACCURACY = re.compile(r"(acc|accuracy)(/dataloader_idx_\d+)?$", re.IGNORECASE)
_STYLES = {"train": "--", "test": ":"}


def plot_logs(
    logs: Any,
    *,
    x: str = "epoch",
    metrics: str | Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes | np.ndarray":
    """Draw losses and accuracies, each in Axes of its own; train is dashed, validation solid, test dotted.

    Args:
        logs: a path as for `read_logs`, a DataFrame (what `fit` returns), a list of these, or a dict with a label each.
        x: the column along the horizontal axis, "epoch", "step" or "time": the seconds that were trained until then.
        metrics: the columns to draw; None draws all that end in loss, acc or accuracy.
        ax: draw everything into these Axes, instead of into a new figure.

    Returns:
        The Axes, or an array of two of them: losses (and all that is no accuracy) on the left, accuracies on the right.

    Example:
        >>> import pandas as pd
        >>> history = pd.DataFrame({"epoch": [0, 1], "train_loss": [2.0, 1.0], "val_loss": [2.1, 1.5]})
        >>> plot_logs(history).get_ylabel()
        'loss'
    """
    import numpy

    if ax is not None and not hasattr(ax, "plot"):
        raise TypeError(f"plot_logs(ax=...) takes one Axes, not {type(ax).__name__}; give one of them, e.g. ax=axes[0]")
    runs = list(_runs(logs))
    columns = list(dict.fromkeys(column for _, frame in runs for column in frame.columns))
    names = _choose(runs, columns, x, [metrics] if isinstance(metrics, str) else metrics)
    groups = [names]
    if ax is None:
        accuracies = [name for name in names if _ACCURACY.search(_parts(name)[1])]
        groups = [group for group in ([n for n in names if n not in accuracies], accuracies) if group]
        from matplotlib import pyplot

        axes = pyplot.subplots(1, len(groups), figsize=(5.5 * len(groups), 3.6), layout="constrained")[1]
    else:
        axes = ax
    for one, group in zip(axes if isinstance(axes, numpy.ndarray) else [axes], groups, strict=True):
        _draw(one, runs, x, group)
    return axes


def _runs(logs: Any) -> list[tuple[str, "pd.DataFrame"]]:
    """Each run with its label; a run that is alone needs none."""
    import pandas as pd

    if isinstance(logs, str | os.PathLike):
        logs = read_logs(logs)
    if isinstance(logs, Mapping):
        nested = [(label, inner, frame) for label, value in logs.items() for inner, frame in _runs(value)]
        return [(f"{label}/{inner}" if inner else str(label), frame) for label, inner, frame in nested]
    if isinstance(logs, list | tuple):
        frames = [frame for value in logs for _, frame in _runs(value)]
    elif not isinstance(logs, pd.DataFrame):
        raise TypeError(
            f"plot_logs takes a path, a DataFrame, or a list or dict of these, not {type(logs).__name__}; "
            "plot_logs('logs') draws all runs, plot_logs(loop.fit(...)) the one that just ended"
        )
    elif {"name", "version"} <= set(logs.columns):
        frames = [frame for _, frame in logs.groupby(["name", "version"], sort=False)]
    else:
        frames = [logs]
    if len(frames) == 1:
        return [("", frames[0])]
    labels = [_label(frame) for frame in frames]
    return [
        (label if label and labels.count(label) == 1 else f"run {i}", frame)
        for i, (label, frame) in enumerate(zip(labels, frames, strict=True))
    ]


def _label(frame: "pd.DataFrame") -> str:
    if not {"name", "version"} <= set(frame.columns):
        return ""
    name, version = frame[["name", "version"]].iloc[0]
    return f"{name}/{version}" if isinstance(version, str) else f"{name}/version_{version}"


def _parts(metric: str) -> tuple[str, str]:
    """`val_loss` is ("val", "loss"); so is Lightning's `val_loss_epoch`."""
    found = _NAME.fullmatch(metric)
    split, quantity, loader = found.groups() if found else (None, metric, None)  # none: it has several lines
    return split or "", quantity + (loader or "")


def _choose(
    runs: list[tuple[str, "pd.DataFrame"]], columns: list[str], x: str, wanted: Sequence[str] | None
) -> list[str]:
    from pandas.api.types import is_numeric_dtype

    numeric = {c for c in columns if any(c in frame and is_numeric_dtype(frame[c]) for _, frame in runs)}
    listed = ", ".join(columns) or "none"
    if x not in columns:
        raise ValueError(f"plot_logs: there is no column x={x!r}; the columns are {listed}: x='step', for example")
    if wanted is None:
        wanted = [c for c in columns if c in numeric and any(kind.search(_parts(c)[1]) for kind in (_LOSS, _ACCURACY))]
        others = {*wanted} if x != "step" else {}  # where there are both, the mean over the epoch
        wanted = [c for c in wanted if c == (mean := c.replace("_step", "_epoch")) or mean not in others]
        if not wanted:
            raise ValueError(
                f"plot_logs: no column ends in loss, acc or accuracy; the columns are {listed}: "
                "choose some with metrics=[...]"
            )
    missing = [metric for metric in wanted if metric not in numeric]
    if missing:
        raise ValueError(f"plot_logs: no numbers to draw for {', '.join(missing)}; the columns are {listed}")
    return list(dict.fromkeys(wanted))


def _draw(ax: "Axes", runs: list[tuple[str, "pd.DataFrame"]], x: str, names: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    quantities = list(dict.fromkeys(_parts(name)[1] for name in names))
    # One colour per run and quantity, shared by train and val; lines drawn before keep theirs to themselves.
    first = len({line.get_color() for line in ax.get_lines()})
    for i, (label, frame) in enumerate(runs):
        for name in (name for name in names if {x, name} <= set(frame.columns)):
            split, quantity = _parts(name)
            places = frame[x].cumsum() if x == "time" else frame[x]  # it stands there for each epoch
            points = frame.assign(**{x: places})[[x, name]].dropna()  # measured every second epoch: still one line
            if points.empty:  # the column is another run's
                continue
            ax.plot(
                points[x],
                points[name],
                _STYLES.get(split, "-"),
                color=f"C{first + i * len(quantities) + quantities.index(quantity)}",
                marker="o",
                markersize=4,
                label=f"{label} {name}".strip(),
            )
    ax.set_xlabel("time in s" if x == "time" else x)
    ax.set_ylabel(quantities[0] if len(quantities) == 1 else "")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # there is no epoch 0.5
    ax.grid(alpha=0.3)
    if ax.get_lines():
        ax.legend()
