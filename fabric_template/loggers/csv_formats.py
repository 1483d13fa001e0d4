"""Convert CSV files from other tools to one table per run, with one column per metric."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

from ..metric_names import SPLITS, find_axis, is_metric

Columns = dict[str, list[Any]]
# A temporary column that contains the run name of each row.
RUN = "run of the row"
# A quoted cell on a single line.
_QUOTED = r'(?<![^;\t|,\n])"[^"\n]*(?:""[^"\n]*)*"'
# The column names that other tools use for the run, the metric and the data split.
RUN_NAMES = ("run", "run_id", "run_name", "experiment", "trial", "trial_id", "fold", "seed", "name")
KEY_NAMES = ("key", "tag", "metric", "variable")
SPLIT_NAMES = ("split", "phase", "mode", "stage", "subset", "set", "dataset")


# Converting text


def decode(content: bytes) -> str:
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return content.decode(encoding, "replace")


def to_commas(text: str) -> str:
    """Remove comments above the header of a CSV file, and separate the cells with commas."""
    if "\n" not in text:
        text = text.replace("\r", "\n")
    lines = text.lstrip("\r\n").split("\n")
    # A header may also start with "#". Unlike a comment, a header has a row of numbers below it.
    while lines[0].startswith("#") and not has_number(re.split(r"[,;|\s]", "".join(lines[1:2]))):
        lines = lines[1:] or [""]
    header, second, text = lines[0], "".join(lines[1:2]), "\n".join(lines)
    unquoted = re.sub(_QUOTED, "", header)
    separator = next((character for character in ";\t|" if character in unquoted), None)
    if "," in unquoted:
        return text
    if separator is not None:
        # Files with semicolons between the cells often have decimal commas, such as 0,5. Keep the
        # commas and semicolons in quoted texts.
        parts = re.split(rf"({_QUOTED})", text)
        for index, part in enumerate(parts):
            point = part.replace(",", ".")
            is_text = index % 2 and not has_number([point[1:-1]])
            parts[index] = part if is_text else point.replace(separator, ",")
        return "".join(parts)
    if len(header.split()) == len(second.split()) > 1:
        return "\n".join(",".join(line.split()) for line in lines)
    return text


def has_number(cells: Iterable[Any]) -> bool:
    for cell in cells:
        with suppress(ValueError):
            float(cell)
            return True
    return False


# Converting columns


def to_wide(columns: Columns) -> Columns:
    """Convert a table in long format to a table with one column per metric."""
    lower = {name.lower(): name for name in reversed([*columns])}
    key = next((lower[name] for name in KEY_NAMES if name in lower), None)
    if key is not None and "value" in lower:
        values = columns[lower["value"]]
        others = {
            name: cells for name, cells in columns.items() if name not in (key, lower["value"])
        }
        columns = others | select(columns[key], values)
    for name in SPLIT_NAMES:
        splits = columns.get(lower.get(name, ""), [])
        if len({*splits}) > 1 and {split.lower() for split in splits} <= {*SPLITS}:
            return split_columns(columns, lower[name])
    return columns


def split_columns(columns: Columns, split: str) -> Columns:
    """Replace a column such as "loss" with a column for each data split, such as "train_loss"."""
    result: Columns = {}
    not_split = (find_axis(columns, "epoch"), find_axis(columns, "step"), split)
    for name, cells in columns.items():
        parts = select(columns[split], cells)
        filled = {f"{part}_{name}": values for part, values in parts.items() if any(values)}
        result |= filled if len(filled) > 1 and name not in not_split else {name: cells}
    return result


def select(keys: list[Any], cells: list[Any]) -> Columns:
    """Split a column with the values of several metrics into one column per metric.

    Example:
        >>> select(["loss", "acc"], ["0.5", "0.9"])
        {'loss': ['0.5', ''], 'acc': ['', '0.9']}
    """
    pairs = list(zip(keys, cells, strict=True))
    return {
        key: [cell if other == key else "" for other, cell in pairs] for key in dict.fromkeys(keys)
    }


def split_runs(columns: Columns) -> dict[str, Columns]:
    """Split a file's table into one table per run, keyed by run name."""
    exported = [name for name in columns if " - " in name]
    others = [name for name in columns if " - " not in name]
    has_minima = any(name.endswith("__MIN") for name in exported)
    if has_minima or (exported and not any(map(is_metric, others))):
        return split_exported(columns, exported, others)
    axis = find_axis(columns, "epoch") or find_axis(columns, "step")
    if axis is None:
        return {"": columns}
    names = choose_run_names(columns, axis)
    keys = [*zip(*(columns[name] for name in names), strict=True)] or count_fits(columns)
    # If no epoch occurs twice, the file contains a single run, so ignore columns such as "name" and
    # "seed".
    is_repeated = len({*columns[axis]}) < len(keys)
    if len({*keys}) < 2 or not is_repeated or not all(map(all, keys)):
        return {"": columns}
    runs = {}
    for key, rows in group_rows(keys).items():
        # If a run's name is just a number, prefix it with the column's name, as in "fold=0".
        label = "/".join(key)
        if names != ["name", "version"] and has_number(key):
            pairs = zip(names, key, strict=True)
            label = "/".join(f"{n}={cell}" if has_number([cell]) else cell for n, cell in pairs)
        runs[label] = {
            name: [cells[row] for row in rows]
            for name, cells in columns.items()
            if name not in names
        }
    return runs


