"""Collect the values that steps log or return, and average them as Trainer does.

A mean is sum(value * batch_size) / sum(batch_size). Logged values are summed on the GPU, because
copying each value to the CPU would slow down the steps.
"""

from __future__ import annotations

import numbers
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..distributed.launch import gather_objects
from ..errors import ConfigurationError
from ..plain_values import to_plain_tensor
from .log_arguments import REDUCTIONS, LogArguments, check_arguments, check_metric_name, value_error

if TYPE_CHECKING:
    from ..training.run import Run

# Values that a step returned, such as the loss, are stored under this name instead of a hook's
# name.
RETURNED = "returned"
# If weight is a power of two, torch.add(total, value, alpha=weight) gives exactly the same result
# as total + value * weight.
_POWERS_OF_TWO = frozenset(2**power for power in range(24))
# The types of values that torch.load(weights_only=True) loads by default.
_LOADABLE_TYPES = (type(None), bool, int, float, complex, str, torch.dtype)
# Checkpoints contain these attributes of the training results.
_SAVED_ATTRIBUTES = ("is_first_batch", "last_hook", "has_new_values")
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass
class Sums:
    """Accumulates the values logged under one name, for an epoch or for a row of metrics.csv.

    Attributes:
        total: The sum, maximum or minimum of the values. For a mean, the sum of value * batch_size.
        weight: For a mean, the sum of the batch sizes.
        result: The result over all processes, or None before LoggedMetric.compute is called.
    """

    total: Tensor | None = None
    weight: Any = 0
    result: Tensor | None = None


