"""Collect the rows of metrics.csv, decide when a row is due, and write it."""

from __future__ import annotations

import math
import numbers
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .csv_logger import FILES, CSVLogger, cells_of, copy_changed, is_first_process
from .read_logs import parse_cell, read_table
from .result_collection import to_numbers
from .run_config import number_parts

if TYPE_CHECKING:
    from ..training.run import Run

# The CSV files of a replaced run stay in this subfolder until the new run saves a checkpoint.
REPLACED_LOGS = ".replaced"


class RowWriter:
    """Collects the values of a row, decides when the row is due, and writes it to metrics.csv.

    By default, each epoch has one row in metrics.csv.

    Attributes:
        rows: All rows of the run so far, which ``fit`` returns.
        is_step_based: Whether rows are written after each validation and at the end of training.
            True if max_steps is set, if validation runs every N steps, or if the training loader
            has no length.
        learning_rates: The learning rates of the last optimizer step.
        step_values: The loss of the last training batch and, if logged, the gradient norm.
    """

    is_per_process = False

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: list[dict[str, Any]] = []
        self.is_step_based = False
        self.learning_rates: list[Any] = []
        # The optimizer step at which ``learning_rates`` was recorded.
        self._step_of_rates: int | None = None
        self.step_values: dict[str, Any] = {}
        # Results of evaluations and values from loop.log_dict for the next row of metrics.csv.
        self._collected: dict[str, Any] = {}
        self._is_validated = False
        # The number of training samples that this process has used since the last row.
        self._num_samples = 0
        # In a resumed run, three durations from the checkpoint, in seconds: the time since the last
        # row, the time spent waiting for batches, and the time spent on validation and saving.
        self._seconds_before_resume: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._started, self._waited_at_start = time.monotonic(), 0.0
        self._excluded_seconds = 0.0

    def choose_interval(self) -> None:
        """Decide whether metrics.csv gets one row per validation instead of one per epoch."""
        has_no_length = self.run.progress.num_train_batches == math.inf
        self.is_step_based = self.counts_steps or has_no_length

    @property
    def counts_steps(self) -> bool:
        """Return whether options such as max_steps count steps instead of epochs."""
        return self.run.stop.max_steps != -1 or self.run.config.check_val_every_n_epoch is None

    def continue_rows(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows or self.rows

    # Clock

    def start_clock(self) -> None:
        """Start the timer for the "time" column of metrics.csv."""
        seconds, waited, self._excluded_seconds = self._seconds_before_resume
        self._started = time.monotonic() - seconds
        self._waited_at_start = self.run.data.seconds_waited - waited

    def elapsed(self) -> float:
        """Return the seconds since the last row of metrics.csv."""
        return time.monotonic() - self._started

    def waited(self) -> float:
        """Return the seconds spent waiting for batches since the last row."""
        return self.run.data.seconds_waited - self._waited_at_start

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude a validation or a save from the time that ``samples_per_second`` divides by."""
        started, before = time.monotonic(), self._excluded_seconds
        try:
            yield
        finally:
            # If a checkpoint is saved during a validation, the time of the validation already
            # includes the time of the save. Do not count the save twice.
            self._excluded_seconds = before + time.monotonic() - started

    # Collecting values for the next row

    def add_train_output(self, output: Any, loss: Tensor | None) -> None:
        """Collect the values that training_step returned.

        Args:
            output: The return value of training_step. For a LightningModule, only the loss is
                collected, because a LightningModule logs its metrics with self.log.
            loss: The training loss. None if manual optimization returned no loss.
        """
        results = self.run.results
        if not results.is_enabled:
            return
        values: dict[str, Tensor] = {}
        if loss is not None:
            loss = loss.detach()
            self.step_values["train_loss"] = loss
            values = {"train_loss": loss.mean() if loss.dim() else loss}
        if self.counts_steps:
            self._num_samples = self._num_samples + results.returned_batch_size()
        if not isinstance(output, Tensor) and not self.run.is_lightning_module:
            values = name_outputs(output, "train")
        results.add_returned(values)

    def add_step_value(self, name: str, value: Tensor) -> None:
        """Add a value to the next row of steps.csv."""
        self.step_values[name] = value

    def record_learning_rates(self) -> None:
        """Record the rate of each optimizer's first group, before schedulers or hooks change it."""
        step = self.run.progress.global_step
        if self._step_of_rates == step:
            return
        optimizers = self.run.optimization.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups[:1]]
        rates = [group["lr"] for group in groups if "lr" in group]
        # Do not call .item() on a rate that is a tensor, because .item() waits for the GPU.
        self.learning_rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._step_of_rates = step

    def collect(self, values: Mapping[str, Any]) -> None:
        """Add values to the next row of metrics.csv."""
        self._collected.update(values)

    def collect_validation(self, values: Mapping[str, Any]) -> None:
        self.collect(values)
        self._is_validated = True

    def step_row(self) -> dict[str, Any]:
        """Return the loss and the learning rates of the last step, for steps.csv."""
        return {**self.step_values, **self._named_rates()}

    def _named_rates(self) -> dict[str, float]:
        self.record_learning_rates()
        rates = number_parts("lr", self.learning_rates)
        return {name: float(rate) for name, rate in rates.items()}

    def _coordinates(self) -> dict[str, Any]:
        progress = self.run.progress
        return {"epoch": progress.newest_epoch, "step": progress.global_step}

    # Writing rows

    def write_after_validation(self) -> None:
        """Write or print a row after a validation in the middle of an epoch."""
        run = self.run
        # Write no row after the last batch of an epoch, because the end of the epoch writes that
        # row.
        if run.progress.is_epoch_complete or not self._is_validated:
            return
        if self.is_step_based:
            self._write(is_in_epoch=True)
            return
        values = train_values_first({**run.results.latest_means(), **self._collected})
        run.console.add_row({**self._coordinates(), **values, "time": self.elapsed()})
        self._is_validated = False

    def write_after_epoch(self) -> None:
        is_validated = self._is_validated or not self.run.should_validate
        if not self.is_step_based or (is_validated and self.run.progress.is_epoch_complete):
            self._write(is_in_epoch=False)

    def write_after_training(self) -> None:
        """In a step-based run, write a final row for the steps since the previous row."""
        last_step = self.rows[-1]["step"] if self.rows else 0
        if self.is_step_based and self.run.progress.global_step > last_step:
            self._write(is_in_epoch=True)

    def _write(self, is_in_epoch: bool) -> None:
        """Write a row to the CSV loggers and the console."""
        run, row = self.run, self._take()
        self.rows.append(row)
        for logger in run.loggers.csv_loggers:
            logger.log_epoch(row)
        run.console.add_row(row)
        if is_in_epoch and not run.is_lightning_module:
            # The metrics of a LightningModule are logged at the end of the epoch. Log those of any
            # other model here.
            means = {name: value for name, value in row.items() if name.startswith("train_")}
            run.loggers.log_metrics(means, step_offset=-1)

    def _take(self) -> dict[str, Any]:
        """Return the finished row of metrics.csv, and start a new one."""
        values = train_values_first({**self._collected, **self.run.results.take_means()})
        if not values and self.run.results.is_enabled:
            self.run.warn_once(
                "metrics.csv contains no metrics, because the steps returned no loss and logged"
                " nothing. Return the loss from training_step, or log a metric in it."
            )
        seconds = self.elapsed()
        own = self._named_rates()
        if self._num_samples:
            samples = float(self._num_samples) * self.run.fabric.world_size
            training_seconds = max(seconds - self._excluded_seconds, 1e-9)
            own["samples_per_second"] = round(samples / training_seconds, 1)
        own["time"] = seconds
        own["waiting"] = round(min(self.waited() / max(seconds, 1e-9), 1.0), 3)
        if self.run.fabric.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.run.fabric.device)
            own["gpu_memory"] = round(peak / 2**30, 3)
        # If the user has logged a value under a name such as "time", use the user's value.
        own = {name: value for name, value in own.items() if name not in values}
        row = {**self._coordinates(), **values, **own}
        if not math.isfinite(row.get("train_loss", 0.0)) and self.run.config.on_nan == "warn":
            self.run.warn_once(
                "The training loss is not finite (NaN or inf). To find the cause, write"
                " FabricLoop(detect_anomaly=True). A smaller learning rate or gradient_clip_val=1.0"
                " often helps."
            )
        self.check_loss(row)
        self._collected = {}
        self._num_samples, self._is_validated = 0, False
        self._seconds_before_resume = (0.0, 0.0, 0.0)
        self.start_clock()
        return row

    def check_loss(self, row: Mapping[str, Any]) -> None:
        """With on_nan="stop", end training if a row's ``train_loss`` is NaN or infinite.

        Call this method in all processes, because it calls all_reduce.
        """
        run = self.run
        if run.config.on_nan != "stop" or run.stop.divergence:
            return
        loss = torch.as_tensor(row.get("train_loss", 0.0), device=run.fabric.device)
        is_finite = loss.isfinite().all().float()
        if not run.fabric.all_reduce(is_finite, reduce_op="min"):
            run.stop.stop_diverged_run()
            text = "Training stops without saving another checkpoint."
            run.warn_once(f"on_nan: {run.stop.divergence}. {text}")

    def frame(self) -> Any:
        """Return the rows as a DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    # State in checkpoints

    def state_dict(self) -> dict[str, Any]:
        self.record_learning_rates()
        loggers = self.run.loggers.csv_loggers
        folders = [Path(logger.log_dir) for logger in loggers]
        return {
            "files": [logger.position() for logger in loggers],
            "folder": f"{folders[0].parent.name}/{folders[0].name}" if folders else "",
            "last_row": dict(self.rows[-1]) if self.rows else None,
            "collected": to_numbers(self._collected),
            "step_values": to_numbers(self.step_values),
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "is_validated": self._is_validated,
            **to_numbers({"num_samples": self._num_samples}),
            "seconds": self.elapsed(),
            "excluded_seconds": self._excluded_seconds,
            "seconds_waited": self.waited(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._collected = dict(state["collected"])
        self.step_values = dict(state["step_values"])
        self.learning_rates = list(state["learning_rates"])
        self._step_of_rates = self.run.progress.global_step
        self._is_validated = state["is_validated"]
        self._num_samples = state["num_samples"] if self.counts_steps else 0
        names = ("seconds", "seconds_waited", "excluded_seconds")
        self._seconds_before_resume = tuple(state[name] for name in names)
        self.start_clock()
        self._rewind(state)

    def _rewind(self, state: Mapping[str, Any]) -> None:
        """Remove the CSV rows written after the checkpoint that the run resumes from."""
        is_finished = self.run.stop.is_finished
        if not is_finished:
            self.run.checkpoints.replace_last(self.run)
        positions = state["files"] or [{}]
        # The checkpoint contains a position, such as the number of rows, for each CSV logger. If
        # the resumed run has more CSV loggers, use the first position for the additional loggers.
        positions = chain(positions, repeat(positions[0]))
        for logger, position in zip(self.run.loggers.csv_loggers, positions, strict=False):
            folders = self._log_folders(logger, state["folder"])
            folder = next((f for f in folders if has_rows(f, state["last_row"], position)), None)
            has_waiting = any("waiting" in of_file for of_file in position.values())
            is_lost = folder is None and state["last_row"] is not None
            copied = copy_other_rows(logger) if is_lost else ""
            if is_finished and folder == Path(logger.log_dir) and not has_waiting:
                rows = read_table(folder / "metrics.csv").rows
            else:
                step = self.run.progress.global_step
                rows = logger.rewind({} if folder is None else position, folder, step)
            self.continue_rows([parse_row(row) for row in rows])
            if is_lost:
                self.run.warn_once(
                    f"{logger.log_dir}/metrics.csv: the rows from before the checkpoint are"
                    " missing. The run continues without them. To keep them, copy a run's log"
                    f" folder together with its checkpoints.{copied}"
                )

    def _log_folders(self, logger: CSVLogger, saved: str) -> list[Path]:
        """Return folders that may contain the resumed run's metrics.csv, most likely first."""
        checkpoint = Path(str(self.run.plan.start.path)).absolute()
        # If the user renamed the run, its current name is in the checkpoint's path.
        names = ["/".join(checkpoint.parts[-3:-1])]
        if re.fullmatch(r"[^/\\]+/[^/\\]+", saved) and ".." not in saved.split("/"):
            names.insert(0, saved)
        # After a resume in a new version folder, the earlier rows are in the old version's folder.
        folders = [Path(logger.root_dir, names[0])]
        folders += [Path(logger.log_dir, REPLACED_LOGS), Path(logger.log_dir)]
        # The folder "logs" may be in any of the checkpoint's four nearest parent folders.
        folders += [parent / "logs" / name for name in names for parent in checkpoint.parents[:4]]
        # ModelCheckpoint saves checkpoints to a subfolder of the log folder.
        return [*folders, *checkpoint.parents[:2]]


