"""Finished: a run that had come to its end is started again, as by a scheduler that requeues; it stays as it ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..core.hooks import is_a, overrides
from ..core.run import Run
from ..trainer.averaging import go_on

AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")  # give their weights to the module when training ends
_LIGHTNINGS = ("lightning.pytorch.", "pytorch_lightning.")

if TYPE_CHECKING:
    from ..trainer.attributes import TrainerFace


def tell_finished(run: Run) -> None:
    """Say in one line that the run that is resumed is finished, if it is, and whose end may have done more to it."""
    if not run.fabric.is_global_zero or not (why := run.stop.ended_by()):
        return
    place = f"epoch {run.at.epochs_done}, step {run.at.global_step}"
    parts = (*run.hooks.callbacks, run.trained.owner)
    own = [part for part in parts if not type(part).__module__.startswith(_LIGHTNINGS)]
    names = [type(part).__name__ for part in own if overrides(part, "on_train_end")]
    again = ""
    if names and run.at.between_epochs:
        again = f". What on_train_end of {', '.join(names)} does is not done again"
    path = run.origin.resume_path
    print(f"resume: '{path}' is of a finished run ({place}), nothing is trained: {why}{again}", file=sys.stderr)


def end_again(run: Run, trainer: TrainerFace) -> None:
    """The weights as they were at the run's end: Lightning's averaging callbacks give the module theirs only then."""
    go_on(run, has_ended=True)
    for callback in run.hooks.callbacks:
        # with BatchNorm they are given in an epoch of its own, which is over
        has_batch_norm = is_a(callback, AVERAGING[1]) and callback.pl_module_contains_batch_norm(run.trained.net)
        if is_a(callback, *AVERAGING) and not (has_batch_norm and run.at.epochs_done >= run.stop.limits()[0]):
            callback.on_train_end(trainer, run.trained.net)
