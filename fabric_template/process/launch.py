"""Launch: from the caller's process to those that run, what each of them does, and back with what they learned."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch.multiprocessing.spawn import ProcessException

from ..core import train
from ..core.evaluate import evaluate
from ..core.ranks import is_joined
from ..core.run import Run
from ..core.said import is_interactive
from ..core.sanity import check_sanity
from ..exact.randomness import isolated_rng
from ..trainer.attributes import TrainerFace
from .build import Plan, build
from .home import choose_place, not_all, settle_files
from .outcome import Outcome
from .prepare import LOADER_OF
from .session import heed_signals, session, start_fit, stop_for, tell_end
from .signals import ending, starts_processes
from .world import come_by_themselves, meet_anew


class Job(NamedTuple):
    """What each process is to do."""

    loop: TrainerFace
    plan: Plan
    keep: bool  # what is measured or predicted
    caller: int  # the process in which the verb was called


def launch(loop: TrainerFace, plan: Plan, keep: bool = True) -> Outcome:
    """Run the plan in the strategy's processes; what is learned is back here afterwards, in ``loop._run``.

    Raises:
        CheckpointError: training came to its end, but its last state or rows could not be written.
    """
    seeds = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS") if plan.config.seed is not None else ()
    before = loop._run
    try:
        loop._status = "running"
        if starts_processes(loop.fabric):  # the caller's own, which learns of theirs
            loop._begin(build(plan, loop, loop.fabric))
        with _kept(*seeds):
            if seeds:
                Fabric.seed_everything(plan.config.seed, workers=True, verbose=False)
            outcome = _anywhere(loop.fabric, Job(loop, plan, keep, caller=os.getpid()))
        run = loop._required(plan.fn)
        if outcome.learned is not None:
            from .away import bring_back

            bring_back(run, outcome.learned)
    except BaseException as error:
        loop._status = "interrupted"
        if loop._run is not None and loop._run is not before:
            loop._run.stop.fail(error)
        raise
    loop._status = "finished" if run.stop.signal is None else "interrupted"
    if outcome.learned is not None and run.stop.signal is not None and not is_interactive():
        raise ending(run.stop.signal)
    if outcome.complaint:
        raise not_all(outcome.complaint)
    return outcome


_ENDED: list[type] = []  # the error of the run before in this process, if it had one


def _anywhere(fabric: Fabric, job: Job) -> Outcome:
    """Where the strategy says: in this process, in others, or in all that somebody else has launched.

    While other processes run, a signal to this one reaches them, too. An error of theirs is raised here as it was there.
    """
    if os.environ.get("LT_CLI_USED") == "1":  # fabric run has launched already
        return _in_process(fabric, "", job)
    launcher, starts = fabric.strategy.launcher, starts_processes(fabric)
    scripts = getattr(launcher, "procs", None)
    makes_scripts = scripts is not None and (scripts or not come_by_themselves(fabric))
    if _ENDED and is_joined():
        from .again import meet_again

        meet_again()
    _ENDED.clear()
    with ExitStack() as around:
        if not is_joined():  # ranks that stay then leave not before the script's end, another run may come
            around.callback(_leave_at_exit)
        store = meet_anew() if come_by_themselves(fabric) and not is_joined() else None
        forward = None
        if starts or makes_scripts:
            from .forward import Forward

            forward = around.enter_context(Forward(launcher))
        around.enter_context(_kept(*["MASTER_PORT"] * starts))
        folder = ""
        if starts:
            from . import away

            folder = around.enter_context(away.desk())
        try:
            # with no arguments: Lightning would walk through them in spawned processes, into the plan's dataclasses, too
            outcome = fabric.launch(partial(_caught, folder, job))
            del store  # which had to stay until the ranks have met
        except ProcessException as error:
            if forward is not None and (number := forward.meaning(error)) is not None:
                raise ending(number) from error
            if (first := away.first_error(folder)) is not None:
                raise first from error
            raise
        if isinstance(outcome, str):
            outcome = away.from_file(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _leave_at_exit() -> None:
    if is_joined():
        from .away import leave

        atexit.register(leave)


@contextmanager
def _kept(*names: str) -> Iterator[None]:
    """Variables of the environment that Lightning sets within are as they were afterwards."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _caught(folder: str, job: Job, fabric: Fabric) -> Any:
    """In the caller's process an error is handed back: Fabric's launch leaves DataLoader patched if it passes through."""
    try:
        return _in_process(fabric, folder, job)
    except BaseException as error:
        if os.getpid() == job.caller:
            _ENDED.append(type(error))
            return error
        from .away import leave_error

        leave_error(error, folder)
        if isinstance(error, Exception):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error  # which torch takes for a good end


def _in_process(fabric: Fabric, folder: str, job: Job) -> Any:
    """What each process does: its own set-up, the run, and the way back."""
    loop, plan = job.loop, job.plan
    loop.fabric = fabric
    elsewhere = os.getpid() != job.caller
    if elsewhere:
        from . import away

        away.unshare(plan.trained.net)
    if isinstance(fabric.strategy, DDPStrategy):
        reset_seed()  # as Trainer's DDP does and Fabric's does not; its other strategies do
    run = results = None
    try:
        if plan.origin.awaits is not None or fabric.world_size > 1:
            from .choose import agree_on_checkpoint

            agree_on_checkpoint(loop, plan)
        choose_place(loop, plan)
        loop._begin(run := build(plan, loop, fabric))
        if run.fn == "fit":
            _fit(loop, run)
        else:
            results = _evaluate(loop, run, job.keep)
    except BaseException as error:
        stopped = run is not None and run.stop.signal is not None and not isinstance(error, Exception)
        for process in () if stopped else getattr(fabric.strategy.launcher, "procs", ()):
            process.kill()  # else they would wait for this one, for ever
        if run is None or not (stopped and elsewhere):
            raise  # else the state is saved; the caller's process ends as the signal says
    outcome = Outcome.of(run, results)
    if not elsewhere:
        return outcome
    outcome.learned = away.learned_by(run)
    path = away.to_file(outcome, folder) if fabric.local_rank == 0 else None
    away.leave_together(fabric)
    return path


def _fit(loop: TrainerFace, run: Run) -> None:
    """Train."""
    signals, listening = run.stop.signals, ExitStack()
    listening.push(partial(settle_files, run))
    if signals.together:  # alone, a signal ends the set-up at once; here the others would wait for ever
        listening.enter_context(signals)
    with listening, session(loop, run), torch.autograd.set_detect_anomaly(run.config.detect_anomaly):
        if getattr(run.fabric.strategy, "num_nodes", 1) > 1:
            from .nodes import tell_unshared

            tell_unshared(run)
        start_fit(run)
        check_sanity(run, isolated_rng())
        heed_signals(run)
        if not signals.together:
            listening.enter_context(signals)
        with torch.enable_grad():
            train.fit(run)
        listening.close()
        tell_end(run)
        stop_for(run, signals.agreed)


def _evaluate(loop: TrainerFace, run: Run, keep: bool) -> list | None:
    """Validate, test or predict."""
    # gloo cannot
    inference = run.config.inference_mode and not (is_joined() and torch.distributed.get_backend() == "gloo")
    with ExitStack() as end, session(loop, run):
        end.push(partial(settle_files, run))
        if run.fn != "predict":
            run.metrics.name_metrics(run.trained.net)
        if run.fabric.is_global_zero:
            run.log.loggers.hyperparameters()
        run.data.set_up_transfer()
        if not run.data.set_up_evaluation(LOADER_OF[run.fn]):
            return None if run.fn == "predict" else []
        return evaluate(run, run.fn, inference=inference, keep=keep)
