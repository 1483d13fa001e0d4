"""Read runs from the files in their folders: metrics.csv, config.yaml, hparams.yaml and .lock.

Somebody else may have written them: nothing in them is executed, and a damaged file counts as an
empty one.
"""

from __future__ import annotations

import csv
import math
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

NOT_METRICS = ("epoch", "step", "time", "name", "version")
# Options that differ in every run or do not influence the training.
NOT_COMPARED = ("name", "version", "default_root_dir", "enable_progress_bar")
LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|(^|_)(nll|r?mse|mae|ppl|wer|cer|fid)(_|$)")
MAX_BYTES = 100_000
# YAML aliases can repeat lists within lists without limit; three levels are enough.
short_repr = reprlib.Repr()
short_repr.maxlevel = 3


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

    def curve(self, metric: str) -> dict[int, float]:
        """Return the last value of a metric in each epoch."""
        rows = [row for row in self.rows if "epoch" in row and metric in row]
        return {int(row["epoch"]): row[metric] for row in rows}

    def mode_of(self, metric: str) -> str:
        """Return the option `mode` for the monitor, else "min" or "max" by the metric's name."""
        if metric == self.options.get("monitor") and self.options.get("mode") in ("min", "max"):
            return str(self.options["mode"])
        return "min" if LOWER_IS_BETTER.search(metric.lower()) else "max"


def find_runs(
    folder: str | os.PathLike,
    metric: str | None = None,
    mode: str | None = None,
) -> list[Run]:
    """Return every run below a folder, sorted by name and version."""
    root = Path(os.path.abspath(folder))
    if not root.is_dir():
        raise ValueError(f"runs: got {str(folder)!r}, expected a folder. Pass for example logs.")
    runs = []
    for path, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name != "checkpoints"]
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
    differing = []
    for option in dict.fromkeys(option for run in runs for option in run.options):
        values = [run.options.get(option) for run in runs]
        if option not in NOT_COMPARED and any(value != values[0] for value in values):
            differing.append(option)
    return differing


def read_run(folder: Path, root: Path) -> Run:
    """Read the run in a folder; its name is the path from the root to the folder above."""
    is_below = root in folder.parent.parents
    name = folder.parent.relative_to(root).as_posix() if is_below else folder.parent.name
    number = re.fullmatch(r"version_(\d{1,9})", folder.name)
    version = int(number[1]) if number else folder.name
    state, resumed_from = read_lock(folder / ".lock")
    options, rows = read_options(folder), read_rows(folder / "metrics.csv")
    return Run(name, version, state, resumed_from, str(folder), options, rows)


def read_lock(path: Path) -> tuple[str, str | None]:
    """Return the state of a run and the checkpoint that it was resumed from.

    A process of the run locks the file and adds lines: its process id, "resumed after step 10 from
    PATH", and at its end the state. A process that is killed leaves no state.
    """
    if not path.is_file():
        return "unknown", None
    with path.open("rb") as file:
        lines = file.read(MAX_BYTES).decode(errors="replace").splitlines()
        is_running = is_locked(file.fileno())
    resumed_from = None
    for line in lines:
        if line.startswith("resumed after step "):
            resumed_from = line.partition(" from ")[2]
    if lines and lines[-1] in ("finished", "interrupted", "failed"):
        return lines[-1], resumed_from
    return "running" if is_running else "interrupted", resumed_from


def is_locked(descriptor: int) -> bool:
    """Return whether another process holds a lock on a file."""
    try:
        import fcntl

        # A shared lock, so that two readers do not take each other for the run.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        # Windows and some network drives have no such locks.
        return False
    return False


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the finite numbers in each row of a CSV file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        # The last line is incomplete if the run was killed while it wrote.
        table = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    except (OSError, csv.Error):
        return []
    return [{name: float(cell) for name, cell in row.items() if is_finite(cell)} for row in table]


def is_finite(cell: Any) -> bool:
    """Return whether a cell of a CSV file is a finite number."""
    try:
        return math.isfinite(float(cell))
    except (TypeError, ValueError):
        return False


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in config.yaml and hparams.yaml without the names of their sections."""
    options: dict[str, Any] = {}
    # hparams.yaml comes last because a resumed run writes only this file again.
    for name in ("config.yaml", "hparams.yaml"):
        for section, content in read_yaml(folder / name).items():
            entries = content if isinstance(content, dict) else {section: content}
            for key, value in entries.items() if section not in ("about", "version") else ():
                option = f"data.{key}" if section == "data" else str(key)
                is_plain = value is None or isinstance(value, str | int | float)
                options[option] = value if is_plain else short_repr.repr(value)
    return options


def read_yaml(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file; an empty one if the file is damaged or too large."""
    import yaml

    try:
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= MAX_BYTES else b""
        # libyaml is eight times as fast, but a large file can nest deep enough to crash it.
        loader = yaml.SafeLoader
        if len(data) < 4_000:
            loader = getattr(yaml, "CSafeLoader", loader)
        # Merge keys ("<<") can expand a small file without limit.
        content = yaml.load(data, loader) if b"<<" not in data else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
