"""The CSV logger: one complete row per epoch, one file per run, nothing ever lost."""

import os
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from ..files.disk import claim_version, make_folder, replace_file, set_aside
from .parsing import FILES
from .tables import Table, writing


class CSVLogger(FabricCSVLogger):
    """Fabric's CSVLogger, with a complete row per epoch on disk as soon as the epoch ends.

    A version that exists is appended to, never emptied. Nothing is written before the first row (or `claim`).

    Args:
        root_dir: the folder of all runs; a local one.
        name: the run's name, a folder in `root_dir`.
        version: a number or a name; None takes the next free number.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
        >>> print(Path(logger.log_dir, "metrics.csv").read_text(), end="")
        epoch,step,val_loss
        0,10,0.5
    """

    def __init__(
        self, root_dir: str | os.PathLike = "logs", name: str | None = "run", version: int | str | None = None
    ):
        root_dir = os.fspath(root_dir)
        if "://" in root_dir:
            raise ValueError(
                f"CSVLogger(root_dir={root_dir!r}): logs are kept in a local folder, so that a row can be appended to "
                "its file; give a path such as 'logs', or use lightning.fabric.loggers.CSVLogger for remote storage"
            )
        super().__init__(root_dir, name=name, version=version)
        self._tables: dict[str, Table] = {}
        self._hparams: dict[str, Any] = {}
        self.has_run = False  # it is of a run of the loop that made it

    def __new__(cls, *args: Any, **words: Any) -> "CSVLogger":
        """A logger of Lightning's to those who ask by isinstance, as a SaveConfigCallback of one's own does."""
        for package in ("lightning.pytorch", "pytorch_lightning"):
            if (theirs := sys.modules.get(f"{package}.loggers.logger")) is not None:
                theirs.Logger.register(cls)
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute {name!r}: it writes numbers into CSV files; who draws or sends"
            " more gives a logger that does, such as logger=TensorBoardLogger('logs')"
        )

    @property
    def save_dir(self) -> str:
        """Trainer's word for `root_dir`: modules and callbacks read it."""
        return self.root_dir

    @property
    @rank_zero_experiment
    def experiment(self) -> "CSVLogger":
        """The logger itself: there is no other object behind it."""
        return self

    def claim(self, version: int | str | None = None) -> int | str | None:
        """Make the version's folder and fix the version; two runs that start together get two numbers.

        Only rank 0 chooses. The others are told: `logger.claim(fabric.broadcast(logger.claim()))`.

        Example:
            >>> from tempfile import mkdtemp
            >>> root = mkdtemp()
            >>> CSVLogger(root).claim(), CSVLogger(root).claim()
            (0, 1)
        """
        if version is not None and version != self._version:
            self._version, self._tables = version, {}
        if getattr(rank_zero_only, "rank", 0) != 0:
            return self._version
        if self._version is None:
            home = Path(self.root_dir, self.name)
            with writing(str(home)):
                self._version = claim_version(home)
        with writing(self.log_dir):
            make_folder(Path(self.log_dir))
        return self._version

    @rank_zero_only
    def check_writable(self) -> None:
        """Make the log folder and prove that it can be written, before hours of training depend on it.

        Example:
            >>> from tempfile import mkdtemp
            >>> CSVLogger(mkdtemp()).check_writable()
        """
        self.claim()
        with writing(self.log_dir):
            with tempfile.TemporaryFile(dir=self.log_dir) as file:  # without a name: a kill leaves nothing behind
                file.write(b"\n")  # a full disk lets us create the file, but not fill it
            for path in (os.path.join(self.log_dir, name) for name in FILES):
                if os.path.lexists(path):
                    open(path, "ab").close()
        self.position()  # known from here on, whatever becomes of the disk

    @rank_zero_only
    def log_epoch(self, row: Mapping[str, Any]) -> None:
        """Append one row to `metrics.csv`; it is on disk when this returns.

        Example:
            >>> from tempfile import mkdtemp
            >>> CSVLogger(mkdtemp()).log_epoch({"epoch": 0, "step": 10, "train_loss": 0.7, "val_loss": 0.5})
        """
        if row:
            self._table("metrics.csv").append(row)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one row to `steps.csv`; without a step, rows are counted. Reads tensors: a CPU-GPU sync point.

        Example:
            >>> from tempfile import mkdtemp
            >>> CSVLogger(mkdtemp()).log_metrics({"train_loss": 0.7}, step=49)
        """
        if not metrics:
            return
        table = self._table("steps.csv")
        if step is None:
            step = metrics.get("step", table.num_rows)
        table.append({**metrics, "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: Mapping | Namespace | None = None, *extra: Mapping | Namespace) -> None:
        """Write `hparams.yaml`; later calls add to what earlier ones gave.

        Example:
            >>> from tempfile import mkdtemp
            >>> CSVLogger(mkdtemp()).log_hyperparams({"lr": 0.1}, {"max_epochs": 3})
        """
        for given in (params or {}, *extra):
            words = plain(given)
            if not isinstance(words, dict):
                raise TypeError(
                    f"log_hyperparams takes a dict or an argparse.Namespace, not {type(given).__name__}: "
                    f"give it a name, e.g. log_hyperparams({{'value': {given!r}}})"
                )
            self._hparams.update(words)
        text = yaml_of(self._hparams)
        self.claim()
        path = os.path.join(self.log_dir, "hparams.yaml")
        with writing(path):
            replace_file(path, text.encode("utf-8", "backslashreplace"), is_needed=False)

    def position(self) -> dict[str, dict[str, Any]]:
        """Where each file stands now, as plain values for a checkpoint; for an example see `rewind`."""
        if getattr(rank_zero_only, "rank", 0) != 0 or self._version is None:
            return {}
        tables = {name: self._table(name).position() for name in FILES}
        return {name: place for name, place in tables.items() if place["columns"] or "waiting" in place}

    @rank_zero_only
    def rewind(self, position: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Drop the rows and columns written after `position`; None drops all.

        What is written from here on makes the files, byte for byte, those of a run that was never interrupted.

        Example:
            >>> from tempfile import mkdtemp
            >>> logger = CSVLogger(mkdtemp())
            >>> logger.log_epoch({"epoch": 0, "step": 10})
            >>> position = logger.position()
            >>> position
            {'metrics.csv': {'rows': 1, 'columns': ['epoch', 'step']}}
            >>> logger.log_epoch({"epoch": 1, "step": 20, "val_loss": 0.5})
            >>> logger.rewind(position)
            >>> logger.position() == position
            True
        """
        self.claim()
        for name in FILES:
            self._table(name).rewind(**(position or {}).get(name, {}))

    @rank_zero_only
    def set_aside(self) -> None:
        """Begin anew in this version; what is there is kept, as `metrics.csv.before` and `steps.csv.before`.

        Example:
            >>> from tempfile import mkdtemp
            >>> logger = CSVLogger(mkdtemp())
            >>> logger.log_epoch({"epoch": 0, "step": 10})
            >>> logger.set_aside()
            >>> logger.position()
            {}
        """
        for name in self.position():
            with writing(self._table(name).path):
                set_aside(self._table(name).path, "before")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Nothing to do: Lightning's ModelCheckpoint tells every logger when it has saved."""

    @rank_zero_only
    def save(self) -> None:
        """Nothing is held back: each row went to the file whole when it was logged (or waits for the disk, see `sync`)."""

    @rank_zero_only
    def sync(self) -> None:
        """Write the rows that the disk refused, and make all survive a power cut; at checkpoints: an fsync takes long."""
        for table in self._tables.values():
            table.sync()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Sync the files; a later row goes on in them."""
        self.sync()

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            self.claim()
            # absolute, so that a change of the working folder does not split a run over two places
            self._tables[name] = Table(os.path.abspath(os.path.join(self.log_dir, name)), FILES[name])
        return self._tables[name]


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))  # an address is another one in each run


def yaml_of(words: dict[str, Any], width: int | None = None) -> str:
    """The text of plain values; with libyaml ten times as fast."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(words, Dumper=dumper, sort_keys=False, allow_unicode=True, width=width)


def plain(value: Any, other: Callable[[Any], Any] = _text) -> Any:
    """The value as YAML can hold it; what YAML has no word for becomes text, or what ``other`` makes of it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value, other)
    for kind in (int, float, str):  # also takes subclasses back to the plain type: numpy's float64 is a float
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping | Namespace):
        items = (value if isinstance(value, Mapping) else vars(value)).items()
        return {key if isinstance(key, int) else str(key): plain(item, other) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, other) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain(value.item(), other)
    return other(value)
