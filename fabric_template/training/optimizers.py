"""Every shape that ``configure_optimizers`` may return, as lists of optimizers and schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from ..errors import ConfigurationError, ConfigurationTypeError, describe

_SHAPES = (
    "an optimizer, a list of them, ([optimizers], [schedulers]),"
    ' {"optimizer": ..., "lr_scheduler": ..., "monitor": ...}, or a list of such dicts'
)
_OPTIMIZER_METHODS = ("step", "zero_grad", "param_groups", "state_dict", "load_state_dict")


class NoOptimizer(Optimizer):
    """The optimizer where ``configure_optimizers`` returned None: training runs, nothing changes."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Callable | None = None) -> Any:
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def is_optimizer(item: Any) -> bool:
    """Return whether an object has the interface of an optimizer."""
    return all(hasattr(item, name) for name in _OPTIMIZER_METHODS)


def has_several_optimizers(given: Any) -> bool:
    """Return whether a list of optimizers was given, alone or before schedulers.

    Example:
        >>> optimizer = NoOptimizer()
        >>> [has_several_optimizers(given) for given in (optimizer, [optimizer] * 2, ([optimizer], []))]
        [False, True, False]
    """
    while isinstance(given, list | tuple) and given and isinstance(given[0], list | tuple):
        given = given[0]
    return isinstance(given, list | tuple) and sum(map(is_optimizer, given)) > 1


def add_scheduler(optimizer: Any, scheduler: Any) -> Any:
    """Return ``optimizer=`` and ``scheduler=`` as ``configure_optimizers`` returns them."""
    if not is_optimizer(optimizer):
        raise ConfigurationTypeError(
            f"scheduler: got it with optimizer={describe(optimizer)}, expected one optimizer. Give"
            " the schedulers of other shapes as configure_optimizers returns them."
        )
    return [optimizer], scheduler if isinstance(scheduler, list) else [scheduler]


