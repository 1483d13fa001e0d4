"""Validate and test every batch of every loader, with the hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .hooks import overridden
from .module_adapter import (
    evaluate_with_iterator,
    takes_argument,
    takes_batch_idx,
    takes_iterator,
)

if TYPE_CHECKING:
    from .run_state import RunState

_HOOK_NAMES = {"validate": "validation", "sanity_check": "validation", "test": "test"}
_LOADER_NAMES = {"validate": "val", "sanity_check": "val", "test": "test"}


def evaluate(
    run: RunState, stage: str, max_batches: int | float | None = None
) -> list[dict[str, Any]]:
    """Run ``validation_step`` or ``test_step`` over the loaders of the run, one after the other.

    Args:
        stage: "validate", "sanity_check" or "test".
        max_batches: Evaluate at most this many batches of each loader.

    Returns:
        What was logged or returned, a dict for each loader.
    """
    name = _HOOK_NAMES[stage]
    loaders = run.data.eval_loaders
    if loaders.count_batches(max_batches) == 0:
        return []
    check_dataloader_idx(run, name, loaders.has_several)
    stage_before, run.progress.stage = run.progress.stage, stage
    run.progress.eval_batches_done = 0
    run.results.start_evaluation()
    run.history.start_evaluation()
    run.data.set_epoch(stage, run.progress.epochs_done)
    loaders.start(max_batches)
    with evaluation_mode(run, name):
        run.hooks.call(f"on_{name}_start")
        run.hooks.call(f"on_{name}_epoch_start")
        run.console.start_evaluation(run, loaders.count_batches(max_batches))
        evaluate_batches(run, name, max_batches)
        run.history.end_evaluation_batches()
        run.hooks.call(f"on_{name}_epoch_end")
        results = run.history.end_evaluation()
        run.loggers.log_evaluation(run)
        if run.progress.phase == "validation":
            run.progress.phase = "validation_end"
        run.hooks.call(f"on_{name}_end")
        run.results.reset()
    run.console.end_evaluation(run)
    run.progress.stage = stage_before
    return results


def evaluate_batches(run: RunState, name: str, max_batches: int | float | None) -> None:
    """Run the step and the hooks of every batch."""
    hooks, results, loaders = run.hooks, run.results, run.data.eval_loaders
    method = getattr(hooks.source, f"{name}_step")
    step = run.make_step(f"{name}_step", method)
    if takes_iterator(method):
        evaluate_with_iterator(run, name, step, max_batches, run.history.outputs)
        return
    arguments = step_arguments(method, loaders.has_several)
    current_loader = 0
    for batch, batch_idx, dataloader_idx in loaders.batches(max_batches):
        if dataloader_idx != current_loader:
            run.history.end_loader()
            current_loader = dataloader_idx
        run.progress.count_eval_batch()
        results.start_batch(batch, dataloader_idx if loaders.has_several else None)
        place = (batch_idx, dataloader_idx) if loaders.has_several else (batch_idx,)
        hooks.call(f"on_{name}_batch_start", batch, *place)
        output = step(batch, *arguments(batch_idx, dataloader_idx))
        run.history.add_evaluation_output(output, dataloader_idx)
        hooks.call(f"on_{name}_batch_end", output, batch, *place)
        results.end_batch()
        run.loggers.log_evaluation_step(run, dataloader_idx)
        run.console.update(run)


def step_arguments(method: Callable, has_several: bool) -> Callable[[int, int], tuple[int, ...]]:
    """Return a function of (batch_idx, dataloader_idx) to what the step takes besides the batch."""
    with_batch_idx = takes_batch_idx(method)
    with_loader = has_several and takes_argument(method, "dataloader_idx")

    def arguments(batch_idx: int, dataloader_idx: int) -> tuple[int, ...]:
        if with_loader:
            return (batch_idx, dataloader_idx) if with_batch_idx else (dataloader_idx,)
        return (batch_idx,) if with_batch_idx else ()

    return arguments


@contextmanager
def evaluation_mode(run: RunState, name: str) -> Iterator[None]:
    """Switch to eval mode without gradients, and back to the mode of each module, also after an error."""
    is_inference = run.config.inference_mode and run.stage != "fit"
    modes = [(module, module.training) for module in run.network.modules()]
    with torch.inference_mode() if is_inference else torch.no_grad():
        try:
            _switch_mode(run, f"on_{name}_model_eval", run.network.eval)
            yield
            _switch_mode(run, f"on_{name}_model_train", lambda: _restore_modes(modes))
        except BaseException:
            _restore_modes(modes)
            raise


def _switch_mode(run: RunState, hook: str, default: Callable[[], Any]) -> None:
    """Call the module's own hook, or the default after the callbacks' hooks."""
    run.hooks.call_callbacks(hook)
    own = run.hooks.module_method(hook)
    (own or default)()


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        module.training = is_training


def check_dataloader_idx(run: RunState, name: str, has_several: bool) -> None:
    """Refuse steps and hooks whose ``dataloader_idx`` does not fit the number of loaders."""
    if not run.is_lightning_module:
        return
    for hook in (f"{name}_step", f"on_{name}_batch_start", f"on_{name}_batch_end"):
        method = overridden(run.module, hook)
        if method is None or takes_iterator(method):
            continue
        loader = "val_dataloaders" if name == "validation" else f"{name}_dataloaders"
        parameter = inspect.signature(method).parameters.get("dataloader_idx")
        is_required = parameter is not None and parameter.default is parameter.empty
        if has_several and not takes_argument(method, "dataloader_idx"):
            raise RuntimeError(
                f"You provided multiple `{loader}`, but no `dataloader_idx` argument in"
                f" `{type(run.model).__name__}.{hook}()`. Try adding `dataloader_idx=0` to its signature."
            )
        if not has_several and is_required:
            raise RuntimeError(
                f"You provided only a single `{loader}`, but have included `dataloader_idx` in"
                f" `{type(run.model).__name__}.{hook}()`. Either remove the argument or give it a default"
                " value i.e. `dataloader_idx=0`."
            )
