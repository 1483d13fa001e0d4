"""Check the arguments of ``self.log``, and find their defaults for each hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
# For each reduction: the values of reduce_fx that select this reduction, and the operation.
REDUCTIONS: dict[str, tuple[tuple[Any, ...], Callable[..., Tensor]]] = {
    "mean": (("mean", "avg", torch.mean), torch.add),
    "sum": (("sum", torch.sum, sum), torch.add),
    "max": (("max", torch.max, max), torch.maximum),
    "min": (("min", torch.min, min), torch.minimum),
}


def find_reduction(reduce_fx: Any) -> str:
    """Return the key of REDUCTIONS for the argument ``reduce_fx``."""
    reduce_fx = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    for name, (accepted, _) in REDUCTIONS.items():
        if reduce_fx in accepted:
            return name
    raise ConfigurationError(
        f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported. If you need a custom"
        f" reduction, please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
    )


def check_name(name: str, add_dataloader_idx: bool) -> None:
    if add_dataloader_idx and "/dataloader_idx_" in name:
        raise ConfigurationError(
            f"You called `self.log` with the key `{name}` but it should not contain information about"
            " `dataloader_idx` when `add_dataloader_idx=True`"
        )


def find_step_and_epoch(
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


def value_error(name: str, value: Any) -> ConfigurationError:
    """Return the error for a value that is not a number, a tensor or a torchmetrics object."""
    what = f"`{type(value).__name__}` values"
    if isinstance(value, Mapping) and any(isinstance(part, Mapping) for part in value.values()):
        what = "nested dictionaries"
    return ConfigurationError(
        f"`self.log({name}, {value})` was called, but {what} cannot be logged"
    )


def to_single_element(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ConfigurationError(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    return value.squeeze()
