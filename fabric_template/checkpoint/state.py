"""Build a checkpoint in Lightning's layout, and restore a run from it.

``LitModel.load_from_checkpoint(path)`` and ``Trainer.fit(ckpt_path=path)`` can read the files.
OWN_KEY holds the states that Trainer does not save: random generators, loaders, running metrics and
the number of CSV rows.
"""

from __future__ import annotations

import random
from collections import deque
from copy import deepcopy
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric import __version__ as lightning_version
from lightning.fabric.utilities import move_data_to_device

from ..distributed.launch import gather_objects
from ..errors import CheckpointError, OtherModelError
from ..lightning_compat.overrides import is_instance_of
from ..rng_state import capture_rng_state, is_generator, restore_rng_state
from .distributed import OWN_KEY, SHARDS_KEY, load_shards
from .hyperparameters import add_hyperparameters
from .weights import load_weights

if TYPE_CHECKING:
    from ..training.progress import Progress
    from ..training.run import Run

# The counters in each progress object of Trainer.
_COUNTS = ("ready", "started", "processed", "completed")
# The attributes of Run that have a state_dict, and whether each process saves its own state.
PARTS = {
    **dict.fromkeys(("progress", "stop", "row", "checkpoints"), False),
    **dict.fromkeys(("data", "validation_schedule", "results", "plain_state"), True),
}


def build_checkpoint(
    run: Run, weights_only: bool = False, epoch: int | None = None
) -> dict[str, Any]:
    """Return a checkpoint of a run. All processes must call this function.

    Args:
        weights_only: Leave out optimizers, callbacks and the position in the loaders.
        epoch: The number of the epoch in the checkpoint. None: the current epoch.
    """
    source: Any = run.module if run.is_lightning_module else run.network
    # Save the names of the network that torch.compile has wrapped, so that the plain network loads.
    source = source._orig_mod if is_instance_of(source, "OptimizedModule") else source
    checkpoint: dict[str, Any] = {
        "epoch": run.progress.epochs_done if epoch is None else epoch,
        "global_step": run.progress.global_step,
        "pytorch-lightning_version": lightning_version,
        "state_dict": source.state_dict(),
        "loops": loops_state(run),
    }
    if not weights_only:
        checkpoint |= training_state(run)
    for part in (run.model, run.datamodule):
        add_hyperparameters(run, checkpoint, part)
    if state := state_of(run.datamodule):
        checkpoint[type(run.datamodule).__qualname__] = state
    if not weights_only:
        run.hooks.call_callbacks("on_save_checkpoint", checkpoint)
    run.hooks.call_module("on_save_checkpoint", checkpoint)
    # Return a new dict, because hooks may have kept a reference to ``checkpoint``.
    return checkpoint if weights_only else {**checkpoint, OWN_KEY: own_state(run)}


def training_state(run: Run) -> dict[str, Any]:
    """Return the states of callbacks, optimizers, schedulers and the precision, as Trainer saves them."""
    strategy = run.fabric.strategy
    # Fabric gathers the state of a ZeroRedundancyOptimizer in process 0.
    get_state: Any = strategy.get_optimizer_state
    if run.steps.is_model_parallel:
        # Each process returns its own shards of the optimizer states.
        get_state = torch.optim.Optimizer.state_dict
    callbacks = {key_of(callback): state_of(callback) for callback in run.hooks.callbacks}
    state = {
        "callbacks": {key: state for key, state in callbacks.items() if state},
        "optimizer_states": [get_state(optimizer) for optimizer in run.optimization.optimizers],
        "lr_schedulers": [
            config.scheduler.state_dict() for config in run.optimization.lr_schedulers
        ],
    }
    if scaler_state := strategy.precision.state_dict():
        state[type(strategy.precision).__qualname__] = scaler_state
    return state


def key_of(callback: Any) -> str:
    return getattr(callback, "state_key", type(callback).__qualname__)


