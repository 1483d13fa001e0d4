"""Run one call of fit, validate, test or predict: set up, loop, tear down, and handle what ends it early."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..checkpoint.run_folders import check_same_checkpoint, open_folders
from ..checkpoint.state import restore_model, restore_training
from ..distributed.environment import end_processes, join_processes
from ..distributed.launch import launch_processes, starts_processes
from ..distributed.signals import SignalHandler
from ..lightning_compat.callbacks import add_model_callbacks, as_list
from ..lightning_compat.private import set_profiled_module
from ..loggers.run_config import write_run_config
from ..loggers.run_summary import end_reason, short_path
from .evaluation_loop import evaluate
from .fit_loop import fit
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
    loop.strategy_api.reset_lightning_optimizers()
    loop.status = TrainerStatus.RUNNING
    run.progress.stage = "train" if run.stage == "fit" else run.stage
    try:
        if starts_processes(fabric):
            result = launch_processes(run)
        else:
            join_processes(fabric)
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
    loop.status = TrainerStatus.FINISHED
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
    profiler = run.loop.given_profiler
    if profiler is not None:
        set_profiled_module(profiler, run.module)
        # The rank becomes a part of the file's name.
        local_rank = run.fabric.local_rank if run.fabric.world_size > 1 else None
        profiler.setup(stage=run.stage, local_rank=local_rank, log_dir=run.loop.log_dir)
    prepare_data(run)
    if run.stage == "fit":
        open_folders(run, stack)
    run.hooks.call_with_stage("setup", run.stage, run.datamodule)
    configure_model(run)
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
    if profiler is not None:
        profiler.describe()
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
    with SignalHandler() as signals, ExitStack() as stack:
        if isinstance(run.optimization, ManualOptimization) and not run.is_lightning_module:
            stack.enter_context(run.optimization.counting_plain_steps())
        run.signals = signals
        run.results.start_training()
        if not run.is_lightning_module and not run.network.training:
            # Submodules in eval mode were put there on purpose, in a network that trains.
            run.network.train()
        run_sanity_check(run)
        run.progress.stage = "train"
        run.results.start_training()
        fit(run)
    run.results.active = None
    finish_signal(run)


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
    """Save where a signal ended training, and pass the signal on."""
    number = run.stop.signal
    if number is None:
        return
    if run.fabric.is_global_zero:
        name, path, step = (
            end_reason(run),
            run.checkpoints.last_model_path,
            run.progress.global_step,
        )
        saved = (
            f" {short_path(Path(path))!r} is saved: resume='last' continues there." if path else ""
        )
        print(
            f"{name}: training stops in epoch {run.progress.epochs_done}, after step {step}.{saved}",
            file=sys.stderr,
        )
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise (SIGTERMException(128 + number) if number == signal.SIGTERM else SystemExit(128 + number))


def evaluate_stage(run: RunState) -> list[dict[str, Any]]:
    stage = "val" if run.stage == "validate" else run.stage
    run.loggers.log_hyperparameters(run)
    run.data.setup_eval_loaders(stage)
    results = evaluate(run, run.stage)
    run.results.active = None
    return results


def predict_stage(run: RunState, keep: bool) -> list[Any] | None:
    run.loggers.log_hyperparameters(run)
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
    """Call the hooks of an error, save where it struck, and close what is open."""
    run.loop.status = TrainerStatus.INTERRUPTED
    run.exception = error
    run.hooks.call_callbacks("on_exception", error)
    run.hooks.call_datamodule(run.datamodule, "on_exception", error)
    if run.stage == "fit" and run.stop.signal is None:
        run.checkpoints.save_exception(run)
    run.loggers.finalize("failed")
    run.data.teardown()
    run.loop.checkpoint_io.teardown()
    run.progress.stage = None
