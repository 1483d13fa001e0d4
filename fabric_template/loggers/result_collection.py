"""Collect logged and returned values with Trainer's arithmetic, on the device of the values.

A mean is sum(value * batch_size) / sum(batch_size), added in order in float32 or wider.
A step never synchronizes with the device.
"""

from __future__ import annotations

import copyreg
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..errors import ConfigurationError
from .log_arguments import (
    REDUCTIONS,
    check_name,
    find_reduction,
    find_step_and_epoch,
    hook_error,
    to_single_element,
    value_error,
)

if TYPE_CHECKING:
    from ..training.run_state import RunState

# The name in LogArguments.hook for values that a step returned instead of calling self.log().
RETURNED = "returned"
_POWERS_OF_TWO = frozenset(2**power for power in range(24))
# Types of values that torch.load(weights_only=True) reads.
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, torch.dtype)
# The attributes of LoopResults that checkpoints contain.
_SAVED_ATTRIBUTES = ("is_in_batches", "is_after_first_batch", "last_hook", "has_new_values")
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass
class LogArguments:
    """The arguments of one ``self.log`` call, with the defaults of its hook."""

    hook: str
    name: str
    prog_bar: bool = False
    logger: bool = True
    on_step: bool = False
    on_epoch: bool = True
    reduction: str = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_dist_group: Any = None
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False
    dataloader_idx: int | None = None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """The key under which LoopResults stores the value."""
        return self.hook, self.name, self.dataloader_idx if self.add_dataloader_idx else None

    def full_name(self, suffix: str = "") -> str:
        """Return the name, with the index of the loader if there are several evaluation loaders.

        Args:
            suffix: "_step" or "_epoch", which distinguishes the two values if both are logged.
        """
        name = self.name + suffix if self.on_step and self.on_epoch else self.name
        if self.add_dataloader_idx and self.dataloader_idx is not None:
            name += f"/dataloader_idx_{self.dataloader_idx}"
        return name