def state_of(part: Any) -> Any:
    """Return the state of a callback or a datamodule, or None if it has no ``state_dict``."""
    state_dict = getattr(part, "state_dict", None)
    state: Any = state_dict() if callable(state_dict) else None
    # A state_dict() that returns vars(self) contains the methods that attach_log() has set.
    methods = [n for n in ("log", "log_dict") if isinstance(state, dict) and callable(state.get(n))]
    return {n: value for n, value in state.items() if n not in methods} if methods else state


def own_state(run: Run) -> dict[str, Any]:
    """Return the states that Trainer does not save. The list "ranks" has one entry per process."""
    of_process = {
        "rng": capture_rng_state(),
        "gradients": run.optimization.accumulated_gradients(),
        **states_of(run, per_process=True),
    }
    # Save only the values that hooks have changed. The resumed run computes the other values.
    window = run.progress.accumulate_grad_batches
    is_changed = window != run.plan.config.accumulate_grad_batches
    return {
        "writer": "FabricLoop",
        **states_of(run, per_process=False),
        "saved_at": run.checkpoints.folders.save_time(),
        "accumulate_grad_batches": window if is_changed else None,
        "flags": run.steps.changed_flags(run.optimization.named_parameters()),
        "outside_parameters": {
            n: p.detach() for n, p in run.optimization.outside_parameters().items()
        },
        "parameter_groups": names_of_groups(run),
        "settings": run_settings(run),
        # Save the seed even if no loader has used it, because a resumed run may use it.
        "sampler_seed": run.data.common_seed(),
        "ranks": gather_objects(run, of_process),
    }


def states_of(run: Run, per_process: bool) -> dict[str, Any]:
    """Return the states of the parts that each process saves, or of those that the first one saves."""
    names = [name for name, is_own in PARTS.items() if is_own == per_process]
    return {name: getattr(run, name).state_dict() for name in names}


def load_states(run: Run, states: dict[str, Any]) -> None:
    """Restore the parts of a run that have a saved state."""
    for name in PARTS:
        if name in states:
            getattr(run, name).load_state_dict(states[name])


def run_settings(run: Run) -> dict[str, Any]:
    """Return the settings that a resumed run should share with the saved run."""
    loaders = run.data.train.loaders if "train" in run.data.created else []
    return {
        "processes": run.fabric.world_size,
        "batch size": [getattr(loader, "batch_size", None) for loader in loaders],
        "num_workers": [getattr(loader, "num_workers", None) for loader in loaders],
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimization.optimizers],
    }


def check_settings(run: Run, saved: dict[str, Any]) -> None:
    """Warn about changed settings. Within an epoch, require the processes and batch sizes saved."""
    current = run_settings(run)
    is_in_epoch = run.progress.is_in_epoch and not run.progress.is_last_batch
    if is_in_epoch and saved["processes"] != current["processes"]:
        raise CheckpointError(
            f"{run.plan.start.path}: it is from the middle of an epoch of a run with {saved['processes']}"
            f" processes, and this run has {current['processes']}. Use {saved['processes']} processes, a"
            " checkpoint from the end of an epoch, or load= to start a new run from the weights."
        )
    sizes, saved_sizes = current["batch size"], saved["batch size"]
    if is_in_epoch and len(sizes) == len(saved_sizes) and sizes != saved_sizes:
        raise CheckpointError(
            f"{run.plan.start.path}: it is from the middle of an epoch with the batch sizes {saved_sizes},"
            f" and the loaders now have {sizes}. The position is counted in batches. Use the saved batch"
            " size, a checkpoint from the end of an epoch, or load= to start a new run from the weights."
        )
    differences = [
        f"{n} {saved[n]} was saved, now {current[n]}" for n in saved if saved[n] != current[n]
    ]
    if differences:
        run.warn_once(
            f"resume: {'; '.join(differences)}. The run continues. Its results differ from those of an"
            " uninterrupted run."
        )


