"""Runs: all that lie below a folder, how each stands and what came of it; two compared; the best."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import LoopConfig
from ..record.parsing import read_table
from .columns import NOT_METRICS, Column
from .journal import Journal, read_journal
from .words import words_of

if TYPE_CHECKING:
    import pandas as pd

FILES = ("metrics.csv", "hparams.yaml", ".lock")  # by which a run's folder is known
COLUMNS = (
    "name", "version", "state", "epochs", "metric", "best", "best_epoch", "seconds", "resumed_from", "changed", "folder",
)  # fmt: skip
# words that are another's for each run, or say nothing of it
_PLACE = ("name", "version", "default_root_dir", "resume", "enable_progress_bar", "enable_model_summary")


@dataclass
class Listed:
    """One run, as its files tell it."""

    name: str
    version: int | str
    folder: Path
    journal: Journal
    words: dict[str, Any]
    rows: list[dict[str, str]]
    damage: str = ""
    changed: dict[str, Any] = field(default_factory=dict)
    metric: str = ""  # by which it is judged
    _columns: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and version, as their folders are called."""
        return f"{self.name}/{self.version if isinstance(self.version, str) else f'version_{self.version}'}"

    @property
    def state(self) -> str:
        """Say how it stands: running, damaged, finished, failed or interrupted; unknown where its files do not tell."""
        if self.journal.is_running:
            return "running"
        if self.damage:
            return "damaged"
        if self.journal.end == "finished" or self._is_complete():
            return "finished"
        return self.journal.end or ("interrupted" if self.journal.is_there else "unknown")  # a kill leaves no word

    def _is_complete(self) -> bool:
        limits = {word: self.words.get(word) for word in ("max_epochs", "max_steps")}
        done = {"max_epochs": self.epochs, "max_steps": max(self.values("step"), default=0)}
        return any(type(limit) is int and 0 < limit <= done[word] for word, limit in limits.items())

    @property
    def epochs(self) -> int:
        """How many are over."""
        return max((int(value) + 1 for value in self.values("epoch")), default=0)

    @property
    def seconds(self) -> float:
        """How long it has trained."""
        return sum(self.values("time"))

    @property
    def metrics(self) -> list[str]:
        """The columns that are numbers of this run."""
        first = {name: cell for row in reversed(self.rows) for name, cell in row.items() if cell}
        return [name for name, cell in first.items() if name not in NOT_METRICS and _number(cell) is not None]

    def column(self, name: str) -> list[float | None]:
        """A number for each row; None where there is none, as in a cell that is empty or NaN."""
        if name not in self._columns:
            self._columns[name] = [_number(row.get(name)) for row in self.rows]
        return self._columns[name]

    def values(self, name: str) -> list[float]:
        """A column's numbers."""
        return [value for value in self.column(name) if value is not None]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Epoch and number (where no epoch is known, the row)."""
        points = enumerate(zip(self.column("epoch"), self.column(name), strict=True))
        return [(row if epoch is None else int(epoch), value) for row, (epoch, value) in points if value is not None]

    def best(self, name: str) -> tuple[float, int] | None:
        """The best number of a metric, and its epoch."""
        low = Column.of(name).low_is_good
        if name == self.words.get("monitor"):
            low = self.words.get("mode", "min") == "min"
        points = self.curve(name)
        epoch, value = (min if low else max)(points, key=lambda point: point[1]) if points else (0, math.nan)
        return (value, epoch) if points else None

    def as_dict(self, metric: str | None = None) -> dict[str, Any]:
        """All of it in plain values."""
        metric = metric or self.metric
        best = self.best(metric) if metric else None
        return {
            "name": self.name, "version": self.version, "state": self.state, "epochs": self.epochs, "metric": metric or None,
            "best": best[0] if best else None, "best_epoch": best[1] if best else None, "seconds": self.seconds,
            "resumed_from": self.journal.resumed[-1][1] if self.journal.resumed else None, "changed": self.changed,
            "folder": str(self.folder),
        }  # fmt: skip


def list_runs(folder: str | os.PathLike = "logs", metric: str | None = None) -> pd.DataFrame:
    """List all runs below a folder, one row each.

    ``state`` is running, finished, interrupted (killed, too), failed, damaged (``last.ckpt`` or ``metrics.csv``), or unknown
    where nothing tells. ``changed`` holds the words of the configuration in which a run differs from the others of its name;
    of a run that is alone those that are not the loop's defaults.

    Args:
        folder: the root of all logs, or a part of it.
        metric: by what a run is judged; None: its monitor, otherwise what was validated.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fabric_template import CSVLogger
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> list_runs(logger.root_dir)[["name", "version", "state", "epochs", "metric", "best"]]
             name  version    state  epochs    metric  best
        0  digits        0  unknown       1  val_loss   0.5
    """
    import pandas as pd

    return pd.DataFrame([run.as_dict(metric) for run in find(folder)], columns=list(COLUMNS))


def find(folder: str | os.PathLike = "logs") -> list[Listed]:
    """Every run below a folder, sorted by name and number."""
    root = Path(os.path.abspath(folder))
    if not root.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: give the root of the logs, such as logs")
    homes = []
    for place, below, files in os.walk(root):
        below[:] = sorted(
            name for name in below if not name.startswith(".") and name not in ("checkpoints", "__pycache__")
        )
        if any(name in files for name in FILES[:-1]) or (".lock" in files and "checkpoints" not in Path(place).parts):
            homes.append(Path(place))
    runs = [_read(home, root) for home in homes]
    runs.sort(key=lambda run: (run.name, isinstance(run.version, str), run.version))
    by_name: dict[str, list[Listed]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    for same in by_name.values():
        _compare(same)
    return runs


def _read(home: Path, root: Path) -> Listed:
    number = re.fullmatch(r"version_(\d{1,9})", home.name)
    name = home.parent.relative_to(root).as_posix() if root in home.parent.parents else home.parent.name
    damage, rows = "", list[dict[str, str]]()
    try:
        columns, rows, _ = read_table(home / "metrics.csv")
        if columns and not {"epoch", "step"} & set(columns):
            damage, rows = "metrics.csv has neither epoch nor step", []
    except (OSError, ValueError, csv.Error) as error:
        damage = f"metrics.csv cannot be read: {error}"
    journal, words = read_journal(home), words_of(home)
    run = Listed(name, int(number[1]) if number else home.name, home, journal, words, rows)
    run.damage = damage or _damage_of(checkpoints_of(home) / "last.ckpt")
    run.metric = _judge(run)
    return run


def checkpoints_of(home: Path) -> Path:
    """Where the checkpoints of these logs lie: in the folder beside the nearest one that is called logs."""
    for parent in home.parents:
        if parent.name == "logs":
            return parent.with_name("checkpoints") / home.relative_to(parent)
    return home / "checkpoints"


def _damage_of(path: Path) -> str:
    """What is wrong with a file that lies there; its two ends are read (`verify` reads all)."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                start, size = file.read(4), file.seek(0, os.SEEK_END)
                file.seek(max(size - 22, 0))
                end = file.read(22)  # a torch file ends in its directory's end, without a comment
            if not start or start.strip(b"\0") == b"" or (start == b"PK\x03\x04" and not end.startswith(b"PK\x05\x06")):
                return "last.ckpt is cut off or altered"
    except OSError as error:
        return f"last.ckpt cannot be read: {error.strerror}"
    return ""  # whole as far as this tells, or a plugin's own kind of file


