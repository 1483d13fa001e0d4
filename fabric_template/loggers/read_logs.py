"""Read the CSV files of one or more runs into one table."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import sort_key, version_of, walk
from ..metric_names import find_axis, parse_metric
from .csv_formats import RUN, decode, has_number, name_columns, split_runs, to_commas, to_wide

if TYPE_CHECKING:
    import pandas as pd

# A quoted cell may contain line breaks. Outside of quotes, a line break ends the row.
_CELL = r'(?:"[^"]*(?:""[^"]*)*"|[^",\n]*)'
_RECORD = re.compile(rf"{_CELL}(?:,{_CELL})*(?=\r?\n)")
_MAX_RECORD_LENGTH = 2**20
_CELLS = re.compile(f"(?:^|,)({_CELL})")
# A cell with one of these strings, in upper or lower case, counts as empty.
MISSING = ("", "nan", "none", "null", "na", "n/a", "-")
EXPECTED = "a metrics.csv, or a folder such as logs, logs/digits or logs/digits/version_0"


def read_logs(path: str | os.PathLike[str], steps: bool = False) -> pd.DataFrame:
    """Return the rows of one or more runs as one table: `name, version, epoch, step, ...`.

    Lightning's CSVLogger writes several rows per epoch, and read_logs merges them into one. If
    validation runs several times in an epoch, the table has one row per validation. read_logs also
    reads CSV files from other tools.

    Args:
        path: A CSV file, or a folder such as logs, logs/digits or logs/digits/version_0.
        steps: Whether to read steps.csv, which contains the values of individual steps. If a run
            has no steps.csv, return one row for each step in its metrics.csv.

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

    tables = []
    for name, version, file in require_runs(path):
        columns = read_columns(file, steps)
        names = columns.pop(RUN, name)
        tables.append(pd.DataFrame(columns, dtype=object).assign(name=names, version=version))
    table = pd.concat(tables, ignore_index=True).fillna("")
    axes = [find_axis(table, axis) for axis in (("step", "epoch") if steps else ("epoch", "step"))]
    order = dict.fromkeys(["name", "version", *axes, *table.columns])
    cells = {name: table[name].tolist() for name in order if name in table}
    # Keep the names of runs and versions as text, because a run may be called "1" or "nan".
    texts = ("name", "version")
    return pd.DataFrame({n: c if n in texts else to_values(c) for n, c in cells.items()})


def require_runs(path: Any) -> list[Any]:
    """Return each run's name, version and CSV file, or raise an error if there are no runs."""
    if not isinstance(path, str | os.PathLike):
        # Import errors.py only here, because it imports Lightning, which would slow down the plot
        # command.
        from ..errors import describe

        text = f"got {describe(path)}, expected a path"
        raise TypeError(f"read_logs(path): {text}. Write read_logs('logs').")
    root = Path(os.path.abspath(path))
    runs = find_runs(root)
    if not runs:
        problem = "The path does not exist"
        if root.exists():
            problem = "The folder contains no metrics.csv"
        raise ValueError(f"read_logs(path): got {str(root)!r}, expected {EXPECTED}. {problem}.")
    return runs


def read_columns(path: Path, steps: bool = False) -> dict[str, list[Any]]:
    """Return the columns of a CSV file as lists of strings, keyed by column name."""
    if steps and path.name == "metrics.csv" and path.with_name("steps.csv").exists():
        path = path.with_name("steps.csv")
    # Do not use pandas here, because reading thousands of files with pandas is slow.
    content = read_table(path)
    if not content.is_complete:
        warnings.warn(f"{path}: the last line is incomplete and was left out.", stacklevel=3)
    headers = [row for row in content.rows if [*row.values()] == [*row]]
    rows = [row for row in content.rows if [*row.values()] != [*row]]
    if len(rows) > 1 and has_number(rows[1].values()) and not has_number(rows[0].values()):
        # Skip a row of units, such as "s" or "%", below the header.
        rows = rows[1:]
    names = {name: name.strip() for name in chain(content.columns, *headers)}
    for name in content.columns[:1]:
        # The header of another tool's file may start with "#".
        names[name] = names[name].removeprefix("#").strip()
    columns = {names[n]: [row.get(n, "") for row in rows] for n in names if names[n]}
    if {*columns} == {"Wall time", "Step", "Value"} and (tag := re.search("tag-(.+)", path.stem)):
        # TensorBoard exports one metric per file, and the file name contains the metric's name.
        columns[tag[1]] = columns.pop("Value")
    if path.name == "steps.csv":
        return columns
    runs = split_runs(to_wide(columns))
    if "" in runs:
        return join_if_incomplete(runs[""], steps)
    tables = {run: join_if_incomplete(table, steps) for run, table in runs.items()}
    counts = {run: len(next(iter(table.values()))) for run, table in tables.items()}
    joined: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        joined[name] = [c for run in tables for c in tables[run].get(name, [""] * counts[run])]
    return joined | {RUN: [run for run, count in counts.items() for _ in range(count)]}


