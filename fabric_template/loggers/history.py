"""Collect the rows of metrics.csv."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .csv_logger import CSVLogger
from .result_collection import to_numbers

if TYPE_CHECKING:
    from ..training.run_state import RunState


class History:
    """Collect the rows that ``fit`` returns and that the CSV logger writes into metrics.csv.

    A row contains the training means and the seconds since the previous row. A row also contains
    the newest validation metrics and the learning rate. An epoch-based run has a row for each
    epoch. A step-based run has a row for each validation and a row at the end. A step-based run
    that never validates has a row for each epoch and a row at the end.

    Attributes:
        rows: All rows of the run so far.
        is_step_based: Whether max_steps is set, whether validation runs every N steps, or whether
            the training loader has no length.
        is_validated: Whether the run has validated since the newest row.
        learning_rates: The rates that the newest optimizer step used.
        step_values: The loss of the newest training batch, and a logged gradient norm.
    """

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.rows: list[dict[str, Any]] = []
        self.is_step_based = self.is_validated = False
        self.learning_rates: list[Any] = []
        self.step_values: dict[str, Any] = {}
        # Since the newest row: the training samples of this process, and the seconds of validation.
        self._num_samples = 0
        self._eval_seconds = 0.0
        self._seconds_before_resume = 0.0
        self.start_clock()

    @property
    def csv_loggers(self) -> list[CSVLogger]:
        """The loggers that write the rows into metrics.csv."""
        return [logger for logger in self.run.loop.loggers if isinstance(logger, CSVLogger)]

    def choose_rows(self) -> None:
        """Choose step-based or epoch-based rows. The training loader must exist before the call."""
        has_no_length = self.run.progress.num_train_batches == math.inf
        self.is_step_based = self.counts_steps or has_no_length

    @property
    def counts_steps(self) -> bool:
        """Return True if max_steps is set or if validation runs every N steps."""
        return self.run.stop.max_steps != -1 or self.run.config.check_val_every_n_epoch is None

    def start_clock(self) -> None:
        """Start the clock for the next row. The time of the first row excludes the setup."""
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the newest CSV row, including seconds before a resume."""
        return self._seconds_before_resume + time.monotonic() - self._started

    def add_train_output(self, output: Any, loss: Tensor) -> None:
        """Add the values that training_step returned. For a LightningModule, add only the loss."""
        results = self.run.results
        if not results.is_enabled:
            return
        loss = loss.detach()
        self.step_values["train_loss"] = loss
        if self.counts_steps:
            self._num_samples += results.returned_batch_size()
        if isinstance(output, Tensor) or self.run.is_lightning_module:
            values = {"train_loss": loss.mean() if loss.dim() else loss}
        else:
            values = name_outputs(output, "train")
        results.add_returned(values)

    def count_validation(self, seconds: float) -> None:
        """Record a validation, to exclude its time from ``samples_per_second``."""
        self._eval_seconds += seconds
        self.is_validated |= self.run.progress.stage == "validate"

    def add_row(self) -> dict[str, Any]:
        values = train_values_first(self.run.results.take_row())
        seconds = self.elapsed()
        row = {**self.position(), **values, **self._learning_rates()}
        if self._num_samples:
            samples = self._num_samples * self.run.fabric.world_size
            row["samples_per_second"] = round(samples / max(seconds - self._eval_seconds, 1e-9), 1)
        row["time"] = seconds
        if not math.isfinite(row.get("train_loss", 0.0)) and self.run.config.on_nan == "warn":
            self.run.warn_once(
                "The training loss is not finite (NaN or inf). To find the operation:"
                " FabricLoop(detect_anomaly=True). A smaller learning rate or gradient_clip_val=1.0 often helps."
            )
        self.check_loss(row)
        self.rows.append(row)
        self._num_samples, self.is_validated = 0, False
        self._seconds_before_resume = self._eval_seconds = 0.0
        self.start_clock()
        return row

    def check_loss(self, row: Mapping[str, Any]) -> None:
        """With on_nan="stop", end training if ``train_loss`` in a row is NaN or infinite.

        All processes must call this method, so that they stop together.
        """
        run = self.run
        if run.config.on_nan != "stop" or run.stop.divergence:
            return
        loss = torch.as_tensor(row.get("train_loss", 0.0), device=run.fabric.device)
        is_finite = loss.isfinite().all().float()
        if not run.fabric.all_reduce(is_finite, reduce_op="min"):
            run.stop.stop_diverged_run()
            run.warn_once(f"on_nan: {run.stop.divergence}. Training stops. No checkpoint is saved.")

    def position(self) -> dict[str, Any]:
        """Return the global step, and the index of the current or just finished epoch."""
        progress = self.run.progress
        epoch = max(0, progress.epochs_done - (not progress.is_in_epoch))
        return {"epoch": epoch, "step": progress.global_step}

    def step_row(self) -> dict[str, Any]:
        """Return the loss and the learning rates of the newest step, for steps.csv."""
        return {**self.step_values, **self._learning_rates()}

    def _learning_rates(self) -> dict[str, float]:
        rates = self.learning_rates if self.run.lr_schedulers else learning_rates(self.run)
        names = ["lr", *(f"lr_{index}" for index in range(1, len(rates)))]
        return {name: float(rate) for name, rate in zip(names, rates, strict=False)}

    def frame(self) -> Any:
        """Return the rows as a DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows],
            "files": [logger.position() for logger in self.csv_loggers],
            "step_values": to_numbers(self.step_values),
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "is_validated": self.is_validated,
            "num_samples": self._num_samples,
            "seconds": self.elapsed(),
            "eval_seconds": self._eval_seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = [dict(row) for row in state["rows"]]
        if not self.counts_steps:
            # Unlike the saved run, the resumed run has no column samples_per_second.
            for row in self.rows:
                row.pop("samples_per_second", None)
        self.step_values = dict(state["step_values"])
        self.learning_rates = list(state["learning_rates"])
        self.is_validated = state["is_validated"]
        self._num_samples = state["num_samples"] if self.counts_steps else 0
        self._seconds_before_resume = state["seconds"]
        self._eval_seconds = state["eval_seconds"]
        # Remove rows newer than the checkpoint. A logger new to this run has no saved position.
        for logger, position in zip_longest(self.csv_loggers, state["files"]):
            if logger is not None:
                logger.rewind(position or {}, self.rows)


def train_values_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as numbers, training values first, without the names "epoch" and "step"."""
    names = sorted(values, key=lambda name: not name.startswith("train"))
    return to_numbers({name: values[name] for name in names if name not in ("epoch", "step")})


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """Return the numbers in a step's output, keyed by their columns in metrics.csv.

    A tensor becomes ``<prefix>_loss``. A dict gives ``<prefix>_<key>``. A pair (loss, accuracy)
    gives ``<prefix>_loss`` and ``<prefix>_acc``.
    """
    named: Mapping[Any, Any] = output if isinstance(output, Mapping) else {}
    if isinstance(output, Tensor | numbers.Number):
        named = {"loss": output}
    elif isinstance(output, tuple) and len(output) == 2:
        named = {"loss": output[0], "acc": output[1]}
    found = {}
    for key, value in named.items():
        name = str(key) if str(key).startswith(f"{prefix}_") else f"{prefix}_{key}"
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().reshape(())
        elif isinstance(value, numbers.Number) and not isinstance(value, bool):
            found[name] = torch.tensor(float(value))  # type: ignore[arg-type]
    return found


def learning_rates(run: RunState) -> list[Any]:
    """Return the learning rate of each optimizer's first parameter group, without a device sync."""
    rates = [group["lr"] for o in run.optimizers for group in o.param_groups[:1] if "lr" in group]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