def _judge(run: Listed) -> str:
    """The monitor; otherwise a loss that was validated, what else was validated, what there is."""
    names = run.metrics
    if run.words.get("monitor") in names:
        return str(run.words["monitor"])
    columns = [Column.of(name) for name in names]
    columns.sort(key=lambda column: (column.split != "val", column.kind != "loss", column.kind == "learning rate"))
    return columns[0].name if columns else ""


def _compare(runs: list[Listed]) -> None:
    """Note in each run the words that are others than those of its fellows, or than the defaults."""
    names = dict.fromkeys(word for run in runs for word in run.words if word not in _PLACE)
    defaults = {one.name: one.default for one in dataclasses.fields(LoopConfig)}
    resolved = vars(LoopConfig().resolved())
    for word in names:
        values = [run.words.get(word) for run in runs]
        if len(runs) > 1:
            differs = any(value != values[0] for value in values)
        else:
            differs = word in defaults and values[0] not in (defaults[word], resolved.get(word))
        for run, value in zip(runs, values, strict=True):
            short = word.removeprefix("hparams.")
            if differs and (short == word or f"model.{short}" not in run.words):
                run.changed[short.removeprefix("model.")] = value


def _number(cell: str | None) -> float | None:
    try:
        value = float(cell or "nan")
    except ValueError:
        return None
    return value if abs(value) < math.inf else None


