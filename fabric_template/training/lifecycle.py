"""Run one call to fit, validate, test or predict, with set-up, teardown and error handling."""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.seed import reset_seed

from ..checkpoint.find_checkpoint import check_same_checkpoint, read_again
from ..checkpoint.restore import load_weights, restore_model, restore_training
from ..checkpoint.run_folders import choose_version, open_folders
from ..checkpoint.state import check_saved_state, record_optimizer_attributes
from ..distributed.launch import (
    check_new_parameters,
    join_processes,
    launch_processes,
    starts_processes,
)
from ..distributed.signals import error_of_signal, is_notebook
from ..errors import explain_error
from ..lightning_compat.overrides import LIGHTNING_PACKAGES, as_list, is_instance_of
from ..lightning_compat.private import set_current_hook, set_device_mesh, set_profiled_module
from ..loggers.console import end_reason, shorten_path
from ..rng_state import unchanged_rng_state
from .check_arguments import warn_of_eval_modules
from .configure_optimizers import move_optimizer_states
from .evaluation_loop import evaluate, predict
from .fit_loop import fit
from .module_adapter import check_network
from .optimization import ManualOptimization
from .run import Run

if TYPE_CHECKING:
    from ..config import LoopConfig
    from ..loggers.result_collection import ResultCollection
    from .plan import Plan

_LIGHTNING_MODULES = tuple(f"{package}.core.module" for package in LIGHTNING_PACKAGES)


def run_plan(plan: Plan) -> Any:
    """Run fit, validate, test or predict from set-up to teardown."""
    fabric = plan.loop.fabric
    is_launching = starts_processes(fabric)
    if not is_launching:
        # Join the process group before creating the Run object, which needs the rank.
        join_processes(fabric)
    run = Run(plan)
    try:
        with plan.loop.running(run):
            return launch_processes(run, run_plan) if is_launching else run_in_process(run)
    except BaseException as error:
        kind = "LightningModule" if run.is_lightning_module else "model"
        is_automatic = run.optimization.is_automatic
        explained = explain_error(error, run.hooks.current, kind, is_automatic)
        handle_exception(run, error)
        if explained is not None:
            raise explained from error
        raise
    finally:
        # A second Ctrl-C may interrupt handle_exception, so end the run in `finally`.
        run.progress.end_run()


def run_in_process(run: Run) -> Any:
    with ExitStack() as stack:
        set_up_process(run, stack)
        has_weights = set_up_model(run, stack)
        if run.stage == "fit":
            result: Any = None
            set_up_training(run, has_weights)
            train(run)
        else:
            run.loggers.log_hyperparameters()
            # Keep the gradients, because users may validate between backward() and step().
            result = predict(run) if run.stage == "predict" else evaluate(run, run.stage)
        tear_down(run)
    return result


def set_up_process(run: Run, stack: ExitStack) -> None:
    """Seed the random generators, set PyTorch's flags, and enter the run's context managers."""
    if run.stage == "fit":
        run.loop.seed_generators()
    if isinstance(run.fabric.strategy, DDPStrategy):
        # Like Trainer, start all processes with the same random state.
        reset_seed()
    read_again(run.plan)
    check_same_checkpoint(run)
    if run.stage == "fit":
        choose_version(run)
    device = next((p.device for p in run.network.parameters()), torch.device("cpu"))
    is_moved = device not in (run.fabric.device, torch.device("meta"))
    if is_moved and not run.steps.is_model_parallel:
        stack.callback(return_network, run, device)
    set_torch_flags(run.config)
    stack.enter_context(torch.set_grad_enabled(True))
    stack.enter_context(torch.autograd.set_detect_anomaly(run.config.detect_anomaly))
    stack.enter_context(run.console.shown(run))
    if run.stage == "fit" and run.fabric.world_size > 1:
        # Handle signals during the set-up, so that no process exits while other processes wait.
        stack.enter_context(run.signals)


def return_network(run: Run, device: torch.device) -> None:
    """Move the network and the optimizer states back to the device used before the run."""
    run.network.to(device)
    move_optimizer_states(run.optimization.optimizers)


