"""Checkpoint: what a run's state is, in Lightning's layout.

Keys are Trainer's (``state_dict, optimizer_states, lr_schedulers, epoch, global_step, loops, callbacks, ...``), so that
``LitModel.load_from_checkpoint(path)`` and ``Trainer.fit(ckpt_path=path)`` read our files and we read theirs. What
Trainer does not keep (random states, the position in the epoch, running sums, the place in the logs) lies under one key, ours.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from lightning.fabric import __version__ as lightning_version

from ..core.overrides import class_of, overrides
from ..core.ranks import gather, share_of
from ..core.run import Run
from ..core.said import Said
from ..exact.randomness import rng_state
from .ordinary import ordinary_bytes

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
    net, owner, datamodule = run.trained.net, run.trained.owner, run.trained.datamodule
    state: dict[str, Any] = {
        "epoch": run.at.current_epoch if epoch is None else epoch,
        "global_step": run.at.global_step,
        "pytorch-lightning_version": lightning_version,
        "state_dict": (net if overrides(owner, "state_dict") is None else owner).state_dict(),
        "loops": loops_state(run),
    }
    if not weights_only:
        state["callbacks"] = {
            key: part
            for callback in run.hooks.callbacks
            if callable(getattr(callback, "state_dict", None)) and (part := callback.state_dict())
            for key in [getattr(callback, "state_key", type(callback).__qualname__)]
        }
        # of one that has a part on each rank (ZeroRedundancyOptimizer) all of it, on rank zero
        state["optimizer_states"] = [*map(run.fabric.strategy.get_optimizer_state, run.optimizing.optimizers)]
        state["lr_schedulers"] = [config.scheduler.state_dict() for config in run.optimizing.schedulers]
        precision = run.fabric.strategy.precision
        if scaler := precision.state_dict():
            state[type(precision).__qualname__] = scaler
    for part in (owner, datamodule):
        if hparams := getattr(part, "hparams", None):  # under the names by which Lightning's classes read them back
            if hasattr(part, "_hparams_name"):
                state[getattr(part, "CHECKPOINT_HYPER_PARAMS_NAME", "hparams_name")] = part._hparams_name
            key, kind = getattr(part, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters"), type(hparams)
            is_omegaconf = kind.__module__.startswith("omegaconf.")  # Hydra's configurations keep their kind
            state[key] = hparams if is_omegaconf else hyperparameters_of(part, run.config.trusted, run.said)
            if is_omegaconf:
                state[getattr(part, "CHECKPOINT_HYPER_PARAMS_TYPE", "hparams_type")] = kind
    if callable(state_of_data := getattr(datamodule, "state_dict", None)) and (held := state_of_data()):
        state[type(datamodule).__qualname__] = held
    if not weights_only:
        run.hooks.call_callbacks("on_save_checkpoint", state)
    run.hooks.call_module("on_save_checkpoint", state)
    return state if weights_only else canonical({**state, OURS: _our_state(run)})  # the hooks see Trainer's keys only


def hyperparameters_of(owner: Any, trusted: bool, said: Said) -> dict[str, Any]:
    """The hyperparameters of a module or datamodule that a file can hold; said once of the others what becomes of them."""
    hparams = dict(getattr(owner, "hparams", None) or {})
    if not hparams or trusted or ordinary_bytes(hparams) is not None:
        return hparams
    from .plain import without_odd

    kept, text = without_odd(hparams)
    if text is not None:
        said.warn(f"{class_of(owner).__name__}: {text}")
    return kept


def in_pieces(run: Run) -> bool:
    """Return whether each rank writes its own part of a checkpoint."""
    return run.steps.sharded is not None


class Point(NamedTuple):
    """Where a resume goes on in an epoch."""

    batches_done: int  # of the epoch
    total_batches: int
    is_last_batch: bool
    saved_in: str | None  # the hook whose callback saves, with the rest of its batch or epoch still to come
    is_exact: bool = True  # whether nothing of a step that is not done has left a trace


def point_of(run: Run) -> Point:
    """Where a resume goes on from a checkpoint that is saved now.

    After an error in the middle of a step, or where a hook in it saves, that is behind the last window of batches that was
    done. If only hooks or a validation were still to come after its update, they come on resume, as after a callback's save.
    """
    at, fx = run.at, run.metrics.fx
    done, total, is_last = at.batches_done, at.total_batches, at.is_last_batch
    if at.between_epochs or not (run.failure.has_come or run.metrics.in_step):
        # in the middle of a window a model in parts has gradients that nobody can be asked for
        return Point(done, total, is_last, fx, run.steps.sharded is None or not at.accumulates)
    windows = at.batches_that_stepped - at.stepped_before
    if at.steps_in_epoch > windows:
        return Point(done, total, is_last, "on_train_batch_end", is_exact=False)
    undone = max(done - windows * at.window, 0)
    is_exact = undone == (fx == "on_train_batch_start") and run.data.is_quiet()
    return Point(done - undone, total - undone, is_last and not undone, None, is_exact)


def _our_state(run: Run) -> dict[str, Any]:
    if run.origin.pending is not None:  # it goes on from there only now
        return run.origin.pending
    at, point, feed, bookmark = run.at, point_of(run), run.data, run.bookmark
    ranks = {
        "rng": rng_state(),
        "train": feed.train.state(feed.fetched_after(point.batches_done)) if feed.train is not None else None,
        "val": feed.val.state(None) if feed.val is not None else None,
        "returned": run.history.train.state_dict(),
        "metrics": run.metrics.state_dict(),
        "held": bookmark.held.state_dict(),
    }
    gathered = gather(run.fabric, ranks)
    return {
        "format": FORMAT,
        "batch_idx": point.batches_done if not at.between_epochs else 0,
        "epoch": at.epochs_done,
        "saved_in": point.saved_in,
        "is_exact": point.is_exact,
        "window": at.window if at.window != run.config.accumulate_grad_batches else None,
        "is_last_batch": point.is_last_batch,
        "total_batches": point.total_batches,
        "batches_that_stepped": at.batches_that_stepped,
        "stepped_before": at.stepped_before,
        "steps_in_epoch": at.steps_in_epoch,
        "seconds": time.monotonic() - run.log.began,
        **run.stop.state_dict(),
        "fingerprint": dict(bookmark.fingerprint),
        "ranks": gathered,
        "buckets": list(run.steps.buckets.order) if run.steps.buckets is not None else [],
        "loaders_epoch": dict(sorted(run.data.made_in.items())) if run.config.reload_dataloaders_every_n_epochs else {},
        "returned": dict(run.history.returned),
        **bookmark.order_state(),
        **({"shares": shares} if (shares := share_of(run.fabric)[0]) != run.fabric.world_size else {}),
        "rates": list(run.log.rates),
        "evaluated": _evaluated(run, point.saved_in),
        "kept": run.keeper.state_dict(),
        **run.log.rows_state(),
    }


def _evaluated(run: Run, saved_in: str | None) -> list[int]:
    """Evaluation batches so far by loader; in the middle of a validation, which comes again, as it began."""
    is_on = run.at.stage == "validate" and run.at.evaluated and saved_in != "on_validation_end"
    seen = run.log.seen_before if is_on else run.log.seen
    return [seen.get(index, 0) for index in range(max(seen, default=-1) + 1)]


def loops_state(run: Run) -> dict[str, Any]:
    """Trainer's progress counters, as its own loops would hold them at this point."""
    all_four = ("ready", "started", "processed", "completed")

    def progress(total: int, current: int, names: tuple[str, ...] = all_four) -> dict[str, Any]:
        return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}

    two, three = ("ready", "completed"), ("ready", "started", "completed")
    at, point = run.at, point_of(run)
    epoch, batches = progress(at.epochs_done, at.epochs_done), progress(point.total_batches, point.batches_done)
    validated = at.evaluated if point.saved_in == "on_validation_end" else 0
    if not at.between_epochs:  # Trainer counts what it begins, what it has done, and what it has quite finished
        for part in epoch.values():
            part["ready"] += 1
            part["started"] += 1
            part["processed"] += point.saved_in == "on_train_epoch_end"
        for part in batches.values():
            part["completed"] -= point.saved_in == "on_train_batch_end" and run.metrics.train.batch is not None
    steps, current = (at.global_step, at.steps_in_epoch) if run.trained.is_automatic else (0, 0)
    manual = 0 if run.trained.is_automatic else at.global_step
    schedulers = sum(getattr(config.scheduler, "last_epoch", 0) or 0 for config in run.optimizing.schedulers)
    states = run.data.train.sources.loader_states() if run.data.train is not None else []  # of loaders that have one
    fit = {
        "state_dict": {"combined_loader": states} if states else {},
        "epoch_progress": epoch,
        "epoch_loop.state_dict": {"_batches_that_stepped": at.batches_that_stepped},
        "epoch_loop.batch_progress": batches | {"is_last_batch": point.is_last_batch},
        "epoch_loop.scheduler_progress": progress(schedulers, 0, two),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": progress(steps, at.steps_in_epoch if steps else 0, two),
                "zero_grad": progress(steps, 0, three),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": progress(manual, 0, two),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": progress(validated, validated) | {"is_last_batch": validated > 0},
    }
    return {
        "fit_loop": fit,
        "validate_loop": {"state_dict": {}, "batch_progress": progress(0, 0) | {"is_last_batch": False}},
        "test_loop": {"state_dict": {}, "batch_progress": progress(0, 0) | {"is_last_batch": False}},
        "predict_loop": {"state_dict": {}, "batch_progress": progress(0, 0)},
    }


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
        keys = [words.setdefault(key, key) if type(key) is str else canonical(key, words, 1) for key in item]
        return dict(zip(keys, [canonical(value, words, depth - 1) for value in item.values()], strict=True))
    return kind([canonical(value, words, depth - 1) for value in item])
