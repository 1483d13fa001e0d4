"""Parsing: the bytes of a CSV file as rows of cells, and a cell as the value that was logged."""

import csv
import errno
import io
import os
from contextlib import suppress
from typing import Any

# The files of a run and their first columns.
FILES = {"metrics.csv": ("epoch", "step"), "steps.csv": ("step", "epoch")}
_END = "\0end"  # read behind the last row; no cell of ours, and not seen if a quote was left open
_CELLS = bytes(sorted({*range(256)} - {*b",\n"}))  # all bytes but those between cells


def read_table(path: str | os.PathLike) -> tuple[list[str], list[dict[str, str]], bool]:
    """The header, the whole rows, and whether that was everything: a line counts once its newline is there."""
    return parsed(bytes_of(path))


def bytes_of(path: str | os.PathLike) -> bytes:
    """A whole file; of one that is not there nothing."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        data = file.read()
        if len(data) < os.fstat(file.fileno()).st_size:
            raise OSError(errno.EIO, "the file ended before its size")
        return data
    return b""


def plain_table(path: str) -> tuple[list[str], bytes, int] | None:
    """Columns, bytes and number of rows of a file with the bytes that we write, a row in each line; no cell is taken apart.

    None: it has to be looked at cell by cell, for its quotes or another number of cells.
    """
    data = bytes_of(path)
    head, end, _ = data.partition(b"\n")
    columns = head.decode("utf-8", "surrogateescape").split(",")
    odd = any(mark in data for mark in (b'"', b"\r", b"\0", "\ufeff".encode()))
    if odd or not data.endswith(b"\n") or not 1 < len(columns) == len(set(columns)):
        return None
    line, marks, lines = b"," * (len(columns) - 1) + b"\n", data.translate(None, _CELLS), data.count(b"\n")
    is_plain = len(marks) == len(line) * lines and marks == line * lines  # else that may be any amount of memory
    return (columns, data, lines - 1) if is_plain else None


def parsed(data: bytes) -> tuple[list[str], list[dict[str, str]], bool]:
    """The same of a file's bytes."""
    whole = data[: data.rfind(b"\n") + 1]
    text = io.TextIOWrapper(io.BytesIO(whole + _END.encode()), "utf-8-sig", "surrogateescape", newline="")
    limit = csv.field_size_limit(len(data) + len(_END))  # a long text was logged: no reason not to read it
    try:
        # another program's cell with a \r in it would not be quoted again when it is written
        head, *cells = [[cell.replace("\r", "\\r") for cell in row] for row in csv.reader(text) if row]
    finally:
        csv.field_size_limit(limit)
    if head == [_END]:
        return [], [], len(whole) == len(data)
    closed = bool(cells) and cells.pop() == [_END]  # otherwise a quote is open, and has swallowed all that follows it
    torn = not closed or (bool(cells) and len(cells[-1]) != len(head))
    columns = [column.lstrip("\ufeff") for column in head]
    rows = [dict(zip(columns, row, strict=False)) for row in (cells[:-1] if torn and closed else cells)]
    return columns, rows, not torn and len(whole) == len(data)


def value_of(cell: str) -> Any:
    """What was logged, of the text of its cell: the very number, True, False, or text.

    Example:
        >>> value_of("0.1"), value_of("3"), value_of("True"), value_of("nan")
        (0.1, 3, True, nan)
    """
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return {"True": True, "False": False}.get(cell, cell)
