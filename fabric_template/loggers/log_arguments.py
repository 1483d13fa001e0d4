"""Check the arguments of ``self.log`` and fill in the defaults of the hook that logs."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError

# Where self.log may be called.
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
    "validation_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "test_step",
    "on_test_batch_start",
    "on_test_batch_end",
]
_EPOCH_HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
]
_REDUCTIONS = {
    "mean": ("mean", "avg", torch.mean),
    "sum": ("sum", torch.sum, sum),
    "max": ("max", torch.max, max),
    "min": ("min", torch.min, min),
}


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
    metric_attribute: str | None
    rank_zero_only: bool
    dataloader_idx: int | None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Where the value is kept."""
        return self.hook, self.name, self.dataloader_idx if self.add_dataloader_idx else None

    def full_name(self, fork: str = "") -> str:
        """Return the name, with the index of one of several evaluation loaders."""
        if self.add_dataloader_idx and self.dataloader_idx is not None:
            return f"{self.name}{fork}/dataloader_idx_{self.dataloader_idx}"
        return self.name + fork

    def forked_name(self, of_step: bool) -> str:
        """Return the name of the step's or of the epoch's value, where both are logged."""
        if self.on_step and self.on_epoch:
            return self.full_name("_step" if of_step else "_epoch")
        return self.full_name()


def parse_arguments(hook: str | None, name: str, given: tuple) -> LogArguments:
    """Return the arguments of ``self.log`` with the defaults of the hook.

    Args:
        given: The arguments after name and value, without batch_size and with the dataloader_idx.

    Raises:
        ConfigurationError: The hook has no step or no epoch to log for, or the reduction is unknown.
    """
    prog_bar, logger, on_step, on_epoch, reduce_fx, *others = given
    arguments = LogArguments(
        str(hook),
        name,
        prog_bar,
        logger is not False,
        *_step_and_epoch(hook, on_step, on_epoch),
        _parse_reduction(reduce_fx),
        *others,
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
    """Return on_step and on_epoch, or raise an error where the hook does not allow them."""
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
        raise hook_error(hook)
    on_step = hook in _TRAIN_STEP_HOOKS if on_step is None else on_step
    on_epoch = hook in _EVAL_STEP_HOOKS if on_epoch is None else on_epoch
    if not on_step and not on_epoch:
        raise ConfigurationError("`self.log(on_step=False, on_epoch=False)` is not useful.")
    return on_step, on_epoch


def hook_error(hook: str | None) -> ConfigurationError:
    """Return the error for a call of ``self.log`` where nothing can be logged."""
    where = f"inside `{hook}`" if hook else "outside of the loop's hooks"
    return ConfigurationError(
        f"You can't `self.log()` {where}. HINT: You can still log directly to the logger by using"
        " `self.logger.experiment`."
    )


def _parse_reduction(reduce_fx: Any) -> str:
    given = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    for reduction, accepted in _REDUCTIONS.items():
        if given in accepted:
            return reduction
    raise ConfigurationError(
        f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom"
        f" reduction, please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
    )


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


def is_torchmetric(value: Any) -> bool:
    """Return whether a value has the interface of a torchmetrics object."""
    names = ("update", "compute", "reset")
    return not isinstance(value, Mapping) and all(hasattr(value, name) for name in names)


def check_metric_attribute(metrics: Mapping[str, Any], name: str, metric: Any) -> None:
    """Refuse a torchmetrics object that is no attribute of the module, which could not be reset.

    Args:
        metrics: The torchmetrics objects of the module by name.
    """
    if any(part is metric for part in metrics.values()):
        return
    advice = "setting an attribute for the metric in your `LightningModule`."
    if metrics:
        advice = (
            f"calling `self.log({name}, ..., metric_attribute=name)` where `name` is one of"
            f" {list(metrics)}"
        )
    raise ConfigurationError(
        "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged. You can"
        f" fix this by {advice}"
    )


def float_type() -> torch.dtype:
    """Return the default dtype, but no narrower than float32, so that long sums stay exact."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32