def parse_optimizers(
    returned: Any,
    is_automatic: bool,
    has_own_scheduler_step: bool = False,
    where: str = "optimizer",
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and the schedulers of any shape.

    Args:
        returned: What ``configure_optimizers`` returned, or ``optimizer=``.
        is_automatic: Whether the loop steps the optimizer.
        has_own_scheduler_step: Whether the module steps schedulers itself, so that any object will do.
        where: The name of the source, for messages.

    Raises:
        ConfigurationTypeError: The shape is not known.
        ConfigurationError: A scheduler lacks its monitor, or its optimizer was not returned.
    """
    found = _split(returned)
    if found is None:
        lightnings = (
            "Unknown configuration for model optimizers. Output from `model.configure_optimizers()`"
            f" should be one of: {_SHAPES}. "
        )
        raise ConfigurationTypeError(
            f"{lightnings if where == 'configure_optimizers' else ''}{where}: got"
            f" {describe(returned)}, expected an optimizer. Write"
            " torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    optimizers, schedulers, monitor = found
    configs = [_parse_scheduler(item, monitor, is_automatic) for item in schedulers]
    if is_automatic and not optimizers:
        raise ConfigurationTypeError(f"{where}: got an empty list, expected {_SHAPES}.")
    if is_automatic and len(optimizers) > 1:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Set"
            " `self.automatic_optimization = False`, then access your optimizers in `training_step`"
            " with `opt1, opt2, ... = self.optimizers()`."
        )
    for config in configs:
        owner = getattr(config.scheduler, "optimizer", None)
        if all(owner is not optimizer for optimizer in optimizers):
            raise ConfigurationError(
                "Some schedulers are attached with an optimizer that wasn't returned from `configure_optimizers`."
            )
        if is_automatic and not has_own_scheduler_step:
            _check_interface(config.scheduler)
    return optimizers, configs


def _split(returned: Any) -> tuple[list[Any], list[Any], str | None] | None:
    """Return (optimizers, schedulers, monitor), or None for an unknown shape."""
    if returned is None:
        warnings.warn(
            "`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer",
            stacklevel=4,
        )
        return [NoOptimizer()], [], None
    if is_optimizer(returned):
        return [returned], [], None
    if isinstance(returned, Mapping):
        return _split_dict(returned)
    if isinstance(returned, list | tuple):
        return _split_sequence(returned)
    return None


def _split_dict(returned: Mapping) -> tuple[list[Any], list[Any], str | None]:
    _check_keys(returned)
    scheduler = returned.get("lr_scheduler")
    schedulers = [] if scheduler is None else [scheduler]
    return [returned["optimizer"]], schedulers, returned.get("monitor")


def _split_sequence(returned: Any) -> tuple[list[Any], list[Any], str | None] | None:
    if len(returned) == 2 and isinstance(returned[0], list) and all(map(is_optimizer, returned[0])):
        optimizers, schedulers = returned
        is_list = isinstance(schedulers, list | tuple)
        return list(optimizers), list(schedulers) if is_list else [schedulers], None
    if returned and all(isinstance(item, Mapping) for item in returned):
        optimizers, schedulers = [], []
        for item in returned:
            _check_keys(item)
            optimizers.append(item["optimizer"])
            if (scheduler := item.get("lr_scheduler")) is not None:
                as_dict = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
                schedulers.append({"monitor": item.get("monitor"), **as_dict})
        return optimizers, schedulers, None
    if all(map(is_optimizer, returned)):
        return list(returned), [], None
    if isinstance(returned, tuple) and len(returned) == 2 and is_optimizer(returned[0]):
        return [returned[0]], [returned[1]], None
    return None


def _check_keys(returned: Mapping) -> None:
    if "optimizer" not in returned:
        raise ConfigurationError(
            f"optimizer: got a dict with the keys {sorted(map(str, returned))}, expected"
            ' "optimizer" among them.'
        )
    unknown = sorted(set(returned) - {"optimizer", "lr_scheduler", "monitor", "frequency"})
    if unknown:
        warnings.warn(
            f"Found unsupported keys in the optimizer configuration: {set(unknown)}", stacklevel=5
        )


def _parse_scheduler(item: Any, monitor: str | None, is_automatic: bool) -> LRSchedulerConfig:
    if isinstance(item, LRSchedulerConfig):
        return item
    if not isinstance(item, Mapping):
        config = LRSchedulerConfig(item)
    else:
        config = (_parse_scheduler_dict if is_automatic else _parse_manual_dict)(item)
        monitor = item.get("monitor", monitor)
    config.monitor = monitor if monitor is not None else config.monitor
    config.reduce_on_plateau |= isinstance(config.scheduler, ReduceLROnPlateau)
    if is_automatic and config.reduce_on_plateau and config.monitor is None:
        raise ConfigurationError(
            "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` scheduler is"
            ' used. For example: {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor":'
            ' "metric_to_track"}'
        )
    return config


def _parse_manual_dict(item: Mapping) -> LRSchedulerConfig:
    ignored = [key for key in item if key in ("reduce_on_plateau", "monitor", "strict")]
    if ignored:
        warnings.warn(
            f"The lr scheduler dict contains the key(s) {ignored}, but the keys will be ignored. You need"
            " to call `lr_scheduler.step()` manually in manual optimization.",
            RuntimeWarning,
            stacklevel=5,
        )
    return LRSchedulerConfig(**{key: value for key, value in item.items() if key not in ignored})


def _parse_scheduler_dict(item: Mapping) -> LRSchedulerConfig:
    known = {field.name for field in fields(LRSchedulerConfig)}
    if unknown := sorted(set(item) - known):
        warnings.warn(
            f"Found unsupported keys in the lr scheduler dict: {set(unknown)}. HINT: remove them from the"
            " output of `configure_optimizers`.",
            RuntimeWarning,
            stacklevel=5,
        )
    if "scheduler" not in item:
        raise ConfigurationError(
            'The lr scheduler dict must have the key "scheduler" with its item'
        )
    interval = item.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise ConfigurationError(
            f'The "interval" key in lr scheduler dict must be "step" or "epoch" but is "{interval}"'
        )
    scheduler = item["scheduler"]
    if isinstance(scheduler, OneCycleLR) and interval == "epoch":
        warnings.warn(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch'. Are you sure you didn't mean 'interval': 'step'?",
            RuntimeWarning,
            stacklevel=5,
        )
    return LRSchedulerConfig(**{name: value for name, value in item.items() if name in known})


def _check_interface(scheduler: Any) -> None:
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        needed = ("step", "state_dict", "load_state_dict")
        if not all(hasattr(scheduler, name) for name in needed):
            raise TypeError(
                f"The provided lr scheduler `{type(scheduler).__name__}` is invalid. It should have"
                " `state_dict` and `load_state_dict` methods defined."
            )
        raise ConfigurationError(
            f"The provided lr scheduler `{type(scheduler).__name__}` doesn't follow PyTorch's LRScheduler"
            " API. You should override the `LightningModule.lr_scheduler_step` hook with your own logic"
            " if you are using a custom LR scheduler."
        )


def check_parameters(optimizers: list[Optimizer], network: nn.Module) -> None:
    """Refuse optimizers that have no parameter of the model: nothing would be trained.

    Plain tensors among the parameters are allowed.
    """
    own = {id(parameter) for parameter in network.parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    theirs = [parameter for group in groups for parameter in group.get("params", ())]
    has_modules = any(isinstance(parameter, nn.Parameter) for parameter in theirs)
    if has_modules and not any(id(parameter) in own for parameter in theirs):
        raise ConfigurationError(
            f"optimizer: got {len(theirs)} parameters of another model, expected those of the model"
            " that is trained. Write torch.optim.SGD(model.parameters(), lr=0.1)."
        )
