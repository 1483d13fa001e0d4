"""Trained: what a run trains or evaluates, as it was given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from .functions import FunctionSteps, takes_iterator
from .overrides import class_of


def is_lightning(owner: Any) -> bool:
    """Whether this is a LightningModule, of whichever package, by its shape."""
    return isinstance(getattr(type(owner), "trainer", None), property) and callable(getattr(owner, "log", None))


@dataclass(frozen=True, eq=False)
class Trained:
    """The owner of the steps, the net that has the parameters, and the datamodule.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> Trained(FunctionSteps(net, training_step=lambda net, batch: net(batch).sum()), net).model is net
        True
    """

    owner: Any
    net: nn.Module
    datamodule: Any = None

    @property
    def model(self) -> Any:
        """The model as it was given: the owner of the steps, or the net that functions are steps of."""
        return self.net if isinstance(self.owner, FunctionSteps) else self.owner

    @property
    def name(self) -> str:
        """What the user calls the model in errors: its class."""
        return class_of(self.model).__name__

    @cached_property
    def is_lightning(self) -> bool:
        """Whether it is a LightningModule."""
        return is_lightning(self.owner)

    @property
    def is_automatic(self) -> bool:
        """Whether the loop steps the optimizer (False: the module does)."""
        return getattr(self.owner, "automatic_optimization", True)

    @cached_property
    def hands_iterator(self) -> bool:
        """Whether the training step takes its batches itself, from ``dataloader_iter``."""
        return takes_iterator(self.owner.training_step)
