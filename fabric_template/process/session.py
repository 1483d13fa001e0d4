"""Session: what happens around a run, in Trainer's order: set-up hooks, devices, restored state; and the way out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning

from ..core.errors import Misuse
from ..core.hooks import is_a, overrides
from ..core.schedulers import step_schedulers
from ..core.steps import Modes
from ..exact.randomness import set_rng_state
from ..files import checkpoint as ckpt
from ..files.disk import clear_stale
from ..files.fingerprint import fingerprint
from ..files.locks import one_writer
from ..files.noticed import tell_forgotten
from ..files.opening import cause_of
from ..files.schema import check_resumable
from ..record.bar import Progress, can_show_bar, is_interactive, summarize
from ..record.earlier import bring_back
from ..record.log import Record
from ..record.logger import CSVLogger
from ..trainer import profiling
from ..trainer.attach import attach, attach_log, keep_if_well
from ..trainer.averaging import go_on
from ..trainer.callbacks import add_callbacks_of
from .choose import load_file
from .finished import end_again, ended_by, is_time_over, tell_finished
from .signals import ending, requeue, starts_processes

if TYPE_CHECKING:
    from ..core.run import Run
    from ..loop import FabricLoop


class Session:
    """Around a run: its folders locked, the module attached, set up and moved; afterwards everything as it was found.

    What gives a thing back is noted before the thing is changed, so that whatever fails, at whatever line, all comes back.
    An error reaches ``on_exception`` of callbacks and datamodule and then the caller, unchanged (a StopIteration, too, which
    no generator would let through).
    """

    def __init__(self, loop: FabricLoop, run: Run) -> None:
        self.loop, self.run, self._found = loop, run, ExitStack()

    def __enter__(self) -> None:
        loop, run, found = self.loop, self.run, self._found
        with found:
            run.record = Record(run)
            folders = _written(run)
            found.enter_context(one_writer(folders))
            _clear(folders)
            found.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            _set_switches(run, found)
            found.callback(_rest, run)
            found.callback(run.feed.close)
            modes = Modes(run.net)
            found.push(lambda kind, *_: kind and modes.restore())
            try:
                attach(run.owner, loop, run.metrics, found, compiled=bool(run.config.compile))
                _set_up(loop, run, found)
            except BaseException as error:
                _tell(loop, run, error)
                raise
            self._found = found.pop_all()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._found:
            try:
                if error is not None:
                    raise error
                _tear_down(self.run)
                profiling.end(self.loop.own_profiler)
            except BaseException as error:
                _tell(self.loop, self.run, error)
                raise


def _rest(run: Run) -> None:
    """The run stays readable; what it saved and what it computed with need not stay in memory."""
    run.metrics.fx = run.stage = run.cut = None
    run.metrics.start(None)
    run.metrics.to_cpu()


def _tell(loop: FabricLoop, run: Run, error: BaseException) -> None:
    """Tell callbacks, datamodule and loggers; what fails in that is said beside the error, and does not take its place."""

    def beside(what: str, call: Callable, *args: Any) -> None:
        try:
            call(*args)
        except Exception as another:
            with suppress(Warning):  # where warnings are errors
                run.warn_once(f"after {type(error).__name__}, {what}: {cause_of(another)}")

    loop._status, run.failed_in, run.metrics.fx = "interrupted", run.metrics.fx, None
    run.has_failed = run.fn == "fit" and run.total_batches > 0 and run.signals.agreed is None  # in a step, perhaps
    if run.fn == "fit" and run.total_batches and isinstance(error, Exception):
        _tell_where(run, error, beside)
    run.metrics.fx = "on_exception"
    for part in run.callbacks:
        beside(f"on_exception of {type(part).__name__} failed", run.hooks.call_one, part, "on_exception", error)
    if (hook := overrides(run.datamodule, "on_exception")) is not None:
        beside(f"on_exception of {type(run.datamodule).__name__} failed", hook, error)
    beside("the loggers could not be closed", run.record.finalize, "failed")


def _set_up(loop: FabricLoop, run: Run, found: ExitStack) -> None:
    """The part that all runs share: data, setup hooks, weights, devices; what is to be given back is noted."""
    fabric, owner, datamodule = run.fabric, run.owner, run.datamodule
    run.stage = "train" if run.fn == "fit" else run.fn
    if hasattr(datamodule, "trainer"):
        keep_if_well(found, datamodule, "trainer")
        datamodule.trainer = loop
    profiling.begin(loop.own_profiler, run, loop.log_dir)
    _add_callbacks_of(owner, loop, run, found)
    shown = run.config.enable_progress_bar and fabric.is_global_zero and can_show_bar()
    run.bar = Progress(shown and loop.progress_bar_callback is None, lambda: loop.progress_bar_metrics)
    found.callback(run.bar.close)
    for part in (datamodule, owner):
        if (hook := run.hooks.own(part, "prepare_data")) is not None:
            per_node = getattr(part, "prepare_data_per_node", True)
            if fabric.local_rank == 0 and (per_node or fabric.node_rank == 0):
                hook()
    fabric.barrier("prepare_data")
    heed_signals(run)
    if (hook := run.hooks.own(datamodule, "setup")) is not None:
        hook(stage=run.fn)
    run.hooks.call("setup", run.fn)
    if (hook := run.hooks.own(owner, "configure_model")) is not None:
        hook()
    heed_signals(run)
    path = run.resume_path or run.load_path
    if path is not None:
        run.checkpoint = load_file(fabric, path, run.trusted)
        if run.resume_path is not None:  # once more: the file may be another one by now
            check_resumable(run.checkpoint, path)
        ours = run.checkpoint.pop(ckpt.OURS, None)  # hooks see Trainer's keys only
        run.steps.convert_net()
        ckpt.load_weights(run, run.checkpoint)
        if run.resume_path is not None:
            run.restored = ours
        if run.resume_path is not None or run.fn != "fit":  # a fit that takes the weights only is a new one
            ckpt.load_callbacks(run, run.checkpoint)
    run.steps.setup(training=run.fn == "fit")


def start_fit(loop: FabricLoop, run: Run) -> None:
    """What fit adds: optimizers, ``on_fit_start``, hyperparameters, the restored state."""
    if run.config.enable_model_summary and run.fabric.is_global_zero and not run.has_summary:
        print(summarize(run.net))
    if sleeping := sum(not module.training for module in run.net.modules()):  # left as they are, as Trainer does
        run.warn_once(
            f"Found {sleeping} module(s) in eval mode at the start of training: no dropout there, BatchNorm frozen; write"
            " model.train() before fit unless this is what you want",
            PossibleUserWarning,
        )
    run.metrics.start(None)
    run.held.set_up()
    run.set_up_optimizers()
    run.fingerprint = fingerprint(run)
    run.held.set_up_optimizers()
    run.hooks.call("on_fit_start")
    if run.resume_path is not None:
        ckpt.load_training_state(run, run.checkpoint)
        tell_finished(run)
        epochs, _ = run.limits()
        if epochs != -1 and run.epochs_done > epochs:
            raise Misuse(
                f"You restored a checkpoint with current_epoch={run.epochs_done}, but you have set max_epochs={epochs}:"
                f" write max_epochs={run.epochs_done + 1} or more to go on"
            )
    run.checkpoint = None
    if run.fabric.is_global_zero and not (run.resume_path is not None and ended_by(run)):
        run.record.hyperparameters()
    if run.steps.buckets is not None:
        run.steps.buckets.begin(run.restored, run.fabric.backward)
    if run.restored is not None:
        bring_back(run)
    elif run.is_auto and run.resume_path is None and run.fabric.is_global_zero:
        for logger in run.loggers:
            if hasattr(type(logger), "set_aside"):
                logger.set_aside()  # of a run that was killed before its first checkpoint, in a version given by name
    run.set_up_update()
    run.net.zero_grad()


def stop_for(run: Run, number: int | None) -> None:
    """After a signal: requeue the job where SLURM asks for it, and end as the signal would; a notebook goes on."""
    run.stopped_by = number
    if number is None:
        return
    where, carries = _way_on_after(run, number), number == signal.SIGINT and not starts_processes(run.fabric)
    if run.fabric.is_global_zero:
        if is_interactive() or not carries:
            print(where, file=sys.stderr)
        if not run.signals.was_theirs:  # whose handler may do so itself
            requeue(number, saved=run.saver is not None and run.saver.complaint() is None)
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
    saver, what = run.saver, "nothing was trained yet"
    if run.total_batches and saver is not None:
        ways = "; ".join(_ways_on(run))
        what = saver.complaint() or (f"'{saver.last_model_path}' is saved: {ways}" if saver.last_model_path else ways)
    elif run.total_batches:
        keeps = any(is_a(callback, "Checkpoint") for callback in run.callbacks)
        what = (
            "resume='last' takes what callbacks have kept" if keeps else "nothing is saved (enable_checkpointing=False)"
        )
    where = f"in epoch {run.current_epoch}, after step {run.global_step}"
    return f"{signal.Signals(number).name}: training stops {where}; {what}"


def heed_signals(run: Run) -> None:
    """While several ranks are set up: one of them has got a signal, so all end here, together."""
    if run.signals is not None and run.signals.together:
        run.signals.check(0, now=True)
        stop_for(run, run.signals.agreed)


def _tell_where(run: Run, error: Exception, beside: Callable) -> None:
    """Save the state, and add to the error where it came and what goes on from where.

    Between two steps the state is exact, and is ``last.ckpt``. In the middle of one it is not: dropout has drawn, BatchNorm
    has counted, sums are begun. Then ``last.ckpt`` stays what it was, and ``exception.ckpt`` is beside it. With several
    processes nothing is saved: the others cannot be asked.
    """
    run.has_failed = True
    run.metrics.val.reset()  # a validation that was on begins again
    paths: list[Path | None] = []
    if run.saver is not None and run.fabric.world_size == 1:
        beside("the state could not be saved", lambda: paths.append(run.saver.save_failed(run)))
    if hasattr(error, "add_note"):  # Python 3.11
        # else the next one was fetched
        is_in_batch = run.metrics.train.batch is not None or run.failed_in is not None or run.is_last_of_epoch
        place = f"in epoch {run.current_epoch}, at batch {max(run.batches_done - is_in_batch, 0)}"
        where = f"{f'after epoch {run.epochs_done - 1}' if run.between_epochs else place}, after step {run.global_step}"
        error.add_note(f"fabric_template: {'; '.join([where, *_ways_on(run, *paths)])}")


def _ways_on(run: Run, beside: Path | None = None) -> list[str]:
    """What to type to go on after an error: from ``last.ckpt``, and from the state that lies beside it."""
    if run.saver is None:
        return []
    exact = None
    if run.saver.saved_step is not None:
        exact = f"resume='last' goes on after step {run.saver.saved_step}"
    elif run.resume_path is not None:
        exact = f"resume={str(run.resume_path)!r} goes on from where this run began"
    if beside is None:
        return [exact or "nothing was saved before"]
    inexact = f"resume={str(beside)!r} goes on after step {run.global_step}, not to the bit"
    return [inexact] if exact is None else [f"{exact}, to the bit", inexact]


def stay_finished(run: Run, trainer: Any) -> None:
    """Of a finished run everything is as it was at its end."""
    if run.restored is not None and (held := ckpt.of_this_rank(run, run.restored).get("held")):
        run.held.put_back(held)
    end_again(run, trainer)


def restore_position(run: Run) -> None:
    """Put random numbers, loaders and running sums where the checkpoint left them; called as the first epoch begins."""
    ours, run.restored, feed = run.restored, None, run.feed
    mine = ckpt.of_this_rank(run, ours)
    if mine["val"] is not None:
        feed.set_up_val()
    if ours["loaders_epoch"]:  # what was made for this process alone is due when it was due then
        feed.made_in = dict(ours["loaders_epoch"])
    loaders = [(feed.train, mine["train"]), (feed.val, mine["val"])]
    loaders = [(stage, state) for stage, state in loaders if state is not None]
    for stage, state in loaders:
        stage.resume(state)
    if feed.in_pass:
        if mine["train"] is None and len(feed.loader_states) < len(feed.train.loaders):
            run.warn_once(
                "resume: the checkpoint does not say which batches of its epoch are done (it is of a run with"
                " enable_checkpointing=False): the rest of the epoch trains on batches of a new pass"
            )
        feed.train.set_epoch(run.current_epoch)
        feed.start_pass()
        run.history.train.load_state_dict(mine["returned"], run.fabric.device)
    run.metrics.load_state_dict(mine["metrics"], run.fabric.device)
    run.history.returned = dict(ours["returned"])
    go_on(run)
    run.window = ours.get("window") or run.window
    for stage, state in loaders:
        stage.put_back_generators(state)
    if held := mine.get("held"):
        run.held.put_back(held)
    tell_forgotten(run, ours, in_epoch=not run.between_epochs)
    set_rng_state(mine["rng"])


def finish_batch(run: Run, validate: Callable[[Run], None]) -> None:
    """What was left of the batch when a callback saved the checkpoint, as it stands in the loop after that hook."""
    if run.saved_in == "on_train_epoch_end":
        if not (run.is_last_of_epoch or run.stops):  # of an epoch that was cut short, and now goes on
            run.saved_in = None
            run.metrics.batches_go_on()
    elif run.saved_in is not None:
        if run.saved_in != "on_validation_end":
            if run.metrics.enabled and run.metrics.train.any_on_step and not run.accumulates:
                run.record.step()
            if run.schedule.in_this_epoch and run.schedule.due():
                validate(run)
        if not run.accumulates:
            step_schedulers(run, "step", plateau=True)
            run.batches_that_stepped += 1
    if run.stops:
        run.feed.batches.close()  # there is no next one
    if is_time_over(run) and run.saved_in is None and run.schedule.in_this_epoch and not run.schedule.is_planned():
        validate(run)  # as it was when max_time had ended this epoch


def _tear_down(run: Run) -> None:
    """The way out after a run that went well."""
    hooks = run.hooks
    if run.fn == "fit":
        hooks.call("on_fit_end")
    if (hook := hooks.own(run.datamodule, "teardown")) is not None:
        hook(stage=run.fn)
    hooks.call("teardown", run.fn)
    run.record.finalize("success")


def _add_callbacks_of(owner: Any, loop: FabricLoop, run: Run, found: ExitStack) -> None:
    """The module's own callbacks join the run's; one that saves checkpoints takes over from the loop."""
    callbacks = add_callbacks_of(run.hooks.own(owner, "configure_callbacks"), run.callbacks)
    loop.callbacks = run.callbacks = run.hooks.callbacks = callbacks
    run.hooks.refresh()
    if loop.checkpoint_callbacks:
        run.saver = None
    for callback in run.callbacks:
        if hasattr(callback, "state_key"):  # Lightning's have self.log
            attach_log(callback, run.metrics, found)


def _written(run: Run) -> list[str | Path | None]:
    """The folders that this process writes in the run: its logs and its checkpoints."""
    if run.fn != "fit" or not run.fabric.is_global_zero:
        return []
    loggers = [logger for logger in run.loggers if isinstance(logger, CSVLogger)]
    for logger in loggers:
        logger.claim()
    return [*(logger.log_dir for logger in loggers), run.folder]


def _clear(folders: list[str | Path | None]) -> None:
    """Remove what killed runs of this name have left unfinished, in any version."""
    for home in {Path(folder).parent for folder in folders if folder}:
        with suppress(OSError):  # tidying fails no run
            for version in os.listdir(home):
                clear_stale(home / version)


def _set_switches(run: Run, found: ExitStack) -> None:
    """Set what the configuration says of PyTorch's global switches; they are given back as they are now."""
    config, warn_only = run.config, torch.is_deterministic_algorithms_warn_only_enabled()
    found.callback(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn_only
    )
    found.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    if config.deterministic is not None:
        torch.use_deterministic_algorithms(bool(config.deterministic), warn_only=config.deterministic == "warn")
    if config.deterministic and config.benchmark:
        run.warn_once(
            "You passed `deterministic=True` and `benchmark=True`: PyTorch chooses its algorithms by their speed then, not"
            " always the same; leave benchmark out"
        )
    if config.benchmark is not None:
        torch.backends.cudnn.benchmark = config.benchmark
    elif config.deterministic:
        torch.backends.cudnn.benchmark = False
