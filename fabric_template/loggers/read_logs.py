"""Read the CSV files of one or several runs as one table."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import number_of

if TYPE_CHECKING:
    import pandas as pd

# A quoted cell or a plain cell, and a line of cells.
_CELL = r'(?:"[^"]*(?:""[^"]*)*"|[^",\n]*)'
_RECORD = re.compile(f"{_CELL}(?:,{_CELL})*")
_CELLS = re.compile(f"(?:^|,)({_CELL})")
EXPECTED = "a metrics.csv, or a folder such as logs, logs/digits or logs/digits/version_0"


def read_logs(path: str | os.PathLike[str], steps: bool = False) -> pd.DataFrame:
    """Return the rows of one or several runs as one table: `name, version, epoch, step, ...`.

    Lightning's CSVLogger writes half-empty rows, which are merged into one row per epoch.

    Args:
        path: A metrics.csv, or a folder such as logs, logs/digits or logs/digits/version_0.
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
        files = [root / filename] if (root / filename).is_file() else find_files(root, filename)
    if not files or not files[0].is_file():
        problem = f"The path has no {filename}" if root.exists() else "The path does not exist"
        raise ValueError(f"read_logs(path): got {str(root)!r}, expected {EXPECTED}. {problem}.")
    tables = {}
    for file in files:
        content = read_table(file)
        if not content.is_complete:
            warnings.warn(f"{file}: the last line is incomplete and was left out.", stacklevel=2)
        table = pd.DataFrame(content.rows, columns=content.columns, dtype=object)
        run, number = file.parent.parent, number_of(file.parent.name)
        name = run.relative_to(root).as_posix() if root in run.parents else run.name
        version = file.parent.name if number is None else number
        table = table if filename == "steps.csv" else join_rows(table)
        tables[name, isinstance(version, str), version] = table.assign(name=name, version=version)
    table = pd.concat([tables[key] for key in sorted(tables)], ignore_index=True).fillna("")
    places = ["step", "epoch"] if filename == "steps.csv" else ["epoch", "step"]
    names = dict.fromkeys(["name", "version", *places, *table.columns])
    return pd.DataFrame({name: to_values(table[name].tolist()) for name in names if name in table})


def find_files(root: Path, name: str) -> list[Path]:
    """Return the files of a name below a folder, except in folders whose names start with a dot."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [subfolder for subfolder in subfolders if not subfolder.startswith(".")]
        if name in files:
            found.append(Path(folder, name))
    return sorted(found)


class CSVTable(NamedTuple):
    """The content of a CSV file.

    Attributes:
        rows: The cells of each row as text, keyed by column.
        is_complete: Whether the last row is complete.
        damaged: The numbers of lines that do not have the form of a row. These lines count as rows.
    """

    columns: list[str]
    rows: list[dict[str, str]]
    is_complete: bool
    damaged: list[int]


def read_table(path: Path) -> CSVTable:
    """Read a CSV file, whatever it contains. A missing file has no rows.

    The csv module is not used, because a stray quotation mark would hide all lines after it, and
    because it refuses long cells.
    """
    content = path.read_bytes() if path.exists() else b""
    text = content.decode("utf-8-sig", "replace").replace("\0", "")
    *lines, rest = text.split("\n")
    records, damaged = read_records(lines)
    columns = records[0] if records else []
    is_complete = not rest and (not content or content.endswith(b"\n"))
    if len(records) > 1 and len(records[-1]) < len(columns):
        records, is_complete = records[:-1], False
    rows = [dict(zip(columns, cells, strict=False)) for cells in records[1:]]
    return CSVTable(columns, rows, is_complete, damaged)


def read_records(lines: list[str]) -> tuple[list[list[str]], list[int]]:
    """Split lines into the cells of records. Also return the numbers of damaged lines."""
    records: list[list[str]] = []
    damaged = []
    index = 0
    while index < len(lines):
        number, line = index + 1, lines[index].removesuffix("\r")
        cells, count = line.split(","), 1
        if '"' in line:
            num_columns = len(records[0]) if records else None
            quoted, count = read_quoted(lines[index : index + 1000], num_columns)
            # Without quotation marks, a damaged line may still have a number in each cell.
            cells = quoted or [cell.strip('"') for cell in cells]
            count = count if quoted else 1
            damaged += [] if quoted else [number]
        index += count
        if not line:
            continue
        if records and len(cells) != len(records[0]) and number not in damaged:
            damaged.append(number)
        records.append(cells)
    return records, damaged


def read_quoted(lines: list[str], num_columns: int | None) -> tuple[list[str] | None, int]:
    """Read a record with quoted cells, which may contain line breaks.

    Returns:
        The cells, or None if the lines have no valid record, and the number of its lines.
    """
    quotes = 0
    for index, line in enumerate(lines):
        quotes += line.count('"')
        if quotes % 2 == 0:
            record = "\n".join(lines[: index + 1]).removesuffix("\r")
            if not _RECORD.fullmatch(record):
                break
            cells = [
                cell[1:-1].replace('""', '"') if cell.startswith('"') else cell
                for cell in _CELLS.findall(record)
            ]
            if num_columns in (None, len(cells)):
                return cells, index + 1
            break
    return None, 1


def join_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Merge half-empty rows into one row per epoch. Keep the last value of each column."""
    places = table.reindex(columns=["epoch", "step"], fill_value="")
    is_complete = places.astype(bool).all(axis=None) and not places.duplicated().any()
    is_of_steps = any(name.endswith("_step") for name in table.columns)
    if (is_complete and not is_of_steps) or not any(places["epoch"]):
        # Do not merge complete rows. An epoch with several validations has several complete rows.
        return table
    table = table.mask(table == "")
    # LearningRateMonitor's rows have no epoch. Use the epoch of the next or the previous row.
    table["epoch"] = table["epoch"].bfill().ffill()
    return table.groupby("epoch", sort=False).last().reset_index()


def parse_cell(cell: str) -> Any:
    """Convert a cell to an int, a float or a bool if possible."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return {"True": True, "False": False}.get(cell, cell)


def to_values(cells: list[Any]) -> list[Any]:
    """Convert cells to numbers if possible. Unlike pandas.read_csv, float() is exact."""
    with suppress(ValueError):
        return [int(cell) for cell in cells]
    with suppress(ValueError):
        return [float(cell or "nan") for cell in cells]
    known = {"": None, "True": True, "False": False}
    return [known.get(cell, cell) for cell in cells]
