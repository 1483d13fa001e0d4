"""Launch: from the caller's process to those that run, and back with what they learned."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch.multiprocessing.spawn import ProcessException

from .opening import CheckpointError
from .outcome import Outcome, leave, leave_together, unshare
from .place import choose_place
from .progress import is_interactive
from .ranks import come_by_themselves
from .resume import agree_on_checkpoint
from .run import Run
from .signals import Forward, ending, starts_processes

if TYPE_CHECKING:
    from .loop import FabricLoop


def launch(loop: FabricLoop, function: Callable, run: Run, *args: Any) -> Outcome:
    """Run the function in the strategy's processes; what it learned is back here afterwards.

    Raises:
        CheckpointError: training came to its end, but its last state or rows could not be written.
    """
    if run.fn != "fit" and loop._run is not None:
        run.follow(loop._run)
    loop._run, loop._status = run, "running"
    loop._runs[run.fn] = run
    if run.config.seed is not None:
        Fabric.seed_everything(run.config.seed, workers=True, verbose=False)
    fabric, rest = loop.fabric, (loop, function, run, args, os.getpid())
    if os.environ.get("LT_CLI_USED") == "1":  # fabric run has launched already
        outcome = _in_process(fabric, *rest)
    else:
        stood = _group_stands()
        outcome = _in_processes(fabric, *rest)
        if _group_stands() and not stood:  # ranks that stay: not before the script's end, another run may come
            atexit.register(leave)
    if isinstance(outcome, Exception):
        raise outcome
    if isinstance(outcome, str):
        outcome = Outcome.from_file(outcome)
    outcome.bring_back(run)
    loop._status = "finished" if run.stopped_by is None else "interrupted"
    if outcome.is_from_elsewhere and run.stopped_by is not None and not is_interactive():
        raise ending(run.stopped_by)
    if outcome.complaint:
        raise CheckpointError(f"training has come to its end, but not everything is on disk: {outcome.complaint}")
    return outcome


def _in_processes(fabric: Fabric, *rest: Any) -> Any:
    """Launch the ranks; while they run, or are made by this process, a signal reaches them, too."""
    launcher = fabric.strategy.launcher
    makes_scripts = hasattr(launcher, "procs") and (launcher.procs or not come_by_themselves(fabric))
    with Forward(launcher) if starts_processes(fabric) or makes_scripts else nullcontext() as forward:
        try:
            return fabric.launch(_caught, *rest)
        except ProcessException as error:
            if (number := forward.meaning(error)) is None:
                raise
            raise ending(number) from error


def _group_stands() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _caught(fabric: Fabric, *rest: Any) -> Any:
    """In the caller's process an error is handed back: Fabric's launch leaves DataLoader patched if it passes through."""
    try:
        return _in_process(fabric, *rest)
    except Exception as error:
        if os.getpid() != rest[-1]:
            raise
        return error


def _in_process(fabric: Fabric, loop: FabricLoop, function: Callable, run: Run, args: tuple, caller: int) -> Any:
    """What each process does: its own set-up, the function, and the way back."""
    loop.fabric, loop._run, loop._runs[run.fn] = fabric, run, run
    elsewhere = os.getpid() != caller
    if elsewhere:
        unshare(run)
    if isinstance(fabric.strategy, DDPStrategy):
        reset_seed()  # as Trainer's DDP does and Fabric's does not; its other strategies do
    try:
        agree_on_checkpoint(loop, run)
        choose_place(loop, run)
        run.set_up(loop, fabric)
        results = function(fabric, run, *args)
    except (KeyboardInterrupt, SystemExit):
        if not elsewhere or run.stopped_by is None:
            raise
        results = None  # the state is saved; the caller's process ends as the signal says
    except Exception:
        for process in getattr(fabric.strategy.launcher, "procs", ()):  # else they would wait for this one, for ever
            process.kill()
        raise
    outcome = Outcome.of(run, results, elsewhere)
    if not elsewhere:
        return outcome
    path = outcome.to_file() if fabric.local_rank == 0 else None
    leave_together(fabric)
    return path
