"""Write metrics.csv with one complete row per epoch, steps.csv and hparams.yaml.

Fabric's CSVLogger empties a version that it opens, and keeps up to 100 rows in memory. This one appends,
and each row is in its file when it was logged.
"""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

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
            claim = claim_version if rank_zero_only.rank == 0 else next_version
            self._version = claim(folder, *others)
        return self._version

    @version.setter
    def version(self, version: int | str) -> None:
        self._version, self._tables = version, {}

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
            step = metrics.get("step", table.num_rows) if step is None else step
            table.append({**metrics, "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Write hparams.yaml. Later calls add to earlier ones."""
        for given in (params or {}, *args):
            values = to_plain(given)
            if not isinstance(values, dict):
                raise TypeError(f"log_hyperparams: got a {type(given).__name__}, expected a dict or a Namespace.")
            self._hparams.update(values)
        write_text(Path(self.log_dir, "hparams.yaml"), to_yaml(self._hparams))

    def position(self) -> dict[str, dict[str, Any]]:
        """Return the rows and columns of each file, for a checkpoint."""
        if rank_zero_only.rank != 0:
            return {}
        tables = {name: self._table(name) for name in FILES}
        return {name: table.position() for name, table in tables.items()}

    @rank_zero_only
    def rewind(self, position: Mapping[str, Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> None:
        """Drop the rows and columns that were written after a position.

        Args:
            rows: The rows of metrics.csv, which are written again where the files are those of a new version.
        """
        for name in FILES:
            place = position.get(name, {"rows": 0, "columns": [], "waiting": []})
            self._table(name).rewind(place["rows"], list(place["columns"]), place["waiting"])
        metrics = self._table("metrics.csv")
        for row in rows if metrics.num_rows == 0 else ():
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
        self.columns: dict[str, None] = {}
        self.num_rows = 0
        self._waiting: list[Mapping[str, Any]] = []
        if path.exists():
            self._load()

    def _load(self) -> None:
        """Read the header and count the rows. A last row without line end was torn, and is dropped."""
        text = self.path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]
            write_text(self.path, text)
        rows = list(csv.reader(io.StringIO(text)))
        self.columns = dict.fromkeys(rows[0]) if rows else {}
        self.num_rows = max(0, len(rows) - 1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row. It waits in memory where the disk refuses it, and is written with the next one."""
        self._waiting.append(dict(row))
        self.num_rows += 1
        try:
            self._write()
        except OSError as error:
            if len(self._waiting) == 1:
                warnings.warn(
                    f"{self.path}: rows could not be written: {error.strerror}. They are written as soon as"
                    " that is possible, and training continues.",
                    stacklevel=2,
                )

    def _write(self) -> None:
        waiting = self._waiting
        if any(name not in self.columns for row in waiting for name in row):
            self._widen(waiting)
        lines = "".join(self._line(row) for row in waiting)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            size = file.tell()
            try:
                file.write(lines)
                file.flush()
            except OSError:
                # A row that was written in part would be read as a whole one.
                os.truncate(self.path, size)
                raise
        self._waiting = []

    def _widen(self, rows: list[Mapping[str, Any]]) -> None:
        """Rewrite the file with the new columns. Their cells are empty in earlier rows."""
        known = [*self.columns, *(name for row in rows for name in row)]
        ordered = [name for name in self._first_columns if name in known] if not self.columns else []
        columns = dict.fromkeys([*ordered, *known])
        old = self._read_rows()
        writer_text = _csv_line(columns)
        writer_text += "".join(_csv_line([*r, *[""] * (len(columns) - len(r))]) for r in old)
        write_text(self.path, writer_text)
        self.columns = columns

    def _read_rows(self) -> list[list[str]]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))[1:]

    def _line(self, row: Mapping[str, Any]) -> str:
        return _csv_line(row.get(name, "") for name in self.columns)

    def position(self) -> dict[str, Any]:
        """Return the rows and columns of the file, and the rows that the disk has refused so far."""
        rows = self.num_rows - len(self._waiting)
        return {"rows": rows, "columns": list(self.columns), "waiting": list(self._waiting)}

    def rewind(self, rows: int, columns: list[str], waiting: list[Mapping[str, Any]]) -> None:
        """Keep the first rows and columns only, and write those that were waiting."""
        self._waiting = []
        if rows != self.num_rows or columns != list(self.columns):
            kept = [row[: len(columns)] for row in self._read_rows()[:rows]]
            self.columns, self.num_rows = dict.fromkeys(columns), len(kept)
            if columns or self.path.exists():
                text = _csv_line(columns) if columns else ""
                write_text(self.path, text + "".join(map(_csv_line, kept)))
        for row in waiting:
            self.append(row)

    def sync(self) -> None:
        """Write what waits, and flush the file to the disk."""
        if self._waiting:
            self._write()
        if self.path.exists():
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())


def _csv_line(values: Any) -> str:
    buffer = io.StringIO()
    cells = ["" if value is None else value for value in values]
    csv.writer(buffer, lineterminator="\n").writerow(cells)
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


def write_text(path: Path, text: str) -> None:
    """Write a file beside its target and rename it, so that it is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(temporary, path)


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
