"""Optimizers: every shape that ``configure_optimizers`` may return."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from .errors import Misuse, MisuseOfType
from .overrides import class_of

_OUTPUT = ". Output from `model.configure_optimizers()` should be one of:"
_SHAPES = (
    "None, Optimizer, [Optimizer, ...], ([Optimizer, ...], [scheduler or its dict, ...]),"
    ' {"optimizer": Optimizer, "lr_scheduler": scheduler or its dict, "monitor": name}, or a list of such dicts'
)


@dataclass
class SchedulerConfig:
    """When a scheduler steps: the dict that ``configure_optimizers`` may give in a scheduler's place.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> SchedulerConfig(scheduler, interval="step").frequency
        1
    """

    scheduler: Any
    name: str | None = None
    """How LearningRateMonitor calls it."""
    interval: str = "epoch"
    """Counts "epoch"s or optimizer "step"s."""
    frequency: int = 1
    """Steps the scheduler every so many of them."""
    reduce_on_plateau: bool = False
    """Whether ``step`` wants the monitored value."""
    monitor: str | None = None
    """The logged metric given to a scheduler that reduces on a plateau."""
    strict: bool = True
    """Whether a monitor that was not logged is an error (True) or a warning."""


def parse_optimizers(
    returned: Any, *, automatic: bool = True, owner: Any = None, custom_step: bool = False
) -> tuple[list, list[SchedulerConfig]]:
    """The optimizers and schedulers in what ``configure_optimizers`` returned.

    ``custom_step``: the owner steps the schedulers in its own ``lr_scheduler_step``, so that any will do.

    Raises:
        MisuseOfType: for any other shape; the message lists them.
        Misuse: for a scheduler without its monitor, or of an optimizer that was not returned.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> parse_optimizers({"optimizer": optimizer})[0] == [optimizer]
        True
    """
    where = f"{class_of(owner).__name__}.configure_optimizers()" if owner is not None else "optimizer="
    found = _taken_apart(returned, where)
    if found is None:
        hint = "; write torch.optim.Adam(model.parameters(), lr=1e-3)" if not isinstance(returned, list | tuple) else ""
        raise MisuseOfType(
            f"Unknown configuration for model optimizers{_OUTPUT if owner is not None else ': expected one of'} {_SHAPES};"
            f" {where} {_describe(returned)}{hint}"
        )
    optimizers, schedulers, monitor = found
    configs = [_parse_scheduler(item, monitor, automatic, where) for item in schedulers]
    if automatic and not optimizers:
        raise MisuseOfType(f"{where} returned an empty list: expected one of {_SHAPES}; None trains nothing")
    if automatic and len(optimizers) > 1:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Set"
            " `self.automatic_optimization = False`, then access your optimizers in `training_step` with"
            " `opt1, opt2, ... = self.optimizers()`. Step functions that are given several step them themselves."
        )
    for config in configs:
        if all(getattr(config.scheduler, "optimizer", None) is not optimizer for optimizer in optimizers):
            raise Misuse(
                "Some schedulers are attached with an optimizer that wasn't returned from `configure_optimizers`."
            )
        _check_api(config.scheduler, automatic and not custom_step)
    return optimizers, configs


def _taken_apart(returned: Any, where: str) -> tuple[list[Any], list[Any], str | None] | None:
    """(optimizers, schedulers or their dicts, the monitor beside them) of each shape; None for any other."""
    if returned is None:
        said = "`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer"
        warnings.warn(said, stacklevel=3)
        return [NoOptimizer()], [], None
    if isinstance(returned, Optimizer) or _steps(returned):
        return [returned], [], None
    if isinstance(returned, Mapping):
        _check_keys(returned, where)
        scheduler = returned.get("lr_scheduler")
        return [returned["optimizer"]], [] if scheduler is None else [scheduler], returned.get("monitor")
    if not isinstance(returned, list | tuple):
        return None
    if len(returned) == 2 and isinstance(returned[0], list) and all(map(_steps, returned[0])):
        optimizers, schedulers = returned
        return list(optimizers), list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers], None
    if returned and all(isinstance(item, Mapping) for item in returned):
        for item in returned:
            _check_keys(item, where)
        schedulers = [
            {"monitor": item.get("monitor"), **_as_dict(item["lr_scheduler"])}
            for item in returned
            if item.get("lr_scheduler") is not None
        ]
        return [item["optimizer"] for item in returned], schedulers, None
    if all(map(_steps, returned)):
        return list(returned), [], None
    if isinstance(returned, tuple) and len(returned) == 2 and _steps(returned[0]) and _is_scheduler(returned[1]):
        return [returned[0]], [returned[1]], None
    return None


def is_maker(given: Any) -> bool:
    """Whether this is a function of the model that returns its optimizers, in their place.

    Example:
        >>> import functools
        >>> is_maker(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)), is_maker(torch.optim.SGD)
        (True, False)
        >>> is_maker(functools.partial(torch.optim.SGD, lr=0.1))
        False
    """
    is_class = isinstance(getattr(given, "func", given), type)  # also with some of its words: it takes parameters
    return callable(given) and not is_class and not _steps(given)


def with_scheduler(optimizer: Any, scheduler: Any) -> Any:
    """An optimizer and what ``scheduler=`` gave beside it: a scheduler, its dict, or a list of them."""
    if scheduler is None:
        return optimizer
    if not _steps(optimizer):
        raise MisuseOfType(
            f"fit got scheduler= and a {type(optimizer).__name__} as optimizer=: expected one optimizer beside it; other"
            " shapes hold their schedulers themselves, as configure_optimizers returns them"
        )
    return [optimizer], scheduler if isinstance(scheduler, list) else [scheduler]


def are_several(optimizer: Any) -> bool:
    """Whether several optimizers are given: a list of them, alone or before schedulers.

    Example:
        >>> one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> are_several(one), are_several([one, one]), are_several(([one], []))
        (False, True, False)
    """
    while isinstance(optimizer, list | tuple) and optimizer and isinstance(optimizer[0], list | tuple):
        optimizer = optimizer[0]
    return isinstance(optimizer, list | tuple) and sum(map(_steps, optimizer)) > 1


class NoOptimizer(Optimizer):
    """Stands where ``configure_optimizers`` returned None: the loop runs, nothing is updated."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Callable | None = None) -> Any:
        """Run the closure, change nothing."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to clear."""

    def state_dict(self) -> dict:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        """Nothing to restore."""


