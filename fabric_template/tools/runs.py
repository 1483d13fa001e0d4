"""List the runs below a folder, compare two of them, find the best one, and write a page of all."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from .run_files import Run, differing_options, find_runs, read_run

COLUMNS = ["name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds"]
COLUMNS += ["resumed_from", "changed", "folder"]
HEADER = ("run", "state", "epochs", "metric", "best", "epoch", "trained", "changed")


def list_runs(folder: str | os.PathLike = "logs", metric: str | None = None) -> Any:
    """List all runs below a folder in a DataFrame, or without pandas in a list of dicts.

    The state is "running", "finished", "interrupted" (also when killed), "failed", or "unknown" if
    no file tells. `changed` holds the options in which the runs of one name differ.

    Args:
        folder: the folder of all logs, or a folder in it.
        metric: the metric that ranks the runs. Default: the run's monitor, or a validated metric.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fabric_template import CSVLogger
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> list_runs(logger.root_dir)[["name", "version", "state", "epochs", "metric", "best"]]
             name  version    state  epochs    metric  best
        0  digits        0  unknown       1  val_loss   0.5
    """
    rows = [{column: vars(run)[column] for column in COLUMNS} for run in find_runs(folder, metric)]
    try:
        import pandas as pd
    except ImportError:
        return rows
    return pd.DataFrame(rows, columns=COLUMNS)


def runs_command(
    paths: Sequence[str] = (),
    *,
    metric: str | None = None,
    mode: str | None = None,
    html: str | None = None,
) -> int:
    """List runs, compare two (`diff RUN RUN`), or find the best (`best --metric METRIC`).

    Args:
        paths: the folder of all runs (default: logs), or diff and two runs, or best and a folder.
        metric: the metric to judge by. Default: the run's monitor, or a validated metric.
        mode: which value is best, min or max. Default: the run's mode, or by the metric's name.
        html: write the table and the curves of all runs into this file, a page for a browser.
    """
    action = paths[0] if paths and paths[0] in ("diff", "best") else "list"
    folders = list(paths) if action == "list" else list(paths[1:])
    if mode not in (None, "min", "max"):
        raise ValueError(f"--mode: got {mode}, expected min or max. Write --mode min.")
    if action == "diff":
        if len(folders) != 2:
            raise ValueError(f"runs diff: got {len(folders)} runs, expected 2. Pass their folders.")
        print(format_table(diff_runs(find_run(folders[0]), find_run(folders[1]))))
        return 0
    if len(folders) > 1:
        raise ValueError(f"runs: got {' '.join(paths)}, expected one folder. Pass the root of all.")
    folder = folders[0] if folders else "logs"
    runs = find_runs(folder, metric, mode)
    if metric is not None or action == "best":
        check_metric(runs, metric)
    if action == "best":
        print_best(runs, mode)
    elif html is not None:
        write_page(runs, metric, html)
        print(f"page        {html}: {len(runs)} runs")
    elif runs:
        print(format_table([HEADER, *map(to_cells, runs)]))
    else:
        print(f"There are no runs in {folder!r}.")
    return 0


def check_metric(runs: Sequence[Run], metric: str | None) -> None:
    """Raise a ValueError that lists the metrics of these runs if none has this one."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    if metric not in names:
        expected = ", ".join(names) or "a logged metric"
        given = metric or "no metric"
        raise ValueError(f"--metric: got {given}, expected {expected}. Pass one of these names.")


def find_run(path: str) -> Run:
    """Return the run in a folder; the folder logs in front of it may be left out."""
    for folder in (Path(path), Path("logs", path)):
        if (folder / "metrics.csv").is_file() or (folder / "hparams.yaml").is_file():
            return read_run(folder.absolute(), Path("logs").absolute())
    raise ValueError(f"runs diff: got {path}, expected a run. Write logs/digits/version_0.")


