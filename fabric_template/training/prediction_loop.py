"""Run ``predict_step`` or ``forward`` over every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device

from .evaluation_loop import check_dataloader_idx, evaluation_mode, step_arguments
from .hooks import overridden
from .module_adapter import evaluate_with_iterator, takes_iterator

if TYPE_CHECKING:
    from .run_state import RunState


class Predictions:
    """The predictions, and the indices of their samples.

    Attributes:
        outputs: By loader and batch, on the CPU; empty where only callbacks see them.
        batch_indices: The indices of the samples, by loader and batch.
        current_indices: Those of the current batch.
    """

    def __init__(self, num_loaders: int, has_several: bool) -> None:
        self.outputs: list[list[Any]] = [[] for _ in range(num_loaders)]
        self.batch_indices: list[list[list[int]]] = [[] for _ in range(num_loaders)]
        self.current_indices: list[int] = []
        self._has_several = has_several

    def as_returned(self) -> list[Any]:
        """Return the outputs by batch; for several loaders a list of such lists."""
        return self.outputs if self._has_several else self.outputs[0]


def predict(run: RunState, keep: bool) -> list[Any] | None:
    """Predict every batch of every loader.

    Args:
        keep: Return the predictions. False: only callbacks see them.
    """
    loaders = run.data.eval_loaders
    if loaders.count_batches() == 0:
        return [] if keep else None
    check_dataloader_idx(run, "predict", loaders.has_several)
    run.progress.stage = "predict"
    run.progress.eval_batches_done = 0
    run.predictions = Predictions(len(loaders.loaders), loaders.has_several)
    run.data.set_epoch("predict", run.progress.epochs_done)
    loaders.start()
    with evaluation_mode(run, "predict"):
        run.hooks.call("on_predict_start")
        run.hooks.call("on_predict_epoch_start")
        run.console.start_evaluation(run, loaders.count_batches())
        predict_batches(run, keep)
        run.hooks.call("on_predict_epoch_end")
        run.hooks.call("on_predict_end")
    return run.predictions.as_returned() if keep else None


def predict_batches(run: RunState, keep: bool) -> None:
    """Run the step and the hooks of every batch."""
    hooks, loaders, predictions = run.hooks, run.data.eval_loaders, run.predictions
    method = predict_method(run)
    step = run.make_step("predict_step", method)
    if takes_iterator(method):
        outputs = predictions.outputs if keep else [[] for _ in predictions.outputs]
        evaluate_with_iterator(run, "predict", step, None, outputs)
        return
    is_own_step = overridden(hooks.source, "predict_step") is not None
    arguments = step_arguments(method, loaders.has_several) if is_own_step else lambda *_: ()
    # BasePredictionWriter asks for all predictions at the end, also where predict returns none.
    intervals = [getattr(callback, "interval", None) for callback in hooks.callbacks]
    keep = keep or any(getattr(interval, "on_epoch", False) for interval in intervals)
    for batch, batch_idx, dataloader_idx in loaders.batches():
        run.progress.count_eval_batch()
        place = (batch_idx, dataloader_idx) if loaders.has_several else (batch_idx,)
        predictions.current_indices = loaders.batch_indices(dataloader_idx, batch_idx)
        hooks.call("on_predict_batch_start", batch, *place)
        output = step(batch, *arguments(batch_idx, dataloader_idx))
        if output is None:
            run.warn_once("predict returned None if it was on purpose, ignore this warning...")
        if predictions.current_indices:
            predictions.batch_indices[dataloader_idx].append(predictions.current_indices)
        hooks.call("on_predict_batch_end", output, batch, *place)
        if keep:
            predictions.outputs[dataloader_idx].append(move_data_to_device(output, "cpu"))
        run.console.update(run)


def predict_method(run: RunState) -> Callable:
    """Return the model's ``predict_step``, or what it does with a batch."""
    own = overridden(run.hooks.source, "predict_step")
    if own is not None:
        return own
    if run.is_lightning_module:
        return run.module.forward
    return getattr(run.model, "forward", None) or run.network
