"""Tables: one CSV file that only grows; its rows, its cells, and what is done when the disk refuses them."""

import csv
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files.disk import BINARY, NOT_A_LINK, clear_stale, fs, replace_file, write_all

FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four: full-width ones


class LogsError(ValueError):
    """Logs that cannot be written; the message is one line that says what to do. The rows are kept for the next try."""


class Table:
    r"""One CSV file that only grows: appended to row by row, replaced as a whole when a column is new.

    A new column costs one pass over the file's bytes: its cells are not taken apart. A row that the disk refuses is kept,
    and written with the next one or at the next `sync`. No file is held open: nothing to leak or to pickle, and an append
    costs some microseconds more.

    Example:
        >>> table = Table("demo.csv", ("epoch",))
        >>> table.append({"loss": 0.5, "epoch": 0})
        >>> Path("demo.csv").read_text()
        'epoch,loss\n0,0.5\n'
    """

    def __init__(self, path: str, first: tuple[str, ...]) -> None:
        self.path, self.first = path, first
        self.waiting: list[dict[str, str]] = []  # rows that are not on disk yet
        self._columns: list[str] = []
        self._num_rows, self._is_whole = 0, True
        self._is_known = False  # whether the file was looked at
        self._is_sure = True  # False: a write of ours has failed, and behind our rows anything may stand
        self._is_ours = False  # whether its bytes are the ones that we write, a row in each line
        self._stamp: tuple[int, ...] | None = None
        self._synced: tuple[int, ...] | None = None  # the stamp of what survives a power cut

    @property
    def num_rows(self) -> int:
        """The rows on disk and those that wait."""
        return self.position()["rows"] + len(self.waiting)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; it is on disk when this returns.

        Raises:
            LogsError: the disk refused it; it is kept.
            ValueError: a value that is more than one number.
        """
        self.waiting.append({cell_of(column): cell_of(number_of(column, value)) for column, value in row.items()})
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait, all of them or none."""
        if not self.waiting:
            return
        self._look_again()
        known, names = self._columns, set(self._columns)
        added = dict.fromkeys(column for row in self.waiting for column in row if column not in names)
        # a new column; or a power cut, a full disk, in mid-row: back to the last good one
        if added or not self._is_whole:
            rank = {column: i for i, column in enumerate(self.first)}
            columns = sorted([*known, *added], key=lambda column: rank.get(column, len(rank)))
            self._replace(columns, self._widened(known, columns) + to_lines(columns, self.waiting))
            self._num_rows += len(self.waiting)
            self.waiting = []
            return
        lines = to_lines(known, self.waiting)
        with writing(self.path):
            fd = fs.open(self.path, os.O_WRONLY | os.O_APPEND | NOT_A_LINK | BINARY)
            self._is_whole = self._is_sure = False  # some of it may be there, or all
            try:
                write_all(fd, lines)  # unbuffered: the rows leave us whole, in one call
            finally:
                fs.close(fd)
        self._num_rows += len(self.waiting)
        self.waiting, self._is_whole = [], True
        self._note_stamp()

    def position(self) -> dict[str, Any]:
        """Rows and columns on disk, and the rows that wait, if there are any: plain values for a checkpoint."""
        self._look_again()
        waiting = {"waiting": [dict(row) for row in self.waiting]} if self.waiting else {}
        return {"rows": self._num_rows, "columns": list(self._columns), **waiting}

    def _look_again(self) -> None:
        try:
            self._look()
        except LogsError:
            if not self._is_known:  # otherwise: as we have written it
                raise

    def _look(self) -> None:
        """Read the file where it is new to us, or changed by another hand."""
        with writing(self.path):
            stamp = self._stamp_now()
            if not self._is_sure or (stamp is not None and stamp == self._stamp):
                return
            if stamp is None:  # there is none
                self._know([], 0)
                return
            from .parsing import bytes_of, plain_table, read_table

            if (plain := plain_table(self.path)) is not None:
                self._is_ours, is_whole = True, True
                columns, _, number = plain
            else:
                columns, rows, is_whole = read_table(self.path)
                content, number = to_table(columns, rows), len(rows)
                self._is_ours = content.count(b"\n") == number + 1 and bytes_of(self.path) == content
            self._know(columns, number, is_whole)
            self._stamp = stamp

    def _know(self, columns: list[str], rows: int, is_whole: bool = True) -> None:
        self._columns, self._num_rows, self._is_whole = columns, rows, is_whole
        self._is_known, self._is_sure, self._stamp = True, True, None

    def rewind(
        self, rows: int = 0, columns: list[str] | None = None, waiting: list[dict[str, str]] | None = None
    ) -> None:
        """Back to what `position` gave: drop what was written since, write what waited then."""
        clear_stale(os.path.dirname(self.path) or ".", os.path.basename(self.path))  # what a kill left of a rewrite
        old, number, whole, cut = self._found(rows)
        if number < rows:
            warnings.warn(
                f"{self.path} has {number} rows, the checkpoint was saved after {rows}: "
                "the earlier rows are gone, the log goes on without them",
                stacklevel=4,
            )
        kept = [column for column in columns or [] if column in old]
        if not kept:
            with writing(self.path), suppress(FileNotFoundError):
                fs.unlink(self.path)
        elif kept != old or number > rows or not whole:
            self._replace(kept, cut(kept))
        self._know(kept, min(rows, number) if kept else 0)
        # made safe again: they come from a file
        self.waiting = [{cell_of(name): cell_of(cell) for name, cell in row.items()} for row in waiting or []]
        self.flush()

    def _found(self, most: int) -> tuple[list[str], int, bool, Callable[[list[str]], bytes]]:
        """The columns and rows that are there, whether that is all, and what makes a table of the first rows."""
        with writing(self.path):
            from .parsing import parsed, plain_table, read_table

            plain = plain_table(self.path)
            if plain is None:
                old, rows, whole = read_table(self.path)
                return old, len(rows), whole, lambda columns: to_table(columns, rows[:most])
        columns, data, number = plain

        def cut(kept: list[str]) -> bytes:
            first = data.rsplit(b"\n", max(number - most, 0) + 1)[0] + b"\n"
            return first if kept == columns else to_table(kept, parsed(first)[1])

        return columns, number, True, cut

    def sync(self) -> None:
        """Write what waits, and make the rows survive a power cut."""
        self.flush()
        if self._stamp is not None and self._stamp == self._synced:  # and what another hand does is that one's to sync
            return
        with writing(self.path), suppress(FileNotFoundError):
            fd = fs.open(self.path, os.O_RDWR | BINARY)
            try:
                fs.fsync(fd)
            finally:
                fs.close(fd)
            self._synced = self._stamp

    def _widened(self, known: list[str], columns: list[str]) -> bytes:
        """The file with these columns: an empty cell more in each line, where all new ones stand at the end."""
        with writing(self.path):
            if self._is_whole and self._is_ours and len(known) > 1 and columns[: len(known)] == known:
                _, _, lines = Path(self.path).read_bytes().partition(b"\n")
                return to_table(columns, []) + lines.replace(b"\n", b"," * (len(columns) - len(known)) + b"\n")
            rows: list[dict[str, str]] = []
            if self._num_rows:
                from .parsing import read_table

                rows = read_table(self.path)[1][: self._num_rows]
            return to_table(columns, rows)

    def _replace(self, columns: list[str], content: bytes) -> None:
        with writing(self.path):
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            self._is_whole = self._is_sure = False
            replace_file(self.path, content)
        self._columns, self._is_whole, self._is_ours, self._is_known = columns, True, True, True
        self._note_stamp()
        self._synced = self._stamp

    def _note_stamp(self) -> None:
        self._is_sure, self._stamp = True, None
        with suppress(OSError):  # it is read again, then
            self._stamp = self._stamp_now()

    def _stamp_now(self) -> tuple[int, ...] | None:
        with suppress(FileNotFoundError):
            found = os.stat(self.path)
            return found.st_ino, found.st_size, found.st_mtime_ns
        return None


