"""Collect the values of ``self.log`` with Trainer's arithmetic, on the device of the values.

A mean is sum(value * batch_size) / sum(batch_size), added in order in float32 or wider.
A step never synchronizes with the device.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..errors import ConfigurationError

# The hooks that may call self.log, with the defaults of (on_step, on_epoch).
_TRAIN_STEP_HOOKS = [
    "training_step",
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "on_train_batch_end",
]
_EVAL_STEP_HOOKS = [
    name.format(stage)
    for stage in ("validation", "test")
    for name in ("{}_step", "on_{}_batch_start", "on_{}_batch_end")
]
_STEP_HOOKS = {
    **dict.fromkeys(_TRAIN_STEP_HOOKS, (True, False)),
    **dict.fromkeys(_EVAL_STEP_HOOKS, (False, True)),
}
_EPOCH_HOOKS = {
    f"on_{stage}_{moment}"
    for stage in ("train", "validation", "test")
    for moment in ("start", "epoch_start", "epoch_end")
}
# For each reduction: the values of reduce_fx that select it, and its operation.
_REDUCTIONS: dict[str, tuple[tuple[Any, ...], Callable[..., Tensor]]] = {
    "mean": (("mean", "avg", torch.mean), torch.add),
    "sum": (("sum", torch.sum, sum), torch.add),
    "max": (("max", torch.max, max), torch.maximum),
    "min": (("min", torch.min, min), torch.minimum),
}
# A product with a power of two is exact, so one fused operation rounds like two.
_POWERS_OF_TWO = frozenset(2**power for power in range(24))
# torch.load(weights_only=True) reads values of these types.
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, torch.dtype)
_SAVED_FIELDS = ("total", "weight", "step_value", "has_value")
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass
class LogArguments:
    """The arguments of one ``self.log`` call, with the defaults of its hook."""

    hook: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduction: str
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    add_dataloader_idx: bool
    rank_zero_only: bool
    dataloader_idx: int | None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """The key of the value in LoopResults."""
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


def parse_arguments(hook: str | None, name: str, given: tuple) -> LogArguments:
    """Return the arguments of ``self.log`` with the defaults of the hook.

    Args:
        given: The arguments after name and value, without batch_size and with the dataloader_idx.
    """
    prog_bar, logger, on_step, on_epoch, reduce_fx, *others = given
    on_step, on_epoch = _step_and_epoch(hook, on_step, on_epoch)
    reduce_fx = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    known = [name for name, (accepted, _) in _REDUCTIONS.items() if reduce_fx in accepted]
    if not known:
        raise ConfigurationError(
            f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom"
            f" reduction, please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
        )
    arguments = LogArguments(
        str(hook), name, prog_bar, logger is not False, on_step, on_epoch, known[0], *others
    )
    if arguments.add_dataloader_idx and "/dataloader_idx_" in name:
        raise ConfigurationError(
            f"You called `self.log` with the key `{name}` but it should not contain information about"
            " `dataloader_idx` when `add_dataloader_idx=True`"
        )
    return arguments


def _step_and_epoch(
    hook: str | None, on_step: bool | None, on_epoch: bool | None
) -> tuple[bool, bool]:
    """Return on_step and on_epoch, or raise an error if the hook does not allow them."""
    if hook in _EPOCH_HOOKS:
        for name, value, allowed in (("on_step", on_step, False), ("on_epoch", on_epoch, True)):
            if value not in (None, allowed):
                raise ConfigurationError(
                    f"You can't `self.log({name}={value})` inside `{hook}`, must be one of ({allowed},)."
                )
        return False, True
    if hook not in _STEP_HOOKS:
        raise hook_error(hook)
    of_step, of_epoch = _STEP_HOOKS[hook]
    on_step = of_step if on_step is None else on_step
    on_epoch = of_epoch if on_epoch is None else on_epoch
    if not on_step and not on_epoch:
        raise ConfigurationError("`self.log(on_step=False, on_epoch=False)` is not useful.")
    return on_step, on_epoch


def hook_error(hook: str | None) -> ConfigurationError:
    """Return the error for a call of ``self.log`` in a hook that does not support logging."""
    where = f"inside `{hook}`" if hook else "outside of the loop's hooks"
    return ConfigurationError(
        f"You can't `self.log()` {where}: the loop's result collection is not registered yet, or the hook"
        " belongs to no step and no epoch. `self.logger.experiment` logs directly to the logger."
    )


def check_loggable(name: str, value: Any) -> None:
    """Raise an error unless the value is a number, a tensor or a torchmetrics object."""
    if isinstance(value, Tensor | numbers.Number) or is_torchmetric(value):
        return
    what = f"`{type(value).__name__}` values"
    if isinstance(value, Mapping) and any(isinstance(part, Mapping) for part in value.values()):
        what = "nested dictionaries"
    raise ConfigurationError(f"`self.log({name}, {value})` was called, but {what} cannot be logged")


def is_torchmetric(value: Any) -> bool:
    """Return whether a value has the interface of a torchmetrics object."""
    names = ("update", "compute", "reset")
    return not isinstance(value, Mapping) and all(hasattr(value, name) for name in names)


def float_type() -> torch.dtype:
    """Return the default dtype, or float32 if that is wider. Long sums need the precision."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