def loops_state(run: Run) -> dict[str, Any]:
    """Return the counters of Trainer's loops, with which Trainer can resume this run."""
    loaders = [loader.state_dict() for loader in run.data.stateful_loaders()]
    is_automatic = run.module.automatic_optimization
    return count_loops(run.progress, run.hooks.current, is_automatic, loaders)


def count_loops(
    progress: Progress, hook: str | None, is_automatic: bool, loader_states: list[Any]
) -> dict[str, Any]:
    saved = progress.state_dict()
    epoch = make_counts(progress.epochs_done, progress.epochs_done)
    batches = make_counts(saved["total_batches"], saved["batches_done"])
    # Only "ready" counts the batches of an unfinished accumulation window.
    batches["total"]["ready"] = progress.total_batches
    batches["current"]["ready"] = progress.batches_done
    if progress.is_in_epoch:
        for counts in epoch.values():
            counts["ready"] += 1
            counts["started"] += 1
            counts["processed"] += hook == "on_train_epoch_end"
        if hook == "on_train_batch_end":
            for counts in batches.values():
                counts["completed"] -= 1
    steps = progress.global_step
    automatic = (
        make_counts(steps, progress.optimizer_steps_in_epoch) if is_automatic else make_counts(0, 0)
    )
    manual = make_counts(0 if is_automatic else steps, 0)
    fit_loop = {
        "state_dict": {"combined_loader": loader_states} if loader_states else {},
        "epoch_progress": epoch,
        "epoch_loop.state_dict": {"_batches_that_stepped": progress.logging_step},
        "epoch_loop.batch_progress": batches | {"is_last_batch": saved["is_last_batch"]},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": automatic, "zero_grad": automatic}
        },
        "epoch_loop.manual_optimization.optim_step_progress": manual,
    }
    return {"fit_loop": fit_loop, "validate_loop": {}, "test_loop": {}, "predict_loop": {}}


def make_counts(total: int, current: int) -> dict[str, Any]:
    return {"total": dict.fromkeys(_COUNTS, total), "current": dict.fromkeys(_COUNTS, current)}


# Restore the model


def restore_model(run: Run, checkpoint: dict[str, Any]) -> bool:
    """Restore the weights, the datamodule and the callbacks. Return whether the weights were loaded.

    In fit, weights that do not match are loaded after on_fit_start, which may add modules.
    """
    is_weights_only = run.stage == "fit" and not run.plan.start.resumes
    if not is_weights_only:
        load_state(run.datamodule, checkpoint.get(type(run.datamodule).__qualname__))
    if SHARDS_KEY in checkpoint or run.steps.is_model_parallel:
        load_shards(run, checkpoint, "state_dict")
    run.hooks.call_module("on_load_checkpoint", checkpoint)
    is_loaded = True
    try:
        load_weights(run, checkpoint)
    except OtherModelError:
        if run.stage != "fit":
            raise
        is_loaded = False
    if not is_weights_only and "callbacks" in checkpoint:
        restore_callbacks(run, checkpoint)
    return is_loaded


def load_state(part: Any, state: Any) -> None:
    if state is not None and callable(getattr(part, "load_state_dict", None)):
        part.load_state_dict(state)


def restore_callbacks(run: Run, checkpoint: dict[str, Any]) -> None:
    states = checkpoint["callbacks"]
    keys = {key_of(callback) for callback in run.hooks.callbacks}
    # Do not warn about a Timer, which max_time= may have added. Do not warn about a ModelCheckpoint
    # if FabricLoop saves the checkpoints itself.
    may_miss = ("Timer",) if run.hooks.callbacks_of("Checkpoint") else ("Timer", "ModelCheckpoint")
    missing = [key for key in states if key not in keys and not key.startswith(may_miss)]
    if missing and run.plan.start.resumes:
        run.warn_once(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be"
            f" provided during `Trainer` instantiation. Please add the following callbacks: {missing}."
        )
    run.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in run.hooks.callbacks:
        load_state(callback, deepcopy(states.get(key_of(callback))) or None)


# Restore the training


