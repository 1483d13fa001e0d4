"""Check the arguments of fit, validate, test and predict before the run starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import nn

from ..data.loaders import check_loader_names, check_loaders, has_loader
from ..distributed.process_group import check_launched
from ..errors import ConfigurationError, ConfigurationTypeError, MissingDataError, check_object
from ..lightning_compat.overrides import find_callbacks, overridden
from ..loggers.run_config import check_own_hparams
from .configure_optimizers import is_optimizer
from .module_adapter import parameters_of, takes_batch_idx

if TYPE_CHECKING:
    from ..loop import FabricLoop
    from .plan import Plan
    from .run import Run

LOADER_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
STEP_OF_STAGE = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
# Removed hooks, which Trainer refuses only in the stages that would have called them.
REMOVED_HOOKS = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
}


def check_call(plan: Plan) -> None:
    """Raise an error if a model, optimizer, step function or loader is missing or invalid."""
    if plan.stage == "fit":
        # Training must run in all launched processes, but an evaluation may run in a single
        # process.
        check_launched(plan.loop.fabric)
    if plan.stage == "predict":
        check_prediction(plan)
    else:
        check_step(plan, STEP_OF_STAGE[plan.stage])
    if plan.stage == "fit":
        check_signature(plan, "validation_step")
        check_optimization(plan)
        check_own_hparams(plan.config.hparams or {}, plan.model, plan.datamodule)
        warn_of_options(plan)
    check_loader_arguments(plan)


def check_idle(loop: FabricLoop, stage: str) -> None:
    """Raise an error if ``loop`` is already running, for example if a hook calls ``loop.fit``."""
    if (run := loop.active_run) is not None:
        raise ConfigurationError(
            f"{stage}: got a call while {run.stage} is running, expected a call after {run.stage}"
            f" has ended. In a hook, use another loop: FabricLoop(logger=False).{stage}(model,"
            " loader)."
        )


def check_sources(stage: str, model: Any, loaders: Mapping[str, Any], datamodule: Any) -> None:
    """Raise an error if the model is missing, or if loaders and a datamodule were both given."""
    check_object("datamodule", datamodule)
    if model is None and stage == "fit":
        raise TypeError("model: got None, expected a module. Write fit(model, loader).")
    if model is None:
        raise TypeError(
            f"`Trainer.{stage}()` requires a `LightningModule` when it hasn't been passed in a"
            f" previous run. Pass the model, as in {stage}(model, loader)."
        )
    if datamodule is not None and any(given is not None for given in loaders.values()):
        text = f"You cannot pass both `trainer.{stage}(dataloaders=..., datamodule=...)`"
        if stage == "fit":
            text = (
                "You cannot pass `train_dataloader` or `val_dataloaders` to"
                " `trainer.fit(datamodule=...)`"
            )
        raise ConfigurationError(f"{text}. Pass either the datamodule or the loaders.")


def check_step(plan: Plan, step: str) -> None:
    name = type(plan.model).__name__
    method = overridden(plan.module, step)
    if method is None:
        text = (
            f"{step}: got None, expected a function fn(model, batch). Write {plan.stage}(...,"
            f" {step}=fn),"
        )
        if plan.is_lightning_module:
            text = (
                f"No `{step}()` method defined. Call {plan.stage}(..., {step}=fn) with fn(model,"
                " batch),"
            )
        raise ConfigurationError(f"{text} or define {step}(self, batch) in the model's class.")
    if "optimizer_idx" in parameters_of(method):
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Remove"
            f" the `optimizer_idx` argument from `{step}`, set `self.automatic_optimization ="
            f" False` and access your optimizers in `{step}` with `opt1, opt2, ... ="
            " self.optimizers()`."
        )
    for old in REMOVED_HOOKS[plan.stage]:
        if plan.is_lightning_module and callable(getattr(plan.model, old, None)):
            raise NotImplementedError(
                f"Support for `{old}` has been removed in v2.0.0. `{name}` implements this method."
                f" You can use the `on_{old.replace('training', 'train')}` hook instead. To access"
                " outputs, save them in-memory as instance attributes."
            )
    check_signature(plan, step)


def check_prediction(plan: Plan) -> None:
    if getattr(plan.model, "predict_step", "") is None:
        raise ConfigurationError("`predict_step` cannot be None to run `Trainer.predict`")
    if not (overridden(plan.module, "predict_step") or overridden(plan.model, "forward")):
        text = "predict_step: got None, expected a function fn(model, batch)."
        if plan.is_lightning_module:
            text = "`Trainer.predict` requires `forward` method to run."
        raise ConfigurationError(
            f"{text} Write predict(..., predict_step=fn), or define forward or predict_step in the"
            f" class {type(plan.model).__name__}."
        )
    check_signature(plan, "predict_step")


def check_signature(plan: Plan, name: str) -> None:
    """Raise an error if a step function accepts neither (batch) nor (batch, batch_idx)."""
    method = overridden(plan.module, name)
    if method is None:
        return
    function = plan.functions.get(name)
    # The first argument is self for a method, and the model for a step function.
    first, step = ("self", method) if function is None else ("model", function)
    if "dataloader_iter" in parameters_of(step):
        raise ConfigurationTypeError(
            f"{name}: got the argument dataloader_iter, expected a batch. Write"
            f" {name}({first}, batch, batch_idx). For several batches per step, pass a list of"
            " loaders, or a DataLoader with a larger batch_size."
        )
    # Like Trainer, do not check the signatures of a LightningModule's step methods.
    if plan.is_lightning_module:
        return
    arguments = [None] * (1 + takes_batch_idx(method) + (function is not None))
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        # Some built-in functions have no signature.
        return
    names = list(signature.parameters)
    gets_dataloader_idx = "dataloader_idx" in names and name != "training_step"
    named = {"dataloader_idx": 0} if gets_dataloader_idx else {}
    try:
        signature.bind(*arguments, **named)
        is_bound = "batch_idx" in getattr(step, "keywords", {})
        if function is not None and "batch_idx" in names and not is_bound:
            place = signature.parameters["batch_idx"]
            if names[2:3] != ["batch_idx"] or place.kind is place.KEYWORD_ONLY:
                raise TypeError("batch_idx is not the third argument")
    except TypeError as error:
        written = str(signature)
        if function is None:
            written = f"(self, {written[1:]}".replace(", )", ")")
        raise ConfigurationTypeError(
            f"{name}: got {name}{written}, expected {name}({first}, batch) or {name}({first},"
            " batch, batch_idx)."
        ) from error


def check_optimization(plan: Plan) -> None:
    """Raise an error if the optimizer is missing, or does not work with the strategy."""
    given = plan.optimizer
    is_ready = given is not None and (is_optimizer(given) or not callable(given))
    if is_ready and isinstance(plan.loop.fabric.strategy, ModelParallelStrategy):
        raise ConfigurationError(
            "fit: got an optimizer object together with ModelParallelStrategy. This strategy"
            " replaces the model's parameters, so the optimizer would train parameters that are no"
            " longer used. Write optimizer=lambda model: torch.optim.Adam(model.parameters()), or"
            " define configure_optimizers."
        )
    if given is None and not overridden(plan.module, "configure_optimizers"):
        model = "model" if isinstance(plan.model, nn.Module) else "model.net"
        text = "optimizer: got None, expected an optimizer. Write"
        if plan.is_lightning_module:
            text = "No `configure_optimizers()` method defined. Define it, or write"
        raise ConfigurationError(
            f"{text} fit(..., optimizer=torch.optim.Adam({model}.parameters()))."
        )
    if plan.module.automatic_optimization:
        return
    # In manual optimization, training_step itself must clip and accumulate gradients, so refuse the
    # options for both.
    unsupported = (
        ("gradient_clip_val", "clipping", 0),
        ("accumulate_grad_batches", "accumulation", 1),
    )
    for option, what, least in unsupported:
        value = getattr(plan.config, option) or 0
        if value > least:
            text = f"{option}: got {value} with several optimizers, expected {least or None}. Do"
            if plan.is_lightning_module:
                text = f"Automatic gradient {what} is not supported for manual optimization. Remove"
                text += f" `Trainer({option}={value})`, and do"
            raise ConfigurationError(f"{text} the gradient {what} in training_step.")


def check_loader_arguments(plan: Plan) -> None:
    """Raise an error if a loader is missing or does not yield batches."""
    call, stage = plan.stage, LOADER_OF_STAGE[plan.stage]
    argument = loader_argument(call, stage)
    if not has_loader(plan.loaders, plan.source, stage):
        remedy = f"define {stage}_dataloader in the class {type(plan.model).__name__}"
        if plan.datamodule is not None:
            remedy = f"pass a datamodule that defines {stage}_dataloader"
        text = found_loader(plan, stage).format("None")
        if plan.is_lightning_module:
            text += (
                f" `{stage}_dataloader` must be implemented to be used with the Lightning Trainer."
            )
        raise MissingDataError(f"{text} Write {call}(model, loader), or {remedy}.")
    for given_stage, loaders in plan.loaders.items():
        check_loaders(loaders, found_loader(plan, given_stage))
        if (call, given_stage) == ("fit", "val") and not plan.is_lightning_module:
            check_loader_names(loaders)
    given = plan.loaders.get(stage)
    if call == "fit" and isinstance(given, list | tuple | dict) and not given:
        kind, item = type(given).__name__, "loader" if isinstance(given, dict) else "batch"
        raise ConfigurationError(f"{argument}: got an empty {kind}, expected at least one {item}.")


def loader_argument(call: str, stage: str) -> str:
    if call == "fit":
        return "train_dataloaders" if stage == "train" else "val_dataloaders"
    return "dataloaders"


def found_loader(plan: Plan, stage: str) -> str:
    """Return an error message about an invalid loader, with {} as a placeholder for the loader."""
    argument = loader_argument(plan.stage, stage)
    text = f"{argument}: got {{}}, expected a loader (an iterable of batches)."
    if plan.is_lightning_module:
        call = f"Trainer.{plan.stage}({argument}=...)"
        text = f"An invalid dataloader was passed to `{call}`. {text}"
    return text


def warn_of_options(plan: Plan) -> None:
    """Warn if options conflict, or if max_epochs, validation_step or val_dataloader is missing."""
    has_timer = bool(find_callbacks(plan.loop.callbacks, "Timer"))
    if plan.config.max_epochs is None and plan.config.max_steps == -1 and not has_timer:
        rank_zero_warn(
            "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit,"
            " set `max_epochs=-1`.",
            category=PossibleUserWarning,
        )
    if plan.config.deterministic and plan.config.benchmark:
        rank_zero_warn(
            "You passed `deterministic=True` and `benchmark=True`. Note that PyTorch ignores"
            " torch.backends.cudnn.deterministic=True when torch.backends.cudnn.benchmark=True."
        )
    has_step = overridden(plan.module, "validation_step") is not None
    has_val_loader = has_loader(plan.loaders, plan.source, "val")
    if has_val_loader and not has_step:
        rank_zero_warn(
            "You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop."
        )
    if has_step and not has_val_loader:
        rank_zero_warn(
            "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop.",
            category=PossibleUserWarning,
        )


def warn_of_eval_modules(run: Run) -> None:
    count = sum(not part.training for part in run.network.modules())
    if count:
        run.warn_once(
            f"Found {count} module(s) in eval mode at the start of training. This may lead to"
            " unexpected behavior during training. If this is intentional, you can ignore this"
            " warning.",
            category=PossibleUserWarning,
        )