class ResultMetric:
    """Keep the last value of one logged name, and the sum of its values over the epoch.

    Args:
        all_reduce: Reduces a value over all processes. None in a single process.

    Attributes:
        given: The arguments of the last checked call. A call with the same ones needs no check.
    """

    def __init__(self, arguments: LogArguments, all_reduce: Callable[..., Any] | None) -> None:
        self.arguments, self._all_reduce = arguments, all_reduce
        self.given: tuple = ()
        self.needs_batch_size = arguments.on_epoch and arguments.reduction == "mean"
        self.torchmetric: Any = None
        self.step_value: Tensor | None = None
        # In a step-based run, the sum since the newest row of metrics.csv.
        self.since_row: ResultMetric | None = None
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
        """Add a 0-dimensional tensor, the mean of batch_size samples."""
        self.has_value, self._epoch_value = True, None
        if self.arguments.on_step:
            # Clone the value, because the user may change it in place afterwards.
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
            self.total = _REDUCTIONS[self.arguments.reduction][1](self.total, value)

    def update_torchmetric(self, metric: Any) -> None:
        """Register a logged torchmetrics object, which keeps its own sums."""
        default = torch.get_default_dtype()
        if metric is self.torchmetric and getattr(metric, "dtype", default) is not default:
            # As in Trainer, each log moves the metric, and the move resets its dtype to the default.
            metric.to(metric.device)
        self.torchmetric, self.has_value, self._epoch_value = metric, True, None
        if self.arguments.on_step:
            # torchmetrics has no public name for the last value of forward().
            self.step_value = getattr(metric, "_forward_cache", None)

    def value(self, of_step: bool) -> Tensor | None:
        """Return the value of the step or of the epoch so far; None if it is not logged."""
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
        arguments = self.arguments
        if self._all_reduce is None or not arguments.sync_dist or arguments.rank_zero_only:
            return value
        group, reduction = arguments.sync_dist_group, arguments.reduction
        return self._all_reduce(value, group=group, reduce_op=reduction)

    def state_dict(self) -> dict[str, Any]:
        arguments = dataclasses.replace(self.arguments, sync_dist_group=None)
        state: dict[str, Any] = {name: getattr(self, name) for name in _SAVED_FIELDS}
        state["since_row"] = None if self.since_row is None else self.since_row.state_dict()
        return {"arguments": dataclasses.asdict(arguments), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update((name, state[name]) for name in _SAVED_FIELDS)
        if self.since_row is not None and state["since_row"] is not None:
            self.since_row.load_state_dict(state["since_row"])


class LoopResults(dict):
    """Map (hook, name, dataloader_idx) to the values logged in one loop: training or evaluation.

    Attributes:
        batch: The current batch.
        batch_size: The size of the current batch. None until a mean needs it.
        logged_batch_size: The batch_size that the current step passed to ``self.log``.
        batches_started: Batches started in this epoch or of this loader; 0 after the last one.
        last_hook: The hook that logged last.
        has_new_values: Whether a batch has ended since the views were updated.
    """

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.is_training = is_training
        self.batch: Any = None
        self.batch_size: int | None = None
        self.logged_batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.has_step_values = False
        self.batches_started = 0
        self.last_hook: str | None = None
        self.has_new_values = False

    def current(self) -> Iterator[ResultMetric]:
        """Yield the metrics that the current loader has logged since the last reset."""
        for metric in self.values():
            if metric.has_value and metric.arguments.dataloader_idx == self.dataloader_idx:
                yield metric

    def mean_loss(self) -> ResultMetric | None:
        """Return the epoch's mean of ``train_loss``, if the training step logs it."""
        metric = self.get(("training_step", "train_loss", None))
        return metric if metric is not None and metric.needs_batch_size else None

    def reset_hook(self, hook: str | None) -> None:
        """Reset the sums of a hook that logs for the first time in this epoch."""
        for metric in self.values():
            if metric.arguments.hook == hook and metric.torchmetric is None:
                metric.reset()

    def find_batch_size(self) -> int:
        """Return the size of the current batch. The first call in a batch determines the size."""
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.batch_size


class MetricViews(NamedTuple):
    """The current values for each reader. Names in ``row`` have no "_step" or "_epoch"."""

    callback: dict[str, Any]
    logged: dict[str, Any]
    progress_bar: dict[str, Any]
    row: dict[str, Any]


class ResultCollection:
    """Implement ``self.log`` for a run, with Trainer's three views of the logged values.

    Attributes:
        active: The LoopResults that receive logged values; None outside of the loops.
        callback_metrics, logged_metrics, progress_bar_metrics: Trainer's attributes of these names.
        is_step_based: Whether the rows of metrics.csv are step-based, see History.
        row: The values of the next row of metrics.csv.
    """

    def __init__(
        self, hooks: Any, module: Any, all_reduce: Callable[..., Any] | None, is_enabled: bool
    ) -> None:
        self._hooks, self._module = hooks, module
        self._all_reduce, self._is_enabled = all_reduce, is_enabled
        self.train, self.evaluation = LoopResults(is_training=True), LoopResults(is_training=False)
        self.active: LoopResults | None = None
        self.is_step_based = False
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.row: dict[str, Tensor] = {}
        # The names of the torchmetrics objects that only evaluations log.
        self._evaluation_metrics: set[str] = set()

    def __deepcopy__(self, memo: dict) -> ResultCollection:
        """Return self, because a copy of a module that is made during a run logs into this run."""
        return self

    def __reduce__(self) -> Any:
        """Pickle a module without its run. The copy ignores logged values."""
        return (ResultCollection, (None, None, None, False))

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
        if not self._is_enabled:
            return
        results, hook = self.active, self._hooks.current
        if results is None:
            raise hook_error(hook)
        index = results.dataloader_idx
        of_name = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist)
        given = (*of_name, sync_dist_group, add_dataloader_idx, rank_zero_only, index)
        metric = results.get((hook, name, index if add_dataloader_idx else None))
        if metric is None or metric.given != given:
            metric = self._register(results, hook, name, given)
        if results.last_hook != hook:
            # As in Trainer, another hook in the first batch resets the sums of that hook.
            if results.batches_started <= 1:
                results.reset_hook(hook)
            results.last_hook = hook
        if isinstance(value, Tensor):
            value = value.detach() if value.requires_grad and not enable_graph else value
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=float_type())
        else:
            check_loggable(name, value)
            metric.update_torchmetric(value)
            return
        if value.dim():
            value = _single_element(name, value)
        if value.dtype is not torch.float32 and value.dtype is not torch.float64:
            value = value.to(float_type())
        if batch_size is not None:
            results.logged_batch_size = batch_size
        else:
            batch_size = results.find_batch_size() if metric.needs_batch_size else 1
        metric.update(value, batch_size)
        if metric.since_row is not None:
            metric.since_row.update(value.detach(), batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        is_collection = hasattr(dictionary, "add_metrics")
        options = {"keep_base": False, "copy_state": False} if is_collection else {}
        for name, value in dictionary.items(**options):
            self.log(name, value, **arguments)

    def _register(
        self, results: LoopResults, hook: str | None, name: str, given: tuple
    ) -> ResultMetric:
        """Check the arguments of a name that is logged for the first time or with new arguments."""
        arguments = parse_arguments(hook, name, given)
        metric = results.get(arguments.key)
        if metric is None:
            metric = self._add_metric(results, arguments)
        elif metric.given and metric.arguments != arguments:
            raise ConfigurationError(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments."
                " This is not allowed"
            )
        metric.arguments, metric.given = arguments, given
        return metric

    def _add_metric(self, results: LoopResults, arguments: LogArguments) -> ResultMetric:
        metric = results[arguments.key] = ResultMetric(arguments, self._all_reduce)
        results.has_step_values |= arguments.on_step
        if self.is_step_based and results is self.train and arguments.on_epoch:
            of_row = dataclasses.replace(arguments, on_step=False)
            metric.since_row = ResultMetric(of_row, self._all_reduce)
        return metric

    def start_training(self) -> None:
        """Send logged values to the training results."""
        self.active = self.train

    def start_evaluation(self) -> None:
        """Send logged values to the evaluation results."""
        self.update_metrics()
        self.active = self.evaluation

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        results = self.active
        assert results is not None
        results.batches_started += 1
        results.batch, results.batch_size, results.logged_batch_size = batch, None, None
        results.dataloader_idx = dataloader_idx

    def end_batch(self) -> None:
        """Clear the current batch. The views are updated when they are read."""
        assert self.active is not None
        self.active.batch = self.active.batch_size = None
        self.active.has_new_values = True

    def end_batches(self) -> None:
        """End the batches of an epoch or of one loader. The views change to the epoch's values."""
        assert self.active is not None
        if self.active.has_new_values:
            self.update_metrics()
        self.active.batches_started = 0

    def reset(self) -> None:
        """Reset the sums after the last hook of an epoch."""
        if self.active is not None:
            for metric in self.active.values():
                metric.reset()
            self.active.dataloader_idx = self.active.last_hook = None
            self.active.batches_started = 0

    def end(self) -> None:
        """Stop logging. callback_metrics and the other views keep the values of the last batch."""
        if self.active is not None and self.active.has_new_values:
            self.update_metrics()
        self.active = None

    def forget_sanity_check(self) -> None:
        """Discard the values of the sanity check."""
        views = (self.callback_metrics, self.logged_metrics, self.progress_bar_metrics, self.row)
        for metrics in (*views, self.evaluation):
            metrics.clear()

    def update_metrics(self) -> dict[str, Tensor]:
        """Update the views. Return the values for the loggers."""
        if not self.active:
            return {}
        self.active.has_new_values = False
        views = self.views()
        self.callback_metrics.update(views.callback)
        self.logged_metrics.update(views.logged)
        self.progress_bar_metrics.update({k: v.item() for k, v in views.progress_bar.items()})
        of_step = self.active.batches_started > 0
        if not of_step and not (self.is_step_based and self.active.is_training):
            self.row.update(views.row)
        return views.logged

    def views(self) -> MetricViews:
        """Return the values of the current step, or of the epoch after its last batch."""
        assert self.active is not None
        of_step = self.active.batches_started > 0
        views = MetricViews({}, {}, {}, {})
        for metric in self.active.current():
            value = metric.value(of_step)
            if value is None:
                continue
            arguments = metric.arguments
            name = arguments.full_name()
            full_name = arguments.full_name("_step" if of_step else "_epoch")
            if arguments.logger:
                views.logged[full_name] = views.row[name] = value
            if arguments.prog_bar:
                views.progress_bar[full_name] = value
            if self.active.is_training or not of_step:
                views.callback[name] = views.callback[full_name] = value
        return views

    def take_row(self) -> dict[str, Tensor]:
        """Return and clear the values of a row. Torchmetrics objects return the epoch so far."""
        row, self.row = self.row, {}
        for metric in self.train.values():
            if metric.since_row is None:
                continue
            source = metric.since_row if metric.torchmetric is None else metric
            value = source.value(of_step=False) if source.has_value else None
            if value is not None and metric.arguments.logger:
                row[metric.arguments.full_name()] = value
            metric.since_row.reset()
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the training epoch so far, including those of torchmetrics objects."""
        train, metrics = self.train, find_torchmetrics(self._module)
        names = {id(metric): name for name, metric in metrics.items()}
        entries = [
            {**metric.state_dict(), "torchmetric": names.get(id(metric.torchmetric))}
            for metric in train.values()
        ]
        # A resumed run continues after the evaluation, whose metrics are reset by then.
        evaluated = {id(metric.torchmetric) for metric in self.evaluation.values()}
        self._evaluation_metrics |= {names[key] for key in evaluated if key in names}
        self._evaluation_metrics -= {entry["torchmetric"] for entry in entries}
        kept = {name: m for name, m in metrics.items() if name not in self._evaluation_metrics}
        return {
            "train": entries,
            "torchmetrics": torchmetrics_state(kept),
            "evaluation_metrics": sorted(self._evaluation_metrics),
            "callback_metrics": dict(self.callback_metrics),
            "row": dict(self.row),
            "position": (train.batches_started, train.last_hook, train.has_new_values),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_torchmetrics(self._module, state["torchmetrics"])
        train, metrics = self.train, find_torchmetrics(self._module)
        for entry in state["train"]:
            # The next self.log call with this name sets the arguments.
            metric = self._add_metric(train, LogArguments(**entry["arguments"]))
            metric.load_state_dict(entry)
            metric.torchmetric = metrics.get(entry["torchmetric"])
        self._evaluation_metrics = set(state["evaluation_metrics"])
        self.callback_metrics, self.row = dict(state["callback_metrics"]), dict(state["row"])
        train.batches_started, train.last_hook, train.has_new_values = state["position"]


def _single_element(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ConfigurationError(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    return value.squeeze()


def find_torchmetrics(module: Any) -> dict[str, Any]:
    """Return the torchmetrics objects of a module by name."""
    named = module.named_modules() if hasattr(module, "named_modules") else ()
    return {name: part for name, part in named if name and is_torchmetric(part)}


def torchmetrics_state(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return copies of the metrics' plain attributes, which state_dict() leaves out by default.

    The attributes include the states of add_state() and the counters of wrappers and collections.
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
            # A MetricTracker has one metric for each call of increment().
            tracker.increment()
            metrics = find_torchmetrics(module)
        if name in metrics:
            vars(metrics[name]).update(copy_plain(attributes))


def copy_plain(values: Mapping[str, Any]) -> Any:
    return apply_to_collection(values, Tensor, lambda tensor: tensor.detach().clone())


def _is_plain(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) can load a value. Subclasses may be unsafe."""
    if type(value) is dict:
        return all(_is_plain(part) for part in [*value.keys(), *value.values()])
    if type(value) in (list, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, Tensor) or type(value) in _PLAIN_TYPES
