"""Saving: a checkpoint that user code asks for, by ``trainer.save_checkpoint``; imported where it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files.checkpoint import in_pieces, state_of
from ..files.keeper import prove
from ..files.storage import door


def save_checkpoint(loop: Any, filepath: Any, weights_only: bool, storage_options: Any) -> None:
    """Write a checkpoint of the run as it stands now; after a test of what was trained, of its training."""
    if loop._run is None:
        raise AttributeError(
            "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call"
            " `Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
        )
    run = loop._run
    if loop._fitted is not None and loop._fitted.trained.model is run.trained.model:  # so that it can be resumed
        run = loop._fitted
    if loop._status == "interrupted" and loop.fabric.world_size > 1 and run.stop.signals.agreed is None:
        raise RuntimeError(
            "an error has ended the run on this rank, and the others cannot be asked for their part of a checkpoint: with"
            " several processes none is saved then; resume='last' goes on from the one before"
        )
    state = state_of(run, weights_only=weights_only)
    run.log.loggers.sync()  # what it says of the logs is on disk before it
    if in_pieces(run):
        from ..files.pieces import for_file

        run.keeper.settle(run)  # whose pieces no file names as yet
        state = for_file(run, Path(filepath), state)
    if loop.fabric.is_global_zero:
        save = run.hooks.timed(door(loop.fabric).save_checkpoint, "save_checkpoint")
        save(state, filepath, storage_options=storage_options)
        if in_pieces(run):
            from ..files.shards import clear_unnamed

            clear_unnamed(Path(filepath).parent)
    prove(run, filepath)
    loop.fabric.barrier("save_checkpoint")
