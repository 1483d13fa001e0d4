"""Schedulers: those that are due step, by optimizer step, by epoch, by metric."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .errors import Misuse
from .overrides import overrides
from .run import Run

if TYPE_CHECKING:
    from .optimizers import SchedulerConfig


def step_schedulers(run: Run, interval: str, plateau: bool) -> None:
    """Step the schedulers that are due now: those that count "step"s or "epoch"s, follow a metric (``plateau``) or do not.

    In manual optimization the module steps its schedulers.
    """
    if not run.optimizing.schedulers:
        return
    if not run.trained.is_automatic:
        if interval == "epoch" and not plateau:
            _say_idle(run)
        return
    count = run.at.batches_done if interval == "step" else run.at.current_epoch + 1
    for config in run.optimizing.schedulers:  # or Lightning's class with the same words, which a callback has put there
        if config.reduce_on_plateau == plateau and config.interval == interval and count % config.frequency == 0:
            _step_one(run, config)


def _say_idle(run: Run) -> None:
    """Say of schedulers that nobody has stepped in two epochs: in the first, a callback may do so after this."""
    for config in run.optimizing.schedulers:
        if run.at.current_epoch == 1 and not run.trained.is_lightning and config.scheduler.last_epoch == 0:
            run.said.warn(
                f"{type(config.scheduler).__name__} has not been stepped in two epochs: training_step steps its optimizers"
                " itself here, and so their schedulers, too; write scheduler.step() in it"
            )


def _step_one(run: Run, config: SchedulerConfig) -> None:
    """Step one scheduler, with its monitor's value when it wants one."""
    value = None
    if config.reduce_on_plateau:
        value = run.log.known_metrics().get(config.monitor or "")
        if value is None:
            known = sorted(run.log.known_metrics())
            if config.strict:
                raise Misuse(
                    f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available. Available metrics"
                    f" are: {known}. Condition can be set using `monitor` key in lr scheduler dict"
                )
            warnings.warn(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is set to"
                " `False`. Skipping learning rate update.", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            return
    own = overrides(run.trained.owner, "lr_scheduler_step")
    if own is not None:
        own(config.scheduler, value)
    elif value is None:
        config.scheduler.step()
    else:
        config.scheduler.step(value)
