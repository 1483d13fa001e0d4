"""Collect what ``self.log`` logs, with Trainer's arithmetic, on the device of the values.

A mean is the sum of value times batch size over the sum of batch sizes, in float32 or wider, added in
order. Nothing is read from the device in a step.
"""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .log_arguments import (
    LogArguments,
    check_loggable,
    check_metric_attribute,
    float_type,
    hook_error,
    is_torchmetric,
    parse_arguments,
)
from .torchmetrics_state import find_torchmetrics, load_torchmetrics, torchmetrics_state

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
# A float is multiplied exactly by these batch sizes, so one operation rounds as two do.
_POWERS_OF_TWO = frozenset(2**power for power in range(24))


class ResultMetric:
    """The last value of one logged name, and its sum over the epoch."""

    def __init__(
        self, arguments: LogArguments, given: tuple, all_reduce: Callable[..., Tensor]
    ) -> None:
        self.arguments, self.given, self._all_reduce = arguments, given, all_reduce
        self._is_synced = arguments.sync_dist and not arguments.rank_zero_only
        self.needs_batch_size = arguments.on_epoch and arguments.reduction == "mean"
        self.torchmetric: Any = None
        self.step_value: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Start the sum of the next epoch."""
        if self.torchmetric is not None:
            self.torchmetric.reset()
        self.total: Tensor | None = None
        self.weight: int | Tensor = 0
        self.has_value = False
        self._epoch_value: Tensor | None = None

    def update(self, value: Tensor, batch_size: int) -> None:
        """Add a value without dimensions that stands for batch_size samples."""
        self.has_value, self._epoch_value = True, None
        if self.arguments.on_step:
            # A clone, because the user may change the value in place afterwards.
            self.step_value = self._sync(value.clone())
            if not self.arguments.on_epoch:
                return
        if self.needs_batch_size:
            self.weight += batch_size
            if self.total is not None and batch_size in _POWERS_OF_TWO:
                self.total = torch.add(self.total, value, alpha=batch_size)
                return
            value = value * batch_size
        if self.total is None:
            self.total = value.to(torch.promote_types(value.dtype, float_type()), copy=True)
        else:
            self.total = _COMBINE[self.arguments.reduction](self.total, value)

    def update_torchmetric(self, metric: Any) -> None:
        """Note that a torchmetrics object was logged, which keeps its own sums."""
        default = torch.get_default_dtype()
        if metric is self.torchmetric and getattr(metric, "dtype", default) is not default:
            # Trainer moves a metric at each log, and that sets its dtype to the default.
            metric.to(metric.device)
        self.torchmetric, self.has_value, self._epoch_value = metric, True, None
        if self.arguments.on_step:
            # torchmetrics keeps the value of forward() for this purpose and has no public name for it.
            self.step_value = getattr(metric, "_forward_cache", None)

    def value(self, of_step: bool) -> Tensor | None:
        """Return the value of the step or of the epoch so far; None where it is not asked for."""
        found = None
        if of_step and self.arguments.on_step:
            found = self.step_value
        elif not of_step and self.arguments.on_epoch:
            found = self._reduce_epoch()
        if found is None:
            return None
        if not isinstance(found, Tensor):
            raise ConfigurationError(
                f"The `.compute()` return of the metric logged as {self.arguments.name!r} must be a"
                f" tensor. Found {found}. Log it with self.log_dict."
            )
        return found if self.arguments.enable_graph else found.detach()

    def _reduce_epoch(self) -> Tensor | None:
        if self._epoch_value is not None:
            return self._epoch_value
        if self.torchmetric is not None:
            self._epoch_value = self.torchmetric.compute()
        elif self.total is not None:
            total = self._sync(self.total.clone())
            if self.arguments.reduction == "mean":
                weight = torch.as_tensor(self.weight, dtype=total.dtype, device=total.device)
                total = total / self._sync(weight)
            self._epoch_value = total
        return self._epoch_value

    def _sync(self, value: Tensor) -> Tensor:
        if not self._is_synced:
            return value
        group, reduction = self.arguments.sync_dist_group, self.arguments.reduction
        return self._all_reduce(value, group=group, reduce_op=reduction)


class Results(dict):
    """The logged names of training, or of an evaluation, by (hook, name, dataloader_idx).

    Attributes:
        batch: The current batch, whose size is looked up when a mean needs it.
        batch_size: Its size, once it was looked up.
        logged_batch_size: The batch_size that its step gave to ``self.log``.
    """

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.is_training = is_training
        self.batch: Any = None
        self.batch_size: int | None = None
        self.logged_batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.has_step_values = False

    def current(self) -> Iterator[ResultMetric]:
        """Yield what was logged since the last reset, for the current loader."""
        for metric in self.values():
            if metric.has_value and metric.arguments.dataloader_idx == self.dataloader_idx:
                yield metric

    def find_batch_size(self) -> int:
        """Return the size of the current batch, which is looked up once."""
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.batch_size


@dataclass
class MetricViews:
    """The current value of each name, for those who read it."""

    callback: dict[str, Tensor]
    logged: dict[str, Tensor]
    progress_bar: dict[str, Tensor]
    row: dict[str, Tensor]


class ResultCollection:
    """``self.log`` of a run, and the three views of what was logged.

    Attributes:
        active: Where values are logged now; None outside of the loops.
        callback_metrics, logged_metrics, progress_bar_metrics: As Trainer's attributes of these names.
        row: The values of this epoch for its row in metrics.csv, without forks in their names.
    """

    def __init__(
        self,
        hooks: Any,
        module: Any,
        stage: str,
        all_reduce: Callable[..., Any] | None,
        is_enabled: bool,
        warns_without_logger: bool,
    ) -> None:
        self._hooks, self._module, self._stage = hooks, module, stage
        self._is_distributed = all_reduce is not None
        self._all_reduce = all_reduce or _unreduced
        self._is_enabled, self._warns_without_logger = is_enabled, warns_without_logger
        self.train, self.evaluation = Results(is_training=True), Results(is_training=False)
        self.active: Results | None = None
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.row: dict[str, Tensor] = {}
        self._last_hook: str | None = None
        # None outside of the batches of an epoch, True in the first one, False in later ones.
        self._is_first_batch: bool | None = None
        # Whether the views lack the values of the last batch.
        self._are_views_old = False
        # The two above of the training epoch, while a validation runs inside it.
        self._paused: tuple[bool | None, str | None] | None = None

    def __deepcopy__(self, memo: dict) -> ResultCollection:
        """Copies of a module that are made while it runs log into the same run."""
        return self

    def __reduce__(self) -> Any:
        """A module that is pickled while it runs does not take the run along."""
        return (ClosedResults, ())

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
        results, hook = self.active, self._hooks.current
        if results is None or not self._is_enabled:
            self._refuse(hook)
            return
        index = results.dataloader_idx
        of_name = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist)
        given = (
            *of_name,
            sync_dist_group,
            add_dataloader_idx,
            metric_attribute,
            rank_zero_only,
            index,
        )
        metric = results.get((hook, name, index if add_dataloader_idx else None))
        if metric is None or metric.given != given:
            metric = self._register(results, hook, name, value, given)
        if self._last_hook != hook:
            if self._is_first_batch is not False:
                self._reset_hook(results, hook)
            self._last_hook = hook
        if isinstance(value, Tensor):
            value = value.detach() if value.requires_grad else value
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=float_type())
        else:
            check_loggable(name, value)
            metric.update_torchmetric(value)
            return
        if value.dim():
            value = _single_element(name, value)
        if value.dtype is not torch.float32 and value.dtype is not torch.float64:
            value = _as_float(metric, value)
        if batch_size is not None:
            results.logged_batch_size = batch_size
        elif metric.needs_batch_size:
            batch_size = results.find_batch_size()
        metric.update(value, batch_size or 1)

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        is_collection = hasattr(dictionary, "add_metrics")
        options = {"keep_base": False, "copy_state": False} if is_collection else {}
        for name, value in dictionary.items(**options):
            self.log(name, value, **arguments)

    def _register(
        self, results: Results, hook: str | None, name: str, value: Any, given: tuple
    ) -> ResultMetric:
        """Check the arguments of a name that is logged for the first time, or differently than before."""
        check_loggable(name, value)
        arguments = parse_arguments(hook, name, given)
        arguments.sync_dist &= self._is_distributed
        if is_torchmetric(value) and arguments.metric_attribute is None:
            check_metric_attribute(find_torchmetrics(self._module), name, value)
        if arguments.logger and given[1] and self._warns_without_logger:
            warnings.warn(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured. You can"
                " enable one by doing `Trainer(logger=ALogger(...))`",
                stacklevel=4,
            )
        metric = results.get(arguments.key)
        if metric is None:
            metric = ResultMetric(arguments, given, self._all_reduce)
            results[arguments.key] = metric
            results.has_step_values |= arguments.on_step
        elif metric.given and metric.arguments != arguments:
            raise ConfigurationError(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments."
                " This is not allowed"
            )
        metric.given = given
        return metric

    def _refuse(self, hook: str | None) -> None:
        if not self._is_enabled:
            warnings.warn(
                "You are trying to `self.log()` but `Trainer(barebones=True)` is configured. Logging can"
                " impact raw speed so it is disabled under this setting.",
                stacklevel=3,
            )
        elif self._stage == "predict":
            raise ConfigurationError(
                "You are trying to `self.log()` but the loop's result collection is not registered yet."
                " This is most likely because you are trying to log in a `predict` hook, but it doesn't"
                " support logging"
            )
        else:
            raise hook_error(hook)

    @staticmethod
    def _reset_hook(results: Results, hook: str | None) -> None:
        """Reset the sums of a hook that logs for the first time in an epoch."""
        for metric in results.values():
            if metric.arguments.hook == hook and metric.torchmetric is None:
                metric.reset()

    def start_training(self) -> None:
        self.active = self.train

    def start_evaluation(self) -> None:
        self.active = self.evaluation
        self._is_first_batch, self._last_hook = None, None

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        self._is_first_batch = self._is_first_batch is None
        results = self.active
        assert results is not None
        results.batch, results.batch_size, results.logged_batch_size = batch, None, None
        results.dataloader_idx = dataloader_idx

    def end_batch(self) -> None:
        """Clear the current batch. The views are brought up to date when somebody reads them."""
        assert self.active is not None
        self.active.batch = self.active.batch_size = None
        self._are_views_old = True

    def end_batches(self) -> None:
        """The batches of an epoch, or of one loader, are over: from now on the epoch's values count."""
        if self._are_views_old:
            self.update_metrics()
        self._is_first_batch = None

    def end_loaders(self) -> None:
        """The batches of all evaluation loaders are over."""
        self.evaluation.dataloader_idx = None

    def pause_training(self) -> None:
        """Keep the position in the training epoch while a validation runs."""
        self.update_metrics()
        self._paused = (self._is_first_batch, self._last_hook)

    def resume_training(self) -> None:
        assert self._paused is not None
        self.active = self.train
        self._is_first_batch, self._last_hook = self._paused
        self._paused = None

    def reset(self) -> None:
        """Forget the sums of an epoch, after all its hooks."""
        if self.active is not None:
            for metric in self.active.values():
                metric.reset()
            self.active.dataloader_idx = None
        self._is_first_batch = self._last_hook = None

    def forget_evaluation(self) -> None:
        """Forget all that the sanity check has measured."""
        views = (self.callback_metrics, self.logged_metrics, self.progress_bar_metrics, self.row)
        for metrics in (*views, self.evaluation):
            metrics.clear()

    def update_metrics(self) -> dict[str, Tensor]:
        """Bring the views up to date. Returns what goes to the loggers."""
        self._are_views_old = False
        if not self.active:
            return {}
        views = self.views()
        self.callback_metrics.update(views.callback)
        self.logged_metrics.update(views.logged)
        self.progress_bar_metrics.update({k: v.item() for k, v in views.progress_bar.items()})
        self.row.update(views.row)
        return views.logged

    def views(self) -> MetricViews:
        """Return the values of this step, or of the epoch after its batches."""
        assert self.active is not None
        of_step = self._is_first_batch is not None
        views = MetricViews({}, {}, {}, {})
        for metric in self.active.current():
            value = metric.value(of_step)
            if value is None:
                continue
            arguments = metric.arguments
            name, forked_name = arguments.full_name(), arguments.forked_name(of_step)
            if arguments.logger:
                views.logged[forked_name] = value
            if arguments.prog_bar:
                views.progress_bar[forked_name] = value
            if self.active.is_training or not of_step:
                views.callback[name] = value
                views.callback[forked_name] = value
            # The row has the epoch's value. What is logged per step only has its last one there.
            if arguments.logger and not (of_step and arguments.on_epoch):
                views.row[name] = value
        return views

    def take_row(self) -> dict[str, Tensor]:
        """Return the values of the epoch's row, once."""
        row, self.row = self.row, {}
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the training epoch so far. Those of torchmetrics objects are included."""
        metrics = find_torchmetrics(self._module)
        names = {id(metric): name for name, metric in metrics.items()}
        of_train = {id(metric.torchmetric) for metric in self.train.values()}
        # Those of an evaluation are reset after it, and a resumed run continues after it.
        of_evaluation = {id(metric.torchmetric) for metric in self.evaluation.values()} - of_train
        kept = {name: part for name, part in metrics.items() if id(part) not in of_evaluation}
        entries = [
            {
                "arguments": dataclasses.asdict(
                    dataclasses.replace(metric.arguments, sync_dist_group=None)
                ),
                "total": metric.total,
                "weight": metric.weight,
                "step_value": metric.step_value,
                "torchmetric": names.get(id(metric.torchmetric)),
            }
            for metric in self.train.values()
            if metric.has_value
        ]
        return {
            "train": entries,
            "torchmetrics": torchmetrics_state(kept),
            "callback_metrics": dict(self.callback_metrics),
            "row": dict(self.row),
            "position": list(self._paused or (self._is_first_batch, self._last_hook)),
            "are_views_old": self._are_views_old and self._paused is None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_torchmetrics(self._module, state["torchmetrics"])
        metrics = find_torchmetrics(self._module)
        for entry in state["train"]:
            arguments = LogArguments(**entry["arguments"])
            # Without given arguments. They are checked when the name is logged again.
            metric = ResultMetric(arguments, (), self._all_reduce)
            metric.total, metric.weight = entry["total"], entry["weight"]
            metric.step_value, metric.has_value = entry["step_value"], True
            metric.torchmetric = metrics.get(entry["torchmetric"])
            self.train[arguments.key] = metric
            self.train.has_step_values |= arguments.on_step
        self.callback_metrics, self.row = dict(state["callback_metrics"]), dict(state["row"])
        self._is_first_batch, self._last_hook = state["position"]
        self._are_views_old = state["are_views_old"]


class ClosedResults:
    """Takes the place of the results in a copy of a module that was pickled while it ran."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the value, because the copy belongs to no run."""

    log_dict = log


