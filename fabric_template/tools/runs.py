"""Find all runs in a folder and its subfolders, and read each run's options and metrics."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..config import LoopArguments, LoopConfig
from ..files import sort_key, walk
from ..loggers.csv_formats import RUN, Columns, group_rows
from ..loggers.read_logs import name_run, read_columns, to_values
from ..metric_names import Metric, find_axis, find_direction, is_metric, parse_metric

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds"]
COLUMNS += ["changed", "folder"]
# Options that are not compared, because they always differ or do not influence training.
NOT_COMPARED = ("name", "version", "default_root_dir", "enable_progress_bar", "resume", "load")
DEFAULTS = {field.name: field.default for field in fields(LoopArguments)}
DEFAULTS |= vars(LoopConfig().resolve())
# Holds the data of one run, such as its name, its options and its logged rows.
Run = dict[str, Any]


def list_runs(
    folder: str | os.PathLike[str] = "logs", metric: str | None = None, mode: str | None = None
) -> pd.DataFrame:
    """Return a table of the runs stored in a folder and its subfolders, or in one CSV file.

    The `state` column contains "running", "finished", "interrupted", "failed" or "unknown". The
    state of a killed run is "interrupted", and the state of a Trainer run is "unknown". The
    `changed` column contains the options that differ between runs with the same name. It also
    contains each entry of FabricLoop(hparams=...) that all runs have and that differs between them.

    Args:
        folder: The folder of all logs, or a folder in it.
        metric: The metric that ranks the runs. Default: each run's monitor or a validation metric.
        mode: "min" if smaller values of the metric are better, "max" if larger values are better.
            By default, use each run's mode, or infer the mode from the metric's name. If the mode
            is unknown, `best` is empty.

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

    if mode not in (None, "min", "max"):
        raise ValueError(f'list_runs(mode): got {mode!r}, expected "min" or "max".')
    runs = find_runs(folder, metric, mode)
    check_metric("list_runs(metric)", metric, runs)
    return pd.DataFrame(runs, columns=COLUMNS)


def check_metric(argument: str, metric: str | None, runs: Sequence[Run]) -> None:
    """Raise an error if no run has logged the metric by which the user ranks the runs."""
    names = dict.fromkeys(name for run in runs for name in run["rows"] if is_metric(name))
    if metric is not None and metric not in names:
        expected = ", ".join(names) or "the logged metrics, but the runs logged none"
        raise ValueError(f"{argument}: got {metric}, expected one of {expected}.")


def find_runs(
    folder: str | os.PathLike[str], metric: str | None = None, mode: str | None = None
) -> list[Run]:
    """Return all runs in a CSV file or in a folder tree, sorted by name and version."""
    if not isinstance(folder, str | os.PathLike):
        kind = type(folder).__name__
        raise TypeError(f"list_runs: got a {kind}, expected a folder. Write list_runs('logs').")
    root = Path(os.path.abspath(folder))
    if not root.exists():
        raise ValueError(f"runs: got {str(folder)!r}, expected a folder of runs, such as logs.")
    runs = read_files(root, root) if root.is_file() else []
    for path, files in walk(root, skipped=["checkpoints"]):
        if "metrics.csv" in files or "hparams.yaml" in files:
            runs.append(read_run(path, root))
        else:
            tables = (name for name in files if name.endswith(".csv"))
            runs += [run for name in tables for run in read_files(path / name, root)]
    runs.sort(key=lambda run: (sort_key(run["name"]), sort_key(str(run["version"]))))
    for run in runs:
        run |= find_best(run, metric, mode)
    settings = [run["options"].keys() - DEFAULTS.keys() - run["recorded"].keys() for run in runs]
    common = set.intersection(*settings) if settings else set()
    differing = [name for name in differing_options(runs) if name in common]
    for _, group in groupby(runs, key=lambda run: run["name"]):
        same_name = list(group)
        names = dict.fromkeys([*differing, *differing_options(same_name)])
        for run in same_name:
            run["changed"] = {name: run["options"][name] for name in names if is_set(run, name)}
    return runs


def differing_options(runs: Sequence[Run]) -> list[str]:
    differing = []
    recorded = {name for run in runs for name in run["recorded"]}
    for option in dict.fromkeys(name for run in runs for name in run["options"]):
        values = [run["options"][option] if is_set(run, option) else None for run in runs]
        if option in recorded:
            # Ignore runs without this option, because some options, such as momentum, exist only
            # for some optimizers.
            values = [value for value in values if value is not None]
        # Also compare the values as strings, because NaN is not equal to itself.
        if any(value != values[0] and str(value) != str(values[0]) for value in values):
            differing.append(option)
    return differing


