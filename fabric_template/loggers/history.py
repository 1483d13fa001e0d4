"""Collect the rows of a run from returned and logged values, learning rate and time."""

from __future__ import annotations

import math
import numbers
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..training.evaluation_loop import as_numbers
from ..training.lr_schedulers import learning_rates
from .result_collection import extract_batch_size

if TYPE_CHECKING:
    from ..training.run_state import RunState


class WeightedMeans:
    """Means of returned values, weighted by batch size. The sums stay on their device.

    Example:
        >>> means = WeightedMeans()
        >>> means.add({"train_loss": torch.tensor(1.0)}, 2)
        >>> means.add({"train_loss": torch.tensor(4.0)}, 1)
        >>> means.compute()
        {'train_loss': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor], batch_size: int) -> None:
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
        """Return the means, over all processes if all_reduce is given. Reads the device."""
        found = {}
        for name, total in self._sums.items():
            weight = torch.tensor(self._weights[name], dtype=total.dtype, device=total.device)
            pair = torch.stack([total, weight])
            if all_reduce is not None:
                pair = all_reduce(pair, reduce_op="sum")
            found[name] = (pair[0] / pair[1]).item()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "weights": dict(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._weights = dict(state["sums"]), dict(state["weights"])


class History:
    """Collects the row of each epoch, which ``fit`` returns and the CSV logger writes.

    Attributes:
        rows: The rows so far.
        returned: The newest means of what the steps returned, by name.
        outputs: What the steps of the current evaluation returned, by loader and batch.
        evaluated: What the newest evaluation measured, for the loggers.
        evaluation_means: The means of what its steps returned.
        learning_rates: Those of the epoch's last optimizer step, noted before a scheduler changed them.
    """

    def __init__(self) -> None:
        self.run: RunState = None  # type: ignore[assignment]
        self.rows: list[dict[str, Any]] = []
        self.returned: dict[str, float] = {}
        self._last_returned: dict[str, float] = {}
        self.learning_rates: list[float] = []
        self._train, self._evaluation = WeightedMeans(), WeightedMeans()
        self.evaluated: dict[str, Any] = {}
        self._results: list[dict[str, Any]] = []
        self._loader_of: dict[str, int] = {}
        self.outputs: list[list[Any]] = []
        self._epoch_started = time.monotonic()
        self._seconds_before_resume = 0.0
        self._is_nan_reported = False

    def start_clock(self) -> None:
        """Start the time of the first epoch, so that it does not cover the set-up."""
        self._epoch_started = time.monotonic()

    @property
    def _all_reduce(self) -> Callable[..., Any] | None:
        fabric = self.run.fabric
        return fabric.all_reduce if fabric.world_size > 1 else None

    # Training

    def add_train_output(self, output: Any, loss: Tensor) -> None:
        """Add what ``training_step`` returned."""
        run = self.run
        if run.config.barebones:
            return
        logs_itself = run.is_lightning_module and run.results.active
        if isinstance(output, Tensor) or logs_itself:
            values = {"train_loss": loss.detach()}
        else:
            values = name_outputs(output, "train")
        self._train.add(values, self._batch_size())

    def _batch_size(self) -> int:
        results = self.run.results.active
        if results.batch_size is None and results.logged_batch_size is not None:
            # The step knows better what a batch with differing tensors holds.
            return extract_batch_size(results.batch, results.logged_batch_size)
        try:
            return results.find_batch_size()
        except ConfigurationError:
            return 1

    def end_train_batches(self) -> None:
        means = self._train.compute(self._all_reduce)
        self.returned.update(means)
        self._warn_of_nan(means.get("train_loss"))
        self._train = WeightedMeans()

    def _warn_of_nan(self, loss: float | None) -> None:
        run = self.run
        if (
            loss is None
            or math.isfinite(loss)
            or self._is_nan_reported
            or run.config.on_nan == "off"
        ):
            return
        self._is_nan_reported = True
        if run.fabric.is_global_zero:
            warnings.warn(
                f"The training loss is not finite (NaN or inf) in epoch {run.progress.epochs_done}. To find"
                " the operation: FabricLoop(detect_anomaly=True). A smaller learning rate or"
                " gradient_clip_val=1.0 often helps.",
                stacklevel=2,
            )

    # Evaluation

    def start_evaluation(self, run: RunState, stage: str) -> None:
        self._evaluation = WeightedMeans()
        self._results, self._loader_of = [], {}
        self.outputs = [[] for _ in run.data.eval_loaders.loaders]
        self._prefix = "test" if stage == "test" else "val"

    def add_evaluation_output(
        self, run: RunState, output: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Add what an evaluation step returned, but for what it logged under the same name."""
        self.outputs[dataloader_idx].append(output)
        values = name_outputs(output, self._prefix)
        active = run.results.active
        if active:
            logged = {key[1] for key, metric in active.items() if metric.has_value}
            allowed = {f"{self._prefix}_loss"} if run.is_lightning_module else set(values)
            values = {n: v for n, v in values.items() if n in allowed and n not in logged}
        if not values:
            return
        loaders = run.data.eval_loaders
        named = {}
        for name, value in values.items():
            if loaders.names and not run.is_lightning_module:
                name = f"{loaders.names[dataloader_idx]}{name.removeprefix(self._prefix)}"
            elif loaders.has_several:
                name = f"{name}/dataloader_idx_{dataloader_idx}"
            self._loader_of[name] = dataloader_idx
            named[name] = value
        self._evaluation.add(named, self._batch_size())

    def end_loader(self, run: RunState) -> None:
        """Collect what was logged for the loader whose batches are over."""
        run.results.end_batches()
        self._results.append(dict(run.results.update_metrics()))

    def end_evaluation_batches(self, run: RunState) -> None:
        self.end_loader(run)
        run.results.active.dataloader_idx = None
        means = self._evaluation.compute(self._all_reduce)
        self.evaluation_means = means
        self.returned.update(means)
        if not run.is_lightning_module:
            # What a plain model returned are its metrics.
            tensors = {name: torch.tensor(value) for name, value in means.items()}
            run.results.callback_metrics.update(tensors)
        epoch_end = getattr(run.module, "functions", {}).get("epoch_end")
        if epoch_end is not None:
            self._call_epoch_end(run, epoch_end)

    def _call_epoch_end(self, run: RunState, epoch_end: Callable) -> None:
        outputs = self.outputs if run.data.eval_loaders.has_several else self.outputs[0]
        values = epoch_end(run.network, outputs) or {}
        previous, run.hooks.current = run.hooks.current, "on_validation_epoch_end"
        for name, value in values.items():
            prefix = f"{self._prefix}_"
            run.results.log(
                name if name.startswith(prefix) else prefix + name, value, sync_dist=True
            )
        run.hooks.current = previous

    def end_evaluation(self, run: RunState) -> list[dict[str, Any]]:
        """Return what was measured, a dict for each loader."""
        at_end = run.results.update_metrics()
        self.outputs = []
        for result in self._results:
            result.update(at_end)
        self.evaluated = {n: v for result in reversed(self._results) for n, v in result.items()}
        if self.evaluation_means and not (run.is_lightning_module and any(self._results)):
            self._add_returned()
        return as_numbers(self._results)

    def _add_returned(self) -> None:
        for index, result in enumerate(self._results):
            for name, value in self.evaluation_means.items():
                if self._loader_of.get(name, 0) == index:
                    result.setdefault(name, value)
        if not self.run.is_lightning_module:
            self.evaluated = {**self.evaluation_means, **self.evaluated}

    # Rows

    def add_row(self) -> dict[str, Any]:
        """Add the row of the epoch that ends."""
        run = self.run
        values = {**self.returned, **run.results.take_row()}
        row: dict[str, Any] = {"epoch": run.progress.epochs_done, "step": run.progress.global_step}
        for name in sorted(values, key=_is_not_of_training):
            value = values[name]
            row[name] = value.item() if isinstance(value, Tensor) else value
        rates = self.learning_rates or learning_rates(run)
        for index, rate in enumerate(rates):
            row.setdefault("lr" if index == 0 else f"lr_{index}", rate)
        row["time"] = self.elapsed()
        self.rows.append(row)
        self._last_returned, self.returned, self.learning_rates = self.returned, {}, []
        self._epoch_started, self._seconds_before_resume = time.monotonic(), 0.0
        return row

    def elapsed(self) -> float:
        """Return the seconds of this epoch, those before a resume included."""
        return self._seconds_before_resume + time.monotonic() - self._epoch_started

    def latest(self) -> dict[str, float]:
        """Return the means of this epoch so far, and of the newest validation. Reads the device."""
        found = {**self._last_returned, **self.returned, **self._train.compute()}
        return {name: found[name] for name in sorted(found, key=_is_not_of_training)}

    def frame(self) -> Any:
        """Return the rows as a DataFrame, or as a list of dicts where pandas is missing."""
        try:
            import pandas
        except ModuleNotFoundError:
            return list(self.rows)
        return pandas.DataFrame(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows],
            "returned": dict(self.returned),
            "learning_rates": list(self.learning_rates),
            "evaluated": [name for name in self.evaluated],
            "train": self._train.state_dict(),
            "seconds": self.elapsed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = [dict(row) for row in state["rows"]]
        self.returned, self.learning_rates = dict(state["returned"]), list(state["learning_rates"])
        self.evaluated = dict.fromkeys(state["evaluated"])
        self._train.load_state_dict(state["train"])
        self._seconds_before_resume = state["seconds"]
        self._epoch_started = time.monotonic()


def _is_not_of_training(name: str) -> bool:
    """Return False for a training metric, so that sorting puts it first."""
    return not name.startswith("train")


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """Return the numbers that a step returned under their names in the history.

    A tensor is ``<prefix>_loss``, a dict gives ``<prefix>_<key>``, a pair ``<prefix>_loss`` and
    ``<prefix>_acc``.

    Example:
        >>> name_outputs((torch.tensor(0.5), torch.tensor(1.0)), "val")
        {'val_loss': tensor(0.5000), 'val_acc': tensor(1.)}
    """
    if isinstance(output, tuple):
        named: Mapping[Any, Any] = {"loss": output[0], "acc": output[1]} if len(output) == 2 else {}
    elif isinstance(output, Tensor | numbers.Number):
        named = {"loss": output}
    else:
        named = output if isinstance(output, Mapping) else {}
    found = {}
    for key, value in named.items():
        name = str(key) if str(key).startswith(f"{prefix}_") else f"{prefix}_{key}"
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().reshape(())
        elif isinstance(value, numbers.Number) and not isinstance(value, bool):
            found[name] = torch.tensor(float(value))  # type: ignore[arg-type]
    return found
