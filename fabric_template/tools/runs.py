"""List the runs below a folder, compare two of them, find the best one, and write a page of all."""

from __future__ import annotations

import base64
import csv
import os
import re
import warnings
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..loggers.read_logs import read_logs

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds"]
COLUMNS += ["resumed_from", "changed", "folder"]
HEADER = ("run", "state", "epochs", "metric", "best", "epoch", "trained", "changed")
NOT_METRICS = ("epoch", "step", "time", "name", "version")
# Options that differ in every run or do not influence the training.
NOT_COMPARED = ("name", "version", "default_root_dir", "enable_progress_bar")
LOWER_IS_BETTER = re.compile(
    r"(?i)loss|error|perplexity|(^|[\W_])(nll|r?mse|mae|ppl|wer|cer|fid)([\W_]|$)"
)
Run = dict[str, Any]  # a row of list_runs, and the options and rows of the run


def list_runs(folder: str | os.PathLike = "logs", metric: str | None = None) -> pd.DataFrame:
    """List all runs below a folder.

    The state is "running", "finished", "interrupted" (also when killed), "failed", or "unknown" for
    a run of Lightning. `changed` holds the options in which the runs of one name differ.

    Args:
        folder: The folder of all logs, or a folder in it.
        metric: The metric that ranks the runs. Default: the run's monitor, or a validated metric.

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


def find_runs(
    folder: str | os.PathLike, metric: str | None = None, mode: str | None = None
) -> list[Run]:
    """Return every run below a folder, sorted by name and version."""
    root = Path(os.path.abspath(folder))
    if not root.is_dir():
        raise ValueError(f"runs: got {str(folder)!r}, expected a folder. Pass for example logs.")
    runs = []
    for path, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name != "checkpoints"]
        if "metrics.csv" in files or "hparams.yaml" in files:
            runs.append(read_run(Path(path), root, metric, mode))
    runs.sort(key=lambda run: (run["name"], isinstance(run["version"], str), run["version"]))
    for _, group in groupby(runs, key=itemgetter("name")):
        same_name = list(group)
        names = differing_options(same_name)
        for run in same_name:
            run["changed"] = {name: run["options"].get(name) for name in names}
    return runs


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Return the options that do not have the same value in all runs."""
    differing = []
    for option in dict.fromkeys(name for run in runs for name in run["options"]):
        values = [run["options"].get(option) for run in runs]
        if option not in NOT_COMPARED and any(value != values[0] for value in values):
            differing.append(option)
    return differing


def read_run(folder: Path, root: Path, metric: str | None = None, mode: str | None = None) -> Run:
    """Read the run in a folder; its name is the path from the root to the folder above."""
    is_below = root in folder.parent.parents
    number = folder.name.removeprefix("version_")
    state, resumed_from = read_lock(folder / ".lock")
    rows = read_rows(folder)
    run: Run = {
        "name": folder.parent.relative_to(root).as_posix() if is_below else folder.parent.name,
        "version": int(number) if number.isdigit() else folder.name,
        "state": state,
        "epochs": int(rows["epoch"].max()) + 1 if "epoch" in rows and len(rows) else 0,
        "seconds": float(rows["time"].sum()) if "time" in rows else 0.0,
        "resumed_from": resumed_from,
        "folder": str(folder),
        "options": read_options(folder),
        "rows": rows,
    }
    metrics = [name for name in rows if name not in NOT_METRICS]
    validated = [name for name in metrics if "val" in name]
    losses = [name for name in validated if "loss" in name]
    monitor = [name for name in metrics if name == run["options"].get("monitor")]
    default = next(iter([*monitor, *losses, *validated, *metrics]), None)
    return run | find_best(run, metric or default, mode)


