"""Collect the rows of a run from returned and logged values, learning rate and time."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from ..errors import ConfigurationTypeError, describe
from ..training.optimization import learning_rates

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
        learning_rates: Those of the epoch's last optimizer step, noted before a scheduler changed them.
        train_sums: What the training steps of this epoch returned. Each process has its own.
        outputs: What the steps of the current evaluation returned, by loader and batch.
        evaluated: What the newest evaluation measured.
        evaluated_metrics: The part of it that loggers get. Of a LightningModule that is what it logged.
    """

    def __init__(self) -> None:
        self.run: RunState = None  # type: ignore[assignment]
        self.rows: list[dict[str, Any]] = []
        self.returned: dict[str, float] = {}
        self.learning_rates: list[float] = []
        self.outputs: list[list[Any]] = []
        self.evaluated: dict[str, Any] = {}
        self.evaluated_metrics: dict[str, Any] = {}
        self.train_sums = WeightedMeans()
        # What was returned since the last row.
        self._row: dict[str, float] = {}
        # Of the current evaluation: what the steps of this loader returned, and what each loader before has
        # returned and logged.
        self._eval_sums = WeightedMeans()
        self._eval_results: list[tuple[dict[str, float], dict[str, Any]]] = []
        self._epoch_started = time.monotonic()
        self._seconds_before_resume = 0.0

    def start_clock(self) -> None:
        """Start the time of the first epoch, so that it does not cover the set-up."""
        self._epoch_started = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds of this epoch, those before a resume included."""
        return self._seconds_before_resume + time.monotonic() - self._epoch_started

    def add_train_output(self, output: Any, loss: Tensor) -> None:
        """Add what ``training_step`` returned. Of a LightningModule that logs, this is the loss."""
        run = self.run
        if run.config.barebones:
            return
        if run.results.train.mean_loss() is not None:
            # The module logs the same mean itself.
            return
        logs_itself = run.is_lightning_module and run.results.active
        if isinstance(output, Tensor) or logs_itself:
            values = {"train_loss": loss.detach()}
        else:
            values = name_outputs(output, "train")
        self.train_sums.add(values, self._batch_size())

    def _batch_size(self) -> int:
        """Return the batch_size that the step gave to ``self.log``, or that of the batch."""
        results = self.run.results.active
        assert results is not None
        if results.logged_batch_size is not None:
            return results.logged_batch_size
        try:
            return results.find_batch_size()
        except MisconfigurationException:
            return 1

    def end_train_batches(self) -> None:
        """Compute the means of the training epoch."""
        means = self._compute(self.train_sums)
        self.train_sums = WeightedMeans()
        logged = self.run.results.train.mean_loss()
        loss = means.get("train_loss", 0.0) if logged is None else logged.value(of_step=False)
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

    def add_evaluation_output(self, output: Any, dataloader_idx: int) -> None:
        """Add what an evaluation step returned. Of a LightningModule that logs, this is the loss."""
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
        """Compute the means of the loader whose batches are over. What is logged comes before them."""
        run = self.run
        run.results.end_batches()
        means = self._compute(self._eval_sums)
        self._eval_sums = WeightedMeans()
        if not run.is_lightning_module:
            # What a plain model returns are its metrics.
            tensors = {name: torch.tensor(value) for name, value in means.items()}
            run.results.callback_metrics.update(tensors)
        # As Trainer, the sanity check forgets the values of a loader when its batches are over.
        logged = {} if run.progress.stage == "sanity_check" else run.results.update_metrics()
        self._eval_results.append((means, logged))

    def end_evaluation_batches(self) -> None:
        """Compute what was measured, before the last hooks of the evaluation."""
        run = self.run
        self.end_loader()
        # What is logged from now on belongs to no loader.
        run.results.evaluation.dataloader_idx = None
        epoch_end = getattr(run.module, "functions", {}).get("epoch_end")
        if epoch_end is not None:
            self._call_epoch_end(epoch_end)

    def _call_epoch_end(self, epoch_end: Callable) -> None:
        """Call the function epoch_end with all outputs, and log what it returns."""
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
        """Return what was measured, a dict for each loader."""
        is_lightning_module = self.run.is_lightning_module
        at_end = self.run.results.update_metrics()
        all_returned: dict[str, Any] = {}
        all_logged: dict[str, Any] = {}
        for returned, logged in reversed(self._eval_results):
            all_returned |= returned
            all_logged |= logged
        all_logged |= at_end
        self.evaluated = all_returned | all_logged
        self.evaluated_metrics = all_logged if is_lightning_module else self.evaluated
        # Trainer returns what a LightningModule logged. One that logs nothing has what it returned.
        uses_returned = not (is_lightning_module and all_logged)
        results = []
        for returned, logged in self._eval_results:
            first = returned if uses_returned else {}
            results.append(to_numbers({**first, **logged, **at_end}))
        self.outputs, self._eval_results = [], []
        return results

    def forget_evaluation(self) -> None:
        """Forget what the sanity check has measured."""
        for values in (self.returned, self._row, self.evaluated, self.evaluated_metrics):
            values.clear()

    def add_row(self) -> dict[str, Any]:
        """Add the row of the epoch that ends."""
        run = self.run
        values = to_numbers({**self._row, **run.results.take_row()})
        row: dict[str, Any] = {"epoch": run.progress.epochs_done, "step": run.progress.global_step}
        row |= {name: values[name] for name in sorted(values, key=_is_not_of_training)}
        for index, rate in enumerate(self.learning_rates or learning_rates(run)):
            row.setdefault("lr" if index == 0 else f"lr_{index}", rate)
        row["time"] = self.elapsed()
        self.rows.append(row)
        self._row, self.learning_rates = {}, []
        self._epoch_started, self._seconds_before_resume = time.monotonic(), 0.0
        return row

    def latest(self) -> dict[str, float]:
        """Return the means of this epoch so far, and of the newest validation. Reads the device."""
        found = {**self.returned, **self.train_sums.compute()}
        logged = self.run.results.train.mean_loss()
        if logged is not None and logged.total is not None:
            # Of this process, because the others do not call this method.
            found["train_loss"] = (logged.total / logged.weight).item()
        return {name: found[name] for name in sorted(found, key=_is_not_of_training)}

    def frame(self) -> Any:
        """Return the rows as a DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows],
            "returned": dict(self.returned),
            "row": dict(self._row),
            "learning_rates": list(self.learning_rates),
            "evaluated": list(self.evaluated),
            "seconds": self.elapsed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = [dict(row) for row in state["rows"]]
        self.returned, self._row = dict(state["returned"]), dict(state["row"])
        self.learning_rates = list(state["learning_rates"])
        self.evaluated = dict.fromkeys(state["evaluated"])
        self._seconds_before_resume = state["seconds"]
        self._epoch_started = time.monotonic()


def to_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with plain numbers in place of tensors."""
    return {n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()}


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
