"""Checkpoint: what a run's state is, in Lightning's layout, and how it comes back.

Keys are Trainer's (``state_dict, optimizer_states, lr_schedulers, epoch, global_step, loops, callbacks, ...``), so that
``LitModel.load_from_checkpoint(path)`` and ``Trainer.fit(ckpt_path=path)`` read our files and we read theirs. What
Trainer does not keep (random states, the position in the epoch, running sums, the place in the logs) lies under one key, ours.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.hooks import is_a, overrides
from ..core.ranks import gather
from ..exact.randomness import rng_state, rng_state_of_another
from ..process.finished import end_state, restore_end
from ..record.earlier import rows_state
from .fingerprint import check_loaded, check_optimizers
from .fitting import given_to, put_into_callback, put_into_optimizer, put_into_scheduler
from .opening import CheckpointError
from .plain import without_odd
from .reading import explain_mismatch, find_weights

if TYPE_CHECKING:
    from ..core.run import Run

OURS = "fabric_template"
FORMAT = 1
MOST = 10_000  # items of a list or dict that is looked through: longer ones are data


# ---- a run's state


def state_of(run: Run, weights_only: bool = False, epoch: int | None = None) -> dict[str, Any]:
    """Everything that a run needs to go on, as one flat dict of tensors and plain values.

    Called on all ranks (each gives its own random states); only rank zero's result is written.

    Args:
        run: as it stands now.
        weights_only: leave out optimizers, callbacks and positions.
        epoch: what the file calls its epoch; None: the current one.
    """
    from lightning.fabric import __version__ as lightning_version

    state: dict[str, Any] = {
        "epoch": run.current_epoch if epoch is None else epoch,
        "global_step": run.global_step,
        "pytorch-lightning_version": lightning_version,
        "state_dict": run.net.state_dict() if overrides(run.owner, "state_dict") is None else run.owner.state_dict(),
        "loops": loops_state(run),
    }
    if not weights_only:
        state["callbacks"] = {
            key: part
            for callback in run.callbacks
            if callable(getattr(callback, "state_dict", None)) and (part := callback.state_dict())
            for key in [getattr(callback, "state_key", type(callback).__qualname__)]
        }
        state["optimizer_states"] = [optimizer.state_dict() for optimizer in run.optimizers]
        state["lr_schedulers"] = [config.scheduler.state_dict() for config in run.schedulers]
        precision = run.fabric.strategy.precision
        if scaler := precision.state_dict():
            state[type(precision).__qualname__] = scaler
    for owner in (run.owner, run.datamodule):
        if hparams := getattr(owner, "hparams", None):  # under the names by which Lightning's classes read them back
            if hasattr(owner, "_hparams_name"):
                state[getattr(owner, "CHECKPOINT_HYPER_PARAMS_NAME", "hparams_name")] = owner._hparams_name
            key, kind = getattr(owner, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters"), type(hparams)
            is_omegaconf = kind.__module__.startswith("omegaconf.")  # Hydra's configurations keep their kind
            state[key] = hparams if is_omegaconf else hyperparameters_of(run, owner)
            if is_omegaconf:
                state[getattr(owner, "CHECKPOINT_HYPER_PARAMS_TYPE", "hparams_type")] = kind
    if callable(state_of_data := getattr(run.datamodule, "state_dict", None)) and (part := state_of_data()):
        state[type(run.datamodule).__qualname__] = part
    if not weights_only:
        run.hooks.call_callbacks("on_save_checkpoint", state)
    run.hooks.call_module("on_save_checkpoint", state)
    return state if weights_only else canonical({**state, OURS: _our_state(run)})  # the hooks see Trainer's keys only


def hyperparameters_of(run: Run, owner: Any) -> dict[str, Any]:
    """The hyperparameters of a module or datamodule that a file can hold; said once of the others what becomes of them."""
    hparams = dict(getattr(owner, "hparams", None) or {})
    kept, text = (hparams, None) if run.config.trusted else without_odd(hparams)
    if text is not None:
        run.warn_once(f"{type(owner).__name__}: {text}")
    return kept


def _our_state(run: Run) -> dict[str, Any]:
    if run.restored is not None:  # it goes on from there only now
        return run.restored
    place, feed = run.place(), run.feed
    ranks = {
        "rng": rng_state(),
        "train": feed.train.state(feed.fetched_after(place.batches_done)) if feed.train is not None else None,
        "val": feed.val.state(None) if feed.val is not None else None,
        "returned": run.history.train.state_dict(),
        "metrics": run.metrics.state_dict(),
        "held": run.held.state_dict(),
    }
    gathered = gather(run.fabric, ranks)
    return {
        "format": FORMAT,
        "batch_idx": place.batches_done if not run.between_epochs else 0,
        "epoch": run.epochs_done,
        "saved_in": place.saved_in,
        "is_exact": place.is_exact,
        "window": run.window if run.window != run.config.accumulate_grad_batches else None,
        "is_last_batch": place.is_last_batch,
        "total_batches": place.total_batches,
        "batches_that_stepped": run.batches_that_stepped,
        "stepped_before": run.stepped_before,
        "steps_in_epoch": run.steps_in_epoch,
        "seconds": time.monotonic() - run.record.began,
        **end_state(run),
        "fingerprint": dict(run.fingerprint),
        "noticed": run.noticed.state_dict() if run.noticed is not None else {},
        "ranks": gathered,
        "buckets": list(run.steps.buckets.order) if run.steps.buckets is not None else [],
        "loaders_epoch": dict(sorted(run.feed.made_in.items())) if run.config.reload_dataloaders_every_n_epochs else {},
        "returned": dict(run.history.returned),
        "rates": list(run.record.rates),
        "kept": run.saver.state_dict() if run.saver is not None else {},
        **rows_state(run),
    }


def of_this_rank(run: Run, ours: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank gave to the checkpoint."""
    return part_of(ours["ranks"], run.fabric.global_rank)


