"""Functions: step functions as an object with step methods; what a step takes, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FunctionSteps:
    """Step functions ``fn(model, batch)`` or ``fn(model, batch, batch_idx)`` as an object with step methods.

    For what there is no function, the net's own method stands in; for a test, then, the function that validates.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> steps = FunctionSteps(net, training_step=lambda model, batch: model(batch).sum())
        >>> steps.training_step(net.weight).shape
        torch.Size([])
    """

    automatic_optimization: bool

    def __init__(self, net: nn.Module, **functions: Callable | None) -> None:
        self.net = net
        self.functions = {name: function for name, function in functions.items() if function is not None}
        for name, function in self.functions.items():
            setattr(self, name, partial(function, net))

    def __getattr__(self, name: str) -> Any:
        if name in (*STEPS, "forward", "configure_optimizers", "automatic_optimization"):
            if hasattr(self.net, name):
                return getattr(self.net, name)
            if name == "test_step" and "validation_step" in vars(self):
                return self.validation_step
        raise AttributeError(f"{type(self.__dict__.get('net')).__name__} has no {name}")


def takes_batch_idx(step: Callable) -> bool:
    """Whether a step takes ``(batch, batch_idx)`` or only ``(batch)``; a method as under Trainer, by how many it takes.

    Of a function what has a default, or can be given by name only, is its own: a factor, say, or an optimizer.

    Example:
        >>> takes_batch_idx(partial(lambda model, batch, factor=0.5: ..., None))
        False
    """
    if takes(step, "batch_idx"):
        return True
    words = [word for word in inspect.signature(step).parameters.values() if word.name != "dataloader_idx"]
    words = [word for word in words if word.kind < word.KEYWORD_ONLY]
    if isinstance(step, partial):
        words = [word for word in words if word.default is word.empty]
    return len(words) >= 2


def takes(step: Callable, name: str) -> bool:
    """Whether a step has an argument of this name, or takes whatever it is given."""
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or inspect.Parameter.VAR_POSITIONAL in {p.kind for p in parameters.values()}


def takes_iterator(step: Callable | None) -> bool:
    """Whether a step takes its batches itself, from an argument ``dataloader_iter``."""
    try:
        return step is not None and "dataloader_iter" in inspect.signature(step).parameters
    except (TypeError, ValueError):
        return False