def to_table(columns: list[str], rows: list[dict[str, str]]) -> bytes:
    """A whole file."""
    return to_lines(columns, [dict(zip(columns, columns, strict=True)), *rows]) if columns else b""


def to_lines(columns: list[str], rows: list[dict[str, str]]) -> bytes:
    """Rows as they stand in the file; a missing cell is empty."""
    text = "".join([",".join([row.get(column, "") for column in columns]) + "\n" for row in rows])
    cells = text.count(",") + text.count("\n")
    if len(columns) == 1 or '"' in text or "\r" in text or cells != len(columns) * len(rows):  # a cell has to be quoted
        file = io.StringIO(newline="")
        csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n").writerows(rows)
        text = file.getvalue()
    return text.encode("utf-8", "surrogateescape")


def number_of(name: str, value: Any) -> Any:
    """A tensor's or array's one number; other values as they are."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        shape = tuple(getattr(value, "shape", ()))
        raise ValueError(
            f"cannot log {name!r}: it has shape {shape}, a cell holds one number; log {name}.mean(), for example"
        ) from None


def cell_of(value: Any) -> str:
    """The text of one cell, on one line; what a spreadsheet would run as a formula gets an apostrophe before it.

    Example:
        >>> cell_of(0.1), cell_of(None), cell_of("=1+1"), cell_of("-0.5")
        ('0.1', '', "'=1+1", '-0.5')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return float.__repr__(value)  # the shortest text that reads back as the same number
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    text = str(value)
    if text.startswith(FORMULAS):
        try:
            float(text)
        except ValueError:
            text = "'" + text
    # One line per row, whatever was logged: so a torn row is found by its missing newline, and tail and grep work.
    return text.replace("\r", "\\r").replace("\n", "\\n").encode("utf-8", "backslashreplace").decode()


@contextmanager
def writing(path: str) -> Iterator[None]:
    """What the disk refuses inside becomes a LogsError that names the file."""
    try:
        yield
    except (OSError, MemoryError) as error:
        why = "there is not enough memory" if isinstance(error, MemoryError) else error.strerror or error
        raise LogsError(
            f"cannot write logs to {path!r}: {why}; "
            "choose a folder that can be written, e.g. CSVLogger(root_dir='/tmp/logs'), or logger=False to log nothing"
        ) from error
