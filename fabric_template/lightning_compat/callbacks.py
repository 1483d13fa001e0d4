"""Collect, check and sort the callbacks of a loop."""

from __future__ import annotations

import math
import sys
from copy import deepcopy
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback, ModelSummary, Timer

from ..errors import ConfigurationError, ConfigurationTypeError, check_object, describe
from .overrides import as_list, find_callbacks, is_instance_of, overridden

if TYPE_CHECKING:
    from ..config import LoopConfig
    from ..training.run import Run


def parse_callbacks(given: Any, config: LoopConfig) -> list[Any]:
    """Return all callbacks of a loop, in the order in which their hooks are called.

    Args:
        given: Lightning's callbacks, or objects with methods such as on_fit_start.
        config: The options. max_time adds a Timer, and enable_model_summary adds a ModelSummary.
    """
    callbacks = as_list(given)
    check_options(callbacks, config)
    if config.max_time is not None and not find_callbacks(callbacks, "Timer"):
        callbacks.append(Timer(duration=config.max_time, interval="step"))
    if config.enable_model_summary and not find_callbacks(callbacks, "ModelSummary"):
        summary = ModelSummary()
        # Lightning would log the table to stderr, which notebooks show in red. Print it instead.
        summary.summarize = print_summary  # type: ignore[method-assign]
        callbacks.append(summary)
    for entry in _entry_points(tuple(sys.path)):
        callbacks += as_list(entry.load()())
    check_callbacks(callbacks)
    return sort_callbacks(callbacks)


def print_summary(
    summary_data: list[tuple[str, list[Any]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Print a table of the model's layers."""
    columns = [[title, *(str(cell).strip() for cell in cells)] for title, cells in summary_data]
    # Omit the FLOPs column if it is empty. The FLOPs are unknown without an example_input_array.
    columns = [column for column in columns if {*column} - {"FLOPs", "0", "n/a"}]
    lines = list(zip(*columns, strict=True))
    if any("other params" not in line for line in lines[1:]):
        widths = [max(map(len, column)) for column in columns]
        for line in lines:
            print("  ".join(map(str.ljust, line, widths)).rstrip())
    frozen = total_parameters - trainable_parameters
    text = f", {frozen:,} of them frozen" if frozen else ""
    print(f"{total_parameters:,} parameters{text}, {model_size:,.1f} MB")


@cache
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group="lightning.pytorch.callbacks_factory"))


def check_options(callbacks: list[Any], config: LoopConfig) -> None:
    """Raise an error for two progress bars, or for a callback that contradicts a loop option."""
    bars = find_callbacks(callbacks, "ProgressBar")
    if len(bars) > 1:
        raise ConfigurationError(
            "You added multiple progress bar callbacks to the Trainer, but currently only one"
            " progress bar is supported."
        )
    if bars and not config.enable_progress_bar:
        raise ConfigurationError(
            "Trainer was configured with `enable_progress_bar=False` but found"
            f" `{type(bars[0]).__name__}` in callbacks list."
        )
    is_refused = config.enable_checkpointing is False and not config.fast_dev_run
    if is_refused and find_callbacks(callbacks, "Checkpoint"):
        raise ConfigurationError(
            "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint`"
            " in callbacks list."
        )


def check_callbacks(callbacks: list[Any]) -> None:
    """Raise an error for callbacks that are unsupported, have no hooks or share a state key."""
    keys = set()
    for callback in callbacks:
        check_object("callbacks", callback)
        has_hooks = any(name.startswith("on_") for name in dir(callback))
        if not has_hooks and not hasattr(callback, "setup"):
            raise ConfigurationTypeError(
                f"callbacks: got {describe(callback)} as a callback, expected an object with hook"
                " methods, such as on_train_epoch_end. For example, pass"
                " callbacks=[EarlyStopping('val_loss')]."
            )
        if is_instance_of(callback, "BatchSizeFinder", "LearningRateFinder"):
            raise ConfigurationError(
                f"callbacks: got a {type(callback).__name__}, which only works with Trainer's"
                " tuner. Leave out this callback."
            )
        key = getattr(callback, "state_key", None)
        if key in keys:
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}`. In the"
                " current configuration, this callback does not support being saved alongside other"
                " instances of the same type. HINT: The `callback.state_key` must be unique among"
                " all callbacks in the Trainer."
            )
        if key is not None and overridden(callback, "state_dict") is not None:
            keys.add(key)


def sort_callbacks(callbacks: list[Any]) -> list[Any]:
    """Move checkpoint callbacks to the end, so that their hooks are called last."""
    return sorted(callbacks, key=lambda callback: is_instance_of(callback, "Checkpoint"))


def add_model_callbacks(callbacks: list[Any], own: list[Any]) -> list[Any]:
    """Combine the loop's callbacks with those that the module's configure_callbacks returns.

    If the loop and the module have callbacks of the same class, keep only the module's callback.
    """
    replaced = {base for callback in own for base in type(callback).__mro__} - {Callback, object}
    kept = [callback for callback in callbacks if type(callback) not in replaced]
    check_callbacks([*kept, *own])
    return sort_callbacks([*kept, *own])


def resume_averaging(run: Run) -> None:
    """Call StochasticWeightAveraging.on_train_epoch_start if the run resumes mid-epoch."""
    callbacks = run.hooks.callbacks_of("StochasticWeightAveraging")
    if not (callbacks and run.plan.start.resumes and run.progress.is_in_epoch):
        return
    # The hook on_train_epoch_start creates StochasticWeightAveraging's scheduler. Afterwards, undo
    # the hook's changes to learning rates and BatchNorm statistics, because the resumed epoch has
    # already started.
    groups = [group for part in run.optimization.optimizers for group in part.param_groups]
    options = [{n: deepcopy(v) for n, v in group.items() if n != "params"} for group in groups]
    buffers = {name: buffer.clone() for name, buffer in run.network.named_buffers()}
    run.hooks.call_callbacks("on_train_epoch_start", callbacks=callbacks)
    for group, saved in zip(groups, options, strict=True):
        group.update(saved)
    with torch.no_grad():
        for name, buffer in run.network.named_buffers():
            buffer.copy_(buffers[name])


def finish_averaging(run: Run) -> None:
    """Copy averaged weights into the model if the resumed run has nothing left to train."""
    if not run.plan.start.resumes:
        return
    callbacks = run.hooks.callbacks_of("WeightAveraging")
    for callback in run.hooks.callbacks_of("StochasticWeightAveraging"):
        # Skip a StochasticWeightAveraging that has already run its extra epoch for BatchNorm,
        # because the model already has the averaged weights.
        if callback.swa_end in (run.progress.epochs_done - 1, math.inf):
            callbacks.append(callback)
    run.hooks.call_callbacks("on_train_end", callbacks=callbacks)