def part_of(ranks: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """What a rank gave to a checkpoint; for one that was not there what the first one gave, but for its random numbers."""
    if rank < len(ranks):
        return ranks[rank]
    part = {**ranks[0], "rng": rng_state_of_another(ranks[0]["rng"], rank)}
    # the seeds by which the ranks share the samples stay, the first one's workers do not
    for stage in ("train", "val"):
        if part[stage] is not None:
            part[stage] = {**part[stage], "sources": [None] * len(part[stage]["sources"])}
    return part


def loops_state(run: Run) -> dict[str, Any]:
    """Trainer's progress counters, as its own loops would hold them at this point."""
    all_four = ("ready", "started", "processed", "completed")

    def progress(total: int, current: int, names: tuple[str, ...] = all_four) -> dict[str, Any]:
        return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}

    two, three = ("ready", "completed"), ("ready", "started", "completed")
    place = run.place()
    epoch, batches = progress(run.epochs_done, run.epochs_done), progress(place.total_batches, place.batches_done)
    validated = run.evaluated if place.saved_in == "on_validation_end" else 0
    if not run.between_epochs:  # Trainer counts what it begins, what it has done, and what it has quite finished
        for part in epoch.values():
            part["ready"] += 1
            part["started"] += 1
            part["processed"] += place.saved_in == "on_train_epoch_end"
        for part in batches.values():
            part["completed"] -= place.saved_in == "on_train_batch_end"
    steps, current = (run.global_step, run.steps_in_epoch) if run.is_automatic else (0, 0)
    manual = 0 if run.is_automatic else run.global_step
    schedulers = sum(getattr(config.scheduler, "last_epoch", 0) or 0 for config in run.schedulers)
    states = run.feed.train.states() if run.feed.train is not None else []  # of loaders that have one
    fit = {
        "state_dict": {"combined_loader": states} if states else {},
        "epoch_progress": epoch,
        "epoch_loop.state_dict": {"_batches_that_stepped": run.batches_that_stepped},
        "epoch_loop.batch_progress": batches | {"is_last_batch": place.is_last_batch},
        "epoch_loop.scheduler_progress": progress(schedulers, 0, two),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": progress(steps, run.steps_in_epoch if steps else 0, two),
                "zero_grad": progress(steps, 0, three),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": progress(manual, 0, two),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": progress(validated, validated) | {"is_last_batch": validated > 0},
    }
    evaluation = {"state_dict": {}, "batch_progress": progress(0, 0) | {"is_last_batch": False}}
    return {
        "fit_loop": fit,
        "validate_loop": copy.deepcopy(evaluation),
        "test_loop": copy.deepcopy(evaluation),
        "predict_loop": {"state_dict": {}, "batch_progress": progress(0, 0)},
    }


