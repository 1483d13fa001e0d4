"""Write metrics.csv with one complete row per epoch, steps.csv and hparams.yaml.

Fabric's CSVLogger empties a version that it opens, and keeps up to 100 rows in memory. This one appends,
and each row is in its file when it was logged.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from ..checkpoint.checkpoint_io import replaced_file
from ..errors import ConfigurationError
from .read_logs import read_table

# Types that YAML has, besides lists and mappings.
PLAIN_TYPES = (type(None), bool, int, float, str, Path)
# The files of a run, with the columns that come first.
FILES = {"metrics.csv": ("epoch", "step"), "steps.csv": ("step", "epoch")}


class CSVLogger(Logger):
    """Writes the rows of a run into CSV files.

    Args:
        root_dir: The folder of all runs.
        name: The name of the run, a folder in root_dir.
        version: A number or a name. None: the next free number.
        checkpoint_dir: The folder of the run's checkpoints, whose versions count as taken, too.

    Example:
        >>> from tempfile import mkdtemp
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> print(Path(logger.log_dir, "metrics.csv").read_text(), end="")
        epoch,step,val_loss
        0,10,0.5
    """

    def __init__(
        self,
        root_dir: str | os.PathLike = "logs",
        name: str | None = "run",
        version: int | str | None = None,
        checkpoint_dir: str | os.PathLike | None = None,
    ) -> None:
        super().__init__()
        self._root_dir = os.fspath(root_dir)
        if "://" in self._root_dir:
            raise ValueError(
                f"root_dir: got {self._root_dir!r}, expected a local folder. Use"
                " lightning.pytorch.loggers.CSVLogger for remote storage."
            )
        self._name, self._version = name or "", version
        self._checkpoint_dir = checkpoint_dir
        self._tables: dict[str, Table] = {}
        self._hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        """The version, which is chosen when it is first asked for."""
        if self._version is None:
            folder = Path(self._root_dir, self._name)
            others = [] if self._checkpoint_dir is None else [Path(self._checkpoint_dir)]
            claim = claim_version if is_first_process() else next_version
            self._version = claim(folder, *others)
        return self._version

    @version.setter
    def version(self, version: int | str | None) -> None:
        if version == self._version:
            return
        self._version, self._tables = version, {}
        # What was logged before the run belongs to the version that the run chooses.
        if version is None:
            self._hparams = {}

    @property
    def root_dir(self) -> str:
        return self._root_dir

    @property
    def save_dir(self) -> str:
        return self._root_dir

    @property
    def log_dir(self) -> str:
        version = self.version
        folder = f"version_{version}" if isinstance(version, int) else version
        return os.path.join(self._root_dir, self._name, folder)

    @property
    def experiment(self) -> CSVLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The CSV logger has no attribute {name!r}: it writes metrics.csv and steps.csv. For images and"
            " graphs write logger=TensorBoardLogger('logs')."
        )

    @rank_zero_only
    def log_epoch(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.csv."""
        if row:
            self._table("metrics.csv").append(row)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row to steps.csv. Without a step, rows are counted."""
        if metrics:
            table = self._table("steps.csv")
            if step is None:
                step = metrics["step"] if "step" in metrics else table.count_rows()
            table.append({**metrics, "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Write hparams.yaml. Later calls add to earlier ones."""
        for given in (params or {}, *args):
            values = to_plain(given)
            if not isinstance(values, dict):
                raise TypeError(
                    f"log_hyperparams: got a {type(given).__name__}, expected a dict or a Namespace."
                )
            self._hparams.update(values)
        write_text(Path(self.log_dir, "hparams.yaml"), to_yaml(self._hparams))

    def position(self) -> dict[str, dict[str, Any]]:
        """Return the rows and columns of each file, for a checkpoint."""
        if not is_first_process():
            return {}
        tables = {name: self._table(name) for name in FILES}
        return {name: table.position() for name, table in tables.items()}

    @rank_zero_only
    def rewind(
        self, position: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Drop the rows and columns that were written after a position.

        Args:
            position: What `position` returned. Empty: drop everything.
            rows: The rows of metrics.csv up to there. Those that the file lacks are written again.
                Files of another run are renamed.
        """
        metrics = self._table("metrics.csv")
        is_other_run = not metrics.agrees_with(rows)
        for name in FILES:
            place = position.get(name, {"rows": 0, "columns": [], "waiting": []})
            if is_other_run:
                self._table(name).set_aside()
            self._table(name).rewind(place["rows"], list(place["columns"]), place["waiting"])
        for row in rows[metrics.count_rows() :]:
            metrics.append(row)

    @rank_zero_only
    def sync(self) -> None:
        """Write the rows that the disk refused, and make all of them survive a power cut."""
        for table in self._tables.values():
            table.sync()

    @rank_zero_only
    def save(self) -> None:
        """Do nothing, because every row is written when it is logged."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with suppress(OSError):
            self.sync()

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            path = Path(os.path.abspath(self.log_dir), name)
            self._tables[name] = Table(path, FILES[name])
        return self._tables[name]


class Table:
    """A CSV file that is appended to. A new column rewrites it, through a file beside it.

    Args:
        path: The file. Its rows are read if it exists.
        first_columns: The columns that come first.
    """

    def __init__(self, path: Path, first_columns: tuple[str, ...]) -> None:
        self.path, self._first_columns = path, first_columns
        self._columns: list[str] = []
        self._num_rows = 0
        self._waiting: list[dict[str, Any]] = []
        self._stamp: tuple[int, int] | None = None
        self._synced_stamp: tuple[int, int] | None = None

    def count_rows(self) -> int:
        """Return the rows in the file and those that wait for the disk.

        Raises:
            OSError: The file cannot be read.
        """
        self._read_changes()
        return self._num_rows + len(self._waiting)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row. It waits in memory where the disk refuses it, and is written with the next one."""
        self._waiting.append({name: to_cell(name, value) for name, value in row.items()})
        try:
            self.write_waiting()
        except OSError as error:
            if len(self._waiting) == 1:
                warnings.warn(
                    f"{self.path}: rows could not be written: {error.strerror}. They are written as soon as"
                    " that is possible, and training continues.",
                    stacklevel=2,
                )

    def write_waiting(self) -> None:
        """Write the rows that wait, all of them or none."""
        if not self._waiting:
            return
        self._read_changes()
        names = dict.fromkeys(name for row in self._waiting for name in row)
        if set(names) <= set(self._columns):
            self._append_lines(to_lines(self._columns, self._waiting))
        else:
            # New columns. Their cells are empty in earlier rows.
            rows = read_table(self.path)[1] if self._num_rows else []
            columns = list(dict.fromkeys([*self._columns, *names]))
            if not self._columns:
                columns.sort(key=self._place_of)
            self._rewrite(columns, [*rows, *self._waiting])
        self._num_rows += len(self._waiting)
        self._waiting = []

    def _place_of(self, name: str) -> int:
        first = self._first_columns
        return first.index(name) if name in first else len(first)

    def _append_lines(self, lines: str) -> None:
        content = lines.encode("utf-8", "backslashreplace")
        # A buffer would write again what the disk refused, when the file is closed.
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # A row that was written in part would be read as a whole one.
                os.truncate(self.path, size)
                raise
        self._note_stamp()

    def _rewrite(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        write_text(self.path, to_lines(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        self._columns = columns
        self._note_stamp()

    def _note_stamp(self) -> None:
        """Note that the file is as this object wrote it. Where the disk does not tell, it is read again."""
        self._stamp = (-1, -1)
        with suppress(OSError):
            self._stamp = self._current_stamp()

    def _current_stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns

    def _read_changes(self) -> None:
        """Read the file if it is new here, or if another program has changed it."""
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        columns, rows, is_complete = read_table(self.path) if stamp is not None else ([], [], True)
        self._columns, self._num_rows, self._stamp = columns, len(rows), stamp
        if not is_complete and columns:
            # A last row that was not finished is dropped.
            self._rewrite(columns, rows)

    def position(self) -> dict[str, Any]:
        """Return the rows and columns of the file, and the rows that the disk has refused so far."""
        with suppress(OSError):
            self._read_changes()
        return {
            "rows": self._num_rows,
            "columns": list(self._columns),
            "waiting": list(self._waiting),
        }

    def rewind(self, rows: int, columns: list[str], waiting: list[dict[str, Any]]) -> None:
        """Keep the first rows and columns only, and write those that were waiting."""
        self._read_changes()
        self._waiting = list(waiting)
        if not columns and self.path.exists():
            self.path.unlink()
        elif rows < self._num_rows or (self._num_rows and columns != self._columns):
            kept = [name for name in columns if name in self._columns]
            self._rewrite(kept, read_table(self.path)[1][:rows])
            self._num_rows = min(rows, self._num_rows)
        self.write_waiting()

    def agrees_with(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the file and these rows are equal up to the end of the shorter one."""
        found = read_table(self.path)[1] if self.path.exists() else []
        for old, row in zip(found, rows, strict=False):
            cells = {name: str(to_cell(name, value)) for name, value in row.items()}
            if any(old.get(name, "") != cell for name, cell in cells.items()):
                return False
        return True

    def set_aside(self) -> None:
        """Rename a file of another run."""
        if self.path.exists():
            os.replace(self.path, self.path.with_name(f"{self.path.name}.before"))

    def sync(self) -> None:
        """Write what waits, and flush the file to the disk."""
        self.write_waiting()
        if self._stamp is not None and self._stamp != self._synced_stamp:
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())
            self._synced_stamp = self._stamp


