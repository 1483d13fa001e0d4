"""Build a checkpoint in Lightning's layout, and restore a run from it.

Lightning's keys come first, so that ``LitModel.load_from_checkpoint(path)`` and
``Trainer.fit(ckpt_path=path)`` read our files. What Trainer does not keep stands under one key: the states
of random generators, loaders, running metrics and the history.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import __version__ as lightning_version
from lightning.fabric.utilities import move_data_to_device

from ..data.samplers import shares_of
from ..distributed.launch import gather_objects
from ..errors import CheckpointError, OtherModelError, WeightsOnlyError
from ..lightning_compat.private import hyperparameters_name
from ..loggers.read_logs import read_table
from ..training.optimization import is_step_due
from .distributed import load_shards
from .rng import capture_rng_state, restore_rng_state, seed_new_process

if TYPE_CHECKING:
    from ..training.run_state import RunState

OWN_KEY = "fabric_template"


def build_checkpoint(
    run: RunState, weights_only: bool = False, epoch: int | None = None
) -> dict[str, Any]:
    """Return the state of a run. Called on all processes; the first one's is written.

    Args:
        weights_only: Leave out optimizers, callbacks and positions.
        epoch: The epoch that the file names. None: the current one.
    """
    source = run.module if run.is_lightning_module else run.network
    checkpoint: dict[str, Any] = {
        "epoch": run.progress.epochs_done if epoch is None else epoch,
        "global_step": run.progress.global_step,
        "pytorch-lightning_version": lightning_version,
        "state_dict": source.state_dict(),
        "loops": loops_state(run),
    }
    if not weights_only:
        checkpoint["callbacks"] = callbacks_state(run)
        # Fabric's method returns the state on the first process only.
        get_state: Any = run.fabric.strategy.get_optimizer_state
        if run.steps.is_model_parallel:
            get_state = torch.optim.Optimizer.state_dict
        checkpoint["optimizer_states"] = [get_state(optimizer) for optimizer in run.optimizers]
        checkpoint["lr_schedulers"] = [c.scheduler.state_dict() for c in run.lr_schedulers]
        precision = run.fabric.strategy.precision
        if scaler_state := precision.state_dict():
            checkpoint[type(precision).__qualname__] = scaler_state
    add_hyperparameters(checkpoint, run.model)
    if run.datamodule is not None:
        add_hyperparameters(checkpoint, run.datamodule)
        state_dict = getattr(run.datamodule, "state_dict", None)
        if callable(state_dict) and (state := state_dict()):
            checkpoint[type(run.datamodule).__qualname__] = state
    if not weights_only:
        run.hooks.call_callbacks("on_save_checkpoint", checkpoint)
    run.hooks.call_module("on_save_checkpoint", checkpoint)
    # A new dict, because hooks may have kept the one that they were given.
    return checkpoint if weights_only else {**checkpoint, OWN_KEY: own_state(run)}


def own_state(run: RunState) -> dict[str, Any]:
    """Return the states of the parts that Trainer does not save. Each process adds its own."""
    of_rank = {
        "rng": capture_rng_state(),
        "data": run.data.state_dict(),
        "results": run.results.state_dict(),
        "train_sums": run.history.train_sums.state_dict(),
    }
    return {
        "progress": run.progress.state_dict(),
        "stop": run.stop.state_dict(),
        "optimization": run.optimization.state_dict() if run.optimization else {},
        "validation_schedule": run.validation_schedule.state_dict()
        if run.validation_schedule
        else None,
        "history": run.history.state_dict(),
        "loggers": run.loggers.state_dict(),
        "checkpoints": run.checkpoints.state_dict(),
        "accumulate_grad_batches": [
            run.config.accumulate_grad_batches,
            run.accumulate_grad_batches,
        ],
        "frozen_at_start": run.frozen_at_start,
        "frozen_parameters": find_frozen_parameters(run),
        "settings": run_settings(run),
        "sampler_seed": run.data.sampler_seed,
        "ranks": gather_objects(run, of_rank),
    }


def run_settings(run: RunState) -> dict[str, Any]:
    """Return what a resumed run should have in common with the run that was saved."""
    loaders = run.data.train.loaders if run.data.train is not None else []
    return {
        "processes": run.fabric.world_size,
        "shares": shares_of(run)[0],
        "batch size": [getattr(loader, "batch_size", None) for loader in loaders],
        "num_workers": [getattr(loader, "num_workers", None) for loader in loaders],
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimizers],
    }


def warn_of_other_settings(run: RunState, saved: dict[str, Any]) -> None:
    """Warn once of settings that make a resumed run differ from the one that was saved."""
    current = run_settings(run)
    saved = {name: value for name, value in saved.items() if name != "shares"}
    differences = [
        f"{n} {saved[n]} was saved, now {current[n]}" for n in saved if saved[n] != current[n]
    ]
    if differences:
        run.warn_once(
            f"resume: {'; '.join(differences)}. The run continues, but not as if it had never stopped."
        )


def callbacks_state(run: RunState) -> dict[str, Any]:
    """Return the states of the callbacks that have one, by their keys."""
    states = {}
    for callback in run.hooks.callbacks:
        state_dict = getattr(callback, "state_dict", None)
        if callable(state_dict) and (state := state_dict()):
            states[getattr(callback, "state_key", type(callback).__qualname__)] = state
    return states


def add_hyperparameters(checkpoint: dict[str, Any], part: Any) -> None:
    """Add what ``save_hyperparameters()`` kept, under the names by which Lightning reads it back."""
    hparams = getattr(part, "hparams", None)
    if not hparams:
        return
    if (name := hyperparameters_name(part)) is not None:
        name_key = getattr(part, "CHECKPOINT_HYPER_PARAMS_NAME", "hparams_name")
        checkpoint[name_key] = name
    key = getattr(part, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters")
    is_omegaconf = type(hparams).__module__.startswith("omegaconf.")
    checkpoint[key] = hparams if is_omegaconf else dict(hparams)
    if is_omegaconf:
        type_key = getattr(part, "CHECKPOINT_HYPER_PARAMS_TYPE", "hparams_type")
        checkpoint[type_key] = type(hparams)


def loops_state(run: RunState) -> dict[str, Any]:
    """Return Trainer's progress counters, as its own loops would hold them here."""
    progress, saved = run.progress, run.progress.state_dict()
    epoch = _counts(progress.epochs_done, progress.epochs_done)
    batches = _counts(saved["total_batches"], saved["batches_done"])
    # A resume in the middle of a step trains the batches of that step again.
    batches["total"]["ready"] = progress.total_batches
    batches["current"]["ready"] = progress.batches_done
    if progress.is_in_epoch:
        for counts in epoch.values():
            counts["ready"] += 1
            counts["started"] += 1
            counts["processed"] += run.hooks.current == "on_train_epoch_end"
        if run.hooks.current == "on_train_batch_end":
            for counts in batches.values():
                counts["completed"] -= 1
    steps, manual_steps = progress.global_step, 0
    if not run.module.automatic_optimization:
        steps, manual_steps = 0, progress.global_step
    in_epoch = progress.optimizer_steps_in_epoch if steps else 0
    scheduler_steps = sum(getattr(c.scheduler, "last_epoch", 0) or 0 for c in run.lr_schedulers)
    loader_states = run.data.loader_states()
    optimizer = {"step": _counts(steps, in_epoch), "zero_grad": _counts(steps, 0)}
    evaluation = {"state_dict": {}, "batch_progress": _counts(0, 0) | {"is_last_batch": False}}
    fit_loop = {
        "state_dict": {"combined_loader": loader_states} if loader_states else {},
        "epoch_progress": epoch,
        "epoch_loop.state_dict": {"_batches_that_stepped": progress.logging_step},
        "epoch_loop.batch_progress": batches | {"is_last_batch": saved["is_last_batch"]},
        "epoch_loop.scheduler_progress": _counts(scheduler_steps, 0),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _counts(manual_steps, 0),
        **{f"epoch_loop.val_loop.{name}": value for name, value in evaluation.items()},
    }
    return {
        "fit_loop": fit_loop,
        "validate_loop": evaluation,
        "test_loop": deepcopy(evaluation),
        "predict_loop": {"state_dict": {}, "batch_progress": _counts(0, 0)},
    }