def check_format(checkpoint: Mapping[str, Any], path: Any) -> None:
    """Refuse a checkpoint of a newer format than we know."""
    ours = checkpoint.get(OURS)
    if isinstance(ours, Mapping) and isinstance(number := ours.get("format", 0), int) and number > FORMAT:
        raise CheckpointError(
            f"'{path}' has format {number}; this version of fabric_template reads up to {FORMAT}: update it with"
            " pip install -U, or save the checkpoint with this version"
        )


def check_fits(net: torch.nn.Module, checkpoint: Mapping[str, Any], path: Any) -> None:
    """Refuse a checkpoint of another model, naming the first keys and shapes that differ."""
    expected = net.state_dict()
    difference = explain_mismatch(expected, find_weights(dict(checkpoint), expected))
    if difference:
        raise CheckpointError(f"'{path}' is of another model: {difference}; build the model with the same arguments")


def check_trained(checkpoint: Mapping[str, Any], path: Any) -> None:
    """Refuse a checkpoint that has no state of a training."""
    if missing := [key for key in ("optimizer_states", "lr_schedulers") if key not in checkpoint]:
        raise CheckpointError(
            f"resume={str(path)!r}: the file holds weights only ({missing[0]} is missing); use load= to start a new run from"
            " them"
        )


def load_weights(run: Run, checkpoint: dict[str, Any]) -> None:
    """Put a checkpoint's weights into the module, by its own hooks."""
    run.hooks.call_module("on_load_checkpoint", checkpoint)
    weights = find_weights(checkpoint, run.net.state_dict())
    strict = getattr(run.owner, "strict_loading", True)
    with given_to(run.net, run.resume_path or run.load_path):
        run.net.load_state_dict(weights, strict=strict if isinstance(strict, bool) else True)


