"""Checks of a call, before anything is launched, wrapped or written."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from lightning.fabric.utilities.warnings import PossibleUserWarning

from ..errors import ConfigurationError, MissingDataError
from .hooks import overridden

if TYPE_CHECKING:
    from .run_state import RunState

LOADER_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
STEP_OF_STAGE = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_MINIMUM = (
    "Lightning `Trainer` expects as minimum a `training_step()`, `train_dataloader()` and"
    " `configure_optimizers()` to be defined."
)


def check_call(run: RunState) -> None:
    """Refuse a model that lacks what its stage needs."""
    if run.stage == "predict":
        check_prediction(run)
    else:
        check_step(run)
    if run.stage == "fit":
        check_optimization(run)
        if run.config.max_epochs is None and run.stop.max_epochs == 1000:
            run.warn_once(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set"
                " `max_epochs=-1`.",
                PossibleUserWarning,
            )
        warn_of_validation(run)
    stage = LOADER_OF_STAGE[run.stage]
    if not run.data.has_loader(stage):
        owner = type(run.model if run.datamodule is None else run.datamodule).__name__
        raise MissingDataError(
            f"An invalid dataloader was passed to `Trainer.{run.stage}({loader_argument(run.stage, stage)}"
            f"=...)`. Found None. `{stage}_dataloader` must be implemented to be used with the Lightning"
            f" Trainer. {run.stage}: got no loader, expected an iterable of batches. Give it as"
            f" {run.stage}(model, loader), or write a method {stage}_dataloader in {owner}."
        )


def loader_argument(call: str, stage: str) -> str:
    """Return the name of the argument that takes the loaders of a stage."""
    if call == "fit":
        return "train_dataloaders" if stage == "train" else "val_dataloaders"
    return "dataloaders"


def check_prediction(run: RunState) -> None:
    if getattr(run.model, "predict_step", "") is None:
        raise ConfigurationError("`predict_step` cannot be None to run `Trainer.predict`")
    has_method = any(overridden(run.hooks.source, name) for name in ("predict_step", "forward"))
    if run.is_lightning_module and not has_method:
        raise ConfigurationError("`Trainer.predict` requires `forward` method to run.")


def check_step(run: RunState) -> None:
    name, step = type(run.model).__name__, STEP_OF_STAGE[run.stage]
    method = overridden(run.hooks.source, step)
    if method is None:
        text = f" to run `Trainer.{run.stage}`." if run.stage != "fit" else f". {_MINIMUM}"
        raise ConfigurationError(
            f"No `{step}()` method defined{text} {name}: expected a method {step}(batch, batch_idx), or a"
            f" function {step}=fn."
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


def check_optimization(run: RunState) -> None:
    """Refuse a fit without optimizer, and options that manual optimization cannot follow."""
    if run.given_optimizer is None and not run.hooks.is_overridden("configure_optimizers"):
        raise ConfigurationError(
            f"No `configure_optimizers()` method defined. {_MINIMUM} {type(run.model).__name__}: expected a"
            " method configure_optimizers(), or fit(..., optimizer=torch.optim.Adam(...))."
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