def set_up_model(run: Run, stack: ExitStack) -> bool:
    """Call ``setup`` and ``configure_model``, load weights, and move the model to the device.

    Returns:
        False if the checkpoint's weights do not match the model, otherwise True.
    """
    is_training = run.stage == "fit"
    attach_run(run, stack)
    prepare_data(run)
    names = [name for name, _ in run.network.named_parameters()]
    run.hooks.call_with_stage("setup", run.stage)
    run.find_new_modules()
    check_new_parameters(run, names, "setup")
    if is_training:
        open_folders(run, stack)
    with run.fabric.strategy.module_init_context():
        run.hooks.call_module("configure_model")
    run.find_new_modules()
    check_network(run.model, run.network)
    run.steps.convert_network()
    run.steps.record_tensor_metadata()
    if run.steps.is_model_parallel:
        # A sharded checkpoint can only be loaded into a network that is already sharded.
        run.steps.setup(is_training)
    checkpoint = run.plan.start.checkpoint
    has_weights = checkpoint is None or restore_model(run, checkpoint)
    if has_weights:
        run.plan.start.finish_loading()
    if not run.steps.is_model_parallel:
        run.steps.setup(is_training)
    return has_weights


def set_up_training(run: Run, has_weights: bool) -> None:
    """Set up the optimizers, restore a checkpoint, and run the sanity check."""
    # Record attributes before on_fit_start, because a checkpoint contains only attributes that
    # change afterwards.
    run.record_attributes()
    run.optimization.configure()
    names = [name for name, _ in run.network.named_parameters()]
    run.hooks.call("on_fit_start")
    check_new_parameters(run, names, "on_fit_start")
    checkpoint = run.plan.start.checkpoint
    if not has_weights and checkpoint is not None:
        # Load the weights after on_fit_start, because on_fit_start may add modules.
        load_weights(run, checkpoint)
        run.plan.start.finish_loading()
    run.network.zero_grad()
    check_saved_state(run)
    run.loggers.log_hyperparameters()
    run.start_optimization()
    record_optimizer_attributes(run)
    if not run.is_lightning_module:
        run.steps.start_training()
    if run.plan.start.resumes and checkpoint is not None:
        restore_training(run, checkpoint)
        print_if_finished(run)
    # Checkpoints contain only the training and requires_grad flags that change after
    # record_flags(). Hooks of the sanity check may change flags, so call record_flags() first.
    run.steps.record_flags(run.optimization.named_parameters())
    run_sanity_check(run)


def train(run: Run) -> None:
    """Train, count the optimizer steps, and handle signals."""
    with ExitStack() as stack:
        if run.fabric.world_size == 1:
            stack.enter_context(run.signals)
        if isinstance(run.optimization, ManualOptimization) and not run.is_lightning_module:
            run.optimization.hook_unwrapped_steps(stack)
        # Stop before the first batch if any process received a signal during the set-up.
        run.stop.check_signals(run.signals, is_due=True)
        warn_of_eval_modules(run)
        fit(run)
    run.optimization.release()
    finish_signal(run)


def tear_down(run: Run) -> None:
    run.results.end()
    # Like Trainer, remove the DistributedDataParallel wrapper before on_fit_end.
    run.steps.unwrap()
    if run.stage == "fit":
        run.hooks.call("on_fit_end")
    run.hooks.call_with_stage("teardown", run.stage)
    if run.stage == "fit":
        run.checkpoints.finish(run)
        run.checkpoints.folders.remove_replaced_logs()
    run.data.teardown()
    run.loop.checkpoint_io.teardown()
    run.loggers.finalize("success")
    if run.hooks.profiler is not None:
        run.hooks.profiler.describe()


def run_sanity_check(run: Run) -> None:
    """Validate on a few batches before training, to find errors in the validation code early."""
    most = run.config.num_sanity_val_steps
    # Like Trainer, skip the sanity check in a resumed run, unless Trainer saved the checkpoint
    # between two epochs.
    is_resumed = run.plan.start.is_pending and run.plan.start.restarts_epoch is not False
    if not run.should_validate or most == 0 or is_resumed:
        return
    with unchanged_rng_state(), run.progress.in_stage("sanity_check"):
        run.hooks.call("on_sanity_check_start")
        evaluate(run, "sanity_check", math.inf if most in (-1, None) else most)
        run.hooks.call("on_sanity_check_end")
        run.results.clear()
    run.progress.start_evaluation()


