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

# Where self.log may be called, with the defaults of (on_step, on_epoch).
_TRAIN_STEP_HOOKS = {
    *("training_step", "on_before_backward", "backward", "on_after_backward", "on_train_batch_end"),
    *(
        "on_before_optimizer_step",
        "optimizer_step",
        "configure_gradient_clipping",
        "clip_gradients",
    ),
    *("on_before_zero_grad", "optimizer_zero_grad", "on_train_batch_start"),
}
_EVAL_STEP_HOOKS = {
    *("validation_step", "on_validation_batch_start", "on_validation_batch_end"),
    *("test_step", "on_test_batch_start", "on_test_batch_end"),
}
_EPOCH_HOOKS = {
    *("on_train_start", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_test_start", "on_test_epoch_start", "on_test_epoch_end"),
}
_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "min", "max")},
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    sum: "sum",
    max: "max",
    min: "min",
}
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
# A float is multiplied exactly by these batch sizes, so one operation rounds as two do.
_POWERS_OF_TWO = frozenset(2**power for power in range(24))


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
    dataloader_idx: int | None
    add_dataloader_idx: bool
    rank_zero_only: bool

    @property
    def suffix(self) -> str:
        """The part of a name that identifies one of several evaluation loaders."""
        has_suffix = self.add_dataloader_idx and self.dataloader_idx is not None
        return f"/dataloader_idx_{self.dataloader_idx}" if has_suffix else ""

    def key(self, of_step: bool) -> str:
        """The name of the step's or of the epoch's value."""
        fork = ("_step" if of_step else "_epoch") if self.on_step and self.on_epoch else ""
        return f"{self.name}{fork}{self.suffix}"


class ResultMetric:
    """The last value of one logged name, and its sum over the epoch."""

    def __init__(
        self, arguments: LogArguments, raw: tuple, all_reduce: Callable[..., Tensor]
    ) -> None:
        self.arguments, self.raw, self._all_reduce = arguments, raw, all_reduce
        self._is_mean = arguments.reduction == "mean"
        self._is_synced = arguments.sync_dist and not arguments.rank_zero_only
        self.needs_batch_size = arguments.on_epoch and self._is_mean
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
        self._computed: Tensor | None = None

    def update(self, value: Tensor, batch_size: int) -> None:
        """Add a value without dimensions that stands for batch_size samples."""
        self._computed = None
        self.has_value = True
        if self.arguments.on_step:
            # A clone, because the user may change the value in place afterwards.
            self.step_value = self._sync(value.clone())
            if not self.arguments.on_epoch:
                return
        if not self._is_mean:
            combine = _COMBINE[self.arguments.reduction]
            self.total = self._widen(value) if self.total is None else combine(self.total, value)
            return
        self.weight += batch_size
        if self.total is None:
            self.total = self._widen(value * batch_size)
        elif batch_size in _POWERS_OF_TWO:
            self.total = torch.add(self.total, value, alpha=batch_size)
        else:
            self.total = self.total + value * batch_size

    @staticmethod
    def _widen(value: Tensor) -> Tensor:
        return value.to(torch.promote_types(value.dtype, float_type()), copy=True)

    def update_torchmetric(self, metric: Any) -> None:
        """Note that a torchmetrics object was logged, which keeps its own sums."""
        self.torchmetric, self.has_value, self._computed = metric, True, None
        if self.arguments.on_step:
            # torchmetrics keeps the value of forward() for this purpose and has no public name for it.
            self.step_value = getattr(metric, "_forward_cache", None)

    def value(self, of_step: bool) -> Tensor | None:
        """Return the value of the step or of the epoch so far; None where it is not asked for."""
        wanted = self.arguments.on_step if of_step else self.arguments.on_epoch
        if not wanted:
            return None
        found = self.step_value if of_step else self._epoch_value()
        if found is None:
            return None
        if self.torchmetric is not None and not isinstance(found, Tensor):
            raise ConfigurationError(
                f"The `.compute()` return of the metric logged as {self.arguments.name!r} must be a"
                f" tensor. Found {found}. Log it with self.log_dict."
            )
        return found if self.arguments.enable_graph else found.detach()

    def _epoch_value(self) -> Tensor | None:
        if self._computed is None:
            if self.torchmetric is not None:
                self._computed = self.torchmetric.compute()
            elif self.total is not None:
                total = self._sync(self.total.clone())
                if self._is_mean:
                    weight = torch.tensor(self.weight, dtype=total.dtype, device=total.device)
                    total = total / self._sync(weight)
                self._computed = total
        return self._computed

    def _sync(self, value: Tensor) -> Tensor:
        if not self._is_synced:
            return value
        arguments = self.arguments
        return self._all_reduce(
            value, group=arguments.sync_dist_group, reduce_op=arguments.reduction
        )

    def state_dict(self) -> dict[str, Any]:
        arguments = dataclasses.replace(self.arguments, sync_dist_group=None)
        return {
            "arguments": dataclasses.asdict(arguments),
            "total": self.total,
            "weight": self.weight,
            "step_value": self.step_value,
        }


