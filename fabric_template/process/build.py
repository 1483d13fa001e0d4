"""Build: a run and all who work for it, made of its plan in the process that runs it: here, once, in this order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.fabric import Fabric

from ..core.history import History
from ..core.hooks import Hooks
from ..core.optimizing import Optimizing
from ..core.progress import Progress
from ..core.run import Failure, Predicted, Run
from ..core.steps import Steps
from ..core.stop import Stop
from ..core.update import AutomaticUpdate
from ..core.validation import Validation
from ..data.feed import Feed
from ..files.keeper import Keeper, KeepsNothing
from ..record.bar import Bar
from ..record.log import Log
from ..record.metrics import Metrics
from ..trainer.manual import LoopOptimizer, ManualUpdate
from ..trainer.shown import shown_to
from .bookmark import Bookmark
from .plan import Plan
from .signals import Signals, is_launched

if TYPE_CHECKING:
    from ..trainer.attributes import TrainerFace


def build(plan: Plan, loop: TrainerFace, fabric: Fabric) -> Run:
    """Make the run. What must wait for the module's own hooks (its optimizers, how it is updated) is empty until then."""
    config, trained = plan.config, plan.trained
    together = fabric.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
    at = Progress(config.accumulate_grad_batches)
    if plan.last is not None:
        at.follow(plan.last)
    if plan.again is not None:
        at.follow_evaluations(plan.again)
    metrics = Metrics(fabric.all_reduce, distributed=fabric.world_size > 1)
    metrics.set_up(predicts=plan.fn == "predict", enabled=not config.barebones, has_logger=bool(plan.home.loggers))
    hooks = Hooks(loop, plan.callbacks, trained.owner, metrics, loop.own_profiler, partial(shown_to, trained))
    signals = Signals(together, patience=1.0 if is_launched(fabric) else 0.0)
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
        steps=Steps(fabric, trained.owner, trained.net, config.compile),
        optimizing=Optimizing(plan.optimizer, lambda optimizer: LoopOptimizer(optimizer, run)),
        metrics=metrics,
        keeper=plan.keeper or KeepsNothing(),
        bar=Bar(lambda: loop.progress_bar_metrics),
    )
    if plan.fn == "fit" and plan.home.folder is not None:
        run.keeper = Keeper(plan.home.folder, config)
    run.log = Log(run)
    run.data = Feed(run, plan.given)
    run.validation = Validation(run)
    run.bookmark = Bookmark(run, loop)
    return run


def choose_update(run: Run) -> None:
    """Know how a batch becomes an update, and how it comes to its device: once the optimizers are known."""
    run.metrics.name_metrics(run.trained.net)
    run.data.set_up_transfer()
    run.update = (AutomaticUpdate if run.trained.is_automatic else ManualUpdate)(run)