class LoggedMetric:
    """Stores the last value logged under one name, and accumulates the values over the epoch.

    Attributes:
        call_arguments: The arguments of the last call to ``self.log``. They are not checked again
            if the next call has the same arguments.
        is_returned: Whether a step returned the values instead of logging them.
        has_value: Whether a value was logged in this epoch.
        batch_number: The ``LoopResults.batch_number`` of the last logged value.
        row: The sums since the last row of metrics.csv. None if each epoch has one row.
    """

    def __init__(self, arguments: LogArguments, all_reduce: Any, has_own_row: bool) -> None:
        self.arguments, self._all_reduce = arguments, all_reduce
        self.call_arguments: tuple = ()
        self.is_returned = arguments.hook == RETURNED
        self.is_mean = arguments.reduction == "mean"
        self.needs_batch_size = arguments.on_epoch and self.is_mean
        self.torchmetric: Any = None
        self.step_value: Tensor | None = None
        self.has_value, self.batch_number = False, 0
        self.epoch, self.row = Sums(), Sums() if has_own_row else None

    def full_name(self, suffix: str = "") -> str:
        """Return the metric's name in logs, such as "loss_epoch" or "loss/dataloader_idx_1".

        Args:
            suffix: "_step" or "_epoch". It is appended only if on_step and on_epoch are both True.
        """
        arguments = self.arguments
        name = arguments.name
        if arguments.on_step and arguments.on_epoch:
            name += suffix
        if arguments.add_dataloader_idx and arguments.dataloader_idx is not None:
            name += f"/dataloader_idx_{arguments.dataloader_idx}"
        return name

    def update(self, value: Tensor, batch_size: Any) -> None:
        """Add a logged scalar to the sum for the epoch and to the sum for the next CSV row."""
        self.has_value = True
        if self.arguments.on_step:
            # Clone the value, because the user may change it in place afterwards.
            self.step_value = self._sync(value.clone())
        if self.arguments.on_epoch:
            self._add(self.epoch, value, batch_size)
            if self.row is not None:
                self._add(self.row, value, batch_size)

    def _add(self, sums: Sums, value: Tensor, weight: Any) -> None:
        sums.result = None
        if self.is_mean:
            sums.weight = sums.weight + weight
            if sums.total is not None and weight in _POWERS_OF_TWO:
                sums.total = torch.add(sums.total, value, alpha=weight)
                return
            value = value * weight
        if sums.total is None:
            sums.total = value.to(torch.promote_types(value.dtype, float_type()), copy=True)
        else:
            sums.total = REDUCTIONS[self.arguments.reduction](sums.total, value)

    def has_other_reduction(self, arguments: LogArguments) -> bool:
        """Return whether a restored metric was saved with a different reduce_fx or on_epoch."""
        is_restored, saved = not self.call_arguments, self.arguments
        is_equal = (saved.reduction, saved.on_epoch) == (arguments.reduction, arguments.on_epoch)
        return is_restored and not is_equal

    def is_reduced(self, sums: Sums) -> bool:
        """Return whether a metric still has to be combined across processes."""
        if self.torchmetric is not None:
            is_logged = self.has_value and self.arguments.on_epoch
            return is_logged and getattr(self.torchmetric, "sync_on_compute", False)
        has_new_sums = sums.total is not None and sums.result is None
        return has_new_sums and self.is_synced and self.arguments.sync_dist_group is None

    @property
    def is_synced(self) -> bool:
        return self.arguments.sync_dist and not self.arguments.rank_zero_only

    def _sync(self, value: Tensor) -> Tensor:
        """Reduce a value over all processes if ``self.log`` was called with sync_dist=True."""
        arguments = self.arguments
        if self._all_reduce is None or not self.is_synced:
            return value
        group, reduction = arguments.sync_dist_group, arguments.reduction
        return self._all_reduce(value, group=group, reduce_op=reduction)

    def update_torchmetric(self, metric: Any) -> None:
        """Store a logged torchmetrics object, which accumulates its values itself."""
        default = torch.get_default_dtype()
        if metric is self.torchmetric and getattr(metric, "dtype", default) is not default:
            # Like Trainer, use metric.to() to reset metric.dtype to torch's default dtype.
            metric.to(metric.device)
        self.torchmetric, self.has_value = metric, True
        if self.arguments.on_step:
            # torchmetrics has no public attribute for the value of the last step.
            self.step_value = getattr(metric, "_forward_cache", None)

    def compute(self, sums: Sums | None) -> Tensor | None:
        """Return the mean, sum, maximum or minimum of the logged values, or None if there are none.

        Call this method in all processes, because it may call all_reduce.

        Args:
            sums: The sums of the logged values. If None, return the last logged value.
        """
        if sums is None:
            value: Any = self.step_value
        elif self.torchmetric is not None:
            is_logged = self.has_value and self.arguments.on_epoch
            value = self.torchmetric.compute() if is_logged else None
        else:
            if sums.result is None and sums.total is not None:
                sums.result = self._sync(sums.total.clone())
                if self.is_mean:
                    total = sums.result
                    weight = torch.as_tensor(sums.weight, dtype=total.dtype, device=total.device)
                    sums.result = total / self._sync(weight)
            value = sums.result
        if value is not None and not isinstance(value, Tensor):
            raise ConfigurationError(
                f"The `.compute()` return of the metric logged as {self.arguments.name!r} must be a"
                f" tensor. Found {value}. Log a dict of values with self.log_dict."
            )
        return value if value is None or self.arguments.enable_graph else value.detach()

    def reset(self) -> None:
        if self.torchmetric is not None:
            self.torchmetric.reset()
        self.has_value, self.epoch = False, Sums()

    def state_dict(self) -> dict[str, Any]:
        return {
            "arguments": {**vars(self.arguments), "sync_dist_group": None},
            "step_value": self.step_value,
            "has_value": self.has_value,
            "epoch": dict(vars(self.epoch)),
            "row": dict(vars(self.row or self.epoch)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step_value, self.has_value = state["step_value"], state["has_value"]
        self.epoch = Sums(**state["epoch"])
        if self.row is not None:
            self.row = Sums(**state["row"])


@dataclass
class LoopResults:
    """Stores the values that the steps of one stage (training or evaluation) log or return.

    Attributes:
        metrics: The logged values, keyed by hook, name and loader index.
        logged: The keys of the metrics that steps or hooks have logged, grouped by the column of
            metrics.csv.
        batch: The current batch.
        batch_number: The number of batches since the run started or resumed.
        batch_size: The size of the current batch, or None if no logged mean has needed it yet.
        logged_batch_size: The batch_size that the current step passed to ``self.log``.
        is_first_batch: Whether the current batch is the first batch of the epoch or loader. None
            before the first batch and after the last batch.
        last_hook: The last hook that called ``self.log``.
        has_new_values: Whether a batch has finished since the last call to ``update_metrics``.
    """

    metrics: dict[tuple, LoggedMetric] = field(default_factory=dict)
    logged: dict[str, set[tuple]] = field(default_factory=dict)
    batch: Any = None
    batch_number: int = 0
    batch_size: int | None = None
    logged_batch_size: Any = None
    dataloader_idx: int | None = None
    is_first_batch: bool | None = None
    last_hook: str | None = None
    has_step_values: bool = False
    has_new_values: bool = False

    def current(self) -> Iterator[LoggedMetric]:
        """Yield each metric that has a value for the current loader in the current epoch."""
        for metric in self.metrics.values():
            if metric.has_value and metric.arguments.dataloader_idx == self.dataloader_idx:
                yield metric

    def record_arguments(self, key: tuple, metric: LoggedMetric) -> None:
        """Record whether a metric is logged for each step, and its column in metrics.csv.

        A resumed run may log the metric with other arguments.
        """
        arguments = metric.arguments
        self.has_step_values |= arguments.on_step
        if arguments.on_epoch and arguments.logger and not metric.is_returned:
            self.logged.setdefault(metric.full_name(), set()).add(key)

    def is_logged(self, name: str) -> bool:
        """Return whether a step or a hook has logged a name in the current epoch."""
        return any(self.metrics[key].has_value for key in self.logged.get(name, ()))

    def start_hook(self, hook: str | None) -> None:
        """Reset the values that ``hook`` logged in the previous epoch."""
        self.last_hook = hook
        if self.is_first_batch is not False:
            for metric in self.metrics.values():
                if metric.arguments.hook == hook and metric.torchmetric is None:
                    metric.reset()

    def current_batch_size(self) -> int:
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.batch_size


class CurrentValues(NamedTuple):
    """Groups logged values by their destination, such as callbacks, loggers or metrics.csv."""

    callback: dict[str, Any]
    logged: dict[str, Any]
    progress_bar: dict[str, Any]
    row: dict[str, Any]


class ResultCollection:
    """Implements ``self.log`` and Trainer's dicts of logged values, such as callback_metrics.

    Attributes:
        active: The results to which ``self.log`` adds values: ``train`` during training, and
            ``evaluation`` during an evaluation. After the run, the results are empty.
        callback_metrics, logged_metrics, progress_bar_metrics: Like the Trainer attributes
            with these names.
        returned: The latest means of the values that steps returned.
        evaluated: The names of the values that the last evaluation logged or returned.
    """

    is_per_process = True

    # After unpickling, is_enabled is False, so that log() does nothing.
    is_enabled = False

    def __init__(self, run: Run) -> None:
        self.run, self._hooks = run, run.hooks
        self.is_enabled = not run.config.barebones
        self._all_reduce: Any = run.fabric.all_reduce if run.fabric.world_size > 1 else None
        self.clear()

    def clear(self) -> None:
        """Remove all logged values, for example those of the sanity check."""
        self.train, self.evaluation = LoopResults(), LoopResults()
        self.active = self.train
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.returned: dict[str, Any] = {}
        self.evaluated: set[str] = set()
        self._loader_values: list[CurrentValues] = []

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return callback_metrics, logged_metrics and progress_bar_metrics in one dict."""
        names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        return {name: getattr(self, name) for name in names}

    def load_metrics(self, metrics: dict[str, dict[str, Any]]) -> None:
        """Copy the metrics of a ddp_spawn process to the main process."""
        vars(self).update(metrics)

    def __deepcopy__(self, memo: dict) -> ResultCollection:
        """Let a module and its deep copy log to the same run."""
        return self

    def __getstate__(self) -> dict:
        """Return an empty state, so that a pickled LightningModule does not contain the run."""
        return {}

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
        """Log a number, a one-element tensor or a torchmetrics object. See LightningModule.log."""
        if not self.is_enabled:
            self._warn_of_barebones()
            return
        results, hook = self.active, self._hooks.current
        index = results.dataloader_idx
        arguments: tuple = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph)
        arguments += (sync_dist, sync_dist_group, add_dataloader_idx, rank_zero_only, index)
        key = (hook, name, index if add_dataloader_idx else None)
        metric = results.metrics.get(key)
        if metric is None or metric.call_arguments != arguments:
            metric = self._register(results, key, arguments)
        if results.last_hook != hook:
            results.start_hook(hook)
        metric.batch_number = results.batch_number
        if batch_size is not None:
            batch_size = results.logged_batch_size = convert_batch_size(name, batch_size)
        if not isinstance(value, Tensor) and is_torchmetric(value):
            self._log_torchmetric(metric, value, metric_attribute)
            return
        value = to_scalar(name, value)
        if batch_size is None and metric.needs_batch_size:
            batch_size = results.current_batch_size()
        metric.update(value, batch_size)

    def _warn_of_barebones(self) -> None:
        # An unpickled ResultCollection has no run attribute, so it cannot call run.warn_once().
        if vars(self):
            self.run.warn_once(
                "You are trying to `self.log()` but `Trainer(barebones=True)` is configured."
                " Logging can impact raw speed so it is disabled under this setting."
            )

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        is_collection = hasattr(dictionary, "add_metrics")
        options = {"keep_base": False, "copy_state": False} if is_collection else {}
        for name, value in dictionary.items(**options):
            self.log(name, value, **arguments)

    def _register(self, results: LoopResults, key: tuple, call_arguments: tuple) -> LoggedMetric:
        """Check the arguments of ``self.log``, and return the LoggedMetric for the logged name."""
        hook, name, _ = key
        arguments = check_arguments(hook, name, call_arguments)
        if call_arguments[1] and not self.run.loop.loggers:
            self.run.warn_once(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured."
                " You can enable one by doing `Trainer(logger=ALogger(...))`"
            )
        metric = results.metrics.get(key)
        if metric is not None and metric.has_other_reduction(arguments):
            if metric.epoch.total is not None:
                self.run.warn_once(
                    f"resume: self.log({arguments.name!r}) uses a different reduce_fx or on_epoch"
                    " from the saved run. In this epoch, the value covers only the batches after"
                    " the resume."
                )
            metric = None
        if metric is None:
            metric = self._add_metric(results, key, arguments)
        elif metric.call_arguments and metric.arguments != arguments:
            raise ConfigurationError(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments."
                " This is not allowed"
            )
        metric.arguments, metric.call_arguments = arguments, call_arguments
        results.record_arguments(key, metric)
        return metric

    def _log_torchmetric(self, metric: LoggedMetric, value: Any, attribute: str | None) -> None:
        is_known = value is metric.torchmetric or attribute is not None
        if not is_known and self.run.is_lightning_module and isinstance(value, nn.Module):
            names = {id(part): name for name, part in find_torchmetrics(self.run.module).items()}
            if id(value) not in names:
                hint = "setting an attribute for the metric in your `LightningModule`"
                if names:
                    call = f"`self.log({metric.arguments.name}, ..., metric_attribute=name)`"
                    hint = f"calling {call} where `name` is one of {list(names.values())}"
                raise ConfigurationError(
                    "Could not find the `LightningModule` attribute for the `torchmetrics.Metric`"
                    f" logged. You can fix this by {hint}."
                )
        metric.update_torchmetric(value)

    def _add_metric(
        self, results: LoopResults, key: tuple, arguments: LogArguments
    ) -> LoggedMetric:
        has_own_row = self.run.row.is_step_based and results is self.train
        metric = results.metrics[key] = LoggedMetric(arguments, self._all_reduce, has_own_row)
        results.record_arguments(key, metric)
        return metric

    def add_returned(self, values: Mapping[str, Tensor]) -> None:
        """Add scalars to the epoch's means if a step returned them without logging them."""
        results = self.active
        for name, value in values.items():
            if name in results.logged and results.is_logged(name):
                continue
            key = (RETURNED, name, None)
            metric = results.metrics.get(key)
            if metric is None:
                check_metric_name(name)
                arguments = LogArguments(RETURNED, name, sync_dist=True, add_dataloader_idx=False)
                arguments.dataloader_idx = results.dataloader_idx
                metric = self._add_metric(results, key, arguments)
            metric.update(to_float(value), self.returned_batch_size())

    def returned_batch_size(self) -> Any:
        """Return the batch_size passed to ``self.log`` or, by default, the size of the batch."""
        if self.active.logged_batch_size is not None:
            return self.active.logged_batch_size
        try:
            return self.active.current_batch_size()
        except MisconfigurationException:
            return 1

    def start_training(self) -> None:
        """Treat values that are logged from now on as training results."""
        self.active = self.train

    def start_evaluation(self) -> None:
        """Treat values that are logged from now on as evaluation results."""
        self.update_metrics()
        self.active, self._loader_values = self.evaluation, []

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        results = self.active
        results.is_first_batch = results.is_first_batch is None
        results.batch_number += 1
        results.batch, results.batch_size, results.logged_batch_size = batch, None, None
        results.dataloader_idx = dataloader_idx

    def end_batch(self) -> None:
        """Drop the reference to the current batch, and mark callback_metrics as outdated."""
        results = self.active
        results.batch = results.batch_size = None
        results.has_new_values = True

    def end_batches(self) -> None:
        """Compute the means of all logged values after the last batch."""
        if self.active.has_new_values:
            self.update_metrics()
        self.active.is_first_batch = None
        # all_reduce must run in every process. Compute the means here, because every process calls
        # this method.
        sums = {metric: metric.epoch for metric in self.active.current()}
        for metric, value in self._compute(sums).items():
            if value is not None and metric.torchmetric is None:
                self._warn_of_missing_sync_dist(metric.arguments)
            if metric.is_returned:
                self.returned[metric.arguments.name] = value

    def _compute(self, sums: dict[LoggedMetric, Sums]) -> dict[LoggedMetric, Tensor | None]:
        """Return the value of each metric over all processes."""
        if self._all_reduce is not None:
            # Sort the metrics, because processes may have logged them in different orders.
            metrics = sort_by_name(sums)
            names = [metric.full_name() for metric in metrics if metric.is_reduced(sums[metric])]
            found = gather_objects(self.run, names)
            if found.count(names) != len(found):
                raise ConfigurationError(
                    f"log: got the metric names {found} from the processes, expected the same"
                    " names. Log or return the same metrics in each process, or leave out"
                    " sync_dist=True."
                )
            for metric in metrics:
                metric.compute(sums[metric])
        return {metric: metric.compute(sums[metric]) for metric in sums}

    def _warn_of_missing_sync_dist(self, arguments: LogArguments) -> None:
        is_synced = self._all_reduce is None or arguments.sync_dist or arguments.rank_zero_only
        if not is_synced:
            self.run.warn_once(
                f"It is recommended to use `self.log({arguments.name!r}, ..., sync_dist=True)` when"
                " logging on epoch level in distributed setting to accumulate the metric across"
                " devices.",
                category=PossibleUserWarning,
            )

    def end_loader(self) -> None:
        """After the last batch of an evaluation loader, store the loader's metrics."""
        self.end_batches()
        # In a sanity check, Trainer updates callback_metrics only after the last loader.
        if self.run.progress.stage != "sanity_check":
            self._loader_values.append(self.update_metrics())
        # Values that a hook logs after the last batch do not belong to a loader.
        self.evaluation.dataloader_idx = None

    def end_evaluation(self) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        """Compute the metrics that an evaluation returns, logs and writes to metrics.csv."""
        at_end, results = self.update_metrics(), []
        for values in self._loader_values:
            # Like Trainer, ignore the values that the step returned if any value was logged.
            first = values.logged or at_end.logged or values.row
            results.append(to_numbers({**first, **at_end.logged}))
        parts = [*self._loader_values, at_end]
        row = {name: value for values in parts for name, value in values.row.items()}
        self.evaluated = set(row).union(*[values.logged for values in parts])
        # If several loaders log the same name, send only the first loader's value, as Trainer does.
        logged = ChainMap(at_end.logged, *[values.logged for values in self._loader_values])
        return results, dict(logged), row

    def reset(self) -> None:
        """Reset all metrics after the last hook of an epoch."""
        results = self.active
        for metric in results.metrics.values():
            metric.reset()
        results.dataloader_idx = results.last_hook = results.is_first_batch = None

    def end(self) -> None:
        """At the end of a run, move callback_metrics and logged_metrics to the CPU."""
        try:
            if self.active.has_new_values:
                self.update_metrics()
        finally:
            for results in (self.train, self.evaluation):
                results.batch = None
            self.active = LoopResults()
        for metrics in (self.callback_metrics, self.logged_metrics):
            metrics.update(move_data_to_device(metrics, "cpu"))

    def update_metrics(self) -> CurrentValues:
        """Update callback_metrics, logged_metrics and progress_bar_metrics with current values."""
        values = self.current_values()
        self.active.has_new_values = False
        self.callback_metrics.update(values.callback)
        self.logged_metrics.update(values.logged)
        self.progress_bar_metrics.update(to_numbers(values.progress_bar))
        return values

    def monitored_metrics(self) -> dict[str, Any]:
        """Return all metrics that callbacks and schedulers can monitor, keyed by name."""
        self.update_metrics()
        return {**self.returned, **self.callback_metrics}

    def current_values(self) -> CurrentValues:
        """Return the current step's values or, after the last batch, the epoch's values."""
        values = CurrentValues({}, {}, {}, {})
        results = self.active
        is_step = results.is_first_batch is not None
        if self._all_reduce is not None and not is_step:
            # Sort the metrics, because processes may have logged them in different orders.
            for metric in sort_by_name(results.current()):
                metric.compute(metric.epoch)
        for metric in results.current():
            value = metric.compute(None if is_step else metric.epoch)
            if value is None:
                continue
            arguments = metric.arguments
            name = metric.full_name()
            full_name = metric.full_name("_step" if is_step else "_epoch")
            if metric.is_returned and results.is_logged(name):
                continue
            # Unlike Trainer's loggers, do not repeat the value of an earlier batch in steps.csv.
            if arguments.logger and not (is_step and metric.batch_number != results.batch_number):
                values.row[name] = value
            if metric.is_returned and self.run.is_lightning_module:
                # Like Trainer, do not log values that a LightningModule returns from a step.
                continue
            if arguments.logger:
                values.logged[full_name] = value
            if arguments.prog_bar:
                values.progress_bar[full_name] = value
            if results is self.train or not is_step:
                values.callback[name] = values.callback[full_name] = value
        return values

    def take_means(self) -> dict[str, Tensor]:
        """Return the mean of each training metric over the steps since the last CSV row."""
        row: dict[str, Tensor] = {}
        sums = {metric: metric.row or metric.epoch for metric in self.train.metrics.values()}
        for metric, value in self._compute(sums).items():
            if metric.row is not None:
                metric.row = Sums()
            if value is None or not metric.arguments.logger:
                continue
            if metric.is_returned:
                self.returned[metric.arguments.name] = value
                row.setdefault(metric.full_name(), value)
            else:
                row[metric.full_name()] = value
        return row

    def latest_means(self) -> dict[str, Tensor]:
        """Return the current training means without communicating with other processes."""
        means = dict(self.returned)
        for metric in self.train.metrics.values():
            sums, name = metric.row or metric.epoch, metric.arguments.name
            is_shown = metric.is_mean and (metric.is_returned or name == "train_loss")
            if is_shown and sums.total is not None:
                means[name] = sums.total / sums.weight
        return means

    def state_dict(self) -> dict[str, Any]:
        train, metrics = self.train, find_torchmetrics(self.run.network)
        names = {id(metric): name for name, metric in metrics.items()}
        if self.active is self.evaluation:
            # A resumed run repeats an unfinished evaluation, so do not save its partial metrics.
            evaluated = {id(metric.torchmetric) for metric in self.evaluation.metrics.values()}
            metrics = {n: m for n, m in metrics.items() if id(m) not in evaluated}
        logged = [*train.metrics.values(), *self.evaluation.metrics.values()]
        if any(m.torchmetric is not None and id(m.torchmetric) not in names for m in logged):
            # Also search lists and dicts for torchmetrics objects.
            objects = self.run.plain_state.objects()
            names |= {id(part): name for name, part in objects.items()}
        entries = [
            {**metric.state_dict(), "torchmetric": names.get(id(metric.torchmetric))}
            for metric in logged
        ]
        state = {
            "train": entries[: len(train.metrics)],
            "evaluation": entries[len(train.metrics) :],
            "torchmetrics": {name: plain_attributes(metric) for name, metric in metrics.items()},
            "callback_metrics": dict(self.callback_metrics),
            "returned": dict(self.returned),
            "evaluated": sorted(self.evaluated),
            "position": {name: getattr(train, name) for name in _SAVED_ATTRIBUTES},
        }
        return apply_to_collection(state, Tensor, to_plain_tensor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_torchmetrics(self.run.network, state["torchmetrics"])
        self._load_metrics(self.train, state["train"])
        self._load_metrics(self.evaluation, state.get("evaluation", []))
        self.callback_metrics = dict(state["callback_metrics"])
        self.returned, self.evaluated = dict(state["returned"]), set(state["evaluated"])
        vars(self.train).update(state["position"])

    def _load_metrics(self, results: LoopResults, entries: list[dict[str, Any]]) -> None:
        """Restore the logged metrics, so that each epoch resets even those that it does not log."""
        torchmetrics = find_torchmetrics(self.run.network)
        for entry in entries:
            arguments = LogArguments(**entry["arguments"])
            index = arguments.dataloader_idx if arguments.add_dataloader_idx else None
            metric = self._add_metric(results, (arguments.hook, arguments.name, index), arguments)
            name = entry["torchmetric"]
            if name is not None and name not in torchmetrics:
                torchmetrics |= self.run.plain_state.objects()
            metric.torchmetric = torchmetrics.get(name)
            if results is self.train:
                # A resumed run repeats an unfinished evaluation, so do not restore its values.
                metric.load_state_dict(entry)


def sort_by_name(metrics: Iterable[LoggedMetric]) -> list[LoggedMetric]:
    """Sort metrics, so that all processes reduce them in the same order."""
    return sorted(metrics, key=lambda metric: (metric.full_name(), metric.arguments.hook))


def float_type() -> torch.dtype:
    """Return torch's default dtype, or float32 if the default dtype has fewer than 32 bits."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


@cache
def warn_of_integer(name: str) -> None:
    """Warn once for each metric if logged integers are converted to floats."""
    rank_zero_warn(
        f"You called `self.log({name!r}, ...)` with an integer, but the value needs to be floating"
        f" to be reduced. Converting it to {float_type()}."
    )


def to_scalar(name: str, value: Any) -> Tensor:
    """Convert a logged number or tensor to a 0-dimensional float32 or float64 tensor."""
    if not isinstance(value, Tensor):
        if not isinstance(value, numbers.Number):
            raise value_error(name, value)
        return torch.tensor(value, dtype=float_type())
    if value.requires_grad:
        value = value.detach()
    if value.dim():
        if value.numel() != 1:
            raise value_error(name, value)
        value = value.squeeze()
    if value.dtype is torch.float32 or value.dtype is torch.float64:
        return value
    if not value.is_floating_point():
        warn_of_integer(name)
    return value.to(float_type())


def convert_batch_size(name: str, batch_size: Any) -> Any:
    """Convert a batch_size to a Python number, but leave a one-element tensor on its device."""
    if isinstance(batch_size, Tensor) and batch_size.numel() == 1:
        # Clone the tensor, because the step may later change it in place.
        return batch_size.detach().clone().reshape(())
    if isinstance(batch_size, np.generic):
        batch_size = batch_size.item()
    if not isinstance(batch_size, numbers.Real):
        raise ConfigurationError(
            f"log {name!r}: got batch_size={batch_size!r}, expected one number or a tensor with one"
            " element. Pass the number of samples in the batch."
        )
    # Convert True to 1, because torch.add(alpha=True) raises an error.
    return int(batch_size) if isinstance(batch_size, bool) else batch_size


def to_float(value: Tensor) -> Tensor:
    """Convert integers and half-precision floats to float32, or float64 if that is the default."""
    if value.dtype is torch.float32 or value.dtype is torch.float64:
        return value
    return value.to(float_type())


def to_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the tensors in a dict to Python numbers, and keep all other values."""
    return {n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()}


def is_torchmetric(value: Any) -> bool:
    """Return whether a value has the interface of a torchmetrics object."""
    return all(hasattr(value, name) for name in ("update", "compute", "reset"))


def find_torchmetrics(module: Any) -> dict[str, Any]:
    return {n: part for n, part in module.named_modules() if n and is_torchmetric(part)}


def plain_attributes(metric: Any) -> dict[str, Any]:
    """Copy the attributes of a torchmetrics object that a checkpoint can store."""
    # Do not use Metric.state_dict(), because it omits states added with persistent=False.
    own = {k: v for k, v in vars(metric).items() if k not in _ATTRIBUTES_OF_MODULES and is_plain(v)}
    return apply_to_collection(own, Tensor, lambda tensor: tensor.detach().clone())


def load_torchmetrics(module: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    metrics = find_torchmetrics(module)
    for name, attributes in state.items():
        tracker: Any = metrics.get(name.rpartition(".")[0])
        if name not in metrics and hasattr(tracker, "increment"):
            # A new MetricTracker is empty. Each call to increment() adds a copy of its base metric.
            tracker.increment()
            metrics = find_torchmetrics(module)
        if name in metrics:
            vars(metrics[name]).update(attributes)


def is_plain(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) can load a value."""
    if type(value) is dict:
        return all(is_plain(part) for part in [*value.keys(), *value.values()])
    if type(value) in (list, tuple):
        return all(is_plain(part) for part in value)
    return isinstance(value, Tensor) or type(value) in _LOADABLE_TYPES