def group_rows(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the row indices of each distinct key in a list of one key per row."""
    rows: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


def choose_run_names(columns: Columns, axis: str) -> list[str]:
    """Return the columns that identify the run of each row, such as "fold" and "seed"."""
    if {"name", "version"} <= {*columns}:
        return ["name", "version"]
    names = [name for name in columns if name.lower() in RUN_NAMES]
    # Use the second and later columns only if they have a value in every row.
    names = [*names[:1], *(name for name in names[1:] if all(columns[name]))]

    def count_positions(count: int) -> int:
        return len({*zip(*(columns[name] for name in [axis, *names[:count]]), strict=True)})

    # Use no more columns than are needed to distinguish the rows of one epoch.
    return names[: max(range(1, len(names) + 1), key=count_positions, default=0)]


def count_fits(columns: Columns) -> list[tuple[str, ...]]:
    """Label each CSV row with the number of the fit call that wrote it."""
    positions = []
    is_complete = all(map(all, columns.values()))
    with suppress(ValueError):
        axes = [axis for axis in (find_axis(columns, "epoch"), find_axis(columns, "step")) if axis]
        rows = zip(*(columns[axis] for axis in axes), strict=True)
        positions = [tuple(map(float, row)) for row in rows]
    number = 1
    labels: list[tuple[str, ...]] = [("fit 1",)]
    for last, position in pairwise(positions):
        # Epoch numbers start over at a new call to fit, but not in a resumed run.
        is_back = all(now < before for now, before in zip(position, last, strict=True))
        number += is_back and position[0] == positions[0][0]
        labels.append((f"fit {number}",))
    return labels if number > 1 and is_complete else []


def name_columns(cells: list[str], has_rows: bool) -> list[str]:
    """Rename duplicate columns, for example a second "loss" column to "loss.1"."""
    if has_rows and all(has_number([cell]) for cell in cells):
        return [f"column {index}" for index in range(1, len(cells) + 1)]
    names: list[str] = []
    known: set[str] = set()
    for cell in cells:
        name = cell
        if cell and cell in known:
            count = sum(cell == other or other.startswith(f"{cell}.") for other in names)
            name = f"{cell}.{count}"
        names.append(name)
        known.add(name)
    return names


def split_exported(columns: Columns, exported: list[str], others: list[str]) -> dict[str, Columns]:
    """Split a W&B export with columns named "<run> - <metric>" into one table per run."""
    runs: dict[str, dict[str, str]] = {}
    for name in exported:
        run, _, metric = name.rpartition(" - ")
        base, _, number = metric.rpartition(".")
        if number.isdigit() and f"{run} - {base}" in columns:
            # If two runs have the same name, their columns were numbered, as in "<run> -
            # <metric>.1".
            run, metric = f"{run}.{number}", base
        # Skip the columns whose names end in __MIN or __MAX, which W&B adds for each metric.
        if not metric.endswith(("__MIN", "__MAX")):
            runs.setdefault(run, {})[metric] = name
    result: dict[str, Columns] = {}
    for run, metrics in runs.items():
        names = {name: name for name in others} | metrics
        cells = zip(*(columns[name] for name in metrics.values()), strict=True)
        rows = [row for row, values in enumerate(cells) if any(values)]
        result[run] = {new: [columns[name][row] for row in rows] for new, name in names.items()}
    return result
