"""Averaging: Lightning's callbacks of averaged weights, where their own state_dict, made for whole epochs, does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from ..core.overrides import is_a
from ..core.run import Run

_SWA = "StochasticWeightAveraging"


def go_on(run: Run, has_ended: bool = False) -> None:
    """Let it set itself up for the epoch that the checkpoint is in the middle of, as it has done at that epoch's start.

    A run that ``has_ended`` between two epochs is shown as it was in the one before.

    By name, and by its hook: there it makes its scheduler and puts it in the others' place, and turns the epoch after the
    last into one that only renews BatchNorm's statistics. What the hook does to weights and optimizer is done already.
    """
    for callback in run.hooks.callbacks:
        epoch = run.at.epochs_done
        if not is_a(callback, _SWA):
            continue
        if run.at.between_epochs and not has_ended and epoch <= callback.swa_end:
            continue
        weights = {name: tensor.detach().clone() for name, tensor in _tensors(run)}
        groups = [(group, dict(group)) for optimizer in run.optimizing.optimizers for group in optimizer.param_groups]
        # the scheduler is made in an epoch that it belongs to
        with run.at.shown_in(min(epoch - run.at.between_epochs, callback.swa_end)):
            run.hooks.call_one(callback, "on_train_epoch_start")
        if epoch > callback.swa_end and not run.at.between_epochs:
            run.hooks.call_one(callback, "on_train_epoch_start")
        with torch.no_grad():
            for name, tensor in _tensors(run):
                tensor.copy_(weights[name])
        for group, before in groups:
            group.clear()
            group.update(before)


def end_again(run: Run) -> None:
    """The weights as they were at a finished run's end: these callbacks give the module theirs only then."""
    go_on(run, has_ended=True)
    for callback in run.hooks.callbacks:
        # with BatchNorm they are given in an epoch of its own, which is over
        has_batch_norm = is_a(callback, _SWA) and callback.pl_module_contains_batch_norm(run.trained.net)
        is_over = has_batch_norm and run.at.epochs_done >= run.stop.limits()[0]
        if is_a(callback, "WeightAveraging", _SWA) and not is_over:
            run.hooks.call_one(callback, "on_train_end")


def _tensors(run: Run) -> Iterator[tuple[str, Tensor]]:
    return chain(run.trained.net.named_parameters(), run.trained.net.named_buffers())
