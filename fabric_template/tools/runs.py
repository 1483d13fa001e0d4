"""List the runs below a folder, compare two runs, find the best run, and write an HTML page."""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import number_of
from ..loggers.metric_names import NOT_METRICS, find_direction
from ..loggers.read_logs import read_logs

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds"]
COLUMNS += ["changed", "folder"]
HEADER = ("run", "state", "epochs", "metric", "best", "epoch", "trained", "changed")
# Ignore options that differ in every run or do not influence training.
NOT_COMPARED = ("name", "version", "default_root_dir", "enable_progress_bar")
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
Run = dict[str, Any]  # A row of list_runs, with the additional keys "options" and "rows".


def list_runs(folder: str | os.PathLike[str] = "logs", metric: str | None = None) -> pd.DataFrame:
    """List all runs below a folder.

    The state is "running", "finished", "interrupted" (also when killed), "failed", or "unknown" for
    a run of Trainer. `changed` lists the options that differ between runs of the same name.

    Args:
        folder: The folder of all logs, or a folder in it.
        metric: The metric that ranks the runs. Default: the run's monitor, or a validation metric.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fabric_template import CSVLogger
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> list_runs(logger.root_dir)[["name", "version", "state", "epochs", "metric", "best"]]
             name  version    state  epochs    metric  best
        0  digits        0  unknown       1  val_loss   0.5
    """
    import pandas as pd

    return pd.DataFrame(find_runs(folder, metric), columns=COLUMNS)


def find_runs(folder: str | os.PathLike[str], metric: str | None = None) -> list[Run]:
    """Return every run below a folder, sorted by name and version."""
    root = Path(os.path.abspath(folder))
    if not root.is_dir():
        raise ValueError(f"runs: got {str(folder)!r}, expected a folder. Write logs, for example.")
    runs = []
    for path, subfolders, files in os.walk(root):
        subfolders[:] = [n for n in subfolders if n != "checkpoints" and not n.startswith(".")]
        if "metrics.csv" in files or "hparams.yaml" in files:
            runs.append(read_run(Path(path), root, metric))
    runs.sort(key=lambda run: (run["name"], isinstance(run["version"], str), run["version"]))
    for run in runs:
        names = differing_options([other for other in runs if other["name"] == run["name"]])
        run["changed"] = {name: run["options"].get(name) for name in names}
    return runs


def differing_options(runs: Sequence[Run]) -> list[str]:
    differing = []
    for option in dict.fromkeys(name for run in runs for name in run["options"]):
        values = [run["options"].get(option) for run in runs]
        if option not in NOT_COMPARED and any(value != values[0] for value in values):
            differing.append(option)
    return differing


def read_run(folder: Path, root: Path, metric: str | None = None) -> Run:
    """Read the run in a folder. A run's name is the path of its parent folder, relative to root."""
    is_below = root in folder.parent.parents
    number = number_of(folder.name)
    rows, options = read_rows(folder), read_options(folder)
    run: Run = {
        "name": folder.parent.relative_to(root).as_posix() if is_below else folder.parent.name,
        "version": folder.name if number is None else number,
        "state": read_state(folder / ".lock"),
        "epochs": int(rows["epoch"].max()) + 1 if "epoch" in rows and len(rows) else 0,
        "seconds": float(rows["time"].sum()) if "time" in rows else 0.0,
        "folder": str(folder),
        "options": options,
        "rows": rows,
    }
    metrics = [name for name in rows if name not in NOT_METRICS]
    # By default, use the run's monitor, or else a validation metric, or else the first column.
    metrics.sort(key=lambda name: (name != options.get("monitor"), "val" not in name))
    return run | find_best(run, metric or next(iter(metrics), None))


def find_best(run: Run, metric: str | None) -> dict[str, Any]:
    """Return the best value of a metric and its epoch."""
    rows = run["rows"]
    rows = rows[rows[metric].abs() < float("inf")] if metric in rows else rows[:0]
    if not len(rows):
        return {"metric": metric, "best": None, "best_epoch": None}
    mode = find_direction(str(metric), run["options"]) or "max"
    row = rows.loc[rows[metric].idxmin() if mode == "min" else rows[metric].idxmax()]
    best_epoch = int(row.get("epoch", 0))
    return {"metric": metric, "best": float(row[metric]), "best_epoch": best_epoch, "mode": mode}


def read_rows(folder: Path) -> pd.DataFrame:
    """Return the numeric columns of metrics.csv, or an empty table if the file is damaged."""
    import pandas as pd

    try:
        with warnings.catch_warnings():
            # The last line may be incomplete while a run trains.
            warnings.simplefilter("ignore")
            return read_logs(folder / "metrics.csv").select_dtypes("number")
    except (OSError, ValueError):
        return pd.DataFrame()


def read_state(path: Path) -> str:
    """Return the state of a run from its lock file.

    While a run trains, its process locks the file. At the end of the run, the process appends
    "finished", "interrupted" or "failed". A killed run leaves an unlocked file without a state.
    """
    if not path.is_file():
        return "unknown"
    state = path.read_text("utf-8", "replace").rstrip().rpartition("\n")[2]
    if state in ("finished", "interrupted", "failed"):
        return state
    return "running" if is_locked(path) else "interrupted"


def is_locked(path: Path) -> bool:
    try:
        import fcntl

        with path.open("rb") as file:
            # A shared lock is refused only while the run holds its exclusive lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        # Windows and some network drives have no file locks, so an active run looks interrupted.
        return False
    return False


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in config.yaml and hparams.yaml without their section names."""
    import yaml

    options: dict[str, Any] = {}
    # hparams.yaml overrides config.yaml, because a resumed run rewrites only hparams.yaml.
    for name in ("config.yaml", "hparams.yaml"):
        try:
            content = yaml.safe_load((folder / name).read_bytes())
        except (OSError, ValueError, yaml.YAMLError):
            continue
        for section, value in content.items() if isinstance(content, dict) else ():
            entries = value if isinstance(value, dict) else {section: value}
            prefix = "data." if section == "data" else ""
            if section != "about":
                entries = entries.get("init_args", entries)
                options |= {f"{prefix}{key}": entry for key, entry in entries.items()}
    return options


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

    from .plots import render_picture

    picture = render_picture([run["folder"] for run in runs if len(run["rows"])], metrics=metric)
    data = base64.b64encode(picture).decode()
    with pd.option_context("display.max_colwidth", None):
        table = pd.DataFrame([to_cells(run) for run in runs], columns=HEADER).to_html(index=False)
    image = f'<img alt="Curves of the runs" width="100%" src="data:image/png;base64,{data}">'
    head = '<!doctype html>\n<meta charset="utf-8">\n<title>Runs</title>\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{image}\n{table}\n{SORT_SCRIPT}", "utf-8", "replace")
    print(f"page        {path}: {len(runs)} runs")