class Results(dict):
    """The logged names of training, or of an evaluation, by (hook, name, dataloader_idx)."""

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.is_training = is_training
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.has_step_values = False

    def valid(self) -> Iterator[ResultMetric]:
        """Yield what was logged since the last reset, for the current loader."""
        for metric in self.values():
            if metric.has_value and metric.arguments.dataloader_idx == self.dataloader_idx:
                yield metric

    def find_batch_size(self) -> int:
        """Return the size of the current batch, which is looked up once."""
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.batch_size


class ResultCollection:
    """``self.log`` of a run, and the three views of what was logged.

    Attributes:
        callback_metrics, logged_metrics, progress_bar_metrics: As Trainer's attributes of these names.
        row: The values of the current epoch for its row in metrics.csv, without forks in their names.
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
        self.train, self.evaluation = Results(True), Results(False)
        self.active: Results | None = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.row: dict[str, Tensor] = {}
        self._last_hook: str | None = None
        # None outside of the batches of an epoch, True in the first one, False in later ones.
        self._is_first_batch: bool | None = None
        # Of the training epoch, while a validation runs inside it.
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
            self._refuse(name)
            return
        raw = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist)
        raw += (sync_dist_group, add_dataloader_idx, metric_attribute, rank_zero_only)
        index = results.dataloader_idx if add_dataloader_idx else None
        metric = results.get((hook, name, index))
        if metric is None or metric.raw != raw:
            metric = self._register(results, metric, name, value, raw, index)
        if self._last_hook != hook:
            if self._is_first_batch is not False:
                self._reset_hook(results, hook)
            self._last_hook = hook
        if not isinstance(value, Tensor):
            if not isinstance(value, numbers.Number):
                check_loggable(name, value)
                metric.update_torchmetric(value)
                return
            value = torch.tensor(value, dtype=float_type())
        elif value.requires_grad and not enable_graph:
            value = value.detach()
        if value.dim():
            value = _single_element(name, value)
        if value.dtype is not torch.float32 and value.dtype is not torch.float64:
            value = _as_float(metric, value)
        if batch_size is None:
            batch_size = results.find_batch_size() if metric.needs_batch_size else 1
        elif results.batch_size is None:
            results.logged_batch_size = batch_size
        metric.update(value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **arguments: Any) -> None:
        """Log every item of a dict or of a torchmetrics MetricCollection."""
        options = (
            {"keep_base": False, "copy_state": False} if hasattr(dictionary, "add_metrics") else {}
        )
        for name, value in dictionary.items(**options):
            self.log(name, value, **arguments)

    def _register(
        self,
        results: Results,
        known: ResultMetric | None,
        name: str,
        value: Any,
        raw: tuple,
        index: int | None,
    ) -> ResultMetric:
        """Check the arguments of a name that is logged for the first time, or differently than before."""
        check_loggable(name, value)
        arguments = parse_arguments(self._hooks.current, name, results.dataloader_idx, raw)
        arguments.sync_dist &= self._is_distributed
        if is_torchmetric(value) and raw[9] is None:
            check_metric_attribute(self._module, name, value)
        if arguments.logger and raw[1] and self._warns_without_logger:
            warnings.warn(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured. You can"
                " enable one by doing `Trainer(logger=ALogger(...))`",
                stacklevel=4,
            )
        if known is None:
            known = ResultMetric(arguments, raw, self._all_reduce)
            results[(arguments.hook, name, index)] = known
            results.has_step_values |= arguments.on_step
        elif known.arguments != arguments and known.raw != ():
            raise ConfigurationError(
                f"You called `self.log({name}, ...)` twice in `{arguments.hook}` with different arguments."
                " This is not allowed"
            )
        known.raw = raw
        return known

    def _refuse(self, name: str) -> None:
        if not self._is_enabled:
            warnings.warn(
                "You are trying to `self.log()` but `Trainer(barebones=True)` is configured. Logging can"
                " impact raw speed so it is disabled under this setting.",
                stacklevel=3,
            )
            return
        hook = self._hooks.current
        if self._stage == "predict":
            raise ConfigurationError(
                "You are trying to `self.log()` but the loop's result collection is not registered yet."
                " This is most likely because you are trying to log in a `predict` hook, but it doesn't"
                " support logging"
            )
        where = f"inside `{hook}`" if hook else "outside of the loop's hooks"
        raise ConfigurationError(
            f"You can't `self.log()` {where}. HINT: You can still log directly to the logger by using"
            " `self.logger.experiment`."
        )

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
        results.batch, results.batch_size, results.logged_batch_size = batch, None, None
        results.dataloader_idx = dataloader_idx

    def end_batch(self) -> None:
        """Clear the current batch. The views are brought up to date when somebody reads them."""
        self.active.batch = self.active.batch_size = None

    def end_batches(self) -> None:
        """The batches of an epoch, or of one loader, are over: from now on the epoch's values count."""
        if self._is_first_batch is not None:
            self.update_metrics()
        self._is_first_batch = None

    def pause_training(self) -> None:
        """Keep the position in the training epoch while a validation runs."""
        self.update_metrics()
        self._paused = (self._is_first_batch, self._last_hook)

    def resume_training(self) -> None:
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
        for metrics in (
            self.callback_metrics,
            self.logged_metrics,
            self.progress_bar_metrics,
            self.row,
        ):
            metrics.clear()
        self.evaluation.clear()

    def update_metrics(self) -> dict[str, Tensor]:
        """Bring the views up to date. Returns what goes to the loggers."""
        if not self.active:
            return {}
        callback, logged, progress_bar = self.views()
        self.callback_metrics.update(callback)
        self.logged_metrics.update(logged)
        self.progress_bar_metrics.update({k: v.item() for k, v in progress_bar.items()})
        of_step = self._is_first_batch is not None
        for metric in self.active.valid():
            arguments = metric.arguments
            if (
                arguments.logger
                and not of_step
                and (value := metric.value(of_step=False)) is not None
            ):
                self.row[arguments.name + arguments.suffix] = value
        return logged

    def views(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return the values of this step, or of the epoch after its batches: (callback, logger, bar)."""
        of_step = self._is_first_batch is not None
        callback: dict[str, Tensor] = {}
        logged: dict[str, Tensor] = {}
        progress_bar: dict[str, Tensor] = {}
        for metric in self.active.valid():
            value = metric.value(of_step)
            if value is None:
                continue
            arguments = metric.arguments
            key = arguments.key(of_step)
            if arguments.logger:
                logged[key] = value
            if self.active.is_training or not of_step:
                callback[arguments.name + arguments.suffix] = value
                callback[key] = value
            if arguments.prog_bar:
                progress_bar[key] = value
        return callback, logged, progress_bar

    def take_row(self) -> dict[str, Tensor]:
        """Return the values of the epoch's row, once."""
        row, self.row = self.row, {}
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the training epoch so far. Those of torchmetrics objects are included."""
        parts = torchmetrics_in(self._module)
        names = {id(part): name for name, part in parts.items()}
        of_train = {id(metric.torchmetric) for metric in self.train.values()}
        # Those of an evaluation are reset after it, and a resumed run continues after it.
        of_evaluation = {id(metric.torchmetric) for metric in self.evaluation.values()} - of_train
        entries = []
        for metric in self.train.values():
            if metric.has_value:
                entries.append(
                    {**metric.state_dict(), "torchmetric": names.get(id(metric.torchmetric))}
                )
        return {
            "train": entries,
            "torchmetrics": {
                name: torchmetric_state(part)
                for name, part in parts.items()
                if id(part) not in of_evaluation
            },
            "callback_metrics": dict(self.callback_metrics),
            "row": dict(self.row),
            "position": list(self._paused or (self._is_first_batch, self._last_hook)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = torchmetrics_in(self._module)
        for name, values in state["torchmetrics"].items():
            for key, value in values.items() if name in parts else ():
                setattr(parts[name], key, value)
        for entry in state["train"]:
            arguments = LogArguments(**entry["arguments"])
            metric = ResultMetric(arguments, (), self._all_reduce)
            metric.total, metric.weight = entry["total"], entry["weight"]
            metric.step_value, metric.has_value = entry["step_value"], True
            metric.torchmetric = parts.get(entry["torchmetric"])
            index = arguments.dataloader_idx if arguments.add_dataloader_idx else None
            self.train[(arguments.hook, arguments.name, index)] = metric
            self.train.has_step_values |= arguments.on_step
        self.callback_metrics = dict(state["callback_metrics"])
        self.row = dict(state["row"])
        self._is_first_batch, self._last_hook = state["position"]


class ClosedResults:
    """Takes the place of the results in a copy of a module that was pickled while it ran."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the value, because the copy belongs to no run."""

    log_dict = log


def _unreduced(value: Tensor, **arguments: Any) -> Tensor:
    return value


def parse_arguments(
    hook: str | None, name: str, dataloader_idx: int | None, raw: tuple
) -> LogArguments:
    """Return the arguments of ``self.log`` with the defaults of the hook.

    Raises:
        ConfigurationError: The hook has no step or no epoch to log for, or the reduction is unknown.
    """
    prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, group = raw[:8]
    add_dataloader_idx, rank_zero_only = raw[8], raw[10]
    on_step, on_epoch = _levels(hook, on_step, on_epoch)
    reduction = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    if reduction is None:
        raise ConfigurationError(
            f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom"
            " reduction, please log a `torchmetrics.Metric` instance instead."
            f" Found: {reduce_fx}"
        )
    if add_dataloader_idx and "/dataloader_idx_" in name:
        raise ConfigurationError(
            f"You called `self.log` with the key `{name}` but it should not contain information about"
            " `dataloader_idx` when `add_dataloader_idx=True`"
        )
    return LogArguments(
        hook=str(hook),
        name=name,
        prog_bar=prog_bar,
        logger=logger is not False,
        on_step=on_step,
        on_epoch=on_epoch,
        reduction=reduction,
        enable_graph=enable_graph,
        sync_dist=sync_dist,
        sync_dist_group=group,
        dataloader_idx=dataloader_idx,
        add_dataloader_idx=add_dataloader_idx,
        rank_zero_only=rank_zero_only,
    )


def _levels(hook: str | None, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    if hook in _EPOCH_HOOKS:
        if on_step:
            raise ConfigurationError(
                f"You can't `self.log(on_step={on_step})` inside `{hook}`, must be one of (False,)."
            )
        if on_epoch is False:
            raise ConfigurationError(
                f"You can't `self.log(on_epoch={on_epoch})` inside `{hook}`, must be one of (True,)."
            )
        return False, True
    if hook not in _TRAIN_STEP_HOOKS and hook not in _EVAL_STEP_HOOKS:
        where = f"inside `{hook}`" if hook else "outside of the loop's hooks"
        raise ConfigurationError(
            f"You can't `self.log()` {where}. HINT: You can still log directly to the logger by using"
            " `self.logger.experiment`."
        )
    on_step = hook in _TRAIN_STEP_HOOKS if on_step is None else on_step
    on_epoch = hook in _EVAL_STEP_HOOKS if on_epoch is None else on_epoch
    if not on_step and not on_epoch:
        raise ConfigurationError("`self.log(on_step=False, on_epoch=False)` is not useful.")
    return on_step, on_epoch


def float_type() -> torch.dtype:
    """Return the default dtype, but no narrower than float32, so that long sums stay exact."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


def is_torchmetric(value: Any) -> bool:
    """Return whether a value has the interface of a torchmetrics object."""
    names = ("update", "compute", "reset")
    return not isinstance(value, Mapping) and all(hasattr(value, name) for name in names)


def torchmetrics_in(module: Any) -> dict[str, Any]:
    """Return the torchmetrics objects of a module by name."""
    named = module.named_modules() if hasattr(module, "named_modules") else ()
    return {name: part for name, part in named if name and is_torchmetric(part)}


def torchmetric_state(metric: Any) -> dict[str, Any]:
    """Return copies of a torchmetrics object's states, which its own state_dict leaves out."""
    names = [*getattr(metric, "_defaults", ()), "_update_count", "_computed"]
    return {name: _copy(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copy(item) for item in value] if isinstance(value, list) else value


def check_loggable(name: str, value: Any) -> None:
    """Refuse what is neither a number, a tensor nor a torchmetrics object."""
    if isinstance(value, Mapping):
        is_nested = any(isinstance(part, Mapping) for part in value.values())
        kind = "nested dictionaries" if is_nested else "`dict` values"
        raise ConfigurationError(
            f"`self.log({name}, {value})` was called, but {kind} cannot be logged"
        )
    if not isinstance(value, Tensor | numbers.Number) and not is_torchmetric(value):
        raise ConfigurationError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
        )


def check_metric_attribute(module: Any, name: str, metric: Any) -> None:
    """Refuse a torchmetrics object that is no attribute of the module, which could not be reset."""
    names = torchmetrics_in(module)
    if all(part is not metric for part in names.values()):
        advice = "setting an attribute for the metric in your `LightningModule`."
        if names:
            advice = f"calling `self.log({name}, ..., metric_attribute=name)` where `name` is one of {list(names)}"
        raise ConfigurationError(
            "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged. You can"
            f" fix this by {advice}"
        )


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
