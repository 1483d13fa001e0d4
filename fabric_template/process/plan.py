"""Plan: what one call of a verb is to do, checked and plain, before anything is launched; it travels to other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.config import Settings
from ..core.origin import Origin
from ..core.progress import Progress
from ..core.run import Home
from ..core.said import Said
from ..core.trained import Trained
from ..data.feed import Given
from ..files.keeper import Keeper, KeepsNothing


@dataclass
class Plan:
    """What `prepare` makes, and `build` makes a run of."""

    fn: str  # "fit", "validate", "test", "predict"
    config: Settings
    trained: Trained
    given: Given
    callbacks: list[Any]
    origin: Origin
    optimizer: Any = None  # in configure_optimizers' place
    home: Home = field(default_factory=Home)
    said: Said = field(default_factory=Said)
    keeper: Keeper | KeepsNothing | None = None  # of the run that an evaluation follows,
    last: Progress | None = None  # and how far that was
    again: Progress | None = None  # how much the same evaluation has counted before
