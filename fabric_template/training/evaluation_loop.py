"""Validate, test and predict on every batch of every loader, and call the hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..lightning_compat.overrides import overridden
from ..loggers.row import name_outputs
from .module_adapter import parameters_of, takes_batch_idx, takes_dataloader_idx

if TYPE_CHECKING:
    from ..data.loaders import StageLoaders
    from .run import Run


def evaluate(run: Run, stage: str, max_batches: int | float = math.inf) -> list[dict[str, Any]]:
    """Run ``validation_step`` or ``test_step`` on every batch of every loader.

    Args:
        stage: "validate", "sanity_check" or "test".
        max_batches: The maximum number of batches of each loader.

    Returns:
        A list with one dict per loader, which contains the values that were logged or returned.
    """
    name, loader_name = ("test", "test") if stage == "test" else ("validation", "val")
    if getattr(run.config, f"limit_{loader_name}_batches") == 0:
        return []
    with run.progress.in_stage(stage):
        run.data.setup_eval_loaders(loader_name)
        loaders = run.data.eval_loaders
        num_batches = loaders.count_batches(max_batches)
        if num_batches == 0:
            return []
        start_evaluation(run, name, loaders, max_batches)
        run.results.start_evaluation()
        with evaluation_mode(run, name):
            run.hooks.call(f"on_{name}_start")
            run.hooks.call(f"on_{name}_epoch_start")
            run.console.start_evaluation(run, num_batches)
            for output, dataloader_idx in run_batches(run, name, loaders, max_batches):
                run.results.add_returned(name_step_values(run, loaders, output, dataloader_idx))
            run.results.end_loader()
            run.hooks.call(f"on_{name}_epoch_end")
            results, logged, row = run.results.end_evaluation()
            run.loggers.log_evaluation(logged, row)
            if stage != "sanity_check" and not any(results):
                warn_of_silent_step(run, name)
            if run.stage == "fit" and stage == "validate":
                run.row.collect_validation(row)
                run.progress.enter("report_validation")
            run.hooks.call(f"on_{name}_end")
            run.results.reset()
    return results


def warn_of_silent_step(run: Run, name: str) -> None:
    if run.results.is_enabled and not run.is_lightning_module:
        run.warn_once(
            f"{name}_step returned no value and logged no metric. Return the loss at the end of the"
            " step."
        )


def start_evaluation(
    run: Run, name: str, loaders: StageLoaders, max_batches: int | float = math.inf
) -> None:
    check_dataloader_idx(run, name, loaders.has_several)
    run.progress.start_evaluation()
    loaders.set_epoch()
    loaders.start(max_batches)


def run_batches(
    run: Run, name: str, loaders: StageLoaders, max_batches: int | float = math.inf
) -> Iterator[tuple[Any, int]]:
    """Run the evaluation step and the hooks for every batch. Yield (output, dataloader_idx).

    Args:
        name: "validation", "test" or "predict".
    """
    hooks, results, has_several = run.hooks, run.results, loaders.has_several
    step = evaluation_step(run, name, has_several)
    current_loader = 0
    for batch, batch_idx, dataloader_idx in loaders.batches(max_batches):
        if dataloader_idx != current_loader:
            results.end_loader()
            current_loader = dataloader_idx
        run.progress.count_eval_batch()
        indices = (batch_idx, dataloader_idx) if has_several else (batch_idx,)
        results.start_batch(batch, dataloader_idx if has_several else None)
        if name == "predict":
            run.data.predictions.start_batch(batch_idx, dataloader_idx)
        hooks.call(f"on_{name}_batch_start", batch, *indices)
        output = step(batch, batch_idx, dataloader_idx)
        yield output, dataloader_idx
        hooks.call(f"on_{name}_batch_end", output, batch, *indices)
        results.end_batch()
        run.loggers.log_evaluation_step(dataloader_idx)
        run.console.update(run)


def name_step_values(
    run: Run, loaders: StageLoaders, output: Any, dataloader_idx: int
) -> dict[str, torch.Tensor]:
    """Convert a validation or test step's output to a dict of values, keyed by CSV column name."""
    prefix = "test" if run.progress.stage == "test" else "val"
    if run.is_lightning_module and isinstance(output, Mapping):
        losses = [output[name] for name in ("loss", f"{prefix}_loss") if name in output]
        output = losses[0] if losses else None
    values = name_outputs(output, prefix)
    # Use only the loss that a LightningModule's step returned, because the step logs other values
    # with self.log.
    if run.is_lightning_module:
        values = {name: v for name, v in values.items() if name == f"{prefix}_loss"}
    elif loaders.names:
        first = loaders.names[dataloader_idx]
        return {first + name.removeprefix(prefix): v for name, v in values.items()}
    if loaders.has_several:
        values = {f"{name}/dataloader_idx_{dataloader_idx}": v for name, v in values.items()}
    return values