def _counts(total: int, current: int) -> dict[str, Any]:
    names = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}


def restore_model(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Restore the weights, the module, the datamodule and the callbacks, before the strategy's set-up."""
    is_weights_only = run.stage == "fit" and not run.resumes
    if run.datamodule is not None and not is_weights_only:
        state = checkpoint.get(type(run.datamodule).__qualname__)
        if state is not None and callable(getattr(run.datamodule, "load_state_dict", None)):
            run.datamodule.load_state_dict(state)
    load_shards(run, checkpoint, "state_dict")
    run.hooks.call_module("on_load_checkpoint", checkpoint)
    load_weights(run, checkpoint)
    if not is_weights_only:
        restore_callbacks(run, checkpoint)


def check_resumable(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuse to resume from a file that holds weights only."""
    if "optimizer_states" not in checkpoint:
        raise WeightsOnlyError(
            "Trying to restore optimizer state but checkpoint contains only the model. This is probably"
            " due to `ModelCheckpoint.save_weights_only` being set to `True`. resume: got"
            f" '{path}', which holds weights only. Write load= to start a new run from them."
        )


def load_weights(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Load the weights of a checkpoint, or of a file of weights."""
    weights = find_weights(checkpoint)
    if weights is None:
        keys = sorted(map(str, checkpoint))[:5]
        raise CheckpointError(
            f"{run.checkpoint_path}: got the keys {keys}, expected a checkpoint with state_dict."
        )
    is_strict = getattr(run.module, "strict_loading", True)
    target = run.module if run.is_lightning_module else run.network
    try:
        target.load_state_dict(weights, strict=is_strict)
    except RuntimeError as error:
        # torch writes a line for each parameter, which may be hundreds.
        differences = shorten(" ".join(str(error).split()), 400, placeholder=" ...")
        raise OtherModelError(
            f"{differences} '{run.checkpoint_path}' is of another model. Build the model with the"
            " arguments that it was trained with."
        ) from error


def find_weights(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return the weights in a checkpoint of ours, of Lightning or ``fabric.save``, or in a plain state_dict."""
    for name in ("state_dict", "model"):
        if isinstance(checkpoint.get(name), dict):
            weights = checkpoint[name]
            break
    else:
        if not all(isinstance(value, torch.Tensor) for value in checkpoint.values()):
            return None
        weights = checkpoint
    # Wrappers of torch put their own name before each key.
    for prefix in ("module.", "_orig_mod."):
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def restore_callbacks(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Give the callbacks their states back."""
    states = checkpoint.get("callbacks")
    if states is None:
        return
    keys = {getattr(c, "state_key", type(c).__qualname__) for c in run.hooks.callbacks}
    missing = [key for key in states if key not in keys]
    # max_time= adds a Timer.
    missing = [key for key in missing if not key.startswith("Timer")]
    if not run.loop.checkpoint_callbacks:
        # The resumed run has FabricLoop's own checkpoints in place of ModelCheckpoint's.
        missing = [key for key in missing if not key.startswith("ModelCheckpoint")]
    if missing and run.resumes:
        run.warn_once(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be"
            f" provided during `Trainer` instantiation. Please add the following callbacks: {missing}."
        )
    run.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in run.hooks.callbacks:
        state = states.get(getattr(callback, "state_key", type(callback).__qualname__))
        if state and callable(getattr(callback, "load_state_dict", None)):
            callback.load_state_dict(deepcopy(state))


def restore_training(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Restore optimizers, schedulers, counters and everything of ours, after the strategy's set-up."""
    restore_optimizers(run, checkpoint)
    precision = run.fabric.strategy.precision
    if (scaler_state := checkpoint.get(type(precision).__qualname__)) is not None:
        precision.load_state_dict(scaler_state)
    own = run.own_state
    if own is None:
        restore_progress_of_trainer(run, checkpoint)
        return
    if "loggers" not in own:
        restore_mini_run(run, own)
        return
    run.progress.load_state_dict(own["progress"])
    if run.stop.max_epochs is not None and -1 < run.stop.max_epochs < run.progress.epochs_done:
        raise CheckpointError(
            f"You restored a checkpoint with current_epoch={run.progress.epochs_done}, but you have set"
            f" Trainer(max_epochs={run.stop.max_epochs}). Please set a different max_epochs value."
        )
    if run.resume_keyword == "auto" or not run.stop.can_stop_early:
        # "auto" leaves a run that stopped early as it is; "last" continues it. Before min_epochs and
        # min_steps are reached, a request to stop is still open.
        run.stop.load_state_dict(own["stop"])
    run.history.load_state_dict(own["history"])
    run.loggers.load_state_dict(own["loggers"])
    run.checkpoints.load_state_dict(own["checkpoints"])


def restore_mini_run(run: RunState, own: dict[str, Any]) -> None:
    """Restore the counters, the rows and the best value of a file that MiniLoop wrote."""
    progress, score = own["progress"], own["checkpoints"]["score"]
    if progress["is_in_epoch"]:
        raise CheckpointError(
            f"resume: got {run.checkpoint_path}, which MiniLoop saved in the middle of an epoch,"
            " expected the end of one. Continue it with MiniLoop, or use load=."
        )
    run.progress.load_state_dict({**progress, "logging_step": progress["global_step"]})
    run.history.rows = list(own["history"]["rows"])
    for logger in run.loggers.csv_loggers:
        path = Path(logger.log_dir, "steps.csv")
        columns, rows = read_table(path)[:2] if path.exists() else ([], [])
        count = sum(int(row["step"]) <= progress["global_step"] for row in rows)
        logger.rewind({"rows": count, "columns": columns}, run.history.rows)
    kept = {} if score is None else {"best.ckpt": score}
    state = {"kept": kept, "is_validated": False, "last_step": progress["global_step"]}
    run.checkpoints.load_state_dict(state)


def find_frozen_parameters(run: RunState) -> list[str]:
    return [name for name, part in run.network.named_parameters() if not part.requires_grad]


def restore_position(run: RunState) -> None:
    """Restore random generators, loaders and running sums, when training is about to continue."""
    run.frozen_at_start = find_frozen_parameters(run)
    checkpoint, run.checkpoint = run.checkpoint, None
    own, run.own_state = run.own_state, None
    if checkpoint is None:
        return
    if own is None:
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        run.data.load_loader_states(fit_loop.get("state_dict", {}).get("combined_loader", []))
        return
    if "settings" not in own:
        # MiniLoop keeps the random numbers only.
        restore_rng_state(own["ranks"][run.fabric.global_rank % len(own["ranks"])]["rng"])
        return
    check_world_size(run, own)
    warn_of_other_settings(run, own["settings"])
    option, current = own["accumulate_grad_batches"]
    if option == run.config.accumulate_grad_batches:
        run.accumulate_grad_batches = current
    # What hooks have frozen or unfrozen. The rest is as the module sets it up now.
    frozen = set(own["frozen_parameters"])
    changed = frozen.symmetric_difference(own["frozen_at_start"])
    for name, parameter in run.network.named_parameters():
        if name in changed:
            parameter.requires_grad = name not in frozen
    ranks = own["ranks"]
    of_rank = ranks[run.fabric.global_rank % len(ranks)]
    run.data.load_state_dict(of_rank["data"])
    sums = move_data_to_device((of_rank["results"], of_rank["train_sums"]), run.fabric.device)
    run.results.load_state_dict(sums[0])
    run.history.train_sums.load_state_dict(sums[1])
    if own["optimization"]:
        run.optimization.load_state_dict(own["optimization"])
    if own["validation_schedule"] is not None:
        run.validation_schedule.load_state_dict(own["validation_schedule"])
    restore_rng_state(of_rank["rng"])
    if run.fabric.global_rank >= len(ranks):
        seed_new_process(run.fabric.global_rank)


def check_world_size(run: RunState, own: dict[str, Any]) -> None:
    """Refuse to continue in the middle of an epoch with another number of processes."""
    saved, current = own["settings"]["shares"], shares_of(run)[0]
    is_in_epoch = run.progress.is_in_epoch and not run.progress.is_last_batch
    if is_in_epoch and saved != current:
        raise CheckpointError(
            f"{run.checkpoint_path}: it is from the middle of an epoch of a run with {saved} processes, and"
            f" this run has {current}. Use {saved} processes, a checkpoint from the end of an epoch, or load="
            " to start a new run from the weights."
        )


def restore_optimizers(run: RunState, checkpoint: dict[str, Any]) -> None:
    load_shards(run, checkpoint, "optimizer_states")
    states = checkpoint["optimizer_states"]
    # on_load_checkpoint may have emptied the list, where the parameters have changed.
    if states and len(states) != len(run.optimizers):
        raise CheckpointError(
            f"{run.checkpoint_path}: got the states of {len(states)} optimizers, expected"
            f" {len(run.optimizers)}. Give the optimizers that the run was started with, or use load=."
        )
    for optimizer, state in zip(run.optimizers, states, strict=False):
        optimizer.load_state_dict(state)
        restore_dtypes(optimizer, state)
    for config, state in zip(run.lr_schedulers, checkpoint.get("lr_schedulers", ()), strict=False):
        config.scheduler.load_state_dict(state)


def restore_dtypes(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give states the dtype that they were saved in. torch casts all but "step" to that of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in saved.get("state", {}).items():
        if not isinstance(index, int) or not isinstance(values, dict):
            continue
        current = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and current[name].dtype != value.dtype:
                current[name] = value.to(current[name].device)


def restore_progress_of_trainer(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Restore the counters of a file that Trainer wrote."""
    progress, fit_loop = run.progress, checkpoint.get("loops", {}).get("fit_loop")
    run.data.keeps_first_iterator = True
    progress.global_step = checkpoint["global_step"]
    if fit_loop is None:
        progress.epochs_done = checkpoint["epoch"]
        return
    epoch = fit_loop["epoch_progress"]["current"]
    batch = fit_loop["epoch_loop.batch_progress"]
    ready, processed = batch["current"]["ready"], batch["current"]["processed"]
    is_between_batches = ready == processed
    is_after_last = batch["is_last_batch"] and is_between_batches
    progress.epochs_done = epoch["processed"]
    progress.total_batches = batch["total"]["processed"]
    progress.logging_step = fit_loop["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    # In on_train_epoch_start an epoch is ready but not started, and the batches are those of the epoch before.
    is_in_epoch = epoch["started"] > epoch["processed"]
    if is_in_epoch and is_after_last:
        # Trainer leaves out what was to come after the last batch.
        progress.epochs_done += 1
    elif is_in_epoch:
        progress.is_in_epoch = True
        progress.batches_done = processed
        progress.batches_at_last_step = processed - processed % run.accumulate_grad_batches
    if is_in_epoch and is_between_batches and batch["total"]["ready"] > batch["total"]["completed"]:
        # Trainer counts the step after on_train_batch_end, in which the file was saved.
        progress.logging_step += is_step_due(run)
