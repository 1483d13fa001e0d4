"""Resume Lightning's callbacks that average weights, in the middle of an epoch and after the end.

These callbacks do some work in on_train_epoch_start and on_train_end and do not save its result.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .run import Run


def resume_averaging(run: Run) -> None:
    """Repeat the start of a resumed epoch for StochasticWeightAveraging, which sets its scheduler.

    The hook also sets learning rates and resets statistics of BatchNorm. Here, these are restored.
    """
    callbacks = run.hooks.callbacks_of("StochasticWeightAveraging")
    if not (callbacks and run.plan.start.resumes and run.progress.is_in_epoch):
        return
    groups = [group for part in run.optimization.optimizers for group in part.param_groups]
    options = [{n: deepcopy(v) for n, v in group.items() if n != "params"} for group in groups]
    buffers = {name: buffer.clone() for name, buffer in run.network.named_buffers()}
    run.hooks.call_callbacks("on_train_epoch_start", callbacks=callbacks)
    for group, saved in zip(groups, options, strict=True):
        group.update(saved)
    with torch.no_grad():
        for name, buffer in run.network.named_buffers():
            buffer.copy_(buffers[name])


def finish_averaging(run: Run) -> None:
    """Give the model of a finished run that was resumed the averaged weights, as at the run's end."""
    if not run.plan.start.resumes:
        return
    callbacks = run.hooks.callbacks_of("WeightAveraging")
    for callback in run.hooks.callbacks_of("StochasticWeightAveraging"):
        # With BatchNorm, an epoch more updates its statistics, and has set the averaged weights.
        if callback.swa_end in (run.progress.epochs_done - 1, math.inf):
            callbacks.append(callback)
    run.hooks.call_callbacks("on_train_end", callbacks=callbacks)