def load_training_state(run: Run, checkpoint: dict[str, Any]) -> None:
    """Optimizers, schedulers, scaler, counters: what fit needs beyond the weights, the random numbers excepted."""
    precision = run.fabric.strategy.precision
    if scaler := checkpoint.get(type(precision).__qualname__):
        with given_to(precision, run.resume_path):
            precision.load_state_dict(scaler)
    check_trained(checkpoint, run.resume_path)
    if len(checkpoint["optimizer_states"]) != len(run.optimizers):
        raise CheckpointError(
            f"resume={str(run.resume_path)!r}: the file holds {len(checkpoint['optimizer_states'])} optimizers, this run has"
            f" {len(run.optimizers)}; use load= to take the weights only"
        )
    ours = run.restored
    known = (ours or {}).get("fingerprint")
    check_optimizers(run, known)
    if ours is not None:
        run.held.put_back_groups(of_this_rank(run, ours).get("held", {}).get("groups", ()))
    for optimizer, state in zip(run.optimizers, checkpoint["optimizer_states"], strict=True):
        put_into_optimizer(optimizer, state, run.resume_path)
        check_loaded(run, optimizer)
    for config, state in zip(run.schedulers, checkpoint["lr_schedulers"], strict=False):
        put_into_scheduler(config.scheduler, state, run.resume_path)
    run.global_step = int(checkpoint.get("global_step", 0))
    if ours is None or of_this_rank(run, ours)["train"] is None:
        fit = checkpoint.get("loops", {}).get("fit_loop", {})
        run.feed.loader_states = fit.get("state_dict", {}).get("combined_loader", [])
    if ours is None:
        _counters_of_trainer(run, checkpoint)
        run.steps_in_epoch = run.batches_done // run.window
        run.stepped_before = run.batches_that_stepped - run.steps_in_epoch
        return
    run.epochs_done, run.batches_done = ours["epoch"], ours["batch_idx"]
    run.total_batches, run.batches_that_stepped = ours["total_batches"], ours["batches_that_stepped"]
    run.steps_in_epoch, run.saved_in = ours["steps_in_epoch"], ours["saved_in"]
    run.is_last_batch = ours["is_last_batch"]
    run.stepped_before = ours.get("stepped_before", run.batches_that_stepped - run.batches_done // run.window)
    run.between_epochs = run.batches_done == 0
    restore_end(run, ours)
    run.record.rates = list(ours["rates"])
    run.metrics.callback = dict(of_this_rank(run, ours)["metrics"]["callback"])
    if run.saver is not None:
        run.saver.load_state_dict(ours["kept"])
        run.saver.goes_on_from(run, run.resume_path)


def _counters_of_trainer(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Where Trainer stood when it wrote this file: it saves in the middle of its own bookkeeping."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    epoch = fit.get("epoch_progress", {}).get("current", {})
    batches = fit.get("epoch_loop.batch_progress", {})
    run.epochs_done = epoch.get("processed", int(checkpoint.get("epoch", -1)) + 1)
    started_and_open = epoch.get("ready", 0) > epoch.get("processed", 0)
    if batches and not started_and_open and not batches.get("is_last_batch"):  # max_steps ended the epoch in its middle
        run.epochs_done, started_and_open = run.epochs_done - 1, True
    run.batches_done = batches.get("current", {}).get("processed", 0) if started_and_open else 0
    if started_and_open and batches.get("is_last_batch"):  # saved in validation, after the last batch
        run.epochs_done, run.batches_done = run.epochs_done + 1, 0
    run.between_epochs = run.batches_done == 0
    run.total_batches = batches.get("total", {}).get("processed", 0)
    run.batches_that_stepped = fit.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", run.global_step)
    if started_and_open and not run.accumulates:  # it counts a step after the hooks that save
        run.batches_that_stepped += 1


def load_callbacks(run: Run, checkpoint: dict[str, Any]) -> None:
    """Give the datamodule and every callback their part of the checkpoint."""
    part = checkpoint.get(type(run.datamodule).__qualname__) if run.datamodule is not None else None
    if part and callable(getattr(run.datamodule, "load_state_dict", None)):
        run.datamodule.load_state_dict(part)
    if not isinstance(states := checkpoint.get("callbacks"), Mapping):
        return
    known = {getattr(callback, "state_key", type(callback).__qualname__) for callback in run.callbacks}
    missing = sorted(map(str, states.keys() - known))
    if not any(is_a(callback, "Checkpoint") for callback in run.callbacks):  # the loop keeps files itself
        missing = [key for key in missing if not key.startswith("ModelCheckpoint")]
    if missing:
        run.warn_once(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided during"
            f" `Trainer` instantiation. Please add the following callbacks: {missing}."
        )
    run.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in run.callbacks:
        state = states.get(getattr(callback, "state_key", type(callback).__qualname__))
        if callable(getattr(callback, "load_state_dict", None)):
            put_into_callback(callback, state, run.resume_path or run.load_path, checkpoint.get("global_step", 0))


def canonical(item: Any, words: dict[str, str] | None = None, depth: int = 20) -> Any:
    """The same nest of plain values with one object for equal strings, and of its own for each list, dict and tuple.

    Pickle writes an object once, and a reference where it comes again. A run that was resumed holds the same names as the
    run that was not, but some of them in other objects, and its files would be longer or shorter for it.

    Example:
        >>> import pickle
        >>> one, other = ["a b", "a b"], ["a b", "".join(["a", " b"])]
        >>> pickle.dumps(one) == pickle.dumps(other), pickle.dumps(canonical(one)) == pickle.dumps(canonical(other))
        (False, True)
    """
    words = {} if words is None else words
    kind = type(item)
    if kind is str:
        return words.setdefault(item, item)
    if kind not in (dict, list, tuple) or len(item) > MOST or not depth:
        return item
    if kind is dict:
        return {canonical(key, words, 1): canonical(value, words, depth - 1) for key, value in item.items()}
    return kind([canonical(value, words, depth - 1) for value in item])
