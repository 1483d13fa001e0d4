"""Read the CSV files of one or several runs as one table."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

EXPECTED = "a metrics.csv, a version's folder, a run's folder or the root of all logs"


def read_logs(path: str | os.PathLike[str], steps: bool = False) -> pd.DataFrame:
    """Return the rows of one or several runs as one table: `name, version, epoch, step, ...`.

    Lightning's CSVLogger writes half-empty rows. They are merged into one row per epoch.

    Args:
        path: A metrics.csv, a version's folder, a run's folder or the root of all logs.
        steps: Read steps.csv, which has the values logged per step.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fabric_template import CSVLogger
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> read_logs(logger.root_dir)
             name  version  epoch  step  val_loss
        0  digits        0      0    10       0.5
    """
    import pandas as pd

    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"read_logs(path): got a {type(path).__name__}, expected a path. Write read_logs('logs')."
        )
    root = Path(os.path.abspath(path))
    filename = "steps.csv" if steps or root.name == "steps.csv" else "metrics.csv"
    if root.is_file():
        files = [root.with_name("steps.csv") if steps else root]
    else:
        files = [root / filename] if (root / filename).is_file() else sorted(root.rglob(filename))
    if not files or not files[0].is_file():
        problem = f"which has no {filename}" if root.exists() else "which does not exist"
        raise ValueError(f"read_logs(path): got {str(root)!r}, {problem}; expected {EXPECTED}.")
    table: list[dict[str, Any]] = []
    for file in files:
        columns, rows, is_complete = read_table(file)
        if not is_complete:
            warnings.warn(f"{file}: the last line is incomplete and was left out.", stacklevel=2)
        run, number = file.parent.parent, re.fullmatch(r"version_(\d+)", file.parent.name)
        name = run.relative_to(root).as_posix() if root in run.parents else run.name
        place = {"name": name, "version": int(number[1]) if number else file.parent.name}
        table += [
            {**row, **place} for row in (rows if filename == "steps.csv" else join_rows(rows))
        ]
    table.sort(key=lambda row: (row["name"], isinstance(row["version"], str), row["version"]))
    names = dict.fromkeys(name for row in table for name in row)
    first = [
        "name",
        "version",
        *(("step", "epoch") if filename == "steps.csv" else ("epoch", "step")),
    ]
    ordered = dict.fromkeys([*(name for name in first if name in names), *names])
    return pd.DataFrame({name: to_values([row.get(name, "") for row in table]) for name in ordered})


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]], bool]:
    """Return the columns and rows of a CSV file, and whether its last row is complete."""
    text = path.read_bytes().decode("utf-8-sig", "replace")
    end = text.rfind("\n") + 1
    # Universal newlines would split a cell that holds a carriage return.
    lines = [line for line in csv.reader(io.StringIO(text[:end], newline="")) if line]
    columns = lines[0] if lines else []
    is_complete = end == len(text)
    if lines and len(lines[-1]) != len(columns):
        lines, is_complete = lines[:-1], False
    return columns, [dict(zip(columns, line, strict=False)) for line in lines[1:]], is_complete


def to_values(cells: list[Any]) -> list[Any]:
    """Convert the cells to numbers if all of them are numbers. float() restores exact values."""
    with suppress(ValueError):
        return [int(cell) for cell in cells]
    with suppress(ValueError):
        return [float(cell or "nan") for cell in cells]
    known = {"": None, "True": True, "False": False}
    return [known.get(cell, cell) for cell in cells]


def join_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Join half-empty rows to one row per epoch with the last value of each column."""
    places = [(row.get("epoch"), row.get("step")) for row in rows]
    is_complete = all(all(place) for place in places) and len(set(places)) == len(places)
    is_of_steps = any(name.endswith("_step") for row in rows[:1] for name in row)
    has_epochs = any(row.get("epoch") for row in rows)
    if (is_complete and not is_of_steps) or not has_epochs:
        # A run that validates several times in an epoch has a complete row for each validation.
        return rows
    # LearningRateMonitor's rows have no epoch. Take it from the next row, else from the previous.
    for ordered in (reversed(rows), rows):
        epoch = ""
        for row in ordered:
            epoch = row["epoch"] = row.get("epoch") or epoch
    joined: dict[str, dict[str, str]] = {}
    for row in rows:
        joined.setdefault(row["epoch"], {}).update({name: v for name, v in row.items() if v})
    return list(joined.values())
