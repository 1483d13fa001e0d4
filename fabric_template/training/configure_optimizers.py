"""Parse the return value of ``configure_optimizers`` into lists of optimizers and schedulers."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from numbers import Real
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from ..errors import ConfigurationError, ConfigurationTypeError, describe
from ..lightning_compat.overrides import is_instance_of

_SHAPES = (
    "an optimizer, a list of optimizers, a tuple ([optimizers], [schedulers]), a dict"
    ' {"optimizer": ..., "lr_scheduler": ..., "monitor": ...}, or a list of such dicts'
)


class NoOptimizer(Optimizer):
    """An optimizer that does nothing, for models whose ``configure_optimizers`` returns None."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add nothing, so that callbacks such as LearningRateMonitor find no parameter groups."""

    def step(self, closure: Callable | None = None) -> Any:
        return closure() if closure is not None else None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def is_optimizer(item: Any) -> bool:
    methods = ("step", "zero_grad", "param_groups", "state_dict", "load_state_dict")
    return all(hasattr(item, name) for name in methods)


def has_several_optimizers(given: Any) -> bool:
    """Return whether fit's ``optimizer`` argument contains several optimizers."""
    if isinstance(given, list | tuple) and given and isinstance(given[0], list | tuple):
        given = given[0]
    return isinstance(given, list | tuple) and sum(map(is_optimizer, given)) > 1


def add_scheduler(optimizer: Any, scheduler: Any) -> Any:
    """Return an optimizer and a scheduler in the form that ``configure_optimizers`` returns."""
    if scheduler is None:
        return optimizer
    if not is_optimizer(optimizer):
        raise ConfigurationTypeError(
            f"scheduler: got a scheduler together with optimizer={describe(optimizer)}, expected"
            " one optimizer object. Write optimizer=([optimizers], [schedulers]) without"
            " scheduler=."
        )
    return [optimizer], scheduler if isinstance(scheduler, list) else [scheduler]


def make_optimizers(given: Any, model: Any, network: nn.Module) -> Any:
    """Return fit's ``optimizer`` argument or, if it is a function, the function's return value."""
    # Call a partial of an optimizer class, such as partial(Adam, lr=0.1), with the parameters.
    # Call a function with the model.
    if isinstance(given, partial) and isinstance(given.func, type):
        return given(network.parameters())
    return given(model) if inspect.isroutine(given) or isinstance(given, partial) else given


