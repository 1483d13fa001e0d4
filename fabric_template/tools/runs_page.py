"""Write the HTML page of `runs --html`, which contains a table and the curves of all runs."""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..metric_names import Metric
from . import plots
from .runs import Run, best_mode

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = Path(__file__).with_name("runs_page.html")
# The maximum number of points on a page. With 60,000 points, the file size is about 1 MB.
MOST_POINTS = 60_000
# The maximum number of panels above the table.
MOST_MAIN = 3
# At most eight options get a column of their own. All other options, including those with values of
# more than 24 characters, share the last column.
MOST_OPTIONS = 8
LONGEST_VALUE = 24


def write_page(runs: Sequence[Run], metric: str | None, path: Path, source: str) -> None:
    """Write a table of the runs, and plots of their curves, to one self-contained HTML file."""
    data = make_panels(runs, metric)
    columns, rows = make_table(runs, data)
    # Escape "<", because a run's name may contain a tag such as "</script>".
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(f"Runs in {source}"),
        "summary": html.escape(summarize(runs, data)),
        "header": "".join(
            f'<th scope="col"><button>{html.escape(column)}</button></th>' for column in columns
        ),
        "rows": "\n".join(rows),
        "data": script,
    }
    page = TEMPLATE.read_text("utf-8")
    page = re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], page)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, "utf-8", "replace")
    print(f"page        {path}: {count_runs(runs)}")