def join_if_incomplete(columns: dict[str, list[Any]], steps: bool) -> dict[str, list[Any]]:
    """Merge the rows of a run that belong to the same epoch or step."""
    axes = [axis for axis in (find_axis(columns, name) for name in ("epoch", "step")) if axis]
    positions = list(zip(*(columns[axis] for axis in axes), strict=True))
    is_complete = len({*positions}) == len(positions) and all(map(all, positions))
    has_steps = not steps and any(name.endswith("_step") for name in columns if name not in axes)
    if not axes or (is_complete and not has_steps) or has_rows_within_epochs(columns, axes):
        return columns
    return join_rows(columns, steps)


def has_rows_within_epochs(columns: dict[str, list[Any]], axes: list[str]) -> bool:
    """Return whether a file has several complete rows per epoch but no step column."""
    if len(axes) != 1 or find_axis(columns, "epoch") != axes[0]:
        return False
    # Require the same number of rows in each epoch, but allow fewer in the last epoch. If an epoch
    # occurs twice, reject the file, because its run was restarted.
    sizes = [len(list(rows)) for _, rows in groupby(columns[axes[0]])]
    is_regular = len({*sizes[:-1]}) == 1 and 1 < sizes[0] >= sizes[-1]
    is_repeated = len(sizes) > len({*columns[axes[0]]})
    return is_regular and not is_repeated and all(map(all, columns.values()))


def find_runs(root: Path) -> list[tuple[str, int | str, Path]]:
    """Return the name, version and CSV file of each run in a folder, or of a single CSV file."""
    if root.is_file():
        files = [root]
    elif (root / "metrics.csv").is_file():
        files = [root / "metrics.csv"]
    else:
        folders = [folder for folder, names in walk(root) if "metrics.csv" in names]
        files = sorted(folder / "metrics.csv" for folder in folders)
    runs = [(*name_run(file.parent, root), file) for file in files]
    return sorted(runs, key=lambda run: (sort_key(run[0]), sort_key(str(run[1]))))


def name_run(folder: Path, root: Path) -> tuple[str, int | str]:
    """Return a run's name and version, such as ("digits", 0) for the folder digits/version_0."""
    parent = folder.parent
    name = parent.relative_to(root).as_posix() if root in parent.parents else parent.name
    return name, version_of(folder.name)


class CSVTable(NamedTuple):
    """The content of a CSV file.

    Attributes:
        rows: The cells of each row as strings, keyed by column.
        is_complete: Whether the last row is complete.
        damaged: The line numbers of malformed lines, which still count as rows.
    """

    columns: list[str]
    rows: list[dict[str, str]]
    is_complete: bool
    damaged: list[int]


def read_table(path: Path, last: Mapping[str, str] | None = None) -> CSVTable:
    """Read a CSV file, even if the file is damaged.

    Args:
        last: The cells of the last row, if known. A last line with these cells is complete, even if
            an editor has removed the line break after it.
    """
    text = to_commas(decode(path.read_bytes())) if path.exists() else ""
    if last is not None and not text.endswith("\n"):
        table = parse_table(path, f"{text}\n")
        rows = table.rows if table.is_complete else []
        if rows and {name: cell for name, cell in rows[-1].items() if cell} == last:
            return table
    return parse_table(path, text)