def copy_other_rows(logger: CSVLogger) -> str:
    """Back up CSV files that the resumed run would overwrite."""
    paths = [Path(logger.log_dir, name) for name in FILES]
    copies = [copy_changed(p).name for p in paths if is_first_process() and read_table(p).rows]
    return f" Rows already in this folder were copied to {' and '.join(copies)}." if copies else ""


def has_rows(folder: Path, row: Mapping[str, Any] | None, position: Mapping[str, Any]) -> bool:
    """Return whether a folder contains the CSV files of the run that saved the checkpoint.

    Args:
        row: The last row of metrics.csv, from the checkpoint.
        position: The last row and the number of rows of each CSV file, from the checkpoint.
    """
    rows = read_table(folder / "metrics.csv").rows
    if row is not None and any(is_same_row(parse_row(found), row) for found in rows):
        return True
    if any("waiting" in of_file for of_file in position.values()):
        return has_written_rows(folder, position)
    last = position.get("steps.csv", {}).get("last")
    if last is None:
        return row is None and folder.is_dir()
    # The user may have deleted metrics.csv or its last rows.
    is_cut = len(rows) < position.get("metrics.csv", {}).get("rows", 0)
    is_own = row is None or (is_cut and all("step" in found for found in rows))
    steps = read_table(folder / "steps.csv").rows if is_own else []
    return any(cells_of(found) == last for found in steps)