def _unreduced(value: Tensor, **arguments: Any) -> Tensor:
    return value


def _single_element(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ConfigurationError(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    return value.squeeze()


def _as_float(metric: ResultMetric, value: Tensor) -> Tensor:
    if not value.is_floating_point() and not metric.has_value:
        arguments = metric.arguments
        warnings.warn(
            f"You called `self.log({arguments.name!r}, ...)` in your `{arguments.hook}` but the value needs"
            f" to be floating to be reduced. Converting it to {float_type()}. You can silence this warning"
            " by converting the value to floating point yourself. If you don't intend to reduce the value"
            " (for instance when logging the global step or epoch) then you can use"
            f" `self.logger.log_metrics({{'{arguments.name}': ...}})` instead.",
            stacklevel=4,
        )
    return value.to(float_type())


def extract_batch_size(batch: Any, default: int | None = None) -> int:
    """Return the number of samples in a batch: the first dimension of the first tensor in it.

    Args:
        default: The size where the batch has no tensor, or tensors that differ.

    Example:
        >>> extract_batch_size({"x": torch.zeros(4, 3), "y": torch.zeros(4)})
        4
    """
    sizes = _tensor_sizes(batch)
    size = next(sizes, default)
    if size is None:
        raise ConfigurationError(
            "We could not infer the batch_size from the batch. Either simplify its structure or provide the"
            " batch_size as `self.log(..., batch_size=batch_size)`."
        )
    if any(other != size for other in sizes):
        if default is not None:
            return default
        warnings.warn(
            "Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is"
            f" {size}. To avoid any miscalculations, use `self.log(..., batch_size=batch_size)`.",
            stacklevel=4,
        )
    return size


def _tensor_sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.dim() else 1
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensor_sizes(part)
    elif hasattr(batch, "__iter__") and not isinstance(batch, str):
        for part in batch:
            yield from _tensor_sizes(part)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from _tensor_sizes(getattr(batch, field.name))
