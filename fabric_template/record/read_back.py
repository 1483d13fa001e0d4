"""Read back: read_logs, the rows of one run or of many as one table."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parsing import FILES, read_table

if TYPE_CHECKING:
    import pandas as pd


def read_logs(path: str | os.PathLike, steps: bool = False) -> pd.DataFrame:
    """Read one run or many into one tidy frame: `name, version, epoch, step, ...`, a row per epoch.

    Lightning's own CSV files are read as well; their half-empty rows are joined, the last value of a column winning.

    Args:
        path: a metrics.csv, a version's folder, a run's folder or the root of all logs.
        steps: read what was logged per step (`steps.csv`) instead.

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
        raise TypeError(f"read_logs takes a path, not a {type(path).__name__}: read_logs('logs') reads all runs")
    root, filename = Path(os.path.abspath(path)), "steps.csv" if steps else "metrics.csv"
    if root.is_file():
        files = [root.with_name(filename) if steps else root]
    else:
        files = [root / filename] if (root / filename).is_file() else list(root.rglob(filename))
    if not files or not files[0].is_file():
        folder = next(p for p in (root, *root.parents) if p.is_dir())
        nearby = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
        what = f"there is no {filename} in {str(path)!r}" if root.exists() else f"{str(path)!r} does not exist"
        hint = "give a metrics.csv, a version's folder, a run's folder or the root of all logs, e.g. read_logs('logs')"
        if steps and root.exists():
            hint = "nothing was logged per step; read_logs(path) reads the epochs"
        raise ValueError(f"read_logs: {what} ({str(folder)!r} holds {nearby}): {hint}")

    runs = []
    for file in files:
        columns, rows, whole = read_table(file)
        if not whole:
            warnings.warn(f"{file}: the last line is not finished and was left out", stacklevel=2)
        folder, run = file.parent, file.parent.parent
        number = re.fullmatch(r"version_(\d+)", folder.name)
        name = run.relative_to(root).as_posix() if root in run.parents else run.name
        version = int(number[1]) if number else folder.name
        runs.append((name, version, columns, rows if file.name == "steps.csv" else _join(rows)))
    runs.sort(key=lambda run: (run[0], isinstance(run[1], str), run[1]))  # version 10 comes after version 9

    rank = {column: i for i, column in enumerate(FILES.get(files[0].name, FILES[filename]))}
    names = dict.fromkeys(column for run in runs for column in run[2] if column not in ("name", "version"))
    frame = {
        "name": [_readable(name) for name, _, _, rows in runs for _ in rows],
        "version": [_readable(version) for _, version, _, rows in runs for _ in rows],
    }
    for column in sorted(names, key=lambda column: rank.get(column, len(rank))):
        frame[_readable(column)] = _typed([row.get(column, "") for *_, rows in runs for row in rows])
    table = pd.DataFrame(frame)
    table.attrs["root"] = str(root)  # where more of these runs is to be found
    return table


def _typed(cells: list[str]) -> list[Any]:
    """Cells as numbers, if all are: Python reads back the very float that was written, pandas' parsers may not."""
    with suppress(ValueError):
        return [int(cell) for cell in cells]
    with suppress(ValueError):
        return [float(cell or "nan") for cell in cells]
    words = {"": None, "True": True, "False": False}
    return [words.get(cell, _readable(cell)) for cell in cells]


def _readable(name: Any) -> Any:
    """Text without what was no UTF-8 in a file, or in a folder's name: pandas refuses that where it has pyarrow."""
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) else name


def _join(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """One row per epoch (per step where no epoch is known), with the last value of each column."""
    places = [(row.get("epoch"), row.get("step")) for row in rows]
    is_by_step = all(all(place) for place in places) and len(set(places)) == len(places)
    if is_by_step and not any(column.endswith("_step") for column in rows[0]):
        # A run that validates several times in an epoch has a complete row for each validation.
        return rows
    key = "epoch" if any(row.get("epoch") for row in rows) else "step"
    # A row without an epoch (LearningRateMonitor logs such) belongs to the next that has one; at the end, to the last.
    for one_way in (reversed(rows), rows):
        latest = ""
        for row in one_way:
            latest = row[key] = row.get(key) or latest
    joined: dict[str, dict[str, str]] = {}
    for row in rows:
        joined.setdefault(row[key], {}).update({column: cell for column, cell in row.items() if cell != ""})
    return list(joined.values())
