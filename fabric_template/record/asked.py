"""Asked: what ``self.log`` is asked for, checked once per name: where, how often, reduced by what."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import Misuse
from .metric_states import MetricStates, is_metric

# Where self.log may be called: the hooks where a value can only belong to the epoch, and those where it may be either,
# with the default (on_step, on_epoch).
_EPOCH_HOOKS = {
    "on_train_start", "on_validation_start", "on_test_start", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_test_epoch_start", "on_test_epoch_end",
}  # fmt: skip
_TRAIN_STEP_HOOKS = {
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step",
    "configure_gradient_clipping", "clip_gradients", "on_before_zero_grad", "optimizer_zero_grad",
    "on_train_batch_start", "on_train_batch_end", "training_step",
}  # fmt: skip
_EVAL_STEP_HOOKS = {
    "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end",
    "validation_step", "test_step",
}  # fmt: skip
REDUCTIONS: dict[Any, str] = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min", "avg": "mean",
                              sum: "sum", max: "max", min: "min", "mean": "mean", "sum": "sum", "max": "max",
                              "min": "min"}  # fmt: skip


@dataclass
class Meta:
    """How one name is logged: ``self.log``'s arguments with the defaults of the hook filled in."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce: str
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    dataloader_idx: int | None
    suffix: bool
    rank_zero_only: bool

    def key(self, on_step: bool) -> str:
        """The name under which the step's or the epoch's value is reported."""
        fork = ("_step" if on_step else "_epoch") if self.on_step and self.on_epoch else ""
        return f"{self.name}{fork}{self.idx_suffix}"

    @property
    def idx_suffix(self) -> str:
        """What tells one of several evaluation loaders from the other in a name."""
        return f"/dataloader_idx_{self.dataloader_idx}" if self.suffix and self.dataloader_idx is not None else ""


def asked(
    fx: str, name: str, value: Any, args: tuple, dataloader_idx: int | None, own: MetricStates | None, has_logger: bool
) -> Meta:  # fmt: skip
    """What these arguments of ``self.log`` come to in this hook; own: the module's metrics."""
    (
        prog_bar,
        logger,
        on_step,
        on_epoch,
        reduce_fx,
        enable_graph,
        sync_dist,
        group,
        suffix,
        attribute,
        rank_zero_only,
    ) = args
    on_step, on_epoch = _levels(fx, name, on_step, on_epoch)
    reduce = REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    if reduce is None:
        raise Misuse(
            f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom reduction,"
            f" please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
        )
    if suffix and "/dataloader_idx_" in name:
        raise Misuse(
            f"You called `self.log` with the key `{name}` but it should not contain information about"
            " `dataloader_idx` when `add_dataloader_idx=True`"
        )
    check_loggable(name, value)
    if is_metric(value) and attribute is None and own is not None:
        _check_attribute(own.names(), name, value)
    if logger and not has_logger:
        warnings.warn(
            f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured. You can enable one"
            " by doing `FabricLoop(logger=ALogger(...))`", stacklevel=5,
        )  # fmt: skip
    return Meta(fx, name, prog_bar, logger is not False, on_step, on_epoch, reduce, enable_graph, sync_dist, group,
                dataloader_idx, suffix, rank_zero_only)  # fmt: skip


def _levels(fx: str, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """The hook's defaults filled in; refused where the hook has no step or no epoch to log for."""
    if fx in _EPOCH_HOOKS:
        if on_step:
            raise Misuse(f"You can't `self.log(on_step={on_step})` inside `{fx}`, must be one of (False,).")
        if on_epoch is False:
            raise Misuse(f"You can't `self.log(on_epoch={on_epoch})` inside `{fx}`, must be one of (True,).")
        return False, True
    if fx in _TRAIN_STEP_HOOKS or fx in _EVAL_STEP_HOOKS:
        on_step = fx in _TRAIN_STEP_HOOKS if on_step is None else on_step
        on_epoch = fx in _EVAL_STEP_HOOKS if on_epoch is None else on_epoch
        if not on_step and not on_epoch:
            raise Misuse("`self.log(on_step=False, on_epoch=False)` is not useful.")
        return on_step, on_epoch
    where = f"inside `{fx}`" if fx else "outside of the loop's hooks"
    raise Misuse(
        f"You can't `self.log()` {where}. HINT: You can still log directly to the logger by using"
        " `self.logger.experiment`."
    )


def check_loggable(name: str, value: Any) -> None:
    """Refuse what is neither a number, a tensor nor a metric."""
    if isinstance(value, Mapping):
        raise Misuse(f"`self.log({name}, {value})` was called, but nested dictionaries cannot be logged")
    if not (isinstance(value, Tensor | numbers.Number) or is_metric(value)):
        raise Misuse(f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged")


def _check_attribute(names: Mapping[int, str], name: str, metric: Any) -> None:
    """A metric that nobody owns is refused; names: those of the module's, by their ids."""
    if id(metric) not in names:
        known = f"calling `self.log({name}, ..., metric_attribute=name)` where `name` is one of {list(names.values())}"
        raise Misuse(
            "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged. You can fix this by"
            f" {known if names else 'setting an attribute for the metric in your `LightningModule`.'}"
        )


def of_one_element(name: str, value: Tensor) -> Tensor:
    """A tensor of one element without its dimensions."""
    if value.numel() != 1:
        raise Misuse(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    return value.squeeze()


def as_float(entry: Any, value: Tensor) -> Tensor:
    """An integer, or a narrow float, as what an entry sums it in."""
    if not value.is_floating_point() and not entry.live:
        warnings.warn(
            f"You called `self.log({entry.meta.name!r}, ...)` in your `{entry.meta.fx}` but the value needs to be"
            f" floating to be reduced. Converting it to {float_type()}. You can silence this warning by converting"
            " the value to floating point yourself.", stacklevel=4,
        )  # fmt: skip
    return value.to(float_type())


def refuse(name: str, fx: str | None, enabled: bool, predicts: bool) -> None:
    """Say why nothing can be logged here; under barebones, once and by the way."""
    if not enabled:
        warnings.warn(
            f"self.log({name!r}) does nothing: `FabricLoop(barebones=True)` is configured; leave barebones out to log",
            stacklevel=3,
        )
        return
    where = f"inside `{fx}`" if fx else "outside of the loop's hooks"
    if predicts:
        where = "in prediction (a result collection is not registered yet, and none will be)"
    raise Misuse(
        f"You can't `self.log({name!r})` {where}; log in training_step, validation_step, test_step or the hooks"
        " around them, or write to `self.logger` directly"
    )


def float_type() -> torch.dtype:
    """The default dtype, but no narrower than float32, so that long sums stay exact enough."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32
