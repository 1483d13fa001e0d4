"""Session: what happens around a run, in Trainer's order: set-up hooks, devices, restored state; and the way out."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning

from ..core.functions import FunctionSteps
from ..core.net import Modes, device_of, with_a_note
from ..core.overrides import is_a, overrides
from ..core.reasons import ended_by, why_ended
from ..core.run import Run
from ..core.said import count
from ..core.steps import is_shared_out
from ..core.update import AutomaticUpdate
from ..files.disk import clear_stale, newest_in
from ..files.keeper import KeepsNothing
from ..files.locks import one_writer
from ..record.bar import find_screen, summarize
from ..record.logger import CSVLogger
from ..record.recipe import write_recipe
from ..trainer.attach import after_error, attach, attach_log
from ..trainer.attributes import TrainerFace
from .broken import tell  # at once: an error may be that no file can be opened any more


def session(loop: TrainerFace, run: Run) -> ExitStack:
    """Around a run: its folders locked, the module attached, set up and moved; afterwards everything as it was found.

    What gives a thing back is noted before the thing is changed, so that whatever fails, at whatever line, all comes back.
    An error reaches ``on_exception`` of callbacks and datamodule and then the caller, unchanged (a StopIteration, too, which
    no generator would let through).
    """
    with ExitStack() as found:
        folders = _written(run)
        run.home.note = found.enter_context(one_writer(folders))
        mine = [Path(folder) for folder in folders if folder is not None]
        theirs = [one for home in {folder.parent for folder in mine} for one in newest_in(home)]
        if folders and loop.checkpoint_callbacks:
            from .choose import folders_of_callbacks

            theirs += folders_of_callbacks(loop)
        for folder in dict.fromkeys([*mine, *theirs]):
            clear_stale(folder)  # what killed runs of this name have left unfinished
        found.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        _set_switches(run, found)
        found.push(partial(_rest, run, device_of(run.trained.net)))
        found.callback(run.data.close)
        after_error(found, Modes(run.trained.net).restore)
        with ExitStack() as end:
            end.push(partial(_end, loop, run))
            if run.steps.compiling is not None:
                found.enter_context(run.steps.compiling)
            attach(run.trained.owner, loop, run.metrics, found, run.steps.compiling)
            _set_up(loop, run, found)
            found.push(end.pop_all())
        return found.pop_all()


def _end(loop: TrainerFace, run: Run, kind: type | None, error: BaseException | None, *_: Any) -> None:
    """The way out, while all that hooks ask for is still there."""
    if error is not None:
        tell(loop, run, error)
        run.home.note("failed" if isinstance(error, Exception) else "interrupted")
        return
    try:
        if run.fn == "fit":
            run.hooks.call("on_fit_end")
        if (hook := run.hooks.own(run.trained.datamodule, "teardown")) is not None:
            hook(stage=run.fn)
        run.hooks.call("teardown", run.fn)
        run.log.loggers.finalize("success")
        if callable(describe := getattr(loop.own_profiler, "describe", None)):  # its report, printed or written
            describe()
    except BaseException as failed:
        tell(loop, run, failed)
        run.home.note("failed")
        raise
    run.home.note("finished" if run.stop.signals.agreed is None else "interrupted")


def _rest(run: Run, home: torch.device, kind: type | None, *_: Any) -> None:
    """The run stays readable; what it saved and what it computed with need not stay in memory.

    The net, and what its optimizers hold, are again where the net was given. After an error nothing can be brought there
    from a device that has failed itself.
    """
    run.hooks.enter(None)
    run.at.enter(None)
    if run.update is not None:
        run.update.close()
    run.keeper.begin_epoch()
    run.metrics.start(None)
    with nullcontext() if kind is None else suppress(RuntimeError):
        run.metrics.to_cpu()
        if run.fabric.device != home and run.steps.sharded is None:
            for part in with_a_note(run.trained.net):
                part.to(home)
            run.optimizing.follow()


def _leave_screen(run: Run, kind: type | None, *_: Any) -> None:
    """The bar stays as it stands: complete after a run that went well, in its middle after one that did not."""
    is_fit, is_whole = run.fn == "fit", kind is None and run.stop.signals.agreed is None
    words = count(run.at.epochs_done, "epoch") if is_fit else run.fn
    is_in_batch = is_fit and kind is not None and run.metrics.train.batch is not None
    run.bar.close(run.at.batches_done - is_in_batch if is_fit else run.at.evaluated, words * is_whole)


def _set_up(loop: TrainerFace, run: Run, found: ExitStack) -> None:
    """The part that all runs share: data, setup hooks, weights, devices; what is to be given back is noted."""
    fabric, owner, datamodule = run.fabric, run.trained.owner, run.trained.datamodule
    run.at.enter("train" if run.fn == "fit" else run.fn)
    if hasattr(datamodule, "trainer"):
        after_error(found, setattr, datamodule, "trainer", datamodule.trainer)
        datamodule.trainer = loop
    if loop.own_profiler is not None:
        from ..trainer.profiling import begin

        begin(loop.own_profiler, run, loop.log_dir)
    loop.callbacks = run.hooks.callbacks
    if (configure := run.hooks.own(owner, "configure_callbacks")) is not None:
        from ..trainer.callbacks import add_callbacks

        loop.callbacks[:] = add_callbacks(configure(), loop.callbacks)
    if loop.checkpoint_callbacks:  # the module's own, too: it takes over from the loop
        run.keeper = KeepsNothing()
    for callback in run.hooks.callbacks:
        if hasattr(callback, "state_key"):  # Lightning's have self.log
            attach_log(callback, run.metrics, found)
    found.push(partial(_leave_screen, run))
    if run.config.enable_progress_bar and fabric.is_global_zero and loop.progress_bar_callback is None:
        from ..record.lines import Lines

        run.log.screen = screen = find_screen(Lines(run.config.monitor, run.config.mode))
        run.bar.show(screen)
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
    if is_shared_out(fabric) and hasattr(owner, "_device_mesh"):
        owner._device_mesh = fabric.strategy.device_mesh  # type: ignore[attr-defined]  # which it shards itself by
    old = "configure_sharded_model"  # Lightning's name for it before; Trainer asks the class whether it has it
    for name in ([old] if overrides(type(owner), old) else []) + ["configure_model"]:
        if (hook := run.hooks.own(owner, name)) is not None:
            hook()
    heed_signals(run)
    if is_shared_out(fabric):
        run.steps.setup(training=run.fn == "fit")
    if run.origin.path is not None:
        from .loaded import load_parts

        load_parts(run, run.origin.path)
    if not is_shared_out(fabric):
        run.steps.setup(training=run.fn == "fit")


def start_fit(run: Run) -> None:
    """What fit adds: optimizers, ``on_fit_start``, hyperparameters, the restored state."""
    has_summary = any(is_a(callback, "ModelSummary") for callback in run.hooks.callbacks)  # which prints it already
    if run.config.enable_model_summary and run.fabric.is_global_zero and not has_summary:
        print(summarize(run.trained.net))
    _tell_modes(run)
    run.metrics.start(None)
    run.bookmark.held.set_up()
    run.optimizing.set_up(run.trained, run.hooks.own(run.trained.owner, "configure_optimizers"))
    run.bookmark.note_parts()
    run.hooks.call("on_fit_start")
    if (path := run.origin.resume_path) is not None:
        from .loaded import load_training

        load_training(run, path)
    run.origin.checkpoint = None
    if run.fabric.is_global_zero and not (run.origin.resume_path is not None and ended_by(run)):
        run.log.loggers.hyperparameters()
        if path is not None:
            run.home.note(f"resumed after step {run.at.global_step} from {path}")
        write_recipe(run)
    if run.steps.buckets is not None:
        run.steps.buckets.begin(run.origin.pending, run.fabric.backward)
    if run.origin.pending is not None:
        from ..record.earlier import bring_back

        bring_back(run, run.origin.pending)
        if run.log.screen is not None:
            for row in run.history.rows:
                run.log.screen.lines.judge(row)
    elif run.origin.is_auto and run.origin.resume_path is None and run.fabric.is_global_zero:
        for logger in run.home.loggers:
            is_new = run.config.version is None and getattr(logger, "has_run", False)  # what it holds was logged ahead
            if hasattr(type(logger), "set_aside") and not is_new:
                logger.set_aside()  # of a run that was killed before its first checkpoint, in a version given by name
    run.metrics.name_metrics(run.trained.net)
    run.data.set_up_transfer()
    run.update = _update_of(run)  # its optimizers are known
    run.trained.net.zero_grad()


def _tell_modes(run: Run) -> None:
    """What is in eval mode as training begins: the whole model of step functions is not left in it, all else is."""
    if isinstance(run.trained.owner, FunctionSteps) and not run.trained.net.training:
        run.said.warn(
            f"{run.trained.name} came in eval mode: it is put into training mode, as model.train() does before a loop of one's"
            " own; what is to stay in eval mode is put there in training_step"
        )
        run.trained.net.train()
    if sleeping := sum(not module.training for module in run.trained.net.modules()):
        run.said.warn(
            f"Found {sleeping} module(s) in eval mode at the start of training. This may lead to unexpected behavior during"
            " training. If this is intentional, you can ignore this warning: no dropout there, BatchNorm frozen; or write"
            " model.train() before fit",
            PossibleUserWarning,
        )


def _update_of(run: Run) -> AutomaticUpdate:
    """How a batch trains: what is rare is imported where it is chosen."""
    if not run.trained.is_automatic:
        from ..trainer.manual import ManualUpdate

        return ManualUpdate(run)
    return AutomaticUpdate(run)


def tell_end(run: Run) -> None:
    """Below the lines, why training has ended, where one did not see that coming; after a NaN, what is good of it."""
    at, why = run.at, why_ended(run)
    if run.stop.is_nan and run.fabric.is_global_zero:
        saved, path = run.keeper.saved_step, run.keeper.last_model_path or run.keeper.best_model_path
        good = f"the last good checkpoint is '{path}'" + (f", after step {saved}" if saved is not None else "")
        run.said.warn(
            f"{why}: training ends after step {at.global_step}; {good if path else 'no good checkpoint is kept'}"
        )
    elif run.log.screen is not None and why and at.total_batches and not why.startswith("max_epochs"):
        run.log.screen.say(f"ended in epoch {at.current_epoch - at.between_epochs}, after step {at.global_step}: {why}")


def stop_for(run: Run, number: int | None) -> None:
    """Leave the run for the signal that has ended it, if one has."""
    run.stop.end_for(number)
    if number is not None:
        from .leaving import leave_for

        leave_for(run, number)


def heed_signals(run: Run) -> None:
    """While several ranks are set up: one of them has got a signal, so all end here, together."""
    if run.fn == "fit" and run.stop.signals.together:
        run.stop.signals.check(0, now=True)
        stop_for(run, run.stop.signals.agreed)


def _written(run: Run) -> list[str | Path | None]:
    """The folders that this process writes in the run: its logs and its checkpoints."""
    if run.fn != "fit" or not run.fabric.is_global_zero:
        return []
    loggers = [logger for logger in run.home.loggers if isinstance(logger, CSVLogger)]
    for logger in loggers:
        logger.claim()
    return [*(logger.log_dir for logger in loggers), run.home.folder]


def _set_switches(run: Run, found: ExitStack) -> None:
    """Set what the configuration says of PyTorch's global switches; they are given back as they are now."""
    config, before = run.config, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    found.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
    found.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    if config.deterministic is not None:
        torch.use_deterministic_algorithms(bool(config.deterministic), warn_only=config.deterministic == "warn")
    if config.deterministic and config.benchmark:
        run.said.warn(
            "You passed `deterministic=True` and `benchmark=True`: PyTorch chooses its algorithms by their speed then, not"
            " always the same; leave benchmark out"
        )
    if config.benchmark is not None:
        torch.backends.cudnn.benchmark = config.benchmark
    elif config.deterministic:
        torch.backends.cudnn.benchmark = False
