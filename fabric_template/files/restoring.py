"""Restoring: how a run's state comes back from a checkpoint; one that does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.overrides import is_a
from ..core.run import Run
from ..exact.put_back import put_back_groups, rng_state_of_another
from .checkpoint import FORMAT, OURS
from .differences import check_loaded, check_optimizers
from .errors import CheckpointError
from .fitting import OtherModel, given_to, put_into_callback, put_into_optimizer, put_into_scheduler
from .ordinary import SHARDS
from .reading import explain_mismatch, find_weights
from .trainers import counters_of


def check_format(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint of a newer format than we know."""
    ours = checkpoint.get(OURS)
    if isinstance(ours, Mapping) and isinstance(number := ours.get("format", 0), int) and number > FORMAT:
        raise CheckpointError(
            f"'{path}' has format {number}; this version of fabric_template reads up to {FORMAT}: update it with"
            " pip install -U, or save the checkpoint with this version"
        )


def check_fits(net: torch.nn.Module, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint of another model, naming the first keys and shapes that differ."""
    expected = net.state_dict()
    difference = explain_mismatch(expected, find_weights(dict(checkpoint), expected))
    if difference:
        raise OtherModel(
            f"Error(s) in loading state_dict for {type(net).__name__}: '{path}' is of another model: {difference}; build the"
            " model with the same arguments"
        )


class WeightsOnly(CheckpointError, KeyError):
    """A checkpoint without the state of a training: a KeyError, too, as Trainer has it."""

    __str__ = ValueError.__str__  # a KeyError's is in quotes


def check_trained(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a checkpoint that has no state of a training."""
    if missing := [key for key in ("optimizer_states", "lr_schedulers") if key not in checkpoint]:
        what = "optimizer" if missing[0] == "optimizer_states" else "learning rate scheduler"
        raise WeightsOnly(
            f"resume={str(path)!r}: the file holds weights only ({missing[0]} is missing); use load= to start a new run from"
            f" them. Trying to restore {what} state but checkpoint contains only the model. This is probably due to"
            " `ModelCheckpoint.save_weights_only` being set to `True`."
        )


def load_weights(run: Run, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Put a checkpoint's weights into the module, by its own hooks."""
    if run.steps.sharded is not None and SHARDS in checkpoint:
        from .bring import bring

        bring(run, checkpoint, path, "state_dict")
    run.hooks.call_module("on_load_checkpoint", checkpoint)
    weights = find_weights(checkpoint, run.trained.net.state_dict())
    if run.steps.sharded is not None:  # of one file, and what the hook has put in
        from .bring import bring

        bring(run, {"state_dict": weights}, path, "state_dict")
    strict = getattr(run.trained.owner, "strict_loading", True)
    with given_to(run.trained.net, path, OtherModel):
        run.trained.net.load_state_dict(weights, strict=strict if isinstance(strict, bool) else True)


def load_training_state(run: Run, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Optimizers, schedulers, scaler, counters: what fit needs beyond the weights, the random numbers excepted."""
    precision = run.fabric.strategy.precision
    if scaler := checkpoint.get(type(precision).__qualname__):
        with given_to(precision, path):
            precision.load_state_dict(scaler)
    check_trained(checkpoint, path)
    states, optimizers = checkpoint["optimizer_states"], run.optimizing.optimizers
    if not states and optimizers:  # as a module's hook has it that empties the list
        run.said.warn(f"resume={str(path)!r}: no optimizer's state is taken from the file, which holds none")
    elif len(states) != len(optimizers):
        raise CheckpointError(
            f"resume={str(path)!r}: the file holds {len(states)} optimizers, this run has {len(optimizers)}; use load= to"
            " take the weights only"
        )
    ours = run.origin.pending
    mine = of_this_rank(run, ours) if ours is not None else {}
    check_optimizers(run, (ours or {}).get("fingerprint"))
    put_back_groups(run, mine.get("held", {}).get("groups", ()))
    if run.steps.sharded is not None and states:
        from .bring import bring

        bring(run, checkpoint, path, "optimizer_states")
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=False):
        put_into_optimizer(optimizer, state, path)
        check_loaded(run, optimizer)
    for config, state in zip(run.optimizing.schedulers, checkpoint["lr_schedulers"], strict=False):
        put_into_scheduler(config.scheduler, state, path)
    step = int(checkpoint.get("global_step", 0))
    if mine.get("train") is None:
        fit = checkpoint.get("loops", {}).get("fit_loop", {})
        run.data.loader_states = fit.get("state_dict", {}).get("combined_loader", [])
    if ours is None:
        run.at.load(step, counters_of(checkpoint, run.at.window))
        return
    run.at.load(step, ours)
    run.origin.saved_in = ours["saved_in"]
    know_the_stop(run, ours)
    run.log.rates, run.metrics.callback = list(ours["rates"]), dict(mine["metrics"]["callback"])
    run.keeper.load_state_dict(ours["kept"])
    run.keeper.goes_on_from(run, path)


def of_this_rank(run: Run, ours: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank gave to the checkpoint; if it was not there what the first one gave, but for its random numbers."""
    ranks, rank = ours["ranks"], run.fabric.global_rank
    if rank < len(ranks):
        return ranks[rank]
    part = {**ranks[0], "rng": rng_state_of_another(ranks[0]["rng"], rank)}
    # the seeds by which the ranks share the samples stay, the first one's workers do not
    for stage in ("train", "val"):
        if part[stage] is not None:
            part[stage] = {**part[stage], "sources": [None] * len(part[stage]["sources"])}
    return part


def load_callbacks(run: Run, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Give the datamodule and every callback their part of the checkpoint."""
    part = checkpoint.get(type(run.trained.datamodule).__qualname__) if run.trained.datamodule is not None else None
    if part and callable(getattr(run.trained.datamodule, "load_state_dict", None)):
        run.trained.datamodule.load_state_dict(part)
    if not isinstance(states := checkpoint.get("callbacks"), Mapping):
        return
    known = {getattr(callback, "state_key", type(callback).__qualname__) for callback in run.hooks.callbacks}
    missing = sorted(map(str, states.keys() - known))
    if not any(is_a(callback, "Checkpoint") for callback in run.hooks.callbacks):  # the loop keeps files itself
        missing = [key for key in missing if not key.startswith("ModelCheckpoint")]
    if missing:
        run.said.warn(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided during"
            f" `Trainer` instantiation. Please add the following callbacks: {missing}."
        )
    run.hooks.call_callbacks("on_load_checkpoint", checkpoint)
    for callback in run.hooks.callbacks:
        state = states.get(getattr(callback, "state_key", type(callback).__qualname__))
        if callable(getattr(callback, "load_state_dict", None)):
            put_into_callback(callback, state, path, checkpoint.get("global_step", 0))


def know_the_stop(run: Run, state: Mapping[str, Any]) -> None:
    """Know again that a run was to stop, and how much of its time is over.

    A run that ``should_stop`` has ended stays so for ``resume="auto"``, the word of a requeue. "last" or a path is a
    wish to go on. Where min_epochs or min_steps still kept it going, it goes on knowing that it is to stop then.
    """
    stop = run.stop
    stop.elapsed = state.get("elapsed", 0.0)
    if state.get("should_stop") and (run.origin.is_auto or not stop.may_stop):
        stop.ask()
