"""Check the arguments of ``self.log``, and choose their default values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError

# In the hooks of a training step, self.log defaults to on_step=True and on_epoch=False.
_TRAIN_STEP_HOOK = re.compile(
    "training_step|on_train_batch_start|on_before_zero_grad|optimizer_zero_grad|on_before_backward"
    "|backward|on_after_backward|on_before_optimizer_step|optimizer_step"
    "|configure_gradient_clipping|clip_gradients|on_train_batch_end"
)
_EVAL_STEP_HOOK = re.compile(r"(validation|test)_step|on_(validation|test)_batch_(start|end)")
_EPOCH_HOOK = re.compile(r"on_(train|validation|test)_(start|epoch_start|epoch_end)")
REDUCTIONS: dict[str, Any] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass
class LogArguments:
    """Stores the checked arguments of a ``self.log`` call."""

    hook: str | None
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


def check_metric_name(name: Any) -> None:
    """Raise an error for a metric name that a CSV file cannot contain."""
    is_text = isinstance(name, str) and 0 < len(name) == len(name.strip())
    if not is_text or re.search("[\0\ud800-\udfff]", name):
        raise ConfigurationError(
            f"log: got the name {name!r}, expected a non-empty string that a CSV file can contain,"
            " without leading or trailing spaces."
        )


def check_arguments(hook: str | None, name: str, arguments: tuple) -> LogArguments:
    """Check the arguments of ``self.log``, and choose default values as Trainer does."""
    check_metric_name(name)
    prog_bar, logger, on_step, on_epoch, reduce_fx, *others = arguments
    is_train_step = _TRAIN_STEP_HOOK.fullmatch(str(hook)) is not None
    if _EPOCH_HOOK.fullmatch(str(hook)):
        for option, value, allowed in (("on_step", on_step, False), ("on_epoch", on_epoch, True)):
            if value not in (None, allowed):
                raise ConfigurationError(
                    f"You can't `self.log({option}={value})` inside `{hook}`, must be one of"
                    f" ({allowed},)."
                )
    elif not is_train_step and not _EVAL_STEP_HOOK.fullmatch(str(hook)):
        where = f"inside `{hook}`" if hook else "outside of the loop's hooks"
        raise ConfigurationError(
            f"You can't `self.log()` {where}: the loop's result collection is not registered yet,"
            " or the hook does not belong to a step or an epoch. To log directly, use"
            " `self.logger.experiment`."
        )
    on_step = is_train_step if on_step is None else on_step
    on_epoch = not is_train_step if on_epoch is None else on_epoch
    if not on_step and not on_epoch:
        raise ConfigurationError("`self.log(on_step=False, on_epoch=False)` is not useful.")
    levels = (prog_bar, logger is not False, on_step, on_epoch)
    checked = LogArguments(hook, name, *levels, find_reduction(reduce_fx), *others)
    if checked.add_dataloader_idx and "/dataloader_idx_" in name:
        raise ConfigurationError(
            f"You called `self.log` with the key `{name}` but it should not contain information"
            " about `dataloader_idx` when `add_dataloader_idx=True`"
        )
    return checked


def find_reduction(reduce_fx: Any) -> str:
    """Return "mean", "sum", "max" or "min" for a ``reduce_fx`` such as "avg" or torch.mean."""
    functions = (torch.mean, torch.sum, torch.max, torch.min, sum, max, min)
    reduction = reduce_fx.__name__ if reduce_fx in functions else str(reduce_fx).lower()
    reduction = "mean" if reduction == "avg" else reduction
    if reduction not in REDUCTIONS:
        raise ConfigurationError(
            "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported. If you need a custom"
            f" reduction, please log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
        )
    return reduction


def value_error(name: str, value: Any) -> ConfigurationError:
    """Return the error for a value that ``self.log`` cannot log."""
    call = f"`self.log({name}, {value})` was called, but"
    if isinstance(value, Tensor):
        return ConfigurationError(
            f"{call} the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    is_nested = isinstance(value, dict) and any(isinstance(part, dict) for part in value.values())
    what = "nested dictionaries" if is_nested else f"`{type(value).__name__}` values"
    return ConfigurationError(f"{call} {what} cannot be logged")