def parse_table(path: Path, text: str) -> CSVTable:
    if path.name not in ("metrics.csv", "steps.csv"):
        # Other tools may omit the last line break. Add it, so that the last row counts as complete.
        text = text.rstrip("\r\n") + "\n"
    # Do not use Python's csv module, because it fails on long cells and stray quotation marks.
    complete, line_break, rest = text.rpartition("\n")
    records, damaged = read_records((complete + line_break).replace("\0", ""))
    header = records[0] if records else []
    columns = name_columns(header, has_rows=len(records) > 1)
    # If the file has no header, its first line is already a row of values.
    records = records[1:] if columns[:1] == header[:1] else records
    rows, names = [], columns
    for cells in records:
        if cells[0] == columns[0] and not has_number(cells):
            # A program that appends to a CSV file may write the header again.
            names = name_columns(cells, has_rows=False)
        rows.append(dict(zip(names, cells, strict=False)))
    is_short = bool(records) and len(records[-1]) < len(names)
    return CSVTable(columns, rows[:-1] if is_short else rows, not (rest or is_short), damaged)


def read_records(text: str) -> tuple[list[list[str]], list[int]]:
    """Return the cells of each complete CSV line, and the line numbers of damaged lines."""
    records: list[list[str]] = []
    damaged = []
    start, number = 0, 1
    while start < len(text):
        end = text.index("\n", start)
        line = text[start:end].removesuffix("\r")
        cells, is_damaged = line.split(","), False
        if '"' in line:
            record = _RECORD.match(text, start, start + _MAX_RECORD_LENGTH)
            quoted = [] if record is None else unquote(record[0].removesuffix("\r"))
            if record is not None and len(quoted) == len(records[0] if records else quoted):
                cells, end = quoted, text.index("\n", record.end())
            else:
                # Remove quotation marks, so that the numbers in a damaged line can still be read.
                cells, is_damaged = [cell.strip('"') for cell in cells], True
        if line.strip():
            records.append(cells)
            if is_damaged or len(cells) != len(records[0]):
                damaged.append(number)
        number += text.count("\n", start, end + 1)
        start = end + 1
    return records, damaged


def unquote(record: str) -> list[str]:
    cells = _CELLS.findall(record)
    return [c[1:-1].replace('""', '"') if c.startswith('"') else c for c in cells]


def join_rows(columns: dict[str, list[Any]], steps: bool) -> dict[str, list[Any]]:
    """Merge rows that belong to the same step or, if ``steps`` is False, to the same validation."""
    import pandas as pd

    table = pd.DataFrame(columns, dtype=object)
    epoch, step = find_axis(table, "epoch"), find_axis(table, "step")
    axes = [axis for axis in (epoch, step) if axis is not None]
    table = table.mask(table == "")
    # Rows written by LearningRateMonitor have no epoch. Copy the epoch from the next row or, at the
    # end of the file, from the previous row.
    table[axes] = table[axes].bfill().ffill()
    table = table.groupby(axes, sort=False, dropna=False).last().reset_index()
    if not steps and epoch is not None and step is not None:
        validated = [name for name in table if parse_metric(name).split in ("validation", "test")]
        is_validated = table[validated].notna().any(axis=1)
        epochs = is_validated.groupby(table[epoch], sort=False, dropna=False)
        # Merge each row with the next validation in its epoch or, if none follows, with the epoch's
        # last validation.
        number = (epochs.cumsum() - is_validated).clip(upper=epochs.transform("sum") - 1)
        table[step] = table[step].where(is_validated | (epochs.transform("sum") == 0))
        keys = [table[epoch], number.clip(lower=0).rename("number")]
        table = table.drop(columns=epoch).groupby(keys, sort=False, dropna=False).last()
        table = table.reset_index(level=0)
    joined: dict[str, list[Any]] = table.astype(object).fillna("").to_dict("list")
    return joined


def parse_cell(cell: str) -> Any:
    """Convert a cell to an int, a float or a bool if possible."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return {"True": True, "False": False}.get(cell, cell)


def to_values(cells: list[Any]) -> list[Any]:
    """Convert cells to numbers if possible."""
    # Parse numbers with int() and float(), because pandas.read_csv may round the last digit.
    for kind in (int, float):
        with suppress(ValueError):
            return [kind(cell) for cell in cells]
    with suppress(ValueError):
        return [
            float("nan" if cell.strip().lower() in MISSING else cell.strip().removesuffix("%"))
            for cell in map(str, cells)
        ]
    known = {"": None, "True": True, "False": False}
    return [known.get(cell, cell) for cell in cells]