def find_best(run: Run, metric: str | None, mode: str | None = None) -> dict[str, Any]:
    """Return the best value of a metric and its epoch.

    The mode is that of the monitor, or "min" for the names of losses and errors.
    """
    rows, options = run["rows"], run["options"]
    rows = rows[rows[metric].abs() < float("inf")] if metric in rows else rows[:0]
    if not len(rows):
        return {"metric": metric, "best": None, "best_epoch": None}
    if mode is None and metric == options.get("monitor"):
        mode = options.get("mode")
    is_min = mode == "min" if mode else LOWER_IS_BETTER.search(str(metric))
    row = rows.loc[rows[metric].idxmin() if is_min else rows[metric].idxmax()]
    return {
        "metric": metric,
        "best": float(row[metric]),
        "best_epoch": int(row.get("epoch", 0)),
        "mode": "min" if is_min else "max",
    }


def read_rows(folder: Path) -> pd.DataFrame:
    """Return the numbers in metrics.csv; without rows if the file is damaged."""
    import pandas as pd

    try:
        with warnings.catch_warnings():
            # A running training may be writing its last line.
            warnings.simplefilter("ignore")
            return read_logs(folder / "metrics.csv").select_dtypes("number")
    except (OSError, ValueError, csv.Error):
        return pd.DataFrame()


def read_lock(path: Path) -> tuple[str, str | None]:
    """Return the state of a run and the checkpoint that it was resumed from.

    A process of the run locks the file and adds lines: its process id, "resumed after step 10 from
    PATH", and at its end the state. A process that is killed leaves no state.
    """
    if not path.is_file():
        return "unknown", None
    resumed_from, state = None, ""
    for line in path.read_text("utf-8", "replace").splitlines():
        state = line
        if line.startswith("resumed after step "):
            resumed_from = line.partition(" from ")[2]
    if state not in ("finished", "interrupted", "failed"):
        state = "running" if is_locked(path) else "interrupted"
    return state, resumed_from


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock on a file."""
    try:
        import fcntl

        with path.open("rb") as file:
            # A shared lock, so that two readers do not take each other for the run.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        # Windows and some network drives have no such locks.
        return False
    return False


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in config.yaml and hparams.yaml without the names of their sections."""
    import yaml

    options: dict[str, Any] = {}
    # libyaml is eight times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # hparams.yaml comes last because a resumed run writes only this file again.
    for name in ("config.yaml", "hparams.yaml"):
        try:
            content = yaml.load((folder / name).read_bytes(), loader)
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
    paths: Sequence[str] = (),
    *,
    metric: str | None = None,
    mode: str | None = None,
    html: str | None = None,
) -> int:
    """List runs, compare two (`diff RUN RUN`), or find the best (`best --metric METRIC`)."""
    action = paths[0] if paths and paths[0] in ("diff", "best") else "list"
    folders = list(paths) if action == "list" else list(paths[1:])
    if mode not in (None, "min", "max"):
        raise ValueError(f"--mode: got {mode}, expected min or max. Write --mode min.")
    if action == "diff":
        if len(folders) != 2:
            raise ValueError(f"runs diff: got {len(folders)} runs, expected 2. Pass their folders.")
        print(format_table(diff_runs(*map(find_run, folders))))
        return 0
    if len(folders) > 1:
        raise ValueError(f"runs: got {' '.join(paths)}, expected one folder. Pass the root of all.")
    folder = folders[0] if folders else "logs"
    runs = find_runs(folder, metric, mode)
    names = dict.fromkeys(name for run in runs for name in run["rows"] if name not in NOT_METRICS)
    if (metric is not None or action == "best") and metric not in names:
        expected = ", ".join(names) or "a logged metric"
        raise ValueError(f"--metric: got {metric or 'no metric'}, expected {expected}.")
    if action == "best":
        print_best([run for run in runs if run["best"] is not None])
    elif html is not None:
        write_page(runs, metric, Path(html))
    elif runs:
        print(format_table([HEADER, *map(to_cells, runs)]))
    else:
        print(f"There are no runs in {folder!r}.")
    return 0