def parse_optimizers(
    returned: Any, is_automatic: bool, has_own_scheduler_step: bool, where: str
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Extract the optimizers and schedulers from the return value of ``configure_optimizers``.

    Args:
        has_own_scheduler_step: Whether the module overrides lr_scheduler_step, which may then step
            schedulers of any class.
        where: The source of the value in error messages: "configure_optimizers" or "optimizer".
    """
    optimizers, schedulers = _split(returned, where)
    configs = [_parse_scheduler(item, is_automatic, where) for item in schedulers]
    if is_automatic and not optimizers:
        raise ConfigurationTypeError(f"{where}: got an empty list, expected {_SHAPES}.")
    if is_automatic and len(optimizers) > 1:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Set"
            " `self.automatic_optimization = False`, then access your optimizers in `training_step`"
            " with `opt1, opt2, ... = self.optimizers()`."
        )
    for config in configs:
        check_scheduler(config.scheduler)
        owner = getattr(config.scheduler, "optimizer", None)
        if all(owner is not optimizer for optimizer in optimizers):
            text = (
                "Some schedulers are attached with an optimizer that wasn't returned from"
                " `configure_optimizers`."
            )
            if where == "optimizer":
                text = (
                    f"scheduler: got {describe(config.scheduler)} for another optimizer, expected a"
                    " scheduler for the optimizer passed to fit. Write StepLR(optimizer,"
                    " step_size=1)."
                )
            raise ConfigurationError(text)
        if is_automatic and not has_own_scheduler_step:
            _check_interface(config.scheduler)
    return optimizers, configs


def _split(returned: Any, where: str) -> tuple[list[Any], list[Any]]:
    if returned is None:
        warnings.warn(
            "`LightningModule.configure_optimizers` returned `None`, this fit will run with no"
            " optimizer",
            stacklevel=4,
        )
        return [NoOptimizer()], []
    given = returned if isinstance(returned, list | tuple) else [returned]
    if given and all(isinstance(item, Mapping) for item in given):
        return _split_dicts(given)
    if all(map(is_optimizer, given)):
        return list(given), []
    if len(given) == 2:
        # configure_optimizers may return the pair ([optimizers], [schedulers]) or (optimizer,
        # scheduler).
        optimizers, schedulers = (
            list(part) if isinstance(part, list | tuple) else [part] for part in given
        )
        if all(map(is_optimizer, optimizers)):
            return optimizers, schedulers
    text = f"{where}: got {describe(returned)}, expected"
    if where == "configure_optimizers":
        text = f"Unknown configuration for model optimizers. {text} {_SHAPES}."
    else:
        text += " an optimizer. Pass an optimizer, such as"
        text += " torch.optim.SGD(model.parameters(), lr=0.1)."
    raise ConfigurationTypeError(text)


def _split_dicts(given: Sequence[Mapping]) -> tuple[list[Any], list[Any]]:
    optimizers, schedulers = [], []
    for item in given:
        if "optimizer" not in item:
            raise ConfigurationError(
                f"optimizer: got a dict with the keys {sorted(map(str, item))}, expected"
                ' the key "optimizer".'
            )
        known = {"optimizer", "lr_scheduler", "monitor", "frequency"}
        _warn_of_keys("optimizer configuration", item, known)
        optimizers.append(item["optimizer"])
        scheduler = item.get("lr_scheduler")
        if scheduler is not None:
            as_dict = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
            monitor = {"monitor": item["monitor"]} if "monitor" in item else {}
            schedulers.append({**monitor, **as_dict})
    return optimizers, schedulers


def _warn_of_keys(what: str, item: Mapping, known: set[str]) -> None:
    if unknown := set(item) - known:
        warnings.warn(f"Found unsupported keys in the {what}: {unknown}", RuntimeWarning, 6)


def _parse_scheduler(item: Any, is_automatic: bool, where: str) -> LRSchedulerConfig:
    if not isinstance(item, Mapping):
        item = {"scheduler": item}
    if "scheduler" not in item:
        raise ConfigurationError(
            'The lr scheduler dict must have the key "scheduler" with its item'
        )
    known = {field.name for field in fields(LRSchedulerConfig)}
    config = LRSchedulerConfig(**{name: item[name] for name in item if name in known})
    is_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
    config.reduce_on_plateau = config.reduce_on_plateau or is_plateau
    if not is_automatic:
        ignored = [key for key in item if key in ("reduce_on_plateau", "monitor", "strict")]
        if ignored:
            warnings.warn(
                f"The lr scheduler dict contains the key(s) {ignored}, but the keys will be"
                " ignored. Call `lr_scheduler.step()` in manual optimization.",
                RuntimeWarning,
                stacklevel=5,
            )
        return config
    _warn_of_keys("lr scheduler dict", item, known)
    if config.interval not in ("step", "epoch"):
        raise ConfigurationError(
            'The "interval" key in lr scheduler dict must be "step" or "epoch" but is'
            f' "{config.interval}"'
        )
    if not isinstance(config.frequency, Real) or not 1 <= config.frequency < math.inf:
        raise ConfigurationError(
            f"frequency: got {config.frequency!r} in the lr scheduler dict, expected a number of"
            f' {config.interval}s (int >= 1). Write "frequency": 1.'
        )
    if config.reduce_on_plateau and config.monitor is None:
        raise _missing_monitor(where)
    if isinstance(config.scheduler, OneCycleLR) and "interval" not in item:
        warnings.warn(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch'. Are you sure you didn't mean"
            " 'interval': 'step'?",
            RuntimeWarning,
            stacklevel=5,
        )
    return config


def _missing_monitor(where: str) -> ConfigurationError:
    if where == "optimizer":
        return ConfigurationError(
            "scheduler: got ReduceLROnPlateau without a monitor, expected the name of a metric."
            " Write"
            ' scheduler={"scheduler": scheduler, "monitor": "val_loss"}.'
        )
    return ConfigurationError(
        "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` scheduler is"
        ' used. For example: {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor":'
        ' "metric_to_track"}'
    )


def check_scheduler(scheduler: Any) -> None:
    """Raise an error if ``scheduler`` is a class or a function instead of a scheduler object."""
    if isinstance(scheduler, list | tuple):
        raise ConfigurationTypeError(
            f"scheduler: got a {type(scheduler).__name__}, expected one scheduler. To use several"
            " schedulers, write [optimizer], [first, second]."
        )
    if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
        raise ConfigurationTypeError(
            f"scheduler: got {describe(scheduler)}, expected a scheduler. Pass a"
            " scheduler, such as torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)."
        )


def _check_interface(scheduler: Any) -> None:
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        return
    name = type(scheduler).__name__
    if not all(hasattr(scheduler, part) for part in ("state_dict", "load_state_dict")):
        raise TypeError(
            f"The provided lr scheduler `{name}` is invalid. It should have `state_dict` and"
            " `load_state_dict` methods defined."
        )
    raise ConfigurationError(
        f"The provided lr scheduler `{name}` doesn't follow PyTorch's LRScheduler API. You should"
        " override the `LightningModule.lr_scheduler_step` hook with your own logic if you are"
        " using a custom LR scheduler."
    )


def check_parameters(
    optimizers: list[Optimizer],
    outside: Mapping[str, torch.Tensor],
    model: Any,
    is_distributed: bool,
) -> None:
    """Check that the model contains all parameters of the optimizers."""
    if not outside:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    count = len({id(parameter) for group in groups for parameter in group.get("params", ())})
    if len(outside) == count and all(isinstance(p, nn.Parameter) for p in outside.values()):
        raise ConfigurationError(
            f"optimizer: got {count} parameters from another model, expected parameters from"
            " the model passed to fit. Write torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    shapes = ["unknown" if is_lazy(p) else str(tuple(p.shape)) for p in outside.values()]
    more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    text = "optimizer: got parameters that are not in the model"
    found = f"Shapes of the unexpected parameters: {', '.join(shapes[:3])}{more}."
    if is_instance_of(model, "LightningModule") and not is_distributed:
        # Like Trainer, accept an optimizer with parameters from outside the model, but warn.
        warnings.warn(
            f"{text}. {found} FabricLoop saves and restores such parameters, but the model's"
            " state_dict() lacks them. Assign them to an attribute of the LightningModule, as an"
            " nn.Module or nn.Parameter.",
            stacklevel=4,
        )
        return
    advice = "Combine them with the model, as in nn.ModuleDict({'net': net, 'loss': loss})."
    if not isinstance(model, nn.Module):
        advice = (
            "Assign them, or the module that contains them, to an attribute of the"
            f" {type(model).__name__} object, such as self.x."
        )
    raise ConfigurationError(
        f"{text}, expected only the model's parameters. {found} The loop would not save these"
        f" parameters or move them to the device. {advice}"
    )


def move_optimizer_states(optimizers: list[Optimizer]) -> None:
    """Move each parameter's optimizer state to the parameter's device."""
    for optimizer in optimizers:
        states = getattr(optimizer, "state", {})
        for group in optimizer.param_groups:
            # torch keeps Adam's step count on the CPU, except in fused and capturable optimizers.
            is_step_moved = group.get("fused") or group.get("capturable")
            for parameter in group.get("params", ()):
                state = states.get(parameter, {})
                for name in state:
                    if name != "step" or is_step_moved:
                        state[name] = move_data_to_device(state[name], parameter.device)
