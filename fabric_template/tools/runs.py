"""List the runs below a folder, compare two of them, find the best one, and write a page of all.

A damaged file of a run counts as an empty one.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ..loggers.read_logs import read_table

COLUMNS = ["name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds"]
COLUMNS += ["resumed_from", "changed", "folder"]
HEADER = ("run", "state", "epochs", "metric", "best", "epoch", "trained", "changed")
NOT_METRICS = ("epoch", "step", "time", "name", "version")
# Options that differ in every run or do not influence the training.
NOT_COMPARED = ("name", "version", "default_root_dir", "enable_progress_bar")
LOWER_IS_BETTER = re.compile(
    r"(?i)loss|error|perplexity|(^|[\W_])(nll|r?mse|mae|ppl|wer|cer|fid)([\W_]|$)"
)


@dataclass
class Run:
    """The columns of `list_runs`, the options and the metrics.csv of one run."""

    name: str
    version: int | str
    state: str
    resumed_from: str | None
    folder: str
    options: dict[str, Any]
    rows: list[dict[str, float]]
    metric: str | None = None
    best: float | None = None
    best_epoch: int | None = None
    changed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.label = f"{self.name}/{os.path.basename(self.folder)}"
        self.epochs = max((int(row["epoch"]) + 1 for row in self.rows if "epoch" in row), default=0)
        self.seconds = sum(row.get("time", 0.0) for row in self.rows)
        names = dict.fromkeys(name for row in self.rows for name in row)
        self.metrics = [name for name in names if name not in NOT_METRICS]

    def set_best(self, metric: str | None = None, mode: str | None = None) -> None:
        """Find the best value of a metric, by default of the monitor or a validated metric."""
        monitor = self.options.get("monitor")
        if metric is None and monitor in self.metrics:
            metric = monitor
        elif metric is None:
            validated = [name for name in self.metrics if "val" in name]
            losses = [name for name in validated if "loss" in name]
            metric = next(iter([*losses, *validated, *self.metrics]), None)
        rows = [row for row in self.rows if metric in row]
        self.metric, self.best, self.best_epoch = metric, None, None
        if metric is not None and rows:
            choose = min if (mode or self.mode_of(metric)) == "min" else max
            row = choose(rows, key=lambda row: row[metric])
            self.best, self.best_epoch = row[metric], int(row.get("epoch", 0))

    def mode_of(self, metric: str) -> str:
        """Return the option `mode` for the monitor, else "min" or "max" by the metric's name."""
        if metric == self.options.get("monitor") and self.options.get("mode") in ("min", "max"):
            return str(self.options["mode"])
        return "min" if LOWER_IS_BETTER.search(metric) else "max"


def list_runs(folder: str | os.PathLike = "logs", metric: str | None = None) -> Any:
    """List all runs below a folder in a DataFrame, or without pandas in a list of dicts.

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
    rows = [{column: vars(run)[column] for column in COLUMNS} for run in find_runs(folder, metric)]
    try:
        import pandas as pd
    except ImportError:
        return rows
    return pd.DataFrame(rows, columns=COLUMNS)


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
            runs.append(read_run(Path(path), root))
            runs[-1].set_best(metric, mode)
    runs.sort(key=lambda run: (run.name, isinstance(run.version, str), run.version))
    for _, group in groupby(runs, key=lambda run: run.name):
        same_name = list(group)
        for option in differing_options(same_name):
            for run in same_name:
                run.changed[option] = run.options.get(option)
    return runs


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Return the options that do not have the same value in all runs."""
    names = dict.fromkeys(option for run in runs for option in run.options)
    differing = []
    for option in names:
        values = [run.options.get(option) for run in runs]
        if option not in NOT_COMPARED and any(value != values[0] for value in values):
            differing.append(option)
    return differing


