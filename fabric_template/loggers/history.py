"""Collect the rows of a run from returned and logged values, learning rate and time."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from ..errors import ConfigurationTypeError, describe
from ..training.optimization import learning_rates
from .csv_logger import CSVLogger

if TYPE_CHECKING:
    from ..training.run_state import RunState


class WeightedMeans:
    """Average returned values, weighted by batch size. The sums stay on the values' device."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        self.num_samples += batch_size
        for name, value in values.items():
            if value.dim():
                value = value.mean(dtype=torch.promote_types(value.dtype, torch.float32))
            total = self._sums.get(name)
            if total is None:
                dtype = torch.promote_types(value.dtype, torch.float32)
                total = torch.zeros((), dtype=dtype, device=value.device)
            self._sums[name] = torch.add(total, value, alpha=batch_size)
            self._weights[name] = self._weights.get(name, 0) + batch_size

    def compute(self, all_reduce: Callable[..., Tensor] | None = None) -> dict[str, float]:
        """Return the means, over all processes if all_reduce is given. Waits for the device."""
        found = {}
        for name, total in self._sums.items():
            weight = torch.tensor(self._weights[name], dtype=total.dtype, device=total.device)
            pair = torch.stack([total, weight])
            if all_reduce is not None:
                pair = all_reduce(pair, reduce_op="sum")
            found[name] = (pair[0] / pair[1]).item()
        return found

    def state_dict(self) -> dict[str, Any]:
        sums, weights = dict(self._sums), dict(self._weights)
        return {"sums": sums, "weights": weights, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._weights = dict(state["sums"]), dict(state["weights"])
        self.num_samples = state["num_samples"]


class History:
    """Collect the rows of a run, which ``fit`` returns and the CSV logger writes into metrics.csv.

    A row covers the time since the previous row: training means, the newest validation, learning
    rate and duration. An epoch-based run has a row for each epoch. A step-based run has a row for
    each validation (or for each epoch without validation), and a row at its end. A run is step-
    based with max_steps, with validation by steps across epochs, or if its loader has no length.

    Attributes:
        rows: The rows so far.
        is_step_based: Whether the run is step-based.
        is_validated: Whether the run has validated since the newest row.
        returned: The newest means of the values that the steps returned, by name.
        learning_rates: The rates of the newest optimizer step, before schedulers changed them.
        train_sums: Sums of this process's training step outputs since the newest row.
        step_values: The loss of the newest training batch, and its gradient norm if that is logged.
        outputs: The outputs of the current evaluation's steps, by loader and batch.
        evaluated: The values of the newest evaluation.
        evaluated_metrics: The values for the loggers: of a LightningModule only the logged ones.
    """

    def __init__(self) -> None:
        self.run: RunState = None  # type: ignore[assignment]
        self.rows: list[dict[str, Any]] = []
        self.is_step_based = self.is_validated = False
        self.returned: dict[str, float] = {}
        self.learning_rates: list[Any] = []
        self.step_values: dict[str, Any] = {}
        self.outputs: list[list[Any]] = []
        self.evaluated: dict[str, Any] = {}
        self.evaluated_metrics: dict[str, Any] = {}
        self.train_sums = WeightedMeans()
        # Means of the values that steps returned since the newest row.
        self._row: dict[str, float] = {}
        # In the current evaluation: sums of the current loader's step outputs, and for each
        # finished loader the returned means and the logged values.
        self._eval_sums = WeightedMeans()
        self._eval_results: list[tuple[dict[str, float], dict[str, Any]]] = []
        self._started = self._eval_started = time.monotonic()
        self._seconds_before_resume = self._eval_seconds = 0.0

    @property
    def csv_loggers(self) -> list[CSVLogger]:
        """The loggers that write the rows into metrics.csv."""
        return [logger for logger in self.run.loop.loggers if isinstance(logger, CSVLogger)]

    def choose_rows(self) -> None:
        """Choose step-based or epoch-based rows. Call this after the training loader is set up."""
        has_no_length = self.run.progress.num_train_batches == math.inf
        self.is_step_based = self.run.results.is_step_based = self.counts_steps or has_no_length

    @property
    def counts_steps(self) -> bool:
        """Return whether the options count steps, not epochs."""
        return self.run.stop.max_steps != -1 or self.run.config.check_val_every_n_epoch is None

    def start_clock(self) -> None:
        """Start the time of a row. The time of the first row excludes the setup."""
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the newest row, including the time before a resume."""
        return self._seconds_before_resume + time.monotonic() - self._started

    @property
    def is_due_at_epoch_end(self) -> bool:
        """Return whether the end of an epoch ends a row."""
        is_due = self.is_validated or not self.run.should_validate
        return not self.is_step_based or (is_due and self.run.progress.is_epoch_complete)

    @property
    def is_due_at_end(self) -> bool:
        """Return whether a step-based run has taken steps since its newest row."""
        last_step = self.rows[-1]["step"] if self.rows else 0
        return self.is_step_based and self.run.progress.global_step > last_step

    def add_train_output(self, output: Any, loss: Tensor) -> None:
        """Add the output of training_step. For a LightningModule that logs, add only the loss."""
        run = self.run
        if run.config.barebones:
            return
        loss = loss.detach()
        self.step_values["train_loss"] = loss
        if run.results.train.mean_loss() is not None and not self.is_step_based:
            # The module's self.log("train_loss") computes the same mean.
            return
        logs_itself = run.is_lightning_module and run.results.active
        if isinstance(output, Tensor) or logs_itself:
            values = {"train_loss": loss}
        else:
            values = name_outputs(output, "train")
        self.train_sums.add(values, self._batch_size())

    def _batch_size(self) -> int:
        """Return the batch_size that the step passed to ``self.log``, or the size of the batch."""
        results = self.run.results.active
        assert results is not None
        if results.logged_batch_size is not None:
            return results.logged_batch_size
        try:
            return results.find_batch_size()
        except MisconfigurationException:
            return 1

    def end_train_batches(self) -> None:
        """Compute the training means for the current row, and reset the sums for the next row."""
        sums, self.train_sums = self.train_sums, WeightedMeans()
        means = self._compute(sums)
        seconds = self.elapsed() - self._eval_seconds
        if self.counts_steps and sums.num_samples:
            samples = sums.num_samples * self.run.fabric.world_size
            self._row["samples_per_second"] = round(samples / max(seconds, 1e-9), 1)
        logged = self.run.results.train.mean_loss()
        loss: Any = means.get("train_loss")
        if loss is None and logged is not None:
            loss = logged.value(of_step=False)
        is_finite = loss is None or math.isfinite(loss)
        if not is_finite and self.run.config.on_nan == "warn":
            self.run.warn_once(
                "The training loss is not finite (NaN or inf). To find the operation:"
                " FabricLoop(detect_anomaly=True). A smaller learning rate or gradient_clip_val=1.0 often helps."
            )

    def _compute(self, sums: WeightedMeans) -> dict[str, float]:
        fabric = self.run.fabric
        all_reduce: Any = fabric.all_reduce
        means = sums.compute(all_reduce if fabric.world_size > 1 else None)
        self.returned.update(means)
        self._row.update(means)
        return means

    def start_evaluation(self) -> None:
        self.outputs = [[] for _ in self.run.data.eval_loaders.loaders]
        self._eval_sums, self._eval_results = WeightedMeans(), []
        self._eval_started = time.monotonic()

    def add_evaluation_output(self, output: Any, dataloader_idx: int) -> None:
        """Add the output of an evaluation step; only the loss if a LightningModule logs."""
        run, prefix = self.run, self._prefix()
        self.outputs[dataloader_idx].append(output)
        values = name_outputs(output, prefix)
        if run.results.active and run.is_lightning_module:
            values = {name: v for name, v in values.items() if name == f"{prefix}_loss"}
        loaders = run.data.eval_loaders
        if loaders.names and not run.is_lightning_module:
            first = loaders.names[dataloader_idx]
            values = {first + name.removeprefix(prefix): v for name, v in values.items()}
        elif loaders.has_several:
            values = {f"{name}/dataloader_idx_{dataloader_idx}": v for name, v in values.items()}
        if values:
            self._eval_sums.add(values, self._batch_size())

    def _prefix(self) -> str:
        return "test" if self.run.progress.stage == "test" else "val"

    def end_loader(self) -> None:
        """Compute the means of the loader that has ended."""
        run = self.run
        run.results.end_batches()
        means = self._compute(self._eval_sums)
        self._eval_sums = WeightedMeans()
        if not run.is_lightning_module:
            # The values that a plain model returns are its metrics.
            tensors = {name: torch.tensor(value) for name, value in means.items()}
            run.results.callback_metrics.update(tensors)
        # Like Trainer, the sanity check discards the values of each loader.
        logged = {} if run.progress.stage == "sanity_check" else run.results.update_metrics()
        self._eval_results.append((means, logged))

    def end_evaluation_batches(self) -> None:
        """Compute the evaluation's means before its last hooks run."""
        run = self.run
        self.end_loader()
        # Values that are logged after the last batch belong to no loader.
        run.results.evaluation.dataloader_idx = None
        epoch_end = getattr(run.module, "functions", {}).get("epoch_end")
        if epoch_end is not None:
            self._call_epoch_end(epoch_end)

    def _call_epoch_end(self, epoch_end: Callable) -> None:
        """Call the user's epoch_end with all outputs, and log the values that it returns."""
        run, prefix = self.run, self._prefix()
        loaders = run.data.eval_loaders
        names = loaders.names or ()
        outputs: Any = self.outputs if loaders.has_several else self.outputs[0]
        if names:
            outputs = dict(zip(names, self.outputs, strict=True))
        values = epoch_end(run.network, outputs) or {}
        if not isinstance(values, Mapping):
            raise ConfigurationTypeError(
                f"epoch_end: got {describe(values)} from it, expected a dict of numbers. Write return"
                " {'f1': f1}."
            )
        prefixes = tuple(f"{name}_" for name in (*names, prefix))
        previous, run.hooks.current = run.hooks.current, "on_validation_epoch_end"
        for name, value in values.items():
            full_name = name if name.startswith(prefixes) else f"{prefix}_{name}"
            run.results.log(full_name, value, sync_dist=True)
        run.hooks.current = previous

    def end_evaluation(self) -> list[dict[str, Any]]:
        """Return the evaluation's values as one dict for each loader."""
        is_lightning_module, results = self.run.is_lightning_module, []
        at_end = self.run.results.update_metrics()
        all_returned: dict[str, Any] = {}
        all_logged = dict(at_end)
        for returned, logged in self._eval_results:
            all_returned = returned | all_returned
            all_logged = logged | all_logged
        self.evaluated = all_returned | all_logged
        self.evaluated_metrics = all_logged if is_lightning_module else self.evaluated
        # Trainer returns logged values. If a LightningModule logs nothing, use its step outputs.
        uses_returned = not (is_lightning_module and all_logged)
        for returned, logged in self._eval_results:
            first = returned if uses_returned else {}
            results.append(to_numbers({**first, **logged, **at_end}))
        self.outputs, self._eval_results = [], []
        self._eval_seconds += time.monotonic() - self._eval_started
        self.is_validated |= self.run.progress.stage == "validate"
        return results

    def forget_sanity_check(self) -> None:
        """Discard the values of the sanity check."""
        for values in (self.returned, self._row, self.evaluated, self.evaluated_metrics):
            values.clear()

    def add_row(self) -> dict[str, Any]:
        """End a row."""
        values = {**self._row, **self.run.results.take_row()}
        speed = {n: values.pop(n) for n in ("samples_per_second",) if n in values}
        row = {**self.position(), **train_values_first(values), **self._learning_rates(), **speed}
        row["time"] = self.elapsed()
        self.rows.append(row)
        self._row, self.is_validated = {}, False
        self._seconds_before_resume = self._eval_seconds = 0.0
        self.start_clock()
        return row

    def position(self) -> dict[str, Any]:
        """Return the current epoch, or between epochs the last one, and the number of steps."""
        progress = self.run.progress
        epoch = max(0, progress.epochs_done - (not progress.is_in_epoch))
        return {"epoch": epoch, "step": progress.global_step}

    def step_row(self) -> dict[str, Any]:
        """Return the loss and the learning rates of the newest step, for steps.csv."""
        return {**self.step_values, **self._learning_rates()}

    def open_row(self) -> dict[str, Any]:
        """Return the values of the row that has not ended."""
        return train_values_first({**self._row, **self.run.results.row})

    def _learning_rates(self) -> dict[str, float]:
        rates = self.learning_rates if self.run.lr_schedulers else learning_rates(self.run)
        names = ["lr", *(f"lr_{index}" for index in range(1, len(rates)))]
        return {name: float(rate) for name, rate in zip(names, rates, strict=False)}

    def latest(self) -> dict[str, float]:
        """Return the training means so far and the newest validation. This waits for the device."""
        means = self.train_sums.compute()
        logged = self.run.results.train.mean_loss()
        if "train_loss" not in means and logged is not None and logged.total is not None:
            # Use this process's sums only. The other processes do not call this method.
            means["train_loss"] = (logged.total / logged.weight).item()
        return train_values_first({**self.returned, **means})

    def frame(self) -> Any:
        """Return the rows as a DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows],
            "files": [logger.position() for logger in self.csv_loggers],
            "returned": dict(self.returned),
            "row": dict(self._row),
            "step_values": to_numbers(self.step_values),
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "evaluated": list(self.evaluated),
            "is_validated": self.is_validated,
            "seconds": self.elapsed(),
            "eval_seconds": self._eval_seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = [dict(row) for row in state["rows"]]
        if not self.counts_steps:
            # The saved run was limited by max_steps. An epoch-based run has no such column.
            for row in self.rows:
                row.pop("samples_per_second", None)
        self.returned, self._row = dict(state["returned"]), dict(state["row"])
        self.step_values = dict(state["step_values"])
        self.learning_rates = list(state["learning_rates"])
        self.evaluated = dict.fromkeys(state["evaluated"])
        self.is_validated = state["is_validated"]
        self._seconds_before_resume = state["seconds"]
        self._eval_seconds = state["eval_seconds"]
        self.start_clock()
        # The saved run may have had fewer CSV loggers.
        for logger, position in zip_longest(self.csv_loggers, state["files"]):
            if logger is not None:
                logger.rewind(position or {}, self.rows)


def to_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with plain numbers in place of tensors."""
    return {n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()}


def train_values_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the training values first."""
    names = sorted(values, key=lambda name: not name.startswith("train"))
    return to_numbers({name: values[name] for name in names})


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """Return the numbers in a step's output, keyed by their names in the history.

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