# The set-up


def set_torch_flags(config: LoopConfig) -> None:
    deterministic, benchmark = config.deterministic, config.benchmark
    if benchmark is not None or deterministic:
        torch.backends.cudnn.benchmark = bool(benchmark)
    if deterministic is not None:
        is_enabled = bool(deterministic)
        torch.use_deterministic_algorithms(is_enabled, warn_only=deterministic == "warn")
    if deterministic:
        # cuBLAS is deterministic only with a fixed-size workspace.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def attach_run(run: Run, stack: ExitStack) -> None:
    """Connect the module, the datamodule, the callbacks and the profiler to the run."""
    parts = {id(part): part for part in (run.module, run.model)}.values()
    for part in (*parts, *run.network.modules()):
        detach_outer_run(part, stack)
    for part in parts:
        trainer = getattr(type(part), "trainer", None)
        if isinstance(trainer, property) and trainer.fset is not None:
            attach_trainer(part, run, stack)
        if run.steps.is_model_parallel and run.is_lightning_module:
            set_device_mesh(part, run.fabric.strategy.device_mesh)
        attach_log(part, run, stack)
    if run.datamodule is not None:
        attach_trainer(run.datamodule, run, stack)
    own_callbacks = run.hooks.module_method("configure_callbacks")
    if own_callbacks is not None:
        run.loop.add_callbacks_of_model(as_list(own_callbacks()))
    for callback in run.hooks.callbacks:
        detach_outer_run(callback, stack)
        attach_log(callback, run, stack)
    if (profiler := run.hooks.profiler) is not None:
        set_profiled_module(profiler, run.module)
        # With several processes, the profiler's file name contains local_rank.
        local_rank = run.fabric.local_rank if run.fabric.world_size > 1 else None
        profiler.setup(stage=run.stage, local_rank=local_rank, log_dir=run.loop.log_dir)


def attach_trainer(part: Any, run: Run, stack: ExitStack) -> None:
    """Set the ``trainer`` attribute of a module or datamodule to the run's loop."""
    with suppress(RuntimeError):
        # Reading LightningModule.trainer raises a RuntimeError if no trainer is attached.
        outer = getattr(part, "trainer", None)
        # A MiniLoop has no status, but its active_stage is not None while it is running.
        status = getattr(getattr(outer, "state", None), "status", None)
        if status == "running" or getattr(outer, "active_stage", None) is not None:
            stack.callback(setattr, part, "trainer", outer)
    part.trainer = run.loop


def attach_log(part: Any, run: Run, stack: ExitStack) -> None:
    """Replace Lightning's ``log`` and ``log_dict`` with much faster methods."""
    attributes = getattr(part, "__dict__", {})
    own_log = getattr(type(part), "log", None)
    if own_log is not None and not _is_lightnings(own_log):
        if any(_is_lightnings(vars(base).get("log")) for base in type(part).__mro__):
            attributes["log"] = partial(_call_own_log, part, run.results)
            stack.callback(attributes.pop, "log", None)
        return
    for name in ("log", "log_dict"):
        own = getattr(type(part), name, None)
        # Do not overwrite a user's attribute, such as a submodule named "log".
        previous = getattr(part, name, None) if own is None else attributes.get(name)
        if previous is not None or not (own is None or _is_lightnings(own)):
            continue
        method = getattr(run.results, name)
        # Exclude self.log from torch.compile, because self.log would trigger a recompilation in
        # every call to training_step.
        attributes[name] = torch.compiler.disable(method) if run.steps.compile else method
        stack.callback(attributes.pop, name, None)


def detach_outer_run(part: Any, stack: ExitStack) -> None:
    """Temporarily remove methods such as ``log`` that another active run added to a module."""
    attributes = getattr(part, "__dict__", {})
    for name in ("log", "log_dict", "optimizers", "lr_schedulers"):
        method = attributes.get(name)
        if callable(method) and is_loop_method(method):
            stack.callback(attributes.update, {name: attributes.pop(name)})


