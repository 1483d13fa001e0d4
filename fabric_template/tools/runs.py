"""Find the runs below a folder, and read their state, options and metrics."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import number_of
from ..loggers.read_logs import read_logs
from ..metric_names import NOT_METRICS, find_direction

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds"]
COLUMNS += ["changed", "folder"]
# Ignore options that differ in every run or do not influence training.
NOT_COMPARED = ("name", "version", "default_root_dir", "enable_progress_bar")
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


def best_mode(metric: str, options: dict[str, Any]) -> str | None:
    """Return "min" or "max": a run's own mode for its monitor, and for others by their name."""
    mode = options.get("mode") if metric == options.get("monitor") else None
    return mode if mode in ("min", "max") else find_direction(metric)


def find_best(run: Run, metric: str | None) -> dict[str, Any]:
    """Return the best value of a metric and its epoch."""
    rows = run["rows"]
    rows = rows[rows[metric].abs() < float("inf")] if metric in rows else rows[:0]
    if not len(rows):
        return {"metric": metric, "best": None, "best_epoch": None}
    mode = best_mode(str(metric), run["options"]) or "max"
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