def count_runs(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


def summarize(runs: Sequence[Run], data: dict[str, Any]) -> str:
    """Return a sentence with the number of runs, the best run and the points per curve."""
    texts = [count_runs(runs)]
    modes = {run["mode"] for run in runs if run["best"] is not None}
    if len({run["metric"] for run in runs if run["rows"]}) == 1 and len(modes) == 1:
        best = runs[rank_runs(runs)[0]]
        texts.append(f"best {best['metric']}: {best['best']:.5g} in {best['label']}")
    if data["thinned"]:
        texts.append(f"long curves are drawn with at most {data['thinned']:,} of their points")
    return "; ".join(texts) + "."


def rank_runs(runs: Sequence[Run]) -> list[int]:
    """Return the indices of the runs, from the best run to the worst."""
    counts = Counter(run["metric"] for run in runs if run["best"] is not None)
    ranking = next((metric for metric, _ in counts.most_common(1)), None)

    def key(number: int) -> tuple[bool, float]:
        run = runs[number]
        if run["best"] is None or run["metric"] != ranking:
            return True, 0.0
        return False, -run["best"] if run["mode"] == "max" else run["best"]

    return sorted(range(len(runs)), key=key)


def make_table(runs: Sequence[Run], data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the table's columns, and the table's rows as HTML."""
    changes = [item for run in runs for item in run["changed"].items()]
    long = {name for name, value in changes if len(str(value)) > LONGEST_VALUE}
    names = dict.fromkeys(name for name, _ in changes)
    options = [name for name in names if name not in long][:MOST_OPTIONS]
    others = [name for name in names if name not in options]
    axis = "step" if data["x"] == "step" else "epoch"
    columns = ["name", "version", "state", "epochs", "metric", "best", f"at {axis}", "time"]
    columns += [*options, "other options"] if others else options
    rows = []
    for number, run in enumerate(runs):
        best, seconds = run["best"], run["seconds"]
        cells = [
            (run["name"], None),
            (run["version"], None),
            (run["state"], None),
            (run["epochs"] or ("" if run["rows"] else 0), None),
            (run["metric"], None),
            ("" if best is None else f"{best:.5g}", best),
            (run[f"best_{axis}"], None),
            (timedelta(seconds=round(seconds)) if seconds else "", seconds or None),
            *((run["changed"].get(option), None) for option in options),
        ]
        if others:
            changed = (
                f"{name}={run['changed'][name]}" for name in others if name in run["changed"]
            )
            cells.append((", ".join(changed), None))
        named = zip(columns, cells, strict=True)
        written = "".join(make_cell(column, *cell) for column, cell in named)
        rows.append(f'<tr data-run="{number}">{written}</tr>')
    return columns, rows


def make_cell(column: str, value: Any, order: Any) -> str:
    """Return an HTML table cell."""
    text = "" if value is None else str(value)
    shown = f"{value:.6g}" if isinstance(value, float) else text
    number = math.nan
    with suppress(TypeError, ValueError):
        number = math.nan if isinstance(value, bool) else float(value if order is None else order)
    label = html.escape(column)
    if math.isnan(number):
        return f'<td data-label="{label}">{html.escape(shown)}</td>'
    # To sort rows by a number, the page reads the cell's HTML attribute data-order.
    order = f"{number!r}".replace("inf", "Infinity")
    return (
        f'<td data-label="{label}" data-order="{order}" title="{html.escape(text)}">'
        f"{html.escape(shown)}</td>"
    )


def make_panels(runs: Sequence[Run], metric: str | None) -> dict[str, Any]:
    """Return the panels and curves of the page as a JSON-serializable dict."""
    tables = {i: table for i, table in enumerate(plots.make_tables(runs)) if len(table)}
    styles = [*range(len(runs))]
    if len(runs) > plots.MOST_COLORED:
        for style, number in enumerate(rank_runs(runs)):
            styles[number] = style
    data: dict[str, Any] = {"x": "epoch", "thinned": None, "panels": [], "styles": styles}
    data["labels"] = [run["label"] for run in runs]
    if not tables:
        return data
    x = plots.choose_x([*tables.values()], None)
    tables = {number: plots.prepare_table(table, x) for number, table in tables.items()}
    metrics = plots.sort_metrics(plots.find_metrics([*tables.values()], x)[1])
    panels: dict[str, dict[str, Any]] = {}
    for found in metrics:
        new = {"title": found.quantity, "is_main": False, "curves": []}
        panel = panels.setdefault(found.quantity.lower(), new)
        for number, table in tables.items():
            panel["curves"] += make_curves(number, table, found, x, runs[number]["options"])
    ranking = {run["metric"] for run in runs} if metric is None else {metric}
    for key in choose_main(metrics, ranking):
        panels[key]["is_main"] = True
    data |= {"x": plots.name_axis([*tables.values()], x), "panels": [*panels.values()]}
    data["thinned"] = thin_curves([curve for panel in panels.values() for curve in panel["curves"]])
    return data


def choose_main(metrics: Sequence[Metric], ranking: set[str | None]) -> list[str]:
    """Choose up to three metrics, such as "loss", to plot above the table of runs."""
    ranked = [metric for metric in metrics if metric.column in ranking]
    usual = [metric for metric in metrics if metric.kind in ("loss", "accuracy")]
    return list(dict.fromkeys(metric.quantity.lower() for metric in ranked + usual))[:MOST_MAIN]


def make_curves(
    number: int, table: pd.DataFrame, metric: Metric, x: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a metric's curve and, for more than 50 training steps, its moving average."""
    import numpy as np
    import pandas as pd

    if not {x, metric.column} <= set(table):
        return []
    columns = [pd.to_numeric(table[name], errors="coerce") for name in (x, metric.column)]
    xs, values = (np.asarray(column, float) for column in columns)
    is_finite = np.isfinite(xs) & np.isfinite(values)
    xs, values = xs[is_finite], values[is_finite]
    if not len(values):
        return []
    curve = {"run": number, "column": metric.column, "split": metric.split or "validation"}
    curves = [curve | {"x": xs, "y": values}]
    mode = best_mode(metric.column, options)
    if len(values) > 50 and plots.has_raw_steps(table, metric, x):
        average = {"x": xs, "y": plots.average_steps(pd.Series(values)), "is_average": True}
        curves.append(curve | average)
        curves[0]["split"] = "raw"
    elif mode is not None and metric.split != "train":
        best = int(values.argmin() if mode == "min" else values.argmax())
        curves[0]["best"] = [shorten(xs[best]), shorten(values[best])]
    return curves


def thin_curves(curves: list[dict[str, Any]]) -> int | None:
    """Keep only every n-th point of long curves, so that the HTML page stays small.

    Returns:
        The largest number of points in a curve, or None if no points were removed.
    """
    most = max(20, MOST_POINTS // max(1, len(curves)))
    longest = max((len(curve["x"]) for curve in curves), default=0)
    for curve in curves:
        step = math.ceil(len(curve["x"]) / most)
        for axis in ("x", "y"):
            curve[axis] = [shorten(value) for value in curve[axis][::step]]
    return most if longest > most else None


def shorten(value: float) -> float:
    """Return a whole number as an int, and any other number with six significant digits."""
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")