def is_loop_method(method: Any) -> bool:
    """Return whether FabricLoop or MiniLoop added a given method, such as ``log``, to an object."""
    owner = getattr(inspect.unwrap(method), "__self__", None)
    is_own_log = isinstance(method, partial) and method.func is _call_own_log
    # Compare class names, because isinstance() fails for classes of a second copy of this package.
    is_results = any(base.__name__ == "ResultCollection" for base in type(owner).__mro__)
    # Recognize a MiniLoop by its attribute ``_added_methods``, because users may rename the class.
    return is_own_log or is_results or hasattr(type(owner), "_added_methods")


def _is_lightnings(method: Any) -> bool:
    return getattr(method, "__module__", None) in _LIGHTNING_MODULES


def _call_own_log(part: Any, results: ResultCollection, *args: Any, **kwargs: Any) -> None:
    set_current_hook(part, results.run.hooks.current)
    type(part).log(part, *args, **kwargs)


def prepare_data(run: Run) -> None:
    """Call ``prepare_data`` in the first process, while all other processes wait.

    With ``prepare_data_per_node=True``, the first process of each machine calls ``prepare_data``.
    """
    hooks = run.hooks
    for part, call in ((run.datamodule, hooks.call_datamodule), (run.module, hooks.call_module)):
        is_per_node = getattr(part, "prepare_data_per_node", True)
        rank = run.fabric.local_rank if is_per_node else run.fabric.global_rank
        if rank == 0:
            call("prepare_data")
    run.fabric.barrier()


# Signals and errors


def print_if_finished(run: Run) -> None:
    """If the checkpoint is from a finished run, print that nothing is left to train."""
    if run.stop.has_no_batches_left and run.fabric.is_global_zero:
        reason = end_reason(run) or "the limit is reached"
        print(
            f"resume: {run.plan.start.path} is from a finished run. Nothing is left to train:"
            f" {reason}. For a new run, leave out resume=.",
            file=sys.stderr,
        )


def finish_signal(run: Run) -> None:
    """If a signal ended training, print a message and, except in a notebook, exit."""
    number, path, progress = run.stop.signal, run.checkpoints.last_model_path, run.progress
    if number is None:
        return
    if run.fabric.is_global_zero:
        run.console.close(run)
        position = f"in epoch {progress.epochs_done}, after step {progress.global_step}"
        keyword = run.checkpoints.resume_keyword
        saved = f" To resume from {shorten_path(Path(path))!r}, write resume={keyword!r}."
        text = f"{end_reason(run)}: training stops {position}.{saved if path else ''}"
        print(text, file=sys.stderr)
    if is_notebook():
        return
    environment = getattr(run.fabric.strategy, "cluster_environment", None)
    if run.fabric.local_rank > 0 and is_instance_of(environment, "LightningEnvironment"):
        # Exit this child process with code 0. With an error code, Lightning would kill the main
        # process, even during a save.
        raise SystemExit(0)
    raise error_of_signal(number)


def handle_exception(run: Run, error: BaseException) -> None:
    """Call ``on_exception``, and close loggers and loaders."""
    run.stop.fail(error)
    run.hooks.leave()

    steps: list[Callable[[], Any]] = [
        partial(run.hooks.call_callbacks, "on_exception", error, callbacks=[callback])
        for callback in run.hooks.callbacks
    ]
    steps.append(partial(run.hooks.call_datamodule, "on_exception", error))
    steps.append(partial(run.loggers.finalize, "failed"))
    for step in (*steps, run.data.teardown, run.loop.checkpoint_io.teardown, run.results.end):
        try:
            step()
        except Exception as other:
            # Only warn, so that the caller gets the original error, even if a filter turns warnings
            # into errors.
            with suppress(Warning):
                warnings.warn(f"The clean-up after the error failed: {other!r}", stacklevel=3)
    run.optimization.release()
    run.steps.unwrap()
    if run.stop.signal is None:
        # End the launched processes, which would otherwise wait for this process forever.
        for process in getattr(run.fabric.strategy.launcher, "procs", ()):
            process.kill()
