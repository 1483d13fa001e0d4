"""Optimizing: the optimizers and schedulers of one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.optim import Optimizer

from .inputs import check_parameters
from .overrides import overrides
from .trained import Trained

if TYPE_CHECKING:
    from .optimizers import SchedulerConfig


class Optimizing:
    """What updates the weights: what was given, or what the module says; ``wrap`` makes of each what a module sees of it."""

    def __init__(self, given: Any, wrap: Callable[[Any], Any]) -> None:
        self.given, self._wrap = given, wrap
        self.optimizers: list[Any] = []
        self.schedulers: list[SchedulerConfig] = []

    def set_up(self, trained: Trained, configure: Callable[[], Any] | None) -> None:
        """Ask the module for its optimizers and schedulers, or take the ones that fit was given."""
        returned = self.given
        if returned is not None and not isinstance(returned, Optimizer):
            from .optimizers import is_maker

            returned = returned(trained.model) if is_maker(returned) else returned
        if returned is None and configure is not None:
            returned = configure()
        optimizers = [returned]
        if not isinstance(returned, Optimizer):
            from .optimizers import parse_optimizers

            custom = overrides(trained.owner, "lr_scheduler_step") is not None
            optimizers, self.schedulers = parse_optimizers(
                returned, automatic=trained.is_automatic, owner=trained.owner, custom_step=custom
            )
        check_parameters(optimizers, trained.net, trained.name)
        self.replace(optimizers)
        self.follow()  # states made before the move (a loaded optimizer)

    def follow(self) -> None:
        """Bring the optimizers' states to where their parameters are now."""
        for optimizer in self.optimizers:
            counts_there = {
                id(parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if group.get("fused") or group.get("capturable")
            }
            for parameter, state in optimizer.state.items():
                for key, value in (state or {}).items():  # None: of a parameter that is another rank's
                    if isinstance(value, Tensor):
                        stays = key == "step" and id(parameter) not in counts_there  # it is read at each step
                        device = value.device if stays else parameter.device
                        state[key] = value.to(device, copy=value.is_shared())  # shared: a launcher spawned with it
                    elif isinstance(value, list | tuple):  # of LBFGS
                        state[key] = move_data_to_device(value, parameter.device)

    def replace(self, optimizers: list[Any]) -> None:
        """Train with these from now on; a callback may bring others."""
        self.optimizers = list(optimizers)
        vars(self).pop("wrapped", None)

    @cached_property
    def wrapped(self) -> list[Any]:
        """Each as a module sees it."""
        return [self._wrap(optimizer) for optimizer in self.optimizers]

    def learning_rates(self) -> list[float]:
        """The first learning rate of each optimizer."""
        return [float(group["lr"]) for o in self.optimizers for group in o.param_groups[:1] if "lr" in group]


def unscales_itself(optimizer: Optimizer) -> bool:
    """Whether this is one of torch's fused optimizers, to which a GradScaler leaves its scale."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)
