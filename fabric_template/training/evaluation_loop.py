"""Validate, test and predict on every batch of every loader, and call the hooks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device

from ..lightning_compat.overrides import overridden
from ..loggers.row import name_outputs
from .module_adapter import takes_argument, takes_batch_idx

if TYPE_CHECKING:
    from .run_state import RunState


def evaluate(
    run: RunState, stage: str, max_batches: int | float = math.inf
) -> list[dict[str, Any]]:
    """Run ``validation_step`` or ``test_step`` over the loaders of the run, one after the other.

    Args:
        stage: "validate", "sanity_check" or "test".
        max_batches: Evaluate at most this many batches of each loader.

    Returns:
        A dict for each loader with the values that were logged or returned.
    """
    name, loader_name = ("test", "test") if stage == "test" else ("validation", "val")
    if getattr(run.config, f"limit_{loader_name}_batches") == 0:
        return []
    stage_before, run.progress.stage = run.progress.stage, stage
    run.data.setup_eval_loaders(loader_name)
    loaders = run.data.eval_loaders
    num_batches = loaders.count_batches(max_batches)
    if num_batches == 0:
        run.progress.stage = stage_before
        return []
    check_dataloader_idx(run, name, loaders.has_several)
    run.progress.eval_batches_done = 0
    run.results.start_evaluation()
    loaders.set_epoch()
    loaders.start(max_batches)
    with evaluation_mode(run, name):
        run.hooks.call(f"on_{name}_start")
        run.hooks.call(f"on_{name}_epoch_start")
        run.console.start_evaluation(run, num_batches)
        evaluate_batches(run, name, max_batches)
        run.results.end_loader()
        run.hooks.call(f"on_{name}_epoch_end")
        values = run.results.end_evaluation()
        if stage == "validate":
            run.row.collect_validation(values.row)
        run.loggers.log_evaluation(run, values.logged, values.row)
        if run.progress.phase == "validation":
            run.progress.phase = "validation_end"
        run.hooks.call(f"on_{name}_end")
        run.results.reset()
    run.progress.stage = stage_before
    return values.results


def evaluate_batches(run: RunState, name: str, max_batches: int | float) -> None:
    hooks, results, has_several = run.hooks, run.results, run.data.eval_loaders.has_several
    step = evaluation_step(run, name, getattr(run.module, f"{name}_step"), has_several)
    current_loader = 0
    for batch, batch_idx, dataloader_idx in run.data.eval_loaders.batches(max_batches):
        if dataloader_idx != current_loader:
            results.end_loader()
            current_loader = dataloader_idx
        run.progress.count_eval_batch()
        place = (batch_idx, dataloader_idx) if has_several else (batch_idx,)
        results.start_batch(batch, dataloader_idx if has_several else None)
        hooks.call(f"on_{name}_batch_start", batch, *place)
        output = step(batch, batch_idx, dataloader_idx)
        results.add_returned(name_step_values(run, output, dataloader_idx))
        hooks.call(f"on_{name}_batch_end", output, batch, *place)
        results.end_batch()
        run.loggers.log_evaluation_step(run, dataloader_idx)
        run.console.update(run)


def name_step_values(run: RunState, output: Any, dataloader_idx: int) -> dict[str, torch.Tensor]:
    """Return the values in the output of a step, keyed by their columns in metrics.csv.

    For a LightningModule, which logs values itself, return only the loss.
    """
    prefix, loaders = prefix_of_stage(run), run.data.eval_loaders
    values = name_outputs(output, prefix)
    if run.is_lightning_module:
        values = {name: v for name, v in values.items() if name == f"{prefix}_loss"}
    elif loaders.names:
        first = loaders.names[dataloader_idx]
        return {first + name.removeprefix(prefix): v for name, v in values.items()}
    if loaders.has_several:
        values = {f"{name}/dataloader_idx_{dataloader_idx}": v for name, v in values.items()}
    return values


def prefix_of_stage(run: RunState) -> str:
    return "test" if run.progress.stage == "test" else "val"


class Predictions:
    """Collect predictions by loader and batch.

    Attributes:
        outputs: The predictions on the CPU. Empty if only callbacks receive them.
        batch_indices: The indices of the samples in each batch.
        current_indices: The indices of the samples in the current batch.
    """

    def __init__(self, num_loaders: int, has_several: bool) -> None:
        self.outputs: list[list[Any]] = [[] for _ in range(num_loaders)]
        self.batch_indices: list[list[list[int]]] = [[] for _ in range(num_loaders)]
        self.current_indices: list[int] = []
        self._has_several = has_several

    def as_returned(self) -> list[Any]:
        """Return the outputs as one list, or as a list of lists for several loaders."""
        return self.outputs if self._has_several else self.outputs[0]


def predict(run: RunState) -> list[Any] | None:
    """Run ``predict_step`` or ``forward`` over every batch of every loader."""
    if run.config.limit_predict_batches == 0:
        return None
    run.data.setup_eval_loaders("predict")
    loaders = run.data.eval_loaders
    num_batches = loaders.count_batches()
    if num_batches == 0:
        return [] if run.returns_predictions else None
    check_dataloader_idx(run, "predict", loaders.has_several)
    run.progress.eval_batches_done = 0
    run.predictions = Predictions(len(loaders.loaders), loaders.has_several)
    loaders.set_epoch()
    loaders.start()
    with evaluation_mode(run, "predict"):
        run.hooks.call("on_predict_start")
        run.hooks.call("on_predict_epoch_start")
        run.console.start_evaluation(run, num_batches)
        predict_batches(run)
        run.hooks.call("on_predict_epoch_end")
        run.hooks.call("on_predict_end")
    return run.predictions.as_returned() if run.returns_predictions else None


def predict_batches(run: RunState) -> None:
    hooks, loaders, predictions = run.hooks, run.data.eval_loaders, run.predictions
    keep = run.returns_predictions
    method = overridden(run.module, "predict_step") or run.model.forward
    step = evaluation_step(run, "predict", method, loaders.has_several)
    # Keep the predictions for BasePredictionWriter, even if predict does not return them.
    intervals = [getattr(callback, "interval", None) for callback in hooks.callbacks]
    keep = keep or any(getattr(interval, "on_epoch", False) for interval in intervals)
    for batch, batch_idx, dataloader_idx in loaders.batches():
        run.progress.count_eval_batch()
        place = (batch_idx, dataloader_idx) if loaders.has_several else (batch_idx,)
        predictions.current_indices = loaders.batch_indices(dataloader_idx, batch_idx)
        hooks.call("on_predict_batch_start", batch, *place)
        output = step(batch, batch_idx, dataloader_idx)
        if output is None:
            run.warn_once("predict returned None if it was on purpose, ignore this warning...")
        if predictions.current_indices:
            predictions.batch_indices[dataloader_idx].append(predictions.current_indices)
        hooks.call("on_predict_batch_end", output, batch, *place)
        if keep:
            predictions.outputs[dataloader_idx].append(move_data_to_device(output, "cpu"))
        run.console.update(run)


def evaluation_step(run: RunState, name: str, method: Callable, has_several: bool) -> Callable:
    """Wrap a step as a function of (batch, batch_idx, dataloader_idx)."""
    step = run.make_step(f"{name}_step", method)
    # Do not pass an index to forward, which takes only the batch.
    is_step = overridden(run.module, f"{name}_step") is not None
    with_batch_idx = is_step and takes_batch_idx(method)
    with_loader = is_step and has_several and takes_argument(method, "dataloader_idx")

    def call(batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        arguments = [batch]
        if with_batch_idx:
            arguments.append(batch_idx)
        if with_loader:
            arguments.append(dataloader_idx)
        return step(*arguments)

    return call


@contextmanager
def evaluation_mode(run: RunState, name: str) -> Iterator[None]:
    """Switch to eval mode without gradients, and restore each module's mode at the end."""
    is_inference = run.config.inference_mode and run.stage != "fit"
    modes = [(module, module.training) for module in run.network.modules()]

    def restore_modes() -> None:
        for module, is_training in modes:
            module.training = is_training

    with torch.inference_mode() if is_inference else torch.no_grad():
        try:
            switch_mode(run, f"on_{name}_model_eval", run.network.eval)
            yield
            switch_mode(run, f"on_{name}_model_train", restore_modes)
        except BaseException:
            restore_modes()
            raise


