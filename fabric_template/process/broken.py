"""Broken: a run that an error or a signal has ended: who is told of it, what is saved, what to type to go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.overrides import overrides
from ..core.run import Run
from ..files.errors import cause_of
from ..trainer.attributes import TrainerFace


def tell(loop: TrainerFace, run: Run, error: BaseException) -> None:
    """Tell callbacks, datamodule and loggers; what fails in that is said beside the error, and does not take its place."""

    def beside(what: str, call: Callable, *args: Any) -> None:
        try:
            call(*args)
        except Exception as another:
            with suppress(Warning):  # where warnings are errors
                run.said.warn(f"after {type(error).__name__}, {what}: {cause_of(another)}")

    loop._status, run.failure.hook = "interrupted", run.hooks.enter(None)
    has_trained = run.fn == "fit" and run.at.total_batches > 0
    is_error = has_trained and isinstance(error, Exception)
    run.failure.has_come = is_error or (has_trained and run.stop.signals.agreed is None)  # in a step, perhaps
    if is_error:
        _tell_where(run, error, beside)
    run.hooks.enter("on_exception")
    for part in run.hooks.callbacks:
        beside(f"on_exception of {type(part).__name__} failed", run.hooks.call_one, part, "on_exception", error)
    if (hook := overrides(run.trained.datamodule, "on_exception")) is not None:
        beside(f"on_exception of {type(run.trained.datamodule).__name__} failed", hook, error)
    if run.fabric.world_size == 1:  # the others may be gone
        beside("what was logged last could not be read", run.metrics.merge)
    beside("the loggers could not be closed", run.log.loggers.finalize, "failed")


def _tell_where(run: Run, error: BaseException, beside: Callable) -> None:
    """Save the state, and add to the error where it came and what goes on from where.

    Between two steps the state is exact, and is ``last.ckpt``. In the middle of one it is not: dropout has drawn, BatchNorm
    has counted, sums are begun. Then ``last.ckpt`` stays what it was, and ``exception.ckpt`` is beside it. With several
    processes nothing is saved, as the others cannot be asked, but what was being saved is waited for.
    """
    run.metrics.val.reset()  # a validation that was on begins again
    paths: list[Path | None] = []
    beside("what was being saved could not be", run.keeper.settle, run, True)
    if run.keeper.keeps and run.fabric.world_size == 1:
        beside("the state could not be saved", lambda: paths.append(run.keeper.save_failed(run)))
    if hasattr(error, "add_note"):  # Python 3.11
        # else the next one was fetched
        is_in_batch = run.metrics.train.batch is not None or run.failure.hook is not None or run.at.is_last_of_epoch
        place = f"in epoch {run.at.current_epoch}, at batch {max(run.at.batches_done - is_in_batch, 0)}"
        place = f"after epoch {run.at.epochs_done - 1}" if run.at.between_epochs else place
        where = f"{place}, after step {run.at.global_step}"
        gone = ["another rank is gone without a word: killed, perhaps by the system for its memory"]
        gone *= any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer"))
        error.add_note(f"fabric_template: {'; '.join([where, *gone, *ways_on(run, *paths)])}")


def ways_on(run: Run, beside: Path | None = None) -> list[str]:
    """What to type to go on after an error: from ``last.ckpt``, and from the state that lies beside it."""
    if not run.keeper.keeps:
        return []
    exact = None
    if run.keeper.saved_step is not None:
        exact = f"resume='last' goes on after step {run.keeper.saved_step}"
    elif run.origin.resume_path is not None:
        exact = f"resume={str(run.origin.resume_path)!r} goes on from where this run began"
    if beside is None:
        return [exact or "nothing was saved before"]
    inexact = f"resume={str(beside)!r} goes on after step {run.at.global_step}, not to the bit"
    return [inexact] if exact is None else [f"{exact}, to the bit", inexact]