def float_type() -> torch.dtype:
    """Return the default dtype, or float32 if the default is less precise."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


class Accumulator:
    """Reduce the values of one name to their mean, sum, maximum or minimum.

    Args:
        reduction: A key of REDUCTIONS. A mean is weighted.
        sync: Reduces a tensor over all processes, or returns it unchanged.
    """

    def __init__(self, reduction: str, sync: Callable[[Tensor], Tensor]) -> None:
        self.is_mean = reduction == "mean"
        self._operation, self._sync = REDUCTIONS[reduction][1], sync
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.weight: int | Tensor = 0
        self._result: Tensor | None = None

    def add(self, value: Tensor, weight: int) -> None:
        """Add a 0-dimensional float tensor. Only a mean uses ``weight``, the number of samples."""
        self._result = None
        if self.is_mean:
            self.weight += weight
            if self.total is not None and weight in _POWERS_OF_TWO:
                # If weight is a power of two, torch.add() rounds like total + value * weight.
                self.total = torch.add(self.total, value, alpha=weight)
                return
            value = value * weight
        if self.total is None:
            self.total = value.to(torch.promote_types(value.dtype, float_type()), copy=True)
        else:
            self.total = self._operation(self.total, value)

    def compute(self) -> Tensor | None:
        """Return the result, or None if nothing was added. All processes must call ``compute``."""
        if self._result is None and self.total is not None:
            self._result = self._sync(self.total.clone())
            if self.is_mean:
                total = self._result
                weight = torch.as_tensor(self.weight, dtype=total.dtype, device=total.device)
                self._result = total / self._sync(weight)
        return self._result

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.weight, self._result = state["total"], state["weight"], None


class LoggedMetric:
    """Keep the last value of one logged name, and accumulate its values over the epoch.

    Attributes:
        call_arguments: The arguments of the last checked call. Equal arguments need no check.
        is_returned: Whether a step returned the values. Such values are reset with each row.
        row: Accumulates the values since the newest row of metrics.csv. In an epoch-based run,
            ``row`` is the same object as ``epoch``.
        has_value: Whether the name was logged in this epoch.
    """

    def __init__(self, arguments: LogArguments, all_reduce: Callable[..., Any] | None) -> None:
        self.arguments, self._all_reduce = arguments, all_reduce
        self.is_returned = arguments.hook == RETURNED
        self.call_arguments: tuple = ()
        self.needs_batch_size = arguments.on_epoch and arguments.reduction == "mean"
        self.torchmetric: Any = None
        self.step_value: Tensor | None = None
        self.has_value = False
        self.epoch = self.row = Accumulator(arguments.reduction, self.sync)

    def reset(self) -> None:
        """Reset the sums for the next epoch."""
        if self.torchmetric is not None:
            self.torchmetric.reset()
        self.has_value = False
        self.epoch.reset()

    def update(self, value: Tensor, batch_size: int) -> None:
        """Add a 0-dimensional tensor. Only a mean uses ``batch_size``, as the tensor's weight."""
        self.has_value = True
        if self.arguments.on_step:
            # Clone the value, because the user may change it in place afterwards.
            self.step_value = value.clone()
            if self.arguments.sync_dist:
                self.step_value = self.sync(self.step_value)
        if self.arguments.on_epoch:
            self.epoch.add(value, batch_size)
            if self.row is not self.epoch:
                self.row.add(value.detach(), batch_size)

    def sync(self, value: Tensor) -> Tensor:
        """Reduce a value over all processes, if sync_dist=True was given."""
        arguments = self.arguments
        if self._all_reduce is None or not arguments.sync_dist or arguments.rank_zero_only:
            return value
        group, reduction = arguments.sync_dist_group, arguments.reduction
        return self._all_reduce(value, group=group, reduce_op=reduction)

    def update_torchmetric(self, metric: Any) -> None:
        """Register a logged torchmetrics object, which keeps its own sums."""
        default = torch.get_default_dtype()
        if metric is self.torchmetric and getattr(metric, "dtype", default) is not default:
            # As in Trainer, each log resets the object's dtype to torch's default, by calling to().
            metric.to(metric.device)
        self.torchmetric, self.has_value = metric, True
        if self.arguments.on_step:
            # Read a private name, because torchmetrics has no public name for this value.
            self.step_value = getattr(metric, "_forward_cache", None)

    def value(self, of_step: bool) -> Tensor | None:
        """Return the value of the step or of the epoch so far, or None if nothing was logged."""
        return self._check_and_detach(self.step_value if of_step else self._reduce(self.epoch))

    def row_value(self) -> Tensor | None:
        """Return the value since the newest row, or the epoch's value of a torchmetrics object."""
        return self._check_and_detach(self._reduce(self.row))

    def _reduce(self, accumulator: Accumulator) -> Any:
        if self.torchmetric is None:
            return accumulator.compute()
        return self.torchmetric.compute() if self.has_value and self.arguments.on_epoch else None

    def _check_and_detach(self, value: Any) -> Tensor | None:
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"The `.compute()` return of the metric logged as {self.arguments.name!r} must be a"
                f" tensor. Found {value}. Log it with self.log_dict."
            )
        return value if self.arguments.enable_graph else value.detach()

    def state_dict(self) -> dict[str, Any]:
        arguments = dataclasses.replace(self.arguments, sync_dist_group=None)
        return {
            "arguments": dataclasses.asdict(arguments),
            "step_value": self.step_value,
            "has_value": self.has_value,
            "epoch": self.epoch.state_dict(),
            "row": self.row.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step_value, self.has_value = state["step_value"], state["has_value"]
        self.row.load_state_dict(state["row"])
        self.epoch.load_state_dict(state["epoch"])


class LoopResults(dict):
    """Map (hook, name, dataloader_idx) to the values logged in one loop: training or evaluation.

    Attributes:
        batch: The current batch.
        batch_size: The size of the current batch. None until a mean needs it.
        logged_batch_size: The batch_size that the current step passed to ``self.log``.
        row_metrics: The metrics whose values are in the rows of metrics.csv, by name.
        is_in_batches: Whether the batches of an epoch or of a loader have started and not ended.
        is_after_first_batch: Whether the second batch of the epoch or loader has started.
        last_hook: The hook that logged last.
        has_new_values: Whether a batch has ended since the last ``update_metrics``.
    """

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.is_training = is_training
        self.batch: Any = None
        self.batch_size: int | None = None
        self.logged_batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.row_metrics: dict[str, LoggedMetric] = {}
        self.has_step_values = False
        self.is_in_batches = self.is_after_first_batch = False
        self.last_hook: str | None = None
        self.has_new_values = False

    def current(self) -> Iterator[LoggedMetric]:
        """Yield the metrics that were logged for the current loader since the last reset."""
        for metric in self.values():
            if metric.has_value and metric.arguments.dataloader_idx == self.dataloader_idx:
                yield metric

    def reset_hook(self, hook: str | None) -> None:
        """Reset the values that were logged in a hook, except for torchmetrics objects."""
        for metric in self.values():
            if metric.arguments.hook == hook and metric.torchmetric is None:
                metric.reset()

    def current_batch_size(self) -> int:
        """Return the size of the current batch. Compute the batch size once per batch."""
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else find_batch_size(self.batch)
        return self.batch_size


def find_batch_size(batch: Any) -> int:
    """Return the batch size that Trainer would find, with a fast path for a tuple of tensors."""
    if type(batch) in (tuple, list):
        sizes = {p.size(0) if isinstance(p, Tensor) and p.dim() else -1 for p in batch}
        if len(sizes) == 1 and -1 not in sizes:
            return sizes.pop()
    return extract_batch_size(batch)


class CurrentValues(NamedTuple):
    """The values of the current step or epoch: for callbacks, loggers, progress bar and CSV rows.

    Attributes:
        row: The values for a row of a CSV file, without the suffix "_step" or "_epoch".
        returned: The means of the values that the steps returned.
    """

    callback: dict[str, Any]
    logged: dict[str, Any]
    progress_bar: dict[str, Any]
    row: dict[str, Any]
    returned: dict[str, Any]


class ResultCollection:
    """Implement ``self.log``, and Trainer's dicts of logged values, such as callback_metrics.

    Attributes:
        active: The LoopResults that receive logged values; None outside of the loops.
        callback_metrics, logged_metrics, progress_bar_metrics: Trainer's attributes of these names.
        row: The evaluated values of the next row of metrics.csv.
        returned: The newest means of the values that steps returned.
        evaluated: The names of the values in the newest evaluation.
        evaluated_metrics: The values that loggers receive from the newest evaluation.
    """

    # An unpickled ResultCollection keeps this value, so its log() does nothing.
    is_enabled = False

    def __init__(self, run: RunState) -> None:
        self.run, self._hooks = run, run.hooks
        self.is_enabled = not run.config.barebones
        self._all_reduce: Any = run.fabric.all_reduce if run.is_distributed else None
        self.train, self.evaluation = LoopResults(is_training=True), LoopResults(is_training=False)
        self.active: LoopResults | None = None
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.row: dict[str, Any] = {}
        self.returned: dict[str, Tensor] = {}
        self.evaluated: set[str] = set()
        self.evaluated_metrics: dict[str, Any] = {}
        # The values of each finished loader of the current evaluation.
        self._loader_values: list[CurrentValues] = []

    def __deepcopy__(self, memo: dict) -> ResultCollection:
        """Return self, so that a module that is copied during a run logs to this run."""
        return self

    def __reduce__(self) -> Any:
        """Pickle an empty object, so that pickling a module does not pickle the run."""
        return (copyreg.__newobj__, (ResultCollection,))  # type: ignore[attr-defined]

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number, a tensor of one element or a torchmetrics object; see LightningModule.log."""
        if not self.is_enabled:
            return
        results, hook = self.active, self._hooks.current
        if results is None:
            raise hook_error(hook)
        index = results.dataloader_idx
        arguments: tuple = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph)
        arguments += (sync_dist, sync_dist_group, add_dataloader_idx, rank_zero_only, index)
        metric = results.get((hook, name, index if add_dataloader_idx else None))
        if metric is None or metric.call_arguments != arguments:
            metric = self._register(results, hook, name, arguments)
        if results.last_hook != hook:
            # As in Trainer, reset the values of a hook that starts to log in an epoch's first batch.
            if not results.is_after_first_batch:
                results.reset_hook(hook)
            results.last_hook = hook
        if isinstance(value, Tensor):
            value = value.detach() if value.requires_grad and not enable_graph else value
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=float_type())
        elif is_torchmetric(value):
            metric.update_torchmetric(value)
            return
        else:
            raise value_error(name, value)
        if value.dim():
            value = to_single_element(name, value)
        if value.dtype is not torch.float32 and value.dtype is not torch.float64:
            value = value.to(float_type())
        if batch_size is not None:
            results.logged_batch_size = batch_size
        else:
            batch_size = results.current_batch_size() if metric.needs_batch_size else 1
        metric.update(value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        is_collection = hasattr(dictionary, "add_metrics")
        options = {"keep_base": False, "copy_state": False} if is_collection else {}
        for name, value in dictionary.items(**options):
            self.log(name, value, **arguments)

    def _register(
        self, results: LoopResults, hook: str | None, name: str, call_arguments: tuple
    ) -> LoggedMetric:
        """Check the arguments of a ``self.log`` call, and return the call's LoggedMetric."""
        prog_bar, logger, on_step, on_epoch, reduce_fx, *others = call_arguments
        on_step, on_epoch = find_step_and_epoch(hook, on_step, on_epoch)
        levels = (prog_bar, logger is not False, on_step, on_epoch)
        arguments = LogArguments(str(hook), name, *levels, find_reduction(reduce_fx), *others)
        check_name(name, arguments.add_dataloader_idx)
        metric = results.get(arguments.key)
        if metric is None:
            metric = self._add_metric(results, arguments)
        elif metric.call_arguments and metric.arguments != arguments:
            raise ConfigurationError(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments."
                " This is not allowed"
            )
        metric.arguments, metric.call_arguments = arguments, call_arguments
        return metric

    def _add_metric(self, results: LoopResults, arguments: LogArguments) -> LoggedMetric:
        metric = LoggedMetric(arguments, self._all_reduce)
        results[arguments.key] = metric
        if metric.is_returned:
            results.row_metrics.setdefault(arguments.name, metric)
        elif arguments.on_epoch and arguments.logger:
            results.row_metrics[arguments.full_name()] = metric
        is_step_based = self.run.history.is_step_based and results.is_training
        if is_step_based and not metric.is_returned:
            metric.row = Accumulator(arguments.reduction, metric.sync)
        results.has_step_values |= arguments.on_step
        return metric

    def add_returned(self, values: Mapping[str, Tensor]) -> None:
        """Accumulate the 0-dimensional tensors that a step returned but did not log."""
        results = self.active
        assert results is not None
        for name, value in values.items():
            metric = results.row_metrics.get(name)
            if metric is None or not (metric.is_returned or metric.has_value):
                metric = self._returned_metric(results, name)
            if metric.is_returned:
                if value.dtype is not torch.float32 and value.dtype is not torch.float64:
                    value = value.to(float_type())
                metric.has_value = True
                metric.epoch.add(value, self.returned_batch_size())

    def _returned_metric(self, results: LoopResults, name: str) -> LoggedMetric:
        metric = results.get((RETURNED, name, None))
        if metric is None:
            arguments = LogArguments(RETURNED, name, sync_dist=True, add_dataloader_idx=False)
            arguments.dataloader_idx = results.dataloader_idx
            metric = self._add_metric(results, arguments)
        return metric

    def returned_batch_size(self) -> int:
        """Return the batch_size that the step passed to ``self.log``, or the size of the batch."""
        results = self.active
        assert results is not None
        if results.logged_batch_size is not None:
            return results.logged_batch_size
        try:
            return results.current_batch_size()
        except MisconfigurationException:
            return 1

    def start_training(self) -> None:
        """Collect the values that are logged from now on as training results."""
        self.active = self.train

    def start_evaluation(self) -> None:
        """Collect the values that are logged from now on as evaluation results."""
        self.update_metrics()
        self.active = self.evaluation
        self.evaluated, self.evaluated_metrics, self._loader_values = set(), {}, []

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        results = self.active
        assert results is not None
        results.is_after_first_batch = results.is_in_batches
        results.is_in_batches = True
        results.batch, results.batch_size, results.logged_batch_size = batch, None, None
        results.dataloader_idx = dataloader_idx

    def end_batch(self) -> None:
        """Clear the current batch, and mark callback_metrics as outdated."""
        assert self.active is not None
        self.active.batch = self.active.batch_size = None
        self.active.has_new_values = True

    def end_batches(self) -> None:
        """Switch from step values to epoch values after the last batch of an epoch or a loader."""
        results = self.active
        assert results is not None
        if results.has_new_values:
            self.update_metrics()
        results.is_in_batches = results.is_after_first_batch = False
        # All processes are here, so reduce the means. A hook may read them in a single process.
        for metric in results.current():
            metric.epoch.compute()

    def end_loader(self) -> None:
        """Store the values of an evaluation loader after its last batch."""
        self.end_batches()
        # As in Trainer, a sanity check updates callback_metrics only after its last loader.
        if self.run.progress.stage != "sanity_check":
            self._loader_values.append(self.update_metrics())
        # Values that are logged after the last batch belong to no loader.
        self.evaluation.dataloader_idx = None

    def end_evaluation(self) -> list[dict[str, Any]]:
        """Return the evaluation's values as one dict for each loader."""
        at_end = self.update_metrics()
        # As in Trainer, loggers receive the values of the last loader first.
        for values in (*reversed(self._loader_values), at_end):
            self.evaluated_metrics.update(values.logged)
        results = []
        for values in self._loader_values:
            # Like Trainer, return logged values. If nothing is logged, return step outputs.
            first = values.logged or at_end.logged or values.returned
            results.append(to_numbers({**first, **at_end.logged}))
        return results

    def reset(self) -> None:
        """Reset the sums after the last hook of an epoch."""
        results = self.active
        if results is not None:
            for metric in results.values():
                # Skip values that training steps returned, because take_row() resets these values.
                if not results.is_training or not metric.is_returned:
                    metric.reset()
            results.dataloader_idx = results.last_hook = None
            results.is_in_batches = results.is_after_first_batch = False

    def end(self) -> None:
        """Stop logging. callback_metrics keeps the values of the last batch."""
        if self.active is not None and self.active.has_new_values:
            self.update_metrics()
        self.active = None
        for metrics in (self.callback_metrics, self.logged_metrics):
            metrics.update(move_data_to_device(metrics, "cpu"))

    def forget_sanity_check(self) -> None:
        for metrics in (self.callback_metrics, self.logged_metrics, self.progress_bar_metrics):
            metrics.clear()
        self.row, self.returned, self.evaluated = {}, {}, set()
        self.evaluation = LoopResults(is_training=False)

    def update_metrics(self) -> CurrentValues:
        """Update callback_metrics, logged_metrics, progress_bar_metrics, and evaluated values."""
        values = self.current_values()
        if self.active is None:
            return values
        self.active.has_new_values = False
        self.callback_metrics.update(values.callback)
        self.logged_metrics.update(values.logged)
        self.progress_bar_metrics.update(to_numbers(values.progress_bar))
        self.returned.update(values.returned)
        if not self.active.is_training and not self.active.is_in_batches:
            self.row.update(values.row)
            self.evaluated.update(values.row, values.logged)
        return values

    def current_values(self) -> CurrentValues:
        """Return the current step's values. After the last batch, return the epoch's values."""
        values = CurrentValues({}, {}, {}, {}, {})
        results = self.active
        if results is None:
            return values
        of_step = results.is_in_batches
        for metric in results.current():
            value = metric.value(of_step)
            if value is None:
                continue
            arguments = metric.arguments
            name = arguments.full_name()
            full_name = arguments.full_name("_step" if of_step else "_epoch")
            if metric.is_returned:
                values.returned[name] = values.row[name] = value
                # As in Trainer, do not log the values that a LightningModule's steps return.
                if not self.run.is_lightning_module:
                    values.logged[name] = values.callback[name] = value
                continue
            if arguments.logger:
                values.logged[full_name] = values.row[name] = value
            if arguments.prog_bar:
                values.progress_bar[full_name] = value
            if results.is_training or not of_step:
                values.callback[name] = values.callback[full_name] = value
        return values

    def take_row(self) -> dict[str, Tensor]:
        """Return the values of the next row of metrics.csv, and reset them."""
        row, self.row = self.row, {}
        for metric in self.train.values():
            name, value = metric.arguments.full_name(), metric.row_value()
            metric.row.reset()
            if value is not None and metric.arguments.logger:
                row[name] = value
                if metric.is_returned:
                    self.returned[name] = value
        return row

    def latest_means(self) -> dict[str, Tensor]:
        """Return this process's newest means of returned values and of train_loss."""
        means = dict(self.returned)
        for metric in self.train.values():
            row, name = metric.row, metric.arguments.name
            is_shown = row.is_mean and (metric.is_returned or name == "train_loss")
            if is_shown and row.total is not None:
                means[name] = row.total / row.weight
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the metrics in this training epoch, also of torchmetrics objects."""
        train, metrics = self.train, find_torchmetrics(self.run.network)
        names = {id(metric): name for name, metric in metrics.items()}
        if self.active is self.evaluation:
            # A resumed run repeats an unfinished evaluation, so leave out the evaluation's metrics.
            evaluated = {id(metric.torchmetric) for metric in self.evaluation.values()}
            metrics = {n: m for n, m in metrics.items() if id(m) not in evaluated}
        entries = [
            {**metric.state_dict(), "torchmetric": names.get(id(metric.torchmetric))}
            for metric in train.values()
        ]
        return {
            "train": entries,
            "torchmetrics": torchmetrics_state(metrics),
            "callback_metrics": dict(self.callback_metrics),
            "returned": dict(self.returned),
            "evaluated": sorted(self.evaluated),
            "row": dict(self.row),
            "position": {name: getattr(train, name) for name in _SAVED_ATTRIBUTES},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_torchmetrics(self.run.network, state["torchmetrics"])
        train, metrics = self.train, find_torchmetrics(self.run.network)
        for entry in state["train"]:
            # Until the resumed run logs this metric, use the self.log arguments in the checkpoint.
            metric = self._add_metric(train, LogArguments(**entry["arguments"]))
            metric.load_state_dict(entry)
            metric.torchmetric = metrics.get(entry["torchmetric"])
        self.callback_metrics, self.row = dict(state["callback_metrics"]), dict(state["row"])
        self.returned, self.evaluated = dict(state["returned"]), set(state["evaluated"])
        vars(train).update(state["position"])


def to_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with plain numbers in place of tensors."""
    return {n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()}


def is_torchmetric(value: Any) -> bool:
    """Return whether a value has the interface of a torchmetrics object."""
    names = ("update", "compute", "reset")
    return not isinstance(value, Mapping) and all(hasattr(value, name) for name in names)


def find_torchmetrics(module: Any) -> dict[str, Any]:
    named = module.named_modules() if hasattr(module, "named_modules") else ()
    return {name: part for name, part in named if name and is_torchmetric(part)}


def torchmetrics_state(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return copies of each torchmetrics object's tensors, numbers and texts.

    state_dict() of a torchmetrics object leaves out its states, unless they are persistent.
    """
    state = {}
    for name, metric in metrics.items():
        attributes = {k: v for k, v in vars(metric).items() if k not in _ATTRIBUTES_OF_MODULES}
        state[name] = copy_plain({k: v for k, v in attributes.items() if _is_plain(v)})
    return state


def load_torchmetrics(module: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    metrics = find_torchmetrics(module)
    for name, attributes in state.items():
        tracker: Any = metrics.get(name.rpartition(".")[0])
        if name not in metrics and hasattr(tracker, "increment"):
            # MetricTracker.increment() adds a metric. Repeat the calls of the saved run.
            tracker.increment()
            metrics = find_torchmetrics(module)
        if name in metrics:
            vars(metrics[name]).update(copy_plain(attributes))


def copy_plain(values: Mapping[str, Any]) -> Any:
    return apply_to_collection(values, Tensor, lambda tensor: tensor.detach().clone())


def _is_plain(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) can load a value."""
    if type(value) is dict:
        return all(_is_plain(part) for part in [*value.keys(), *value.values()])
    if type(value) in (list, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, Tensor) or type(value) in _PLAIN_TYPES