def restore_training(run: Run, checkpoint: dict[str, Any]) -> None:
    """Restore optimizers, schedulers, counters and the CSV files."""
    restore_optimizers(run, checkpoint)
    precision = run.fabric.strategy.precision
    load_state(precision, checkpoint.get(type(precision).__qualname__))
    own = run.plan.start.training_state(run.stop.max_steps != -1)
    if own["writer"] == "MiniLoop":
        restore_mini_attributes(run, own["ranks"])
    check_counters(run, own["progress"])
    epochs_done, max_epochs = own["progress"]["epochs_done"], run.stop.max_epochs
    if -1 < max_epochs < epochs_done:
        raise CheckpointError(
            f"You restored a checkpoint with current_epoch={epochs_done}, but you have set"
            f" Trainer(max_epochs={max_epochs}). Please set a different max_epochs value."
        )
    restore_outside_parameters(run, own.get("outside_parameters", {}))
    run.progress.load_state_dict(own.pop("progress"))
    if run.plan.start.keyword != "auto" and run.stop.can_stop_early:
        # Ignore the saved should_stop, so that resume="last" continues a run that EarlyStopping
        # stopped. resume="auto" keeps should_stop, because job schedulers restart ended runs, too.
        own.pop("stop", None)
    load_states(run, own)


def check_counters(run: Run, counters: dict[str, Any]) -> None:
    """Raise an error for counters that no run can have, such as negative numbers."""
    for name, value in counters.items():
        kind = type(getattr(run.progress, name, None))
        is_wrong = kind in (int, bool) and type(value) is not kind
        if is_wrong or (type(value) is int and not 0 <= value < 2**62):
            raise CheckpointError(
                f"{run.plan.start.path}: got the counter {name}={shorten(repr(value), 40)}, expected a number"
                f" of type {kind.__name__} that a run can reach. Use another checkpoint, or load=."
            )


def restore_mini_attributes(run: Run, ranks: list[dict[str, Any]]) -> None:
    """Restore the attributes of modules that MiniLoop has saved."""
    parts = ranks[run.fabric.global_rank % len(ranks)]["rng"].get("parts", {})
    modules = {**dict(run.network.named_modules()), "": run.model}
    for place, attributes in parts.items():
        known = vars(modules[place]) if place in modules else {}
        # MiniLoop has saved other types as tensors and lists.
        others = (np.ndarray, np.generic, set, deque)
        if any(
            name not in known or is_generator(known[name]) or isinstance(known[name], others)
            for name in attributes
        ):
            raise CheckpointError(
                f"resume: got {run.plan.start.path}, in which MiniLoop saved the state of {place!r},"
                " expected only attributes of modules. Continue it with MiniLoop, or use load=."
            )
        vars(modules[place]).update(move_data_to_device(attributes, run.fabric.device))


def restore_position(run: Run) -> None:
    """Restore random generators, loaders and running sums right before training continues."""
    own = run.plan.start.take()
    if own is None:
        return
    if own["writer"] == "Trainer":
        # Trainer saves no random states.
        run.data.load_loader_states(own["loader_states"])
        return
    ranks, rank = own["ranks"], run.fabric.global_rank
    of_process = ranks[rank % len(ranks)]
    # MiniLoop saves only the random states.
    if own["writer"] == "FabricLoop":
        check_settings(run, own["settings"])
        if own["accumulate_grad_batches"]:
            run.loop.accumulate_grad_batches = own["accumulate_grad_batches"]
        restore_network(run, own["flags"], of_process["gradients"])
        of_process["results"] = move_data_to_device(of_process["results"], run.fabric.device)
        load_states(run, of_process)
    restore_rng_state(of_process["rng"])
    if rank >= len(ranks):
        # The saved run had no process of this rank. Use different random numbers in each process.
        seed = int(torch.randint(2**31, ())) + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