def switch_mode(run: RunState, hook: str, default: Callable[[], Any]) -> None:
    """Call a hook of callbacks and module. For a module without the hook, call ``default``."""
    run.hooks.call_callbacks(hook)
    (run.hooks.module_method(hook) or default)()


def check_dataloader_idx(run: RunState, name: str, has_several: bool) -> None:
    """Raise an error if ``dataloader_idx`` is missing for several loaders, or required for one."""
    if not run.is_lightning_module:
        return
    loader = "val_dataloaders" if name == "validation" else f"{name}_dataloaders"
    for hook in (f"{name}_step", f"on_{name}_batch_start", f"on_{name}_batch_end"):
        method = overridden(run.module, hook)
        if method is None:
            continue
        where = f"`{type(run.model).__name__}.{hook}()`"
        parameter = inspect.signature(method).parameters.get("dataloader_idx")
        if has_several and not takes_argument(method, "dataloader_idx"):
            raise RuntimeError(
                f"You provided multiple `{loader}`, but no `dataloader_idx` argument in {where}. Try adding"
                " `dataloader_idx=0` to its signature."
            )
        if not has_several and parameter is not None and parameter.default is parameter.empty:
            raise RuntimeError(
                f"You provided only a single `{loader}`, but have included `dataloader_idx` in {where}."
                " Either remove the argument or give it a default value i.e. `dataloader_idx=0`."
            )
