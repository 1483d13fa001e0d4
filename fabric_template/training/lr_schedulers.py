"""Step the learning rate schedulers after a batch and after an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from .run import Run


def step_schedulers_after_batch(run: Run) -> None:
    """Like Trainer, step all schedulers except ReduceLROnPlateau before ``on_train_batch_end``."""
    if run.progress.is_window_end:
        run.row.record_learning_rates()
    # ReduceLROnPlateau is stepped later, when the metric that it monitors is known.
    step_lr_schedulers(run, "step", reduce_on_plateau=False)
    if run.progress.is_epoch_complete:
        step_lr_schedulers(run, "epoch", reduce_on_plateau=False)


def step_lr_schedulers(run: Run, interval: str, reduce_on_plateau: bool) -> None:
    """Step the schedulers that are due according to their interval and frequency.

    Args:
        interval: "step" or "epoch", as in Lightning's ``lr_scheduler`` dict.
        reduce_on_plateau: Whether to step ReduceLROnPlateau schedulers instead of all others.
    """
    if not run.optimization.is_automatic or (interval == "step" and not run.progress.is_window_end):
        return
    # Like Trainer, apply the frequency of a scheduler to batches, not to optimizer steps.
    count = run.progress.batches_done if interval == "step" else run.progress.epochs_done + 1
    for config in run.optimization.lr_schedulers:
        is_due = config.interval == interval and count % config.frequency == 0
        if is_due and config.reduce_on_plateau == reduce_on_plateau:
            step_scheduler(run, config)


def step_scheduler(run: Run, config: LRSchedulerConfig) -> None:
    scheduler: Any = config.scheduler
    monitored = None
    if config.reduce_on_plateau:
        metrics = run.results.monitored_metrics()
        monitored = metrics.get(str(config.monitor))
        if monitored is None:
            text = (
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available"
            )
            if config.strict:
                text += f". Available metrics are: {sorted(metrics)}."
                if config.interval == "step":
                    text += ' With interval="step", the metric is missing until the first epoch or'
                    text += " validation has ended."
                raise ConfigurationError(text)
            run.warn_once(f"{text} but strict is set to `False`.", category=RuntimeWarning)
            return
    module_step = run.hooks.module_method("lr_scheduler_step")
    if module_step is not None:
        module_step(scheduler, monitored)
    elif monitored is None:
        scheduler.step()
    else:
        scheduler.step(monitored)
