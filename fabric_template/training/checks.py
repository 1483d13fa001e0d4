"""Checks of a call, before anything is launched, wrapped or written."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.utils.data import Dataset

from ..distributed.launch import check_launched
from ..distributed.strategies import check_strategy
from ..errors import (
    ConfigurationError,
    ConfigurationTypeError,
    MissingDataError,
    check_object,
    describe,
)
from .hooks import overridden
from .module_adapter import ModuleAdapter, takes_batch_idx, takes_iterator

if TYPE_CHECKING:
    from .run_state import RunState

LOADER_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
STEP_OF_STAGE = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
_MINIMUM = (
    "Lightning `Trainer` expects as minimum a `training_step()`, `train_dataloader()` and"
    " `configure_optimizers()` to be defined."
)


def check_call(run: RunState) -> None:
    """Refuse a model, functions or loaders that the call cannot work with."""
    if run.stage == "fit":
        # One process may evaluate by itself.
        check_launched(run.fabric)
    check_strategy(run)
    if run.stage == "predict":
        check_prediction(run)
    else:
        check_step(run)
    check_signature(run, STEP_OF_STAGE[run.stage])
    if run.stage == "fit":
        check_signature(run, "validation_step")
        check_epoch_end(run)
        check_optimization(run)
        if run.config.max_epochs is None and run.stop.max_epochs == 1000:
            run.warn_once(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set"
                " `max_epochs=-1`.",
                PossibleUserWarning,
            )
        warn_of_validation(run)
    check_loaders(run)


def check_sources(stage: str, loaders: Mapping[str, Any], datamodule: Any) -> None:
    """Refuse loaders beside a datamodule, and a class in its place."""
    check_object("datamodule", datamodule)
    if datamodule is None or all(given is None for given in loaders.values()):
        return
    if stage == "fit":
        raise ConfigurationError(
            "You cannot pass `train_dataloader` or `val_dataloaders` to `trainer.fit(datamodule=...)`"
        )
    raise ConfigurationError(
        f"You cannot pass both `trainer.{stage}(dataloaders=..., datamodule=...)`"
    )


def missing_model(stage: str) -> TypeError:
    """Return the error for a call without model and without a run before it."""
    if stage == "fit":
        return TypeError("model: got None, expected a module. Write fit(model, loader).")
    return TypeError(
        f"`Trainer.{stage}()` requires a `LightningModule` when it hasn't been passed in a previous run."
        f" {stage}: got no model and there was no fit before it. Write {stage}(model, loader)."
    )


def check_loaders(run: RunState) -> None:
    """Refuse a call without loader, and given loaders that are none."""
    call, stage = run.stage, LOADER_OF_STAGE[run.stage]
    argument = loader_argument(call, stage)
    if not run.data.has_loader(stage):
        owner = type(run.model if run.datamodule is None else run.datamodule).__name__
        raise MissingDataError(
            f"An invalid dataloader was passed to `Trainer.{call}({argument}=...)`. Found None."
            f" `{stage}_dataloader` must be implemented to be used with the Lightning Trainer."
            f" {call}: got no loader, expected an iterable of batches. Write {call}(model, loader), or"
            f" a method {stage}_dataloader in {owner}."
        )
    for given_stage in run.data.given:
        run.data.request(given_stage)
    evaluated = run.data.given.get("val")
    if isinstance(evaluated, Mapping) and "train" in evaluated and not run.is_lightning_module:
        raise ConfigurationError(
            "val_dataloaders: got a loader named 'train', expected another name, since train_loss is"
            " the loss of training. Write {'train_again': loader}."
        )
    given = run.data.given.get(stage)
    if call == "fit" and isinstance(given, list | tuple | dict) and not given:
        raise ConfigurationError(f"fit: got {argument}={given}, expected at least one batch.")


def loader_argument(call: str, stage: str) -> str:
    """Return the name of the argument that takes the loaders of a stage."""
    if call == "fit":
        return "train_dataloaders" if stage == "train" else "val_dataloaders"
    return "dataloaders"


def check_loader(loader: Any, where: str) -> None:
    """Refuse what gives no batches.

    Args:
        where: Where the loader comes from, as Lightning says it: "passed to ...".

    Raises:
        ConfigurationTypeError: The message names what to write.
    """
    problem = find_loader_problem(loader)
    if problem is not None:
        raise ConfigurationTypeError(
            f"An invalid dataloader was {where}. Found {describe(loader)}, which {problem}"
        )


def find_loader_problem(loader: Any) -> str | None:
    """Return why an object gives no batches and what to write; None if it seems to.

    Example:
        >>> find_loader_problem("data/train")
        'gives single characters. Write DataLoader(dataset, batch_size=32).'
        >>> find_loader_problem([1, 2]) is None
        True
    """
    if isinstance(loader, str | bytes):
        return "gives single characters. Write DataLoader(dataset, batch_size=32)."
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if isinstance(loader, type) or not is_iterable:
        return "cannot be iterated. Give a DataLoader, a TensorLoader or any iterable of batches."
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        return "gives single samples. Write DataLoader(dataset, batch_size=32)."
    if hasattr(loader, "iloc"):
        return (
            "gives the names of its columns. Write"
            " TensorLoader(torch.tensor(frame.to_numpy()), batch_size=32)."
        )
    if _is_array(loader):
        return "gives single rows. Write TensorLoader(x, y, batch_size=32)."
    parts = loader.values() if isinstance(loader, Mapping) else loader
    if isinstance(loader, Mapping | tuple) and loader and all(map(_is_array, parts)):
        return "holds whole tensors. Write TensorLoader(x, y, batch_size=32)."
    if type(loader) in (list, tuple) and not _is_uniform(loader):
        return "holds neither loaders nor batches of one kind. Leave out what is neither."
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__array_interface__")


def _is_uniform(items: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether items may be batches or loaders: numbers and texts, or objects of one class."""
    are_values = [isinstance(item, int | float | str) for item in items]
    return all(are_values) or (len(set(map(type, items))) == 1 and items[0] is not None)