# ---- two runs, and the best


def named(text: str, folder: str = "logs") -> Listed:
    """The run that somebody means: its folder, or its name and version below the root of the logs."""
    for home in (Path(text), Path(folder, text)):
        if any((home / name).is_file() for name in FILES):
            return _read(Path(os.path.abspath(home)), Path(os.path.abspath(folder)))
    raise ValueError(
        f"there is no run {text!r}: give its folder, or its name and version below {folder}: digits/version_0"
    )


def diff_runs(a: Listed, b: Listed) -> dict[str, Any]:
    """What is other in two runs: words; of each metric the last and the best value; and how far their curves are apart."""
    words = [word for word in dict.fromkeys([*a.words, *b.words]) if word not in _PLACE]
    missing = "-"
    curves: dict[str, Any] = {}
    for metric in dict.fromkeys([*a.metrics, *b.metrics]):
        first, second = dict(a.curve(metric)), dict(b.curve(metric))
        shared = sorted(first.keys() & second.keys())
        apart = {epoch: abs(first[epoch] - second[epoch]) for epoch in shared}
        where = max(apart, key=apart.__getitem__, default=None)
        curves[metric] = {
            "last": [list(run.values())[-1] if run else None for run in (first, second)],
            "best": [best[0] if (best := run.best(metric)) else None for run in (a, b)],
            "best_epoch": [best[1] if (best := run.best(metric)) else None for run in (a, b)],
            "epochs_in_both": len(shared),
            "first_difference": next((epoch for epoch in shared if apart[epoch] > 0), None),
            "largest_difference": None if where is None else apart[where],
            "largest_difference_epoch": where,
        }
    return {
        "runs": [a.label, b.label],
        "state": [a.state, b.state], "epochs": [a.epochs, b.epochs], "seconds": [a.seconds, b.seconds],
        "words": {
            word.removeprefix("hparams."): [a.words.get(word, missing), b.words.get(word, missing)]
            for word in words if a.words.get(word, missing) != b.words.get(word, missing)
        },
        "metrics": curves,
    }  # fmt: skip


def best_run(runs: Sequence[Listed], metric: str) -> Listed:
    """The run with the best value of a metric."""
    known = [run for run in runs if run.best(metric) is not None]
    if not known:
        names = ", ".join(dict.fromkeys(name for run in runs for name in run.metrics)) or "none"
        raise ValueError(f"no run has numbers for {metric!r}: logged were {names}")
    scores = {id(run): (run.best(metric) or (math.nan, 0))[0] for run in known}
    monitored: Mapping[str, Any] = next((run.words for run in known if run.words.get("monitor") == metric), {})
    low = monitored.get("mode", "min") == "min" if monitored else Column.of(metric).low_is_good
    return (min if low else max)(known, key=lambda run: scores[id(run)])
