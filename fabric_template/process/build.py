"""Build: a run and all who work for it, made of its plan in the process that runs it: here, once, in this order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric import Fabric

from ..core.config import Settings
from ..core.history import History
from ..core.hooks import Hooks
from ..core.optimizing import Optimizing
from ..core.origin import Origin
from ..core.progress import Progress
from ..core.ranks import is_joined
from ..core.run import Failure, Home, Predicted, Run
from ..core.said import Said
from ..core.steps import Steps, is_shared_out
from ..core.stop import Stop
from ..core.trained import Trained
from ..core.validation import Validation
from ..data.feed import Feed, Given
from ..files.keeper import Keeper, KeepsNothing
from ..files.storage import door
from ..record.bar import Bar
from ..record.log import Log
from ..record.metrics import Metrics
from ..trainer.attributes import TrainerFace
from .bookmark import Bookmark
from .signals import Signals

if TYPE_CHECKING:
    from ..core import services


@dataclass
class Plan:
    """What one call of a verb is to do, checked and plain, before anything is launched; it travels to other processes."""

    fn: str  # "fit", "validate", "test", "predict"
    config: Settings
    trained: Trained
    given: Given
    origin: Origin
    optimizer: Any = None  # in configure_optimizers' place
    home: Home = field(default_factory=Home)
    said: Said = field(default_factory=Said)
    keeper: services.Keeper | None = None  # of the run that an evaluation follows,
    last: Progress | None = None  # and how far that was
    again: Progress | None = None  # how much the same evaluation has counted before


def build(plan: Plan, loop: TrainerFace, fabric: Fabric) -> Run:
    """Make the run. What must wait for the module's own hooks (its optimizers, how it is updated) is empty until then."""
    config, trained, is_alone = plan.config, plan.trained, fabric.world_size == 1
    at = Progress(config.accumulate_grad_batches)
    if plan.last is not None:
        at.follow(plan.last)
    if plan.again is not None:
        at.follow_evaluations(plan.again)
    plan.home.loggers, plan.home.recipe = loop.loggers, loop.recipe
    kind: type[Metrics] = Metrics
    if is_shared_out(fabric):
        from ..record.gathered import GatheredMetrics as kind
    metrics = kind(fabric.all_reduce, distributed=not is_alone, predicts=plan.fn == "predict",
                      enabled=not config.barebones, has_logger=bool(plan.home.loggers))  # fmt: skip
    hooks = Hooks(loop, loop.callbacks, trained.owner, metrics, loop.own_profiler, partial(_shown_to, trained))
    # a launcher may pass on to this process what it has already been sent
    patience = 0.0 if is_alone and "TORCHELASTIC_RUN_ID" not in os.environ else 1.0
    signals = Signals(together=not is_alone and is_joined(), patience=patience, speaks=fabric.is_global_zero)
    run = Run(
        fn=plan.fn,
        config=config,
        fabric=fabric,
        trained=trained,
        origin=plan.origin,
        home=plan.home,
        said=plan.said,
        at=at,
        stop=Stop(config, at, hooks, signals, plan.said, speaks=fabric.is_global_zero),
        failure=Failure(),
        history=History(),
        predicted=Predicted(),
        hooks=hooks,
        steps=Steps(fabric, trained.owner, trained.net, _compiling(plan, fabric)),
        optimizing=Optimizing(plan.optimizer, lambda optimizer: _as_seen(optimizer, run)),
        metrics=metrics,
        keeper=_keeper(plan, fabric, signals),
        bar=Bar(lambda: run.log.beside_bar()),
    )
    run.log = Log(run)
    run.history.warns = config.on_nan == "warn"
    if isinstance(config.on_nan, int):
        from ..core.watched import Watched

        run.history.train = Watched(run.stop, run.log.all_reduce)
    run.data = Feed(run, plan.given)
    run.validation = Validation(run)
    run.bookmark = Bookmark(run)
    return run


def _keeper(plan: Plan, fabric: Fabric, signals: Signals) -> services.Keeper:
    """What keeps the run's checkpoints, if anything does."""
    if plan.home.folder is None:
        return plan.keeper or KeepsNothing()
    if not getattr(door(fabric), "behind", False):
        return Keeper(plan.home.folder, plan.config)
    from ..files.background import BackgroundKeeper

    signals.behind = keeper = BackgroundKeeper(plan.home.folder, plan.config)
    return keeper


def _shown_to(trained: Trained, callback: Any, trainer: Any) -> Any:
    """What a callback finds in the module's place."""
    from ..trainer.shown import shown_to

    return shown_to(trained, callback, trainer)


def _as_seen(optimizer: Any, run: Run) -> Any:
    """An optimizer as a module sees it."""
    from ..trainer.shown import LoopOptimizer

    return LoopOptimizer(optimizer, run)


def _compiling(plan: Plan, fabric: Fabric) -> Any:
    """What compiles the steps, if anything does."""
    if plan.config.compile is False:
        return None
    from ..core.compiling import Compiling

    compiling = Compiling(plan.config.compile)
    if plan.fn == "fit":
        compiling.check(fabric.device, plan.config.accumulate_grad_batches)
    return compiling