def check_prediction(run: RunState) -> None:
    if getattr(run.model, "predict_step", "") is None:
        raise ConfigurationError("`predict_step` cannot be None to run `Trainer.predict`")
    has_method = any(overridden(run.hooks.source, name) for name in ("predict_step", "forward"))
    if not has_method:
        raise ConfigurationError(
            f"`Trainer.predict` requires `forward` method to run. predict: got"
            f" {type(run.model).__name__} without one. Write a method forward or predict_step, or"
            " predict(..., predict_step=fn)."
        )


def check_step(run: RunState) -> None:
    name, step = type(run.model).__name__, STEP_OF_STAGE[run.stage]
    method = overridden(run.hooks.source, step)
    if method is None:
        text = f" to run `Trainer.{run.stage}`." if run.stage != "fit" else f". {_MINIMUM}"
        if not run.is_lightning_module:
            text = "."
        raise ConfigurationError(
            f"No `{step}()` method defined{text} {run.stage}: got {name} without it. Write a method"
            f" {step}(self, batch) in {name}, or {run.stage}(..., {step}=fn) with fn(model, batch)."
        )
    if "optimizer_idx" in inspect.signature(method).parameters:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Remove the"
            f" `optimizer_idx` argument from `{step}`, set `self.automatic_optimization = False` and access"
            f" your optimizers in `{step}` with `opt1, opt2, ... = self.optimizers()`."
        )
    for old in ("training_epoch_end", "validation_epoch_end", "test_epoch_end"):
        if run.is_lightning_module and callable(getattr(run.model, old, None)):
            raise NotImplementedError(
                f"Support for `{old}` has been removed in v2.0.0. `{name}` implements this method. You can"
                f" use the `on_{old.replace('training', 'train')}` hook instead. To access outputs, save"
                " them in-memory as instance attributes."
            )


def check_signature(run: RunState, name: str) -> None:
    """Refuse a step that cannot be called with a batch, or with a batch and its index."""
    functions = run.module.functions if isinstance(run.module, ModuleAdapter) else {}
    step = functions.get(name) or overridden(run.hooks.source, name)
    # In a LightningModule Python's own error names the step, as in Trainer.
    if step is None or run.is_lightning_module or takes_iterator(step):
        return
    called = overridden(run.hooks.source, name)
    with_batch_idx = called is not None and takes_batch_idx(called)
    arguments = [None] * (1 + with_batch_idx + (name in functions))
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        # A builtin does not tell its arguments.
        return
    named = {"dataloader_idx": 0} if "dataloader_idx" in signature.parameters else {}
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        first, written = "model", str(signature)
        if name not in functions:
            first, written = "self", f"(self, {written[1:]}".replace(", )", ")")
        raise ConfigurationTypeError(
            f"{name}: got {name}{written}, expected {name}({first}, batch) or {name}({first}, batch,"
            " batch_idx)."
        ) from error


def check_epoch_end(run: RunState) -> None:
    """Refuse an ``epoch_end`` without validation, or that cannot be called."""
    functions = run.module.functions if isinstance(run.module, ModuleAdapter) else {}
    epoch_end = functions.get("epoch_end")
    if epoch_end is None:
        return
    if not run.data.has_loader("val"):
        raise ConfigurationError(
            "epoch_end: got no val_dataloaders, expected them, since epoch_end(model, outputs) gets"
            " what validation_step returned."
        )
    try:
        inspect.signature(epoch_end).bind(None, None)
    except TypeError as error:
        raise ConfigurationTypeError(
            f"epoch_end: got epoch_end{inspect.signature(epoch_end)}, expected epoch_end(model, outputs)."
        ) from error


def check_optimization(run: RunState) -> None:
    """Refuse a fit without optimizer, and options that manual optimization cannot follow."""
    if run.given_optimizer is None and not run.hooks.is_overridden("configure_optimizers"):
        minimum = f" {_MINIMUM}" if run.is_lightning_module else ""
        raise ConfigurationError(
            f"No `configure_optimizers()` method defined.{minimum} fit: got"
            f" {type(run.model).__name__} without it and no optimizer. Write fit(...,"
            " optimizer=torch.optim.Adam(model.parameters()))."
        )
    if run.module.automatic_optimization:
        return
    if value := run.config.gradient_clip_val:
        raise ConfigurationError(
            "Automatic gradient clipping is not supported for manual optimization. Remove"
            f" `Trainer(gradient_clip_val={value})` or switch to automatic optimization."
        )
    if run.config.accumulate_grad_batches != 1:
        raise ConfigurationError(
            "Automatic gradient accumulation is not supported for manual optimization. Remove"
            f" `Trainer(accumulate_grad_batches={run.config.accumulate_grad_batches})` or switch to"
            " automatic optimization."
        )


def warn_of_validation(run: RunState) -> None:
    """Warn of a validation step without loader, and of a loader without step."""
    has_step, has_loader = run.hooks.is_overridden("validation_step"), run.data.has_loader("val")
    if has_loader and not has_step:
        run.warn_once(
            "You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop."
        )
    if has_step and not has_loader and run.is_lightning_module:
        run.warn_once(
            "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop.",
            PossibleUserWarning,
        )
