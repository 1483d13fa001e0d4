"""Launch: from the caller's process to those that run, and back with what they learned."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch.multiprocessing.spawn import ProcessException

from ..core.said import is_interactive
from ..files.opening import CheckpointError
from .agreement import come_by_themselves
from .build import build
from .choose import agree_on_checkpoint
from .desk import desk, first_error, leave_error
from .home import choose_place
from .outcome import Outcome, leave, leave_together, unshare
from .plan import Plan
from .signals import Forward, ending, starts_processes

if TYPE_CHECKING:
    from ..trainer.attributes import TrainerFace


def launch(loop: TrainerFace, function: Callable, plan: Plan, *args: Any) -> Outcome:
    """Run the function in the strategy's processes; what it learned is back here afterwards, in ``loop._run``.

    Raises:
        CheckpointError: training came to its end, but its last state or rows could not be written.
    """
    seeds = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS") if plan.config.seed is not None else ()
    try:
        loop._status = "running"
        if starts_processes(loop.fabric):  # the caller's own, which learns of theirs
            loop._begin(build(plan, loop, loop.fabric))
        with _kept(*seeds):
            if seeds:
                Fabric.seed_everything(plan.config.seed, workers=True, verbose=False)
            outcome = _anywhere(loop.fabric, loop, function, plan, args, os.getpid())
        run = loop._required(plan.fn)
        outcome.bring_back(run)
    except BaseException:
        loop._status = "interrupted"
        raise
    loop._status = "finished" if run.stop.signal is None else "interrupted"
    if outcome.is_from_elsewhere and run.stop.signal is not None and not is_interactive():
        raise ending(run.stop.signal)
    if outcome.complaint:
        raise CheckpointError(f"training has come to its end, but not everything is on disk: {outcome.complaint}")
    return outcome


def _anywhere(fabric: Fabric, *rest: Any) -> Outcome:
    """Where the strategy says: in this process, in others, or in all that somebody else has launched."""
    if os.environ.get("LT_CLI_USED") == "1":  # fabric run has launched already
        return _in_process(fabric, "", *rest)
    stood = _group_stands()
    try:
        return _in_processes(fabric, *rest)
    finally:
        if _group_stands() and not stood:  # ranks that stay: not before the script's end, another run may come
            atexit.register(leave)


def _in_processes(fabric: Fabric, *rest: Any) -> Outcome:
    """Launch the ranks; while they run, or are made by this process, a signal reaches them, too.

    An error of theirs is raised here as it was there.
    """
    launcher, starts = fabric.strategy.launcher, starts_processes(fabric)
    makes_scripts = (
        launcher is not None and hasattr(launcher, "procs") and (launcher.procs or not come_by_themselves(fabric))
    )
    with ExitStack() as around:
        forward = around.enter_context(Forward(launcher)) if starts or makes_scripts else None
        around.enter_context(_kept(*["MASTER_PORT"] * starts))
        folder = around.enter_context(desk()) if starts else ""
        try:
            # with no arguments: Lightning would walk through them in spawned processes, into the plan's dataclasses, too
            outcome = fabric.launch(partial(_caught, folder, rest))
        except ProcessException as error:
            if forward is not None and (number := forward.meaning(error)) is not None:
                raise ending(number) from error
            if (first := first_error(folder)) is not None:
                raise first from error
            raise
        if isinstance(outcome, str):
            outcome = Outcome.from_file(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@contextmanager
def _kept(*names: str) -> Iterator[None]:
    """Variables of the environment that Lightning sets within are as they were afterwards."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _group_stands() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _caught(folder: str, rest: tuple, fabric: Fabric) -> Any:
    """In the caller's process an error is handed back: Fabric's launch leaves DataLoader patched if it passes through."""
    try:
        return _in_process(fabric, folder, *rest)
    except BaseException as error:
        if os.getpid() == rest[-1]:
            return error
        leave_error(error, folder)
        if isinstance(error, Exception):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error  # which torch takes for a good end


def _in_process(
    fabric: Fabric, folder: str, loop: TrainerFace, function: Callable, plan: Plan, args: tuple, caller: int
) -> Any:
    """What each process does: its own set-up, the function, and the way back."""
    loop.fabric = fabric
    elsewhere = os.getpid() != caller
    if elsewhere:
        unshare(plan.trained.net)
    if isinstance(fabric.strategy, DDPStrategy):
        reset_seed()  # as Trainer's DDP does and Fabric's does not; its other strategies do
    run = None
    try:
        agree_on_checkpoint(loop, plan)
        choose_place(loop, plan)
        loop._begin(run := build(plan, loop, fabric))
        results = function(loop, run, *args)
    except BaseException as error:
        stopped = run is not None and run.stop.signal is not None and not isinstance(error, Exception)
        for process in () if stopped else getattr(fabric.strategy.launcher, "procs", ()):
            process.kill()  # else they would wait for this one, for ever
        if run is None or not (stopped and elsewhere):
            raise
        results = None  # the state is saved; the caller's process ends as the signal says
    outcome = Outcome.of(run, results, elsewhere)
    if not elsewhere:
        return outcome
    path = outcome.to_file(folder) if fabric.local_rank == 0 else None
    leave_together(fabric)
    return path