def predict(run: Run) -> list[Any] | None:
    """Run ``predict_step`` or ``forward`` on every batch of every loader."""
    if run.config.limit_predict_batches == 0:
        return None
    run.data.setup_eval_loaders("predict")
    loaders, predictions = run.data.eval_loaders, run.data.predictions
    is_returned = run.plan.returns_predictions
    num_batches = loaders.count_batches()
    if num_batches == 0:
        return [] if is_returned else None
    start_evaluation(run, "predict", loaders)
    # BasePredictionWriter needs the predictions, even if predict does not return them.
    intervals = [getattr(callback, "interval", None) for callback in run.hooks.callbacks]
    is_kept = is_returned or any(getattr(i, "on_epoch", False) for i in intervals)
    predictions.start(loaders)
    with evaluation_mode(run, "predict"):
        run.hooks.call("on_predict_start")
        run.hooks.call("on_predict_epoch_start")
        run.console.start_evaluation(run, num_batches)
        for output, dataloader_idx in run_batches(run, "predict", loaders):
            if output is None:
                run.warn_once("predict returned None if it was on purpose, ignore this warning...")
            predictions.end_batch(output, dataloader_idx, is_kept)
        run.hooks.call("on_predict_epoch_end")
        run.hooks.call("on_predict_end")
    return predictions.as_returned() if is_returned else None


def evaluation_step(run: Run, name: str, has_several: bool) -> Callable:
    """Wrap a step method in a function that takes (batch, batch_idx, dataloader_idx)."""
    method = overridden(run.module, f"{name}_step")
    # Without a predict_step, predict calls forward, which takes only the batch.
    step = run.make_step(f"{name}_step", run.model.forward if method is None else method)
    with_batch_idx = method is not None and takes_batch_idx(method)
    with_loader = method is not None and has_several and takes_dataloader_idx(method)

    def call(batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        arguments = [batch]
        if with_batch_idx:
            arguments.append(batch_idx)
        if with_loader:
            arguments.append(dataloader_idx)
        return step(*arguments)

    return call


@contextmanager
def evaluation_mode(run: Run, name: str) -> Iterator[None]:
    """Disable gradients and set eval mode in a `with` block, then restore each module's mode."""
    # TorchScript cannot run in inference mode after a backward pass.
    is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in run.network.modules())
    is_inference = run.config.inference_mode and run.stage != "fit" and not is_scripted
    gradients_off = torch.inference_mode if is_inference else torch.no_grad
    with gradients_off(), run.steps.captured_modes() as restore_modes:
        switch_mode(run, f"on_{name}_model_eval", run.network.eval)
        yield
        switch_mode(run, f"on_{name}_model_train", restore_modes)


def switch_mode(run: Run, hook: str, default: Callable[[], Any]) -> None:
    """Switch between train and eval mode, using the model's own hook if it has one."""
    run.hooks.call_callbacks(hook)
    (run.hooks.module_method(hook) or default)()


def check_dataloader_idx(run: Run, name: str, has_several: bool) -> None:
    """Raise an error if a hook lacks ``dataloader_idx`` for several loaders or needs it for one."""
    loader = "val_dataloader" if name == "validation" else f"{name}_dataloader"
    functions = run.plan.functions
    for hook in (f"{name}_step", f"on_{name}_batch_start", f"on_{name}_batch_end"):
        method = overridden(run.module, hook)
        if method is None:
            continue
        where = f"`{hook}()`" if hook in functions else f"`{type(run.model).__name__}.{hook}()`"
        parameter = parameters_of(method).get("dataloader_idx")
        # dataloader_idx is optional in the steps of a model that is not a LightningModule.
        is_optional = hook == f"{name}_step" and not run.is_lightning_module
        if has_several and not is_optional and not takes_dataloader_idx(method):
            raise RuntimeError(
                f"You provided multiple `{loader}`, but no `dataloader_idx` argument in {where}."
                " Try adding `dataloader_idx=0` to its signature."
            )
        if not has_several and parameter is not None and parameter.default is parameter.empty:
            raise RuntimeError(
                f"You provided only a single `{loader}`, but have included `dataloader_idx` in"
                f" {where}. Either remove the argument or give it a default value i.e."
                " `dataloader_idx=0`."
            )
