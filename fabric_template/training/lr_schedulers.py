"""When learning rate schedulers step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .optimization import is_step_due

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from .run_state import RunState


def after_optimizer_step(run: RunState) -> None:
    """Step the schedulers that do not follow a metric."""
    if not run.lr_schedulers:
        return
    if run.progress.is_epoch_complete or run.stop.has_max_steps:
        run.history.learning_rates = learning_rates(run)
    step_lr_schedulers(run, "step", plateau=False)
    if run.progress.is_epoch_complete:
        step_lr_schedulers(run, "epoch", plateau=False)


def step_lr_schedulers(run: RunState, interval: str, plateau: bool) -> None:
    """Step the schedulers that count this interval.

    Args:
        interval: "step", after each optimizer step, or "epoch".
        plateau: Step those that follow a monitored metric; False: the others.
    """
    if not run.lr_schedulers or not run.module.automatic_optimization:
        return
    if interval == "step" and not is_step_due(run):
        return
    # epochs_done counts whole epochs, and the current one is not counted yet.
    count = run.progress.batches_done if interval == "step" else run.progress.epochs_done + 1
    for config in run.lr_schedulers:
        is_due = config.interval == interval and count % config.frequency == 0
        if is_due and config.reduce_on_plateau == plateau:
            _step(run, config)


def _step(run: RunState, config: LRSchedulerConfig) -> None:
    monitored = None
    if config.reduce_on_plateau:
        monitored = _monitored_value(run, config)
        if monitored is None:
            return
    own_step = run.hooks.module_method("lr_scheduler_step")
    if own_step is not None:
        run.hooks.inside("lr_scheduler_step", own_step)(config.scheduler, monitored)
    elif monitored is None:
        config.scheduler.step()
    else:
        config.scheduler.step(monitored)


def _monitored_value(run: RunState, config: LRSchedulerConfig) -> Any:
    """Return the newest value of a scheduler's monitor; None where a lenient one has none."""
    metrics = run.loggers.monitored_metrics()
    value = metrics.get(config.monitor)
    if value is not None:
        return value
    if config.strict:
        raise ConfigurationError(
            f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available."
            f" Available metrics are: {sorted(metrics)}. Condition can be set using `monitor` key in lr"
            " scheduler dict"
        )
    run.warn_once(
        f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is"
        " set to `False`. Skipping learning rate update.",
        RuntimeWarning,
    )
    return None


def learning_rates(run: RunState) -> list[float]:
    """Return the learning rate of each optimizer's first parameter group."""
    rates = [group["lr"] for o in run.optimizers for group in o.param_groups[:1] if "lr" in group]
    return [float(rate) for rate in rates]