def is_set(run: Run, option: str) -> bool:
    """Return whether a run's option differs from the default."""
    options = run["options"]
    value = options.get(option)
    if value is None or option in NOT_COMPARED:
        return False
    if option == "mode":
        return bool(value not in ("auto", find_direction(str(options.get("monitor"))) or "min"))
    if option == "max_epochs" and value in (-1, 1000):
        # If the user does not set max_epochs, MiniLoop records 1000 or, with max_steps, -1.
        return False
    return option not in DEFAULTS or bool(value != DEFAULTS[option])


def read_run(folder: Path, root: Path) -> Run:
    """Read a run from a folder."""
    name, version = name_run(folder, root)
    file, state = folder / "metrics.csv", read_state(folder / ".lock")
    options, about = read_options(folder)
    recorded = find_recorded(about, options)
    run: Run = {"name": name, "version": version, "state": state, "file": file}
    run |= {"options": options | recorded, "about": about, "recorded": recorded}
    rows, _ = read_rows(file)
    return describe_run(run, rows, f"{name}/{folder.name}")


def read_files(path: Path, root: Path) -> list[Run]:
    """Read the runs in a CSV file written by this package or another tool."""
    if path.name == "metrics.csv":
        return [read_run(path.parent, path.parent)]
    rows, names = read_rows(path)
    has_axis = find_axis(rows, "epoch") or find_axis(rows, "step")
    if path != root and not has_axis and not any(parse_metric(name).split for name in rows):
        # Skip tables that are not logs, such as predictions.
        return []
    folder = path.parent.relative_to(root).as_posix() if root in path.parents else "."
    name = path.parent.name if folder == "." else folder
    groups = [(path.stem, rows)]
    if len({*names}) > 1:
        groups = []
        for run_name, indices in group_rows(names).items():
            table = {column: [cells[index] for index in indices] for column, cells in rows.items()}
            groups.append((run_name, table))
    runs = []
    for version, table in groups:
        run: Run = {"name": name, "version": version, "state": "unknown", "file": path}
        run |= {"options": {}, "about": {}, "recorded": {}}
        label = version if path == root else f"{name}/{version}"
        # Ignore the "time" column, which has a different meaning in other tools' files.
        runs.append(describe_run(run, table, label) | {"seconds": 0.0})
    return runs


def describe_run(run: Run, rows: Columns, label: str) -> Run:
    """Return a run with its metrics, duration and number of epochs."""
    column = find_axis(rows, "epoch")
    epochs = [] if column is None else [epoch for epoch in rows[column] if abs(epoch) < math.inf]
    count = 0
    if epochs:
        # Some tools count epochs from 1, or log fractions of epochs such as 0.5.
        is_from_one = min(epochs) == 1 or any(epoch % 1 for epoch in epochs)
        count = math.ceil(max(epochs)) if is_from_one else int(max(epochs)) + 1
    return run | {
        "epochs": count,
        "seconds": math.fsum(value for value in rows.get("time", []) if abs(value) < math.inf),
        "folder": str(run["file"].parent),
        "label": label,
        "rows": rows,
    }


def choose_metric(run: Run) -> str | None:
    """Return the metric by which a run is ranked, or None if the run has no metrics."""
    monitor = run["options"].get("monitor")
    if isinstance(monitor, str) and monitor in run["rows"]:
        return monitor
    metrics = [parse_metric(str(name)) for name in run["rows"] if is_metric(str(name))]
    metrics = [metric for metric in metrics if metric.kind != "learning rate"]

    def priority(metric: Metric) -> tuple[bool, bool, bool]:
        is_of_training = metric.split == "train" or (metric.split == "" and metric.kind == "loss")
        is_unknown = find_direction(metric.column) is None
        return metric.split != "validation", is_unknown, is_of_training

    return min(metrics, key=priority).column if metrics else None


def best_mode(metric: str, options: dict[str, Any]) -> str | None:
    """Return "min" if lower values of a metric are better, "max" if higher, None if unknown."""
    mode = options.get("mode") if metric == options.get("monitor") else None
    return mode if mode in ("min", "max") else find_direction(metric)


