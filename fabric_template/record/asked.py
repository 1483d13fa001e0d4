"""Asked: what ``self.log`` is asked for, checked once per name: where, how often, reduced by what."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import Misuse
from .loggable import check_loggable, is_metric, metrics_in

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
    fx: str, name: str, value: Any, args: tuple, dataloader_idx: int | None, module: Any, has_logger: bool
) -> Meta:  # fmt: skip
    """What these arguments of ``self.log`` come to in this hook; a metric must be one of the module's."""
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
    if is_metric(value) and attribute is None and module is not None:
        _check_attribute(module, name, value)
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


def _check_attribute(module: Any, name: str, metric: Any) -> None:
    """A metric that nobody owns is refused."""
    names = metrics_in(module)
    if all(part is not metric for part in names.values()):
        known = f"calling `self.log({name}, ..., metric_attribute=name)` where `name` is one of {list(names)}"
        raise Misuse(
            "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged. You can fix this by"
            f" {known if names else 'setting an attribute for the metric in your `LightningModule`.'}"
        )
