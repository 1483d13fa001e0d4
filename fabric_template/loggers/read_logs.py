"""Read the CSV files of one run or of many as one table."""

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


def read_logs(path: str | os.PathLike, steps: bool = False) -> pd.DataFrame:
    """Return the rows of one run or of many as one table: `name, version, epoch, step, ...`.

    Half-empty rows, as Lightning's CSVLogger writes them, are joined to one row per epoch.

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
    root, is_steps = Path(os.path.abspath(path)), steps or Path(path).name == "steps.csv"
    runs = []
    for file in find_files(root, "steps.csv" if steps else "metrics.csv"):
        columns, rows, is_complete = read_table(file)
        if not is_complete:
            warnings.warn(f"{file}: the last line is incomplete and was left out.", stacklevel=2)
        run = file.parent.parent
        number = re.fullmatch(r"version_(\d+)", file.parent.name)
        name = run.relative_to(root).as_posix() if root in run.parents else run.name
        version = int(number[1]) if number else file.parent.name
        runs.append((name, version, columns, rows if is_steps else join_rows(rows)))
    runs.sort(key=lambda run: (run[0], isinstance(run[1], str), run[1]))

    table: dict[str, list[Any]] = {"name": [], "version": []}
    for name, version, _, rows in runs:
        table["name"] += [name] * len(rows)
        table["version"] += [version] * len(rows)
    names = dict.fromkeys(column for run in runs for column in run[2])
    first = [
        name for name in (("step", "epoch") if is_steps else ("epoch", "step")) if name in names
    ]
    for column in dict.fromkeys([*first, *names]):
        if column not in ("name", "version"):
            table[column] = to_values([row.get(column, "") for run in runs for row in run[3]])
    return pd.DataFrame(table)


def find_files(root: Path, filename: str) -> list[Path]:
    """Return the CSV files at a path or below it."""
    if root.is_file():
        files = [root.with_name(filename) if filename == "steps.csv" else root]
    else:
        files = [root / filename] if (root / filename).is_file() else sorted(root.rglob(filename))
    if files and files[0].is_file():
        return files
    folder = next(parent for parent in (root, *root.parents) if parent.is_dir())
    content = ", ".join(sorted(item.name for item in folder.iterdir())[:10]) or "nothing"
    fix = f"{str(folder)!r} holds {content}."
    problem = f"which has no {filename}" if root.exists() else "which does not exist"
    raise ValueError(f"read_logs(path): got {str(root)!r}, {problem}; expected {EXPECTED}. {fix}")


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


def to_values(cells: list[str]) -> list[Any]:
    """Return cells as numbers if all of them are: Python's float reads back the exact value."""
    with suppress(ValueError):
        return [int(cell) for cell in cells]
    with suppress(ValueError):
        return [float(cell or "nan") for cell in cells]
    known = {"": None, "True": True, "False": False}
    return [known.get(cell, cell) for cell in cells]


def join_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return one row per epoch, or per step where no epoch is known, with each column's last value."""
    places = [(row.get("epoch"), row.get("step")) for row in rows]
    is_complete = all(all(place) for place in places) and len(set(places)) == len(places)
    if is_complete and not any(name.endswith("_step") for row in rows[:1] for name in row):
        # A run that validates several times in an epoch has a complete row for each validation.
        return rows
    key = "epoch" if any(row.get("epoch") for row in rows) else "step"
    # LearningRateMonitor's rows have no epoch. They belong to the next row, the last to the one before.
    for ordered in (reversed(rows), rows):
        latest = ""
        for row in ordered:
            latest = row[key] = row.get(key) or latest
    joined: dict[str, dict[str, str]] = {}
    for row in rows:
        joined.setdefault(row[key], {}).update({name: cell for name, cell in row.items() if cell})
    return list(joined.values())
