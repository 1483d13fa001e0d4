"""Optimizing: the optimizers and schedulers of one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .inputs import check_parameters
from .optimizers import SchedulerConfig, parse_optimizers
from .overrides import overrides
from .trained import Trained


class Optimizing:
    """What updates the weights: what was given, or what the module says; ``wrap`` makes of each what a module sees of it."""

    def __init__(self, given: Any, wrap: Callable[[Any], Any]) -> None:
        self.given, self._wrap = given, wrap
        self.optimizers: list[Any] = []
        self.wrapped: list[Any] = []
        self.schedulers: list[SchedulerConfig] = []

    def set_up(self, trained: Trained, configure: Callable[[], Any] | None) -> None:
        """Ask the module for its optimizers and schedulers, or take the ones that fit was given."""
        returned = self.given
        if returned is None and configure is not None:
            returned = configure()
        custom = overrides(trained.owner, "lr_scheduler_step") is not None
        optimizers, self.schedulers = parse_optimizers(
            returned, automatic=trained.is_automatic, owner=trained.owner, custom_step=custom
        )
        check_parameters(optimizers, trained.net, trained.name)
        for optimizer in optimizers:  # states made before the move (a loaded optimizer) follow their parameters
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        device = value.device if key == "step" else parameter.device
                        state[key] = value.to(device, copy=value.is_shared())  # shared: a launcher spawned with it
        self.replace(optimizers)

    def replace(self, optimizers: list[Any]) -> None:
        """Train with these from now on; a callback may bring others."""
        self.optimizers = list(optimizers)
        self.wrapped = [self._wrap(optimizer) for optimizer in self.optimizers]

    def learning_rates(self) -> list[float]:
        """The first learning rate of each optimizer."""
        return [float(group["lr"]) for o in self.optimizers for group in o.param_groups[:1] if "lr" in group]
