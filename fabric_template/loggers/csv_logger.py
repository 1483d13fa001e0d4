"""Write a run's metrics.csv, steps.csv and hparams.yaml.

Unlike Fabric's CSVLogger, this CSVLogger appends to an existing metrics.csv and writes each row
immediately.
"""

from __future__ import annotations

import codecs
import csv
import errno
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from ..config import to_yaml_value
from ..files import claim_version, next_version, version_folder, write_file, write_yaml
from .read_logs import read_table

FILES = ("metrics.csv", "steps.csv")
Rows = Sequence[Mapping[str, Any]]


class CSVLogger(Logger):
    """Writes the rows of a run to CSV files.

    Args:
        root_dir: The folder of all runs.
        name: The name of the run, and of the folder in root_dir that contains its versions.
        version: The number or name of the version. If None, use the next free number.
        checkpoint_dir: The folder of the run's checkpoints. If given, an automatically chosen
            version number must be free in both folders.

    Example:
        >>> from tempfile import mkdtemp
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> print(Path(logger.log_dir, "metrics.csv").read_text(), end="")
        epoch,step,val_loss
        0,10,0.5
    """

    # Lightning's Logger defines these names as read-only properties. Replace the properties with
    # attributes, so that __init__ can set them.
    name: str = ""
    root_dir: str = ""
    save_dir: str = ""

    def __init__(
        self,
        root_dir: str | os.PathLike[str] = "logs",
        name: str | None = "run",
        version: int | str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.root_dir = self.save_dir = os.fspath(root_dir)
        self.name, self._version = name or "", version
        self._checkpoint_dir = checkpoint_dir
        self._tables: dict[str, Table] = {}
        self._hparams: dict[str, Any] = {}

    @property
    def version(self) -> int | str:
        """The run's version, by default the next free number."""
        if self._version is None:
            folders = [Path(self.root_dir, self.name)]
            if self._checkpoint_dir is not None:
                folders.append(Path(self._checkpoint_dir))
            self._version = (claim_version if is_first_process() else next_version)(*folders)
        return self._version

    def use_version(self, version: int | str) -> None:
        """Switch to the folder of ``version``, and keep the hyperparameters logged so far."""
        if version != self._version:
            self._version, self._tables = version, {}

    def start_new_version(self) -> None:
        """Use a new version folder for the next run."""
        self._version, self._tables, self._hparams = None, {}, {}

    @property
    def log_dir(self) -> str:
        return os.path.join(self.root_dir, self.name, version_folder(self.version))

    @property
    def experiment(self) -> CSVLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The CSV logger has no attribute {name!r}, because this logger only writes CSV files."
            " For images and graphs, write logger=TensorBoardLogger('logs')."
        )

    @rank_zero_only
    def log_epoch(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.csv."""
        if row:
            self._table("metrics.csv").append(row)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row to steps.csv.

        Args:
            step: The number in the "step" column. If None, use metrics["step"]. If metrics contains
                no step, use the number of rows so far.
        """
        if metrics:
            table = self._table("steps.csv")
            row = {"step": table.num_rows, **metrics}
            table.append(row if step is None else row | {"step": step})

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Add hyperparameters to hparams.yaml."""
        for hparams in (params or {}, *args):
            self._hparams.update(to_yaml_value(hparams))
        write_yaml(Path(self.log_dir, "hparams.yaml"), self._hparams)

    def position(self) -> dict[str, Any]:
        """Return the columns, the row count, the last row and the unwritten rows of each file."""
        return {n: self._table(n).position() for n in FILES} if is_first_process() else {}

    def rewind(
        self, position: Mapping[str, Any], folder: Path | None = None, step: int = 0
    ) -> list[dict[str, str]]:
        """Drop the rows written after a checkpoint, and return the remaining rows of metrics.csv.

        Args:
            position: The dict that `position()` returned for the checkpoint. If empty, drop all
                rows.
            folder: The log folder to read the rows from. If None, read the run's own log folder.
            step: The optimizer step at which the checkpoint was saved.
        """
        self._tables = {}
        rows: dict[str, list[dict[str, str]]] = {}
        for name in FILES:
            source = Path(folder or self.log_dir, name)
            file_position = position.get(name, {"rows": 0, "columns": []})
            table = read_table(source, file_position.get("last"))
            rows[name], is_edited = rows_before(table.rows, file_position, step)
            if not is_first_process():
                continue
            columns = file_position["columns"]
            if is_edited:
                columns = list(dict.fromkeys([*columns, *table.columns]))
            if position and (is_edited or table.damaged):
                keep_copy(source, table.damaged)
            self._table(name).replace(columns if rows[name] else [], rows[name])
        return rows["metrics.csv"]

    @rank_zero_only
    def sync(self) -> None:
        """Write the rows that are still in memory, and flush the files to disk."""
        for table in self._tables.values():
            table.sync()

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            self._tables[name] = Table(Path(os.path.abspath(self.log_dir), name))
        return self._tables[name]


class Table:
    """Appends rows to a CSV file.

    If a row has a new column, the whole file is rewritten atomically. If writing fails, for example
    because the disk is full, the row stays in memory until the next call to ``append``.

    Attributes:
        num_rows, columns: The number of rows and the columns in the file.
        waiting: The rows in memory that are not in the file yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[dict[str, Any]] = []
        self._is_synced = True
        self._set_content([], [], 0)
        # If the file cannot be read now, start training anyway, because write_waiting() reads the
        # file again before it writes.
        with suppress(OSError):
            self._read()

    def position(self) -> dict[str, Any]:
        """Return the columns, row count and last row to store in a checkpoint.

        If rows could not be written, also return these rows and the last row in the file.
        """
        last = self.waiting[-1] if self.waiting else self._last
        position = {
            "rows": self.num_rows + len(self.waiting),
            "columns": self.all_columns,
            "last": None if last is None else cells_of(last),
        }
        if self.waiting:
            position["waiting"] = [cells_of(row) for row in self.waiting]
            position["last_written"] = None if self._last is None else cells_of(self._last)
        return position

    @property
    def all_columns(self) -> list[str]:
        waiting = [name for row in self.waiting for name in row]
        return list(dict.fromkeys([*self.columns, *waiting]))

    def _read(self) -> None:
        """Read the columns and the number of rows, and remove an incomplete last row."""
        size = file_size(self.path)
        table = read_table(self.path, None if self._last is None else cells_of(self._last))
        self._set_content(table.columns, table.rows, size)
        if not table.is_complete:
            self.replace(table.columns, table.rows)

    def _set_content(self, columns: list[str], rows: Rows, size: int) -> None:
        self.columns, self.num_rows, self._size = columns, len(rows), size
        self._last = rows[-1] if rows else None

    def append(self, row: Mapping[str, Any]) -> None:
        self.waiting.append({name: to_cell(name, value) for name, value in row.items()})
        try:
            self.write_waiting()
        except OSError as error:
            if len(self.waiting) == 1:
                warnings.warn(
                    f"{self.path}: rows could not be written: {error.strerror}. Training continues."
                    " The logger will try to write these rows again together with the next row.",
                    stacklevel=2,
                )

    def write_waiting(self) -> None:
        """Append the rows in ``waiting`` to the file.

        Raises:
            OSError: Writing failed. The file is unchanged, and the rows stay in ``waiting``.
        """
        if not self.waiting:
            return
        # Another program may have changed the file, or saved it with semicolons between the cells.
        is_unchanged = file_size(self.path) == self._size and self._can_append()
        if not is_unchanged:
            self._read()
        columns = self.all_columns
        if columns != self.columns or not (is_unchanged or self._can_append()):
            # Rewrite the file, with empty cells for the new column in earlier rows.
            table = read_table(self.path, None if self._last is None else cells_of(self._last))
            if table.damaged:
                keep_copy(self.path, table.damaged)
            self.replace(columns, [*table.rows, *self.waiting])
        else:
            content = to_lines(columns, self.waiting)
            # Do not buffer the file, because closing a buffered file would retry a failed write.
            with self.path.open("ab", buffering=0) as file:
                if file.write(content) < len(content):
                    # Remove a partly written row, because it might look like a complete row.
                    os.truncate(self.path, self._size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(content)
            self.num_rows += len(self.waiting)
            self._last, self._is_synced = self.waiting[-1], False
        self.waiting = []

    def _can_append(self) -> bool:
        """Return whether the file has this table's header and a complete last line."""
        if self._size == 0:
            return True
        header = to_header(self.columns)
        with self.path.open("rb") as file:
            start = file.read(len(header) + 4).removeprefix(codecs.BOM_UTF8)
            file.seek(-1, os.SEEK_END)
            is_line_end = file.read() == b"\n"
        return is_line_end and start.replace(b"\r\n", b"\n").startswith(header)

    def replace(self, columns: list[str], rows: Rows) -> None:
        """Replace the content of the CSV file, or delete the file if ``columns`` is empty."""
        content = to_header(columns) + to_lines(columns, rows)
        if not content:
            self.path.unlink(missing_ok=True)
        elif not self.path.exists() or self.path.read_bytes() != content:
            write_file(self.path, content)
        self._set_content(columns, rows, len(content))

    def sync(self) -> None:
        """Append the waiting rows to the file, and flush the file to disk."""
        self.write_waiting()
        if not self._is_synced:
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())
            self._is_synced = True


def to_header(columns: list[str]) -> bytes:
    return to_lines(columns, [dict(zip(columns, columns, strict=True))]) if columns else b""


def is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0


def file_size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def to_cell(name: str, value: Any) -> Any:
    """Convert a scalar tensor or array to a number, and return any other value unchanged."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        shape = tuple(getattr(value, "shape", ()))
        raise ValueError(
            f"log {name!r}: got a tensor of shape {shape}, expected one number. Log {name}.mean()."
        ) from None


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the non-empty cells of a row as strings, keyed by column name."""
    return {name: str(value) for name, value in row.items() if value is not None and value != ""}


def rows_before(
    rows: list[dict[str, str]], position: Mapping[str, Any], step: int
) -> tuple[list[dict[str, str]], bool]:
    """Return CSV rows written before a checkpoint, and whether a user edited the CSV file.

    Args:
        position: The number of rows at the time of the checkpoint and, if known, the last row. If
            the disk was full, "waiting" contains the rows that the file may lack.
        step: The optimizer step at which the checkpoint was saved.
    """
    count, last = position["rows"], position.get("last")
    if count == 0:
        return [], False
    if count <= len(rows) and last in (None, cells_of(rows[count - 1])):
        return rows[:count], False
    for index in range(len(rows), 0, -1):
        if cells_of(rows[index - 1]) == last:
            # If a user has sorted the file, earlier rows may follow the checkpoint's last row. Keep
            # them.
            return rows[:index] + [r for r in rows[index:] if is_earlier(r, rows[index - 1])], True
    if position.get("waiting"):
        num_written = count - len(position["waiting"])
        return rows[:num_written] + position["waiting"], len(rows) < num_written
    return [row for row in rows if is_before(row, step)], True


def is_before(row: Mapping[str, str], step: int) -> bool:
    """Return whether the "step" cell of a CSV row is empty or at most ``step``."""
    try:
        return float(row.get("step", "")) <= step
    except ValueError:
        return True


def is_earlier(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether the "step" cell of a CSV row contains a smaller number than another row's."""
    try:
        return float(row["step"]) < float(other["step"])
    except (KeyError, ValueError):
        return False


def keep_copy(path: Path, damaged: Sequence[int]) -> None:
    """Back up a CSV file that another program has changed, before the file is rewritten."""
    if not path.exists():
        text = "the rows from before the checkpoint are missing. The run continues without them."
        warnings.warn(f"{path}: {text}", stacklevel=2)
        return
    target = copy_changed(path)
    lines = f" in lines {', '.join(map(str, damaged[:5]))}" if damaged else ""
    warnings.warn(
        f"{path}: another program changed this file{lines}. The changed file was copied to"
        f" {target.name}. The run restores its own rows and continues.",
        stacklevel=2,
    )


def copy_changed(path: Path) -> Path:
    """Copy a CSV file to a new file in the same folder, and return the path of the copy."""
    target, number = path.with_name(f"{path.name}.changed"), 1
    while target.exists():
        target, number = path.with_name(f"{path.name}.changed-{number}"), number + 1
    with suppress(OSError):
        write_file(target, path.read_bytes())
    return target


def to_lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Format rows as lines of a CSV file, with empty cells for missing values."""
    lines: list[str] = []
    file: Any = SimpleNamespace(write=lines.append)
    csv.DictWriter(file, columns, extrasaction="ignore").writerows(rows)
    # Before Python 3.13, the csv module quotes a cell that contains \r only if the line terminator
    # also contains \r. Therefore, write its default terminator, and shorten it here.
    text = "".join(line.removesuffix("\r\n") + "\n" for line in lines)
    return text.encode("utf-8", "backslashreplace")