def is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0


def to_cell(name: str, value: Any) -> Any:
    """Return the number of a scalar, tensor or array; of anything else the text."""
    if not hasattr(value, "item"):
        return (
            value if isinstance(value, bool | int | float) else "" if value is None else str(value)
        )
    try:
        return value.item()
    except (RuntimeError, ValueError):
        shape = tuple(getattr(value, "shape", ()))
        raise ValueError(
            f"log {name!r}: got a tensor of shape {shape}, expected one number. Log {name}.mean()."
        ) from None


def to_lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as the lines of a CSV file. A missing cell is empty."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return buffer.getvalue()


def next_version(*folders: Path) -> int:
    """Return the number after the highest version in some folders."""
    paths = [path for folder in folders for path in folder.glob("version_*")]
    found = [re.fullmatch(r"version_(\d+)", path.name) for path in paths]
    return max((int(match[1]) for match in found if match), default=-1) + 1


def claim_version(folder: Path, *others: Path) -> int:
    """Create the folder of the next version. Runs that start at once get different numbers."""
    version = next_version(folder, *others)
    while True:
        try:
            Path(folder, f"version_{version}").mkdir(parents=True)
            return version
        except FileExistsError:
            version += 1
        except OSError as error:
            raise ConfigurationError(
                f"default_root_dir: got {str(folder)!r} for a run, expected a folder that can be written"
                f" ({error.strerror}). Give another one, or logger=False and enable_checkpointing=False."
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is never half written."""
    with replaced_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def to_yaml(values: dict[str, Any]) -> str:
    """Return plain values as YAML."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)


def to_plain(value: Any) -> Any:
    """Return a value as YAML can hold it; objects become their text.

    Example:
        >>> to_plain({"path": Path("logs"), "lr": 0.1})
        {'path': 'logs', 'lr': 0.1}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping | Namespace):
        items = (value if isinstance(value, Mapping) else vars(value)).items()
        return {key if isinstance(key, int) else str(key): to_plain(item) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_plain(value.item())
    # An address in a text would differ between two runs.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))