def read_run(folder: Path, root: Path) -> Run:
    """Read the run in a folder; its name is the path from the root to the folder above."""
    is_below = root in folder.parent.parents
    name = folder.parent.relative_to(root).as_posix() if is_below else folder.parent.name
    number = folder.name.removeprefix("version_")
    state, resumed_from = read_lock(folder / ".lock")
    return Run(
        name,
        int(number) if number.isdigit() else folder.name,
        state,
        resumed_from,
        str(folder),
        read_options(folder),
        read_rows(folder / "metrics.csv"),
    )


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


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the finite numbers in each row of a CSV file."""
    table = read_table(path)[1] if path.is_file() else []
    rows = []
    for row in table:
        numbers = {}
        for name, cell in row.items():
            try:
                number = float(cell)
            except ValueError:
                continue
            if math.isfinite(number):
                numbers[name] = number
        rows.append(numbers)
    return rows


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in config.yaml and hparams.yaml without the names of their sections."""
    options: dict[str, Any] = {}
    # hparams.yaml comes last because a resumed run writes only this file again.
    for name in ("config.yaml", "hparams.yaml"):
        for section, content in read_yaml(folder / name).items():
            if section == "about":
                continue
            entries = content if isinstance(content, dict) else {section: content}
            entries = entries.get("init_args", entries)
            for key, value in entries.items():
                is_plain = value is None or isinstance(value, str | int | float)
                option = f"data.{key}" if section == "data" else str(key)
                options[option] = value if is_plain else str(value)
    return options


def read_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        # libyaml is eight times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(path.read_bytes(), loader) if path.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


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
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    if (metric is not None or action == "best") and metric not in names:
        expected = ", ".join(names) or "a logged metric"
        raise ValueError(f"--metric: got {metric or 'no metric'}, expected {expected}.")
    if action == "best":
        print_best(runs, mode)
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
    metric, best = ("", "") if run.best is None else (str(run.metric), f"{run.best:.5g}")
    epoch = "" if run.best_epoch is None else str(run.best_epoch)
    minutes, seconds = divmod(round(run.seconds), 60)
    trained = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    changed = ", ".join(f"{option}={value}" for option, value in run.changed.items())
    return run.label, run.state, str(run.epochs), metric, best, epoch, trained, changed


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of a table; replace characters that control a terminal."""
    cells = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def diff_runs(a: Run, b: Run) -> list[tuple[str, ...]]:
    """Return a table of the options in which two runs differ, and of their results."""
    first, second = to_cells(a), to_cells(b)
    table: list[tuple[str, ...]] = [("", a.label, b.label, "differs")]
    for option in differing_options([a, b]):
        table.append((option, str(a.options.get(option, "")), str(b.options.get(option, "")), ""))
    table += [(HEADER[i], first[i], second[i], "") for i in (1, 2, 6)]
    for metric in dict.fromkeys([*a.metrics, *b.metrics]):
        pairs = zip(a.rows, b.rows, strict=False)
        unequal = [row for row, other in pairs if row.get(metric) != other.get(metric)]
        differs = f"from epoch {unequal[0].get('epoch', 0):.0f}" if unequal else "no"
        texts = []
        for run in (a, b):
            run.set_best(metric)
            texts.append("" if run.best is None else f"{run.best:.6g} in epoch {run.best_epoch}")
        table.append((f"best {metric}", *texts, differs))
    return table


def print_best(runs: Sequence[Run], mode: str | None) -> None:
    """Print the run with the best value, and its checkpoints."""
    candidates = [run for run in runs if run.best is not None]
    metric = str(candidates[0].metric)
    choose = min if (mode or candidates[0].mode_of(metric)) == "min" else max
    best = choose(candidates, key=lambda run: run.best or 0.0)
    print(f"best        {metric} {best.best:.6g} in epoch {best.best_epoch}")
    print(f"run         {best.folder}")
    # The checkpoints of logs/digits/version_0 are in checkpoints/digits/version_0.
    checkpoints = Path("/checkpoints/".join(best.folder.rsplit("/logs/", 1)))
    for path in sorted(checkpoints.rglob("*.ckpt")):
        print(f"checkpoint  {path}")


def write_page(runs: Sequence[Run], metric: str | None, path: Path) -> None:
    """Write the table and the curves of runs into one HTML file."""
    import pandas as pd

    from .plots import render_picture

    if not path.parent.is_dir():
        raise ValueError(f"--html: got {path}, expected a file in a folder that exists.")
    picture = render_picture([run.folder for run in runs if run.metrics], metrics=metric)
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