def has_written_rows(folder: Path, position: Mapping[str, Any]) -> bool:
    """Return whether a folder contains rows that were on disk when a checkpoint was saved."""
    lasts = {
        name: of_file.get("last_written", of_file["last"]) for name, of_file in position.items()
    }
    for name, last in lasts.items():
        rows = read_table(folder / name, last).rows
        if last is not None and any(cells_of(found) == last for found in rows):
            return True
    return folder.is_dir() and not any(lasts.values())


def is_same_row(found: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether two rows have the same epoch, the same step and about the same time."""
    if any(found.get(name) != row.get(name) for name in ("epoch", "step")):
        return False
    first, second = found.get("time"), row.get("time")
    if isinstance(first, int | float) and isinstance(second, int | float):
        # A spreadsheet program may have rounded the times, so compare them with a tolerance.
        return math.isclose(first, second, rel_tol=1e-3)
    return bool(first == second)


def parse_row(row: Mapping[str, str]) -> dict[str, Any]:
    """Convert the cells of a CSV row to numbers if possible, and drop empty cells."""
    return {name: parse_cell(cell) for name, cell in cells_of(row).items()}


def train_values_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's metrics as numbers, with training metrics first."""
    names = sorted(values, key=lambda name: not name.startswith("train"))
    return to_numbers({name: values[name] for name in names if name not in ("epoch", "step")})


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """Return the numbers that a step returned, keyed by their columns in metrics.csv.

    Args:
        output: A loss, a pair (loss, accuracy) or a dict of numbers. For example, a pair is written
            to the columns ``<prefix>_loss`` and ``<prefix>_acc``.
        prefix: The data split, such as "train".
    """
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        output = output._asdict()
    named: Mapping[Any, Any] = output if isinstance(output, Mapping) else {}
    if isinstance(output, Tensor | numbers.Number):
        named = {"loss": output}
    elif isinstance(output, tuple) and len(output) == 2:
        named = {"loss": output[0], "acc": output[1]}
    found = {}
    for key, value in named.items():
        name = str(key) if str(key).startswith(f"{prefix}_") else f"{prefix}_{key}"
        if name in found:
            step = {"train": "training_step", "val": "validation_step"}.get(prefix, "test_step")
            raise ConfigurationError(
                f"{step}: two of the returned keys {list(named)} refer to the same column. Return"
                " only one of them."
            )
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().reshape(())
        elif isinstance(value, numbers.Real):
            found[name] = torch.tensor(float(value))
    return found
