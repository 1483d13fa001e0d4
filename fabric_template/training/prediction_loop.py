"""Prediction: ``predict_step`` or ``forward`` over every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device

from .evaluation_loop import check_dataloader_idx, evaluation_mode, step_arguments
from .hooks import overridden

if TYPE_CHECKING:
    from collections.abc import Callable

    from .run_state import RunState


def predict(run: RunState, keep: bool) -> list[Any] | None:
    """Predict every batch of every loader.

    Args:
        keep: Return the predictions. False: only callbacks see them.

    Returns:
        The outputs by batch on the CPU; for several loaders a list of such lists.
    """
    loaders = run.data.eval_loaders
    if loaders.count_batches() == 0:
        return [] if keep else None
    check_dataloader_idx(run, "predict", loaders.has_several)
    run.progress.stage = "predict"
    run.progress.eval_batches_done = 0
    predictions: list[list[Any]] = [[] for _ in loaders.loaders]
    with evaluation_mode(run, "predict"):
        run.hooks.call("on_predict_start")
        run.hooks.call("on_predict_epoch_start")
        run.console.start_evaluation(run, loaders.count_batches())
        _predict_batches(run, predictions, keep)
        run.hooks.call("on_predict_epoch_end")
        run.hooks.call("on_predict_end")
    run.progress.stage = None
    if not keep:
        return None
    return predictions if loaders.has_several else predictions[0]


def _predict_batches(run: RunState, predictions: list[list[Any]], keep: bool) -> None:
    hooks, loaders = run.hooks, run.data.eval_loaders
    method = _predict_method(run)
    step = hooks.inside("predict_step", run.steps.get("predict_step", method))
    is_own_step = overridden(hooks.source, "predict_step") is not None
    arguments = step_arguments(method) if is_own_step else lambda *_: ()
    for batch, batch_idx, dataloader_idx in loaders.batches():
        run.progress.eval_batches_done += 1
        place = (batch_idx, dataloader_idx) if loaders.has_several else (batch_idx,)
        loaders.note_batch_indices(dataloader_idx, batch_idx)
        hooks.call("on_predict_batch_start", batch, *place)
        output = step(batch, *arguments(batch_idx, dataloader_idx))
        hooks.call("on_predict_batch_end", output, batch, *place)
        if keep:
            predictions[dataloader_idx].append(move_data_to_device(output, "cpu"))
        run.console.update(run)


def _predict_method(run: RunState) -> Callable:
    """Return the model's ``predict_step``, or what it does with a batch."""
    own = overridden(run.hooks.source, "predict_step")
    if own is not None:
        return own
    if run.is_lightning_module:
        return run.module.forward
    return getattr(run.model, "forward", None) or run.network