def restore_network(
    run: Run, flags: dict[str, dict[str, bool]], gradients: dict[str, torch.Tensor]
) -> None:
    """Restore changed flags, and the gradients of an unfinished optimizer step."""
    run.steps.set_training_modes(flags["training"])
    requires_grad = flags["requires_grad"]
    for name, parameter in run.optimization.named_parameters().items():
        parameter.requires_grad = requires_grad.get(name, parameter.requires_grad)
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device, copy=True)


def restore_optimizers(run: Run, checkpoint: dict[str, Any]) -> None:
    if SHARDS_KEY in checkpoint or run.steps.is_model_parallel:
        load_shards(run, checkpoint, "optimizer_states")
    states = checkpoint["optimizer_states"]
    add_missing_groups(run, states)
    # Accept an empty list, because on_load_checkpoint hooks may have removed the optimizer states.
    if states and len(states) != len(run.optimization.optimizers):
        raise CheckpointError(
            f"{run.plan.start.path}: got the states of {len(states)} optimizers, expected"
            f" {len(run.optimization.optimizers)}. Give the optimizers that the run was started with, or use load=."
        )
    for optimizer, state in zip(run.optimization.optimizers, states, strict=False):
        load_optimizer_state(run, optimizer, state)
        restore_dtypes(optimizer, state)
    saved = checkpoint.get("lr_schedulers", ())
    # StochasticWeightAveraging exchanges the schedulers during training.
    is_averaging = bool(run.hooks.callbacks_of("StochasticWeightAveraging"))
    if saved and len(saved) != len(run.optimization.lr_schedulers) and not is_averaging:
        run.warn_once(
            f"resume: {len(saved)} lr_schedulers were saved, now {len(run.optimization.lr_schedulers)}. The states are"
            " restored in this order, and a scheduler without a state starts again."
        )
    for config, state in zip(run.optimization.lr_schedulers, saved, strict=False):
        config.scheduler.load_state_dict(state)


def names_of_groups(run: Run) -> list[list[list[str | None]]]:
    """Return the names of the parameters in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in run.optimization.named_parameters().items()}
    return [
        [[names.get(id(parameter)) for parameter in group["params"]] for group in item.param_groups]
        for item in run.optimization.optimizers
    ]


def add_missing_groups(run: Run, states: list[dict[str, Any]]) -> None:
    """Add the parameter groups that the saved run has added to its optimizers during training."""
    parameters = run.optimization.named_parameters()
    saved = (run.plan.start.own or {}).get("parameter_groups", ())
    for optimizer, state, names in zip(run.optimization.optimizers, states, saved, strict=False):
        known = len(optimizer.param_groups)
        # An own optimizer may save its state in another form.
        groups = state.get("param_groups", ())
        added = zip(groups[known:], names[known:], strict=False)
        for group, group_names in added:
            if all(name in parameters for name in group_names):
                group = {**group, "params": [parameters[name] for name in group_names]}
                optimizer.add_param_group(group)


def load_optimizer_state(run: Run, optimizer: Any, state: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (state.get("param_groups", ()), optimizer.param_groups)
        ]
        if sizes[0] == sizes[1]:
            raise
        raise CheckpointError(
            f"{run.plan.start.path}: got an optimizer with groups of {sizes[0]} parameters, expected"
            f" {sizes[1]}. Add the same groups before the run resumes, in configure_optimizers or"
            " on_fit_start, or use load=."
        ) from error


def restore_outside_parameters(run: Run, saved: dict[str, torch.Tensor]) -> None:
    """Restore the parameters that only optimizers have, because state_dict lacks them."""
    with torch.no_grad():
        for name, parameter in run.optimization.outside_parameters().items():
            if name in saved:
                parameter.copy_(saved[name])


def restore_dtypes(optimizer: Any, saved: dict[str, Any]) -> None:
    """Undo torch's cast of optimizer states to the dtypes of the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in saved.get("state", {}).items():
        if not isinstance(index, int) or not isinstance(values, dict):
            continue
        current = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and current[name].dtype != value.dtype:
                current[name] = value.to(current[name].device)
