"""Run: the parts of one fit, validate, test or predict; a record, without logic of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric import Fabric

from .config import Settings
from .history import History
from .hooks import Hooks
from .optimizing import Optimizing
from .origin import Origin
from .progress import Progress
from .said import Said
from .steps import Steps
from .stop import Stop
from .trained import Trained

if TYPE_CHECKING:
    from .services import Bar, Bookmark, Data, Keeper, Log, Metrics, Update, Validation


def _nowhere(line: str) -> None:
    """Nothing is written by this process."""


@dataclass
class Home:
    """Where a run lives."""

    loggers: list[Any] = field(default_factory=list)
    folder: Path | None = None  # for checkpoints
    is_chosen: bool = False  # whether name and version are
    note: Callable[[str], None] = _nowhere  # a line beside its lock, for who lists the runs
    recipe: dict[str, Any] = field(default_factory=dict)  # the words that it was asked for with


@dataclass
class Failure:
    """How a run has failed."""

    has_come: bool = False  # an error ends this run, in the middle of a step, perhaps
    hook: str | None = None  # that the error came from


@dataclass
class Predicted:
    """What a run has predicted."""

    made: list[list[Any]] = field(default_factory=list)  # by loader, then by batch
    indices: list[list[list[int]]] = field(default_factory=list)  # the samples of each, for callbacks that write them


@dataclass
class Run:
    """One call of a verb, in the process that runs it. What the rooms above bring is theirs; here stands what it is for."""

    fn: str  # "fit", "validate", "test", "predict"
    config: Settings
    fabric: Fabric
    trained: Trained
    origin: Origin
    home: Home
    said: Said
    # how it stands
    at: Progress
    stop: Stop
    failure: Failure
    history: History
    predicted: Predicted
    # who does what
    hooks: Hooks
    steps: Steps
    optimizing: Optimizing
    metrics: Metrics
    bar: Bar
    keeper: Keeper
    # these know the run, and are made after it
    data: Data = field(init=False)
    log: Log = field(init=False)
    validation: Validation = field(init=False)
    bookmark: Bookmark = field(init=False)
    update: Update = None  # type: ignore[assignment]  # chosen once the optimizers are known