def to_cells(run: Run) -> tuple[str, ...]:
    """Return the texts of a run below HEADER."""
    metric, best = ("", "") if run.best is None else (str(run.metric), f"{run.best:.5g}")
    epoch = "" if run.best_epoch is None else str(run.best_epoch)
    minutes, seconds = divmod(round(run.seconds), 60)
    trained = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    changed = ", ".join(f"{option}={value}" for option, value in run.changed.items())
    return run.label, run.state, str(run.epochs), metric, best, epoch, trained, changed


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of a table; replace characters that control a terminal."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def printable(text: str) -> str:
    """Replace line breaks and the characters that control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def diff_runs(a: Run, b: Run) -> list[tuple[str, ...]]:
    """Return a table of the options in which two runs differ, and of their results."""
    first, second = to_cells(a), to_cells(b)
    table: list[tuple[str, ...]] = [("", a.label, b.label, "differs")]
    for option in differing_options([a, b]):
        table.append((option, str(a.options.get(option, "")), str(b.options.get(option, "")), ""))
    table += [(HEADER[i], first[i], second[i], "") for i in (1, 2, 6)]
    for metric in dict.fromkeys([*a.metrics, *b.metrics]):
        curves = [run.curve(metric) for run in (a, b)]
        epochs = sorted(curves[0].keys() & curves[1].keys())
        unequal = [epoch for epoch in epochs if curves[0][epoch] != curves[1][epoch]]
        differs = f"from epoch {unequal[0]}" if unequal else "no"
        last = [f"{list(curve.values())[-1]:.6g}" if curve else "" for curve in curves]
        table.append((f"last {metric}", *last, differs if epochs else ""))
        if not metric.startswith("lr"):
            table.append((f"best {metric}", best_text(a, metric), best_text(b, metric), ""))
    return table


def best_text(run: Run, metric: str) -> str:
    """Return the best value of a metric and its epoch as text."""
    run.set_best(metric)
    return "" if run.best is None else f"{run.best:.6g} in epoch {run.best_epoch}"


def print_best(runs: Sequence[Run], mode: str | None) -> None:
    """Print the run with the best value, and its checkpoints."""
    candidates = [run for run in runs if run.best is not None]
    metric = str(candidates[0].metric)
    choose = min if (mode or candidates[0].mode_of(metric)) == "min" else max
    best = choose(candidates, key=lambda run: run.best or 0.0)
    # The checkpoints of logs/digits/version_0 are in checkpoints/digits/version_0.
    checkpoints = Path("/checkpoints/".join(best.folder.rsplit("/logs/", 1)))
    print(f"best        {metric} {best.best:.6g} in epoch {best.best_epoch}")
    print(f"run         {printable(best.folder)}")
    for path in sorted(checkpoints.rglob("*.ckpt")):
        print(f"checkpoint  {printable(str(path))}")


def write_page(runs: Sequence[Run], metric: str | None, path: str) -> None:
    """Write the table and the curves of runs into one HTML file."""
    header = "".join(f"<th>{title}</th>" for title in HEADER)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in to_cells(run)) for run in runs]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    image = draw_curves(runs, metric)
    page = PAGE.substitute(count=len(runs), image=image, header=header, body=body)
    try:
        Path(path).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        reason = f"--html: got {path}, expected a file that can be written: {error.strerror}."
        raise ValueError(f"{reason} Write it into another folder.") from error


def draw_curves(runs: Sequence[Run], metric: str | None) -> str:
    """Return the picture of `plot_logs` as an HTML image, or nothing without numbers to draw."""
    from matplotlib import pyplot

    from .plots import plot_logs

    folders = [run.folder for run in runs if run.metrics]
    try:
        axes = plot_logs(folders, metrics=metric)
    except ValueError:
        return ""
    figure: Any = axes.figure if hasattr(axes, "figure") else axes[0].figure
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    pyplot.close(figure)
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="Curves of the runs" src="data:image/png;base64,{data}">'


PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Runs</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 75rem; padding: 0 1rem }
img { max-width: 100%; max-height: 32rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; vertical-align: top; overflow-wrap: anywhere }
tr { border-bottom: 1px solid #ddd }
</style>
<h1>Runs: $count</h1>
$image
<table><thead><tr>$header</tr></thead>
<tbody>
$body
</tbody></table>
</html>
""")