def find_best(run: Run, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """Return a dict with the best value of a metric, and the epoch and step of this value."""
    rows, metric = run["rows"], metric or choose_metric(run)
    found: Run = {
        "metric": metric,
        "best": None,
        "best_epoch": None,
        "best_step": None,
        "mode": mode,
    }
    if metric is None or metric not in rows:
        return found
    mode = mode or best_mode(metric, run["options"])
    values = rows[metric]
    finite = [index for index, value in enumerate(values) if abs(value) < math.inf]
    if not finite or mode is None:
        return found
    choose = min if mode == "min" else max
    best = choose(finite, key=lambda index: values[index])
    for axis in ("epoch", "step"):
        column = find_axis(rows, axis)
        position = math.nan if column is None else rows[column][best]
        found[f"best_{axis}"] = int(position) if abs(position) < math.inf else None
    return found | {"best": float(values[best]), "mode": mode}


def read_rows(path: Path) -> tuple[Columns, list[str]]:
    """Return the numeric columns of a CSV file, and its column of run names."""
    columns: dict[str, list[Any]] = {}
    with warnings.catch_warnings(), suppress(OSError, ValueError):
        # Ignore warnings about an incomplete last line, because the run may still be training.
        warnings.simplefilter("ignore")
        columns = read_columns(path)
    names = columns.pop(RUN, [])
    rows = {name: to_values(cells) for name, cells in columns.items()}
    numeric = [name for name in rows if rows[name] and type(rows[name][0]) in (int, float)]
    return {name: rows[name] for name in numeric if name not in ("name", "version")}, names


def read_state(path: Path) -> str:
    """Read the state of a run from its lock file."""
    if not path.is_file():
        return "unknown"
    # At the end of a run, the process appends "finished", "interrupted" or "failed" to the lock
    # file. A killed run leaves an unlocked file without such a line.
    state = path.read_text("utf-8", "replace").rstrip().rpartition("\n")[2]
    if state in ("finished", "interrupted", "failed"):
        return state
    return "running" if is_locked(path) else "interrupted"


def is_locked(path: Path) -> bool:
    try:
        import fcntl

        with path.open("rb") as file:
            # A request for a shared lock fails while the run holds its exclusive lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        # Without file locks, as on Windows, a run that is still training looks interrupted.
        return False
    return False


@lru_cache(maxsize=4096)
def parse_yaml(text: str) -> Any:
    # Prefer the YAML parser written in C, which is ten times faster.
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def find_recorded(about: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read the model class, optimizers and batch size from the "about" section of config.yaml."""
    found: dict[str, Any] = {}
    for part, value in about.items():
        kind, _, number = part.partition("_")
        if kind not in ("model", "optimizer") and part != "batch_size":
            continue
        entries = dict(value) if isinstance(value, dict) else {part: value}
        if "class" in entries:
            found[part] = entries.pop("class")
        if kind == "model":
            continue
        for name, entry in entries.items():
            numbered = f"{name}_{number}" if kind == "optimizer" and number else name
            known = [options.get(other) for other in (name, f"data.{name}")]
            if name == "lr":
                known.append(options.get("learning_rate"))
            if entry not in known:
                found[f"optimizer.{numbered}" if numbered in options else numbered] = entry
    return {name: entry for name, entry in found.items() if name not in options}


def read_options(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options in config.yaml and hparams.yaml, and the "about" section of config.yaml.

    The "about" section describes the model, the machine and the package versions.
    """
    options: dict[str, Any] = {}
    hparams: dict[str, Any] = {}
    about: dict[str, Any] = {}
    # Let hparams.yaml override config.yaml, because a resumed run updates only hparams.yaml.
    for name in ("config.yaml", "hparams.yaml"):
        try:
            text = (folder / name).read_text("utf-8")
            # Many runs contain the same sections, so parse each top-level section separately. For a
            # repeated section, parse_yaml() returns the cached result.
            parts = [parse_yaml(part) for part in re.split(r"(?m)^(?=\w)", text) if part]
        except (OSError, ValueError, yaml.YAMLError):
            continue
        contents = [part for part in parts if isinstance(part, dict)]
        for section, value in [item for content in contents for item in content.items()]:
            entries = value if isinstance(value, dict) else {section: value}
            if section == "about":
                about = entries
                continue
            if section == "hparams":
                hparams |= {str(key): entry for key, entry in entries.items()}
            elif "class_path" in entries:
                entries = entries.get("init_args") or {}
            prefix = "data." if section == "data" else ""
            options |= {f"{prefix}{key}": entry for key, entry in entries.items()}
    # If an option and a setting in hparams= have the same name, prefer the option's value, unless
    # it is the default value.
    unset = [name for name in hparams if options[name] == DEFAULTS.get(name)]
    return options | {name: hparams[name] for name in unset}, about