def _steps(item: Any) -> bool:
    """Whether this is an optimizer or has the shape of one."""
    return all(hasattr(item, name) for name in ("step", "zero_grad", "param_groups", "state_dict", "load_state_dict"))


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, LRScheduler | ReduceLROnPlateau | Mapping) or hasattr(item, "step")


def _as_dict(scheduler: Any) -> dict:
    return dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


def _check_keys(item: Mapping, where: str) -> None:
    if not _steps(item.get("optimizer")):
        raise MisuseOfType(
            f"Unknown configuration for model optimizers{_OUTPUT if '(' in where else ': expected one of'}"
            f' {_SHAPES}; {where} returned a dict without an optimizer under "optimizer"'
        )
    _warn_of_keys(item, {"optimizer", "lr_scheduler", "monitor"}, "the optimizer configuration")


def _warn_of_keys(item: Mapping, known: set[str], where: str) -> None:
    if extra := sorted(map(repr, item.keys() - known)):
        warnings.warn(
            f"Found unsupported keys in {where}: {{{', '.join(extra)}}}. HINT: remove them from the output of"
            " `configure_optimizers`.", RuntimeWarning, stacklevel=5,
        )  # fmt: skip


def _parse_scheduler(item: Any, monitor: str | None, automatic: bool, where: str) -> SchedulerConfig:
    words = _as_dict(item)
    if "scheduler" not in words:
        raise Misuse('The lr scheduler dict must have the key "scheduler" with its item being an lr scheduler')
    known = {field.name for field in fields(SchedulerConfig)}
    _warn_of_keys(words, known, "the lr scheduler dict")
    config = SchedulerConfig(**{key: value for key, value in words.items() if key in known})
    if config.interval not in ("step", "epoch"):
        raise Misuse(f'The "interval" key in lr scheduler dict must be "step" or "epoch" but is "{config.interval}"')
    if not automatic:
        ignored = [key for key in ("reduce_on_plateau", "monitor", "strict") if words.get(key) is not None]
        if ignored:
            warnings.warn(
                f"The lr scheduler dict contains the key(s) {ignored}, but the keys will be ignored. You need to call"
                " `lr_scheduler.step()` manually in manual optimization.", RuntimeWarning, stacklevel=4,
            )  # fmt: skip
        return config
    if isinstance(config.scheduler, ReduceLROnPlateau) and "reduce_on_plateau" not in words:
        config.reduce_on_plateau = True
    if config.reduce_on_plateau:
        config.monitor = config.monitor or monitor
        if config.monitor is None:
            who, example = "`configure_optimizers`", 'scheduler, "monitor": "metric_to_track"}'
            if isinstance(item, Mapping):
                who, example = "The lr scheduler dict", '{"scheduler": scheduler, "monitor": "your_loss"}}'
            raise Misuse(
                f"{who} must include a monitor when a `ReduceLROnPlateau` scheduler is used. For example:"
                f' {{"optimizer": optimizer, "lr_scheduler": {example}, with the name of a logged metric: {where} returned none'
            )
    if isinstance(config.scheduler, OneCycleLR) and config.interval == "epoch":
        warnings.warn(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch'. Are you sure you didn't mean 'interval': 'step'?",
            RuntimeWarning, stacklevel=4,
        )  # fmt: skip
    return config


def _check_api(scheduler: Any, stepped_by_loop: bool) -> None:
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise MisuseOfType(
            f"The provided lr scheduler `{type(scheduler).__name__}` is invalid."
            " It should have `state_dict` and `load_state_dict` methods defined."
        )
    if stepped_by_loop and not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        raise MisuseOfType(
            f"The provided lr scheduler `{type(scheduler).__name__}` doesn't follow PyTorch's LRScheduler API. You should"
            " override the `LightningModule.lr_scheduler_step` hook with your own logic if you are using a custom LR"
            " scheduler; where there is no module, give one of torch.optim.lr_scheduler's."
        )


def _describe(returned: Any) -> str:
    if isinstance(returned, list | tuple):
        return f"returned a {type(returned).__name__} of {[type(item).__name__ for item in returned]}"
    if isinstance(returned, type):
        return f"returned the class {returned.__name__}"
    return f"returned a {type(returned).__name__}"