def find_run(path: str) -> Run:
    """Return the run in a folder; the folder logs in front of it may be left out."""
    for folder in (Path(path), Path("logs", path)):
        if (folder / "metrics.csv").is_file():
            return read_run(folder.absolute(), Path("logs").absolute())
    raise ValueError(f"runs diff: got {path}, expected a run. Write logs/digits/version_0.")


def to_cells(run: Run) -> tuple[str, ...]:
    """Return the texts of a run below HEADER."""
    best = ("", "", "")
    if run["best"] is not None:
        best = (run["metric"], f"{run['best']:.5g}", str(run["best_epoch"]))
    minutes, seconds = divmod(round(run["seconds"]), 60)
    trained = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    changed = ", ".join(f"{option}={value}" for option, value in run.get("changed", {}).items())
    label = f"{run['name']}/{Path(run['folder']).name}"
    return label, run["state"], str(run["epochs"]), *best, trained, changed


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of a table; replace characters that control a terminal."""
    cells = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def diff_runs(a: Run, b: Run) -> list[tuple[str, ...]]:
    """Return a table of the options in which two runs differ, and of their results."""
    first, second = to_cells(a), to_cells(b)
    table: list[tuple[str, ...]] = [("", first[0], second[0], "differs")]
    for option in differing_options([a, b]):
        values = [str(run["options"].get(option, "")) for run in (a, b)]
        table.append((option, *values, ""))
    table += [(HEADER[i], first[i], second[i], "") for i in (1, 2, 6)]
    for metric in dict.fromkeys([*a["rows"], *b["rows"]]):
        if metric in NOT_METRICS:
            continue
        values = [run["rows"].get(metric, []) for run in (a, b)]
        epochs = a["rows"].get("epoch", a["rows"].index)
        rows = zip(epochs, *values, strict=False)
        unequal = [epoch for epoch, value, other in rows if value != other and value == value]
        texts = []
        for run in (a, b):
            best = find_best(run, metric)
            is_found = best["best"] is not None
            texts.append(f"{best['best']:.6g} in epoch {best['best_epoch']}" if is_found else "")
        table.append((f"best {metric}", *texts, f"from epoch {unequal[0]}" if unequal else "no"))
    return table


def print_best(runs: Sequence[Run]) -> None:
    """Print the run with the best value, and its checkpoints."""
    choose = min if runs[0]["mode"] == "min" else max
    best = choose(runs, key=lambda run: run["best"])
    print(f"best        {best['metric']} {best['best']:.6g} in epoch {best['best_epoch']}")
    print(f"run         {best['folder']}")
    # The checkpoints of logs/digits/version_0 are in checkpoints/digits/version_0.
    checkpoints = Path("/checkpoints/".join(best["folder"].rsplit("/logs/", 1)))
    for path in sorted(checkpoints.rglob("*.ckpt")):
        print(f"checkpoint  {path}")


def write_page(runs: Sequence[Run], metric: str | None, path: Path) -> None:
    """Write the table and the curves of runs into one HTML file."""
    import pandas as pd

    from .plots import render_picture

    if not path.parent.is_dir():
        raise ValueError(f"--html: got {path}, expected a file in a folder that exists.")
    picture = render_picture([run["folder"] for run in runs if len(run["rows"])], metrics=metric)
    data = base64.b64encode(picture).decode()
    frame = pd.DataFrame([to_cells(run) for run in runs], columns=HEADER)
    with pd.option_context("display.max_colwidth", None):
        table = frame.to_html(index=False)
    style = (
        "body { font: 15px system-ui } img { max-width: 100% } table { border-collapse: collapse }"
    )
    head = f'<!doctype html>\n<meta charset="utf-8">\n<title>Runs</title>\n<style>{style}</style>\n'
    image = f'<img alt="Curves of the runs" src="data:image/png;base64,{data}">'
    path.write_text(f"{head}<h1>Runs: {len(runs)}</h1>\n{image}\n{table}\n", "utf-8", "replace")
    print(f"page        {path}: {len(runs)} runs")
