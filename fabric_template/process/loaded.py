"""Loaded: what a run takes from its checkpoint file as it is set up; resumed.py takes up the rest, with the first epoch."""

from __future__ import annotations

import sys
from pathlib import Path

from ..core.errors import Misuse
from ..core.overrides import overrides
from ..core.reasons import ended_by
from ..core.run import Run
from ..files.checkpoint import OURS
from ..files.restoring import load_callbacks, load_training_state, load_weights
from ..files.schema import check_resumable
from .choose import load_file


def load_parts(run: Run, path: str | Path) -> None:
    """The file, and of it weights and callbacks, before the strategy wraps anything."""
    origin = run.origin
    origin.checkpoint = load_file(run.fabric, path, origin.trusted)
    if origin.resume_path is not None:  # once more: the file may be another one by now
        check_resumable(origin.checkpoint, path)
    ours = origin.checkpoint.pop(OURS, None)  # hooks see Trainer's keys only
    run.steps.convert_net()
    load_weights(run, origin.checkpoint, path)
    if origin.resume_path is not None:
        origin.pending = ours
    if origin.resume_path is not None or run.fn != "fit":  # a fit that takes the weights only is a new one
        load_callbacks(run, origin.checkpoint, path)


def load_training(run: Run, path: str | Path) -> None:
    """Optimizers, schedulers and counters of the run that goes on."""
    assert run.origin.checkpoint is not None
    load_training_state(run, run.origin.checkpoint, path)
    _tell_finished(run)
    epochs, _ = run.stop.limits()
    if epochs != -1 and run.at.epochs_done > epochs:
        raise Misuse(
            f"You restored a checkpoint with current_epoch={run.at.epochs_done}, but you have set Trainer(max_epochs="
            f"{epochs}): write max_epochs={run.at.epochs_done + 1} or more to go on"
        )


def _tell_finished(run: Run) -> None:
    """Say in one line that the run that is resumed is finished, if it is, and whose end may have done more to it."""
    if not run.fabric.is_global_zero or not (why := ended_by(run)):
        return
    parts = (*run.hooks.callbacks, run.trained.owner)
    own = [part for part in parts if not type(part).__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))]
    names = [type(part).__name__ for part in own if overrides(part, "on_train_end")]
    said = f". What on_train_end of {', '.join(names)} does is not done again"
    again = said if names and run.at.between_epochs else ""
    place = f"'{run.origin.resume_path}' is of a finished run (epoch {run.at.epochs_done}, step {run.at.global_step})"
    print(f"resume: {place}, nothing is trained: {why}{again}", file=sys.stderr)
