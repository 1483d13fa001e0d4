"""Implement the command ``runs``: a table of runs, their differences, the best run, a web page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from ..metric_names import NOT_METRICS
from .plots import render_picture
from .runs import Run, differing_options, find_best, find_runs, read_run

HEADER = ("run", "state", "epochs", "metric", "best", "epoch", "trained", "changed")
# A click on a header sorts the HTML table by the column. A second click reverses the order.
SORT_SCRIPT = """<script>
const body = document.querySelector("tbody");
document.querySelectorAll("th").forEach((header, column) => {
  let direction = -1;
  header.onclick = () => {
    direction = -direction;
    const text = row => row.cells[column].textContent;
    const compare = (a, b) => a - b || a.localeCompare(b, undefined, {numeric: true});
    body.append(...[...body.rows].sort((a, b) => direction * compare(text(a), text(b))));
  };
});
</script>
"""


def runs_command(
    paths: Sequence[str] = (), *, metric: str | None = None, html: str | None = None
) -> int:
    """List runs, compare two (`diff RUN RUN`), or find the best (`best --metric METRIC`)."""
    action, *folders = paths if paths and paths[0] in ("diff", "best") else ["list", *paths]
    if len(folders) != 2 if action == "diff" else len(folders) > 1:
        expected = "two runs" if action == "diff" else "one folder"
        raise ValueError(f"runs: got {' '.join(paths)}, expected {expected}. Write logs/digits.")
    if action == "diff":
        print(format_table(diff_runs(*map(find_run, folders))))
        return 0
    runs = find_runs(folders[0] if folders else "logs", metric)
    names = dict.fromkeys(name for run in runs for name in run["rows"] if name not in NOT_METRICS)
    if (metric is not None or action == "best") and metric not in names:
        expected = ", ".join(names) or "a logged metric"
        raise ValueError(f"--metric: got {metric or 'no metric'}, expected {expected}.")
    if action == "best":
        print_best([run for run in runs if run["best"] is not None])
    elif html is not None:
        write_page(runs, metric, Path(html))
    else:
        print(format_table([HEADER, *map(to_cells, runs)]))
    return 0


def find_run(path: str) -> Run:
    """Return the run in a folder such as logs/digits/version_0."""
    if not Path(path, "metrics.csv").is_file():
        raise ValueError(f"runs: got {path}, expected a run. Write logs/digits/version_0.")
    return read_run(Path(path).absolute(), Path("logs").absolute())


def to_cells(run: Run) -> tuple[str, ...]:
    best = ("", "", "")
    if run["best"] is not None:
        best = (run["metric"], f"{run['best']:.5g}", str(run["best_epoch"]))
    trained = str(timedelta(seconds=round(run["seconds"])))
    changed = ", ".join(f"{option}={value}" for option, value in run.get("changed", {}).items())
    label = f"{run['name']}/{Path(run['folder']).name}"
    return label, run["state"], str(run["epochs"]), *best, trained, changed


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of a table, and replace characters that cannot be printed."""
    cells = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def diff_runs(a: Run, b: Run) -> list[tuple[str, ...]]:
    first, second = to_cells(a), to_cells(b)
    table: list[tuple[str, ...]] = [("", first[0], second[0])]
    for option in differing_options([a, b]):
        table.append((option, *(str(run["options"].get(option, "")) for run in (a, b))))
    table += [(HEADER[i], first[i], second[i]) for i in (1, 2, 6)]
    for metric in dict.fromkeys([*a["rows"], *b["rows"]]):
        if metric not in NOT_METRICS:
            cells = [to_cells(run | find_best(run, metric)) for run in (a, b)]
            bests = [f"{c[4]} in epoch {c[5]}" if c[4] else "" for c in cells]
            table.append((f"best {metric}", *bests))
    return table


def print_best(runs: Sequence[Run]) -> None:
    choose = min if runs[0]["mode"] == "min" else max
    best = choose(runs, key=lambda run: run["best"])
    print(f"best        {best['metric']} {best['best']:.6g} in epoch {best['best_epoch']}")
    print(f"run         {best['folder']}")
    # The run logs/digits/version_0 has its checkpoints in checkpoints/digits/version_0.
    checkpoints = Path("/checkpoints/".join(best["folder"].rsplit("/logs/", 1)))
    for path in sorted(checkpoints.rglob("*.ckpt")):
        print(f"checkpoint  {path}")


def write_page(runs: Sequence[Run], metric: str | None, path: Path) -> None:
    import pandas as pd

    picture = render_picture([run["folder"] for run in runs if len(run["rows"])], metrics=metric)
    data = base64.b64encode(picture).decode()
    with pd.option_context("display.max_colwidth", None):
        table = pd.DataFrame([to_cells(run) for run in runs], columns=HEADER).to_html(index=False)
    image = f'<img alt="Curves of the runs" width="100%" src="data:image/png;base64,{data}">'
    head = '<!doctype html>\n<meta charset="utf-8">\n<title>Runs</title>\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{image}\n{table}\n{SORT_SCRIPT}", "utf-8", "replace")
    print(f"page        {path}: {len(runs)} runs")
