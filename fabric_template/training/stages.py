"""Run one call of fit, validate, test or predict: set up, loop, tear down, and handle what ends it early."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerStatus

from ..checkpoint.resolve import check_same_checkpoint, open_folders
from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..checkpoint.state import restore_model, restore_training
from ..distributed.launch import (
    end_processes,
    join_processes,
    launch_processes,
    seed_processes,
    starts_processes,
)
from ..distributed.signals import (
    SignalHandler,
    error_of_signal,
    is_notebook,
    requeue_slurm_job,
)
from ..lightning_compat.callbacks import add_model_callbacks, as_list
from ..lightning_compat.private import set_profiled_module
from ..loggers.run_summary import end_reason, short_path, write_run_config
from .evaluation_loop import evaluate
from .fit_loop import fit
from .hooks import is_instance_of
from .optimization import AutomaticOptimization, ManualOptimization
from .prediction_loop import predict
from .setup import (
    attach_logs,
    attach_run,
    configure_model,
    configure_optimizers,
    prepare_data,
    set_torch_flags,
)

if TYPE_CHECKING:
    from .run_state import RunState


def run_stage(run: RunState, function: Callable[[RunState], Any]) -> Any:
    """Run a call with everything around it, in new processes where the strategy starts them."""
    loop, fabric = run.loop, run.fabric
    loop.run = loop.runs[run.stage] = run
    loop.strategy.reset_lightning_optimizers()
    loop.status = TrainerStatus.RUNNING
    run.progress.stage = "train" if run.stage == "fit" else run.stage
    try:
        if starts_processes(fabric):
            result = launch_processes(run)
        else:
            join_processes(fabric)
            seed_processes(fabric)
            if not fabric.is_global_zero:
                # Scripts that Fabric has started know their rank only now.
                run.console.is_enabled = run.warn_once.is_enabled = False
            if fabric.world_size > 1:
                check_same_checkpoint(run)
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(True))
                stack.enter_context(torch.autograd.set_detect_anomaly(run.config.detect_anomaly))
                stack.enter_context(run.console.shown(run))
                result = run_in_process(run, function, stack)
    except BaseException as error:
        handle_exception(run, error)
        if run.stop.signal is None:
            end_processes(fabric)
        raise
    is_interrupted = run.stop.signal is not None
    loop.status = TrainerStatus.INTERRUPTED if is_interrupted else TrainerStatus.FINISHED
    return result


def run_in_process(run: RunState, function: Callable[[RunState], Any], stack: ExitStack) -> Any:
    """Set up, run and tear down in this process.

    Args:
        function: ``fit_stage``, ``evaluate_stage`` or ``predict_stage``.
        stack: Undoes at the end what the set-up changes.
    """
    set_torch_flags(run.config)
    attach_run(run, stack)
    own_callbacks = run.hooks.module_method("configure_callbacks")
    if own_callbacks is not None:
        run.loop.callbacks = add_model_callbacks(run.loop.callbacks, as_list(own_callbacks()))
        attach_logs(run, stack)
    set_up_profiler(run)
    set_up_signals(run, stack)
    prepare_data(run)
    heed_signals(run)
    if run.stage == "fit":
        open_folders(run, stack)
    run.hooks.call_with_stage("setup", run.stage, run.datamodule)
    configure_model(run)
    heed_signals(run)
    run.steps.convert_network()
    is_sharded = run.steps.is_model_parallel
    if is_sharded:
        # The shards of a checkpoint are read into those of the network.
        run.steps.setup(run.stage == "fit")
    if run.checkpoint is not None:
        restore_model(run, run.checkpoint)
        run.checkpoint = run.checkpoint if run.resumes else None
    if not is_sharded:
        run.steps.setup(run.stage == "fit")
    result = function(run)
    if run.stage == "fit":
        run.hooks.call("on_fit_end")
    run.hooks.call_with_stage("teardown", run.stage, run.datamodule)
    if run.stage == "fit":
        run.checkpoints.finish(run)
    run.data.teardown()
    run.loop.checkpoint_io.teardown()
    run.loggers.finalize("success")
    run.progress.stage = None
    if run.loop.given_profiler is not None:
        run.loop.given_profiler.describe()
    return result


def fit_stage(run: RunState) -> None:
    """Prepare training, restore a checkpoint, check the validation, train."""
    configure_optimizers(run)
    run.hooks.call("on_fit_start")
    run.network.zero_grad()
    run.loggers.log_hyperparameters(run)
    if run.fabric.is_global_zero:
        write_run_config(run)
    is_automatic = run.module.automatic_optimization
    run.optimization = AutomaticOptimization(run) if is_automatic else ManualOptimization(run)
    if run.checkpoint is not None:
        restore_training(run, run.checkpoint)
        print_if_finished(run)
    run.results.start_training()
    if not run.is_lightning_module and not run.network.training:
        # Submodules in eval mode were put there on purpose, in a network that trains.
        run.network.train()
    run_sanity_check(run)
    heed_signals(run)
    run.progress.stage = "train"
    run.results.start_training()
    with ExitStack() as stack:
        if run.fabric.world_size == 1:
            stack.enter_context(run.signals)
        if isinstance(run.optimization, ManualOptimization) and not run.is_lightning_module:
            run.optimization.count_plain_steps(stack)
        fit(run)
    run.results.end()
    # Free the graph of the last loss.
    run.optimization.last_loss = None
    finish_signal(run)


def set_up_profiler(run: RunState) -> None:
    profiler = run.loop.given_profiler
    if profiler is not None:
        set_profiled_module(profiler, run.module)
        # The rank becomes a part of the file's name.
        local_rank = run.fabric.local_rank if run.fabric.world_size > 1 else None
        profiler.setup(stage=run.stage, local_rank=local_rank, log_dir=run.loop.log_dir)


def set_up_signals(run: RunState, stack: ExitStack) -> None:
    if run.stage == "fit":
        is_one_of_several = run.fabric.world_size > 1
        is_launched = is_one_of_several or "TORCHELASTIC_RUN_ID" in os.environ
        run.signals = SignalHandler(not run.fabric.is_global_zero, is_launched)
        if is_one_of_several:
            # The others would wait for a process that a signal ends in its set-up.
            stack.enter_context(run.signals)


def heed_signals(run: RunState) -> None:
    """End a fit of several processes during its set-up, if one of them has received a signal."""
    if run.stage == "fit" and run.fabric.world_size > 1:
        run.signals.check(run, is_due=True)
        if run.stop.signal is not None:
            raise error_in_process(run, run.stop.signal)


def print_if_finished(run: RunState) -> None:
    """Print that a finished run was resumed, for example by a job scheduler that restarts it."""
    progress, is_done = run.progress, run.stop.is_fit_done and not run.progress.is_in_epoch
    if is_done and run.fabric.is_global_zero:
        place = f"epoch {progress.epochs_done}, step {progress.global_step}"
        text = (
            f"resume: {run.checkpoint_path} is from a finished run ({place}); it trains no further:"
            f" {end_reason(run)}."
        )
        print(text, file=sys.stderr)


def finish_signal(run: RunState) -> None:
    """Print where a signal ended training, and end the program as the signal would.

    In a notebook fit returns.
    """
    number, manager = run.stop.signal, run.checkpoints
    if number is None:
        return
    if run.fabric.is_global_zero:
        path = manager.last_model_path
        saved = (
            f" {short_path(Path(path))!r} is saved: resume='last' continues there." if path else ""
        )
        progress = run.progress
        place = f"in epoch {progress.epochs_done}, after step {progress.global_step}"
        print(f"{end_reason(run)}: training stops {place}.{saved}", file=sys.stderr)
        if number == getattr(signal, "SIGUSR1", None) and not run.signals.is_handled_by_user:
            requeue_slurm_job(is_saved=bool(path))
    if not is_notebook():
        raise error_in_process(run, number)


def error_in_process(run: RunState, number: int) -> BaseException:
    """Return what ends this process of a run with the exit code of a signal."""
    environment = getattr(run.fabric.strategy, "cluster_environment", None)
    if run.fabric.local_rank > 0 and is_instance_of(environment, "LightningEnvironment"):
        # Lightning kills the first process, which may be saving, for the exit code of another one.
        return SystemExit(0)
    return error_of_signal(number)


def evaluate_stage(run: RunState) -> list[dict[str, Any]]:
    stage = "val" if run.stage == "validate" else run.stage
    run.loggers.log_hyperparameters(run)
    if getattr(run.config, f"limit_{stage}_batches") == 0:
        return []
    run.network.zero_grad()
    run.data.setup_eval_loaders(stage)
    results = evaluate(run, run.stage)
    run.results.end()
    return results


def predict_stage(run: RunState, keep: bool) -> list[Any] | None:
    run.loggers.log_hyperparameters(run)
    if run.config.limit_predict_batches == 0:
        return None
    run.network.zero_grad()
    run.data.setup_eval_loaders("predict")
    return predict(run, keep)


def run_sanity_check(run: RunState) -> None:
    """Validate a few batches before training, so that a broken validation fails at once."""
    most = run.config.num_sanity_val_steps
    if not run.should_validate or most == 0 or run.checkpoint is not None:
        return
    rng_state = capture_rng_state()
    run.progress.stage = "sanity_check"
    run.hooks.call("on_sanity_check_start")
    run.data.setup_eval_loaders("val")
    evaluate(run, "sanity_check", None if most == -1 else most)
    run.hooks.call("on_sanity_check_end")
    run.results.forget_evaluation()
    run.history.forget_evaluation()
    run.progress.stage, run.progress.eval_batches_done = "train", 0
    restore_rng_state(rng_state)


def handle_exception(run: RunState, error: BaseException) -> None:
    """Save where an error struck, call its hooks, and close what is open.

    The error must reach the caller. What fails in here costs a warning.
    """
    run.loop.status = TrainerStatus.INTERRUPTED
    run.exception = error
    was_signaled = run.signals is not None and run.signals.received is not None
    hook, run.hooks.current = run.hooks.current, None
    if run.stage == "fit" and not was_signaled:
        with warn_of_failure(error, "the state could not be saved"):
            run.checkpoints.save_exception(run, hook)
        with warn_of_failure(error, "its place could not be described"):
            add_note(run, error)
    for callback in list(run.hooks.callbacks):
        with warn_of_failure(error, f"on_exception of {type(callback).__name__} failed"):
            run.hooks.call_callbacks("on_exception", error, callbacks=[callback])
    with warn_of_failure(error, "on_exception of the datamodule failed"):
        run.hooks.call_datamodule(run.datamodule, "on_exception", error)
    with warn_of_failure(error, "the loggers could not be closed"):
        run.loggers.finalize("failed")
    with warn_of_failure(error, "the loaders could not be closed"):
        run.data.teardown()
    with warn_of_failure(error, "the checkpoint files could not be closed"):
        run.loop.checkpoint_io.teardown()
    with warn_of_failure(error, "the last values could not be read"):
        run.results.end()
    if run.results.active:
        with warn_of_failure(error, "the metrics could not be computed"):
            run.results.update_metrics()
    run.progress.stage = run.results.active = None


@contextmanager
def warn_of_failure(error: BaseException, what: str) -> Iterator[None]:
    """Warn of an exception that follows from another one, instead of raising it."""
    try:
        yield
    except Exception as other:
        # A warning may be an error, too.
        with suppress(Warning):
            text = f"after {type(error).__name__}, {what}: {type(other).__name__}: {other}"
            warnings.warn(text, stacklevel=3)


def add_note(run: RunState, error: BaseException) -> None:
    """Add to an error at which batch it struck, and how to resume."""
    progress, manager = run.progress, run.checkpoints
    if run.optimization is None or not isinstance(error, Exception) or sys.version_info < (3, 11):
        return
    # Between two batches, the next one was being fetched.
    batch = progress.batches_done - (progress.phase is not None)
    place = f"in epoch {progress.epochs_done}, at batch {max(batch, 0)}"
    resume = ""
    if manager.is_enabled:
        step = manager.saved_step
        resume = (
            f". resume='last' continues after step {step}" if step >= 0 else ". Nothing was saved"
        )
    error.add_note(f"fabric_template: {place}, after step {progress.global_step}{resume}.")
