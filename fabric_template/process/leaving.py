"""Leaving: how a process leaves a run that a signal has ended: what it prints, and what its caller or the shell gets."""

from __future__ import annotations

import signal
import sys

from ..core.overrides import is_a
from ..core.run import Run
from ..core.said import is_interactive
from .broken import ways_on
from .signals import ending, starts_processes
from .slurm import requeue


def leave_for(run: Run, number: int) -> None:
    """After a signal: requeue the job where SLURM asks for it, and end as the signal would; a notebook goes on."""
    where, carries = _way_on_after(run, number), number == signal.SIGINT and not starts_processes(run.fabric)
    if run.fabric.is_global_zero:
        if is_interactive() or not carries:
            print(where, file=sys.stderr)
        if not run.stop.signals.was_theirs:  # whose handler may do so itself
            requeue(number, saved=run.keeper.keeps and run.keeper.complaint() is None)
    if is_interactive():
        return
    environment = getattr(run.fabric.strategy, "cluster_environment", None)
    if run.fabric.local_rank > 0 and type(environment).__name__ == "LightningEnvironment":
        raise SystemExit(0)  # Lightning kills the first process, which may still be busy, for the exit code of another
    if carries and run.fabric.is_global_zero:
        raise KeyboardInterrupt(where)  # a traceback's last line
    raise ending(number)


def _way_on_after(run: Run, number: int) -> str:
    """What is saved when a signal ends training, and what to type to go on."""
    saver, what = run.keeper, "nothing was trained yet"
    if run.at.total_batches and saver.keeps:
        ways = "; ".join(ways_on(run))
        what = saver.complaint() or (f"'{saver.last_model_path}' is saved: {ways}" if saver.last_model_path else ways)
    elif run.at.total_batches:
        keeps = any(is_a(callback, "Checkpoint") for callback in run.hooks.callbacks)
        nothing = "nothing is saved (enable_checkpointing=False)"
        what = "resume='last' takes what callbacks have kept" if keeps else nothing
    where = f"in epoch {run.at.current_epoch}, after step {run.at.global_step}"
    return f"{signal.Signals(number).name}: training stops {where}; {what}"
