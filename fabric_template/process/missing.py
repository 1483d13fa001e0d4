"""Missing: what a verb needs and was not given, in Trainer's words and in ours; imported where something is missing.

Trainer's sentences are quoted whole: who knows one finds it again.
"""

from __future__ import annotations

import warnings
from typing import Any

from ..core.errors import MissingLoader, Misuse
from ..data.feed import loader_argument
from ..trainer.attributes import TrainerFace
from .build import Plan

_MINIMUM = (
    ". Lightning `Trainer` expects as minimum a `training_step()`, `train_dataloader()` and `configure_optimizers()` to be"
    " defined. It is missing"
)


def from_last_run(loop: TrainerFace, fn: str, load: Any) -> tuple[Any, Any]:
    """The run before has the model that was not given: (model, load), as Trainer takes them."""
    if (last := loop._run) is None:
        raise no_model(fn)
    best, chooses = loop.checkpoint_path("best"), loop.checkpoint_callbacks or loop.config.monitor
    if load is None and best is not None and chooses:
        warnings.warn(
            f"`.{fn}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call will be used."
            f" You can pass `.{fn}(ckpt_path='best')` to use the best model or `.{fn}(ckpt_path='last')` to use the last"
            f" model. It is '{best}'; write {fn}(model) for the model as it is",
            stacklevel=5,
        )
        load = "best"
    return last.trained.model, load


def tell_not_taken(loop: TrainerFace, fn: str, path: Any) -> None:
    """The path that was set gives way to the one that is passed."""
    warnings.warn(
        f"`trainer.ckpt_path = {str(loop._set_path)!r}` was called but then you passed `trainer.{fn}(ckpt_path="
        f"{str(path)!r})`. The latter will be loaded.",
        stacklevel=5,
    )
    loop._set_path = None


def no_step(plan: Plan, fn: str, step: str) -> Exception:
    """No method for the verb, and no function."""
    name = plan.trained.name
    if fn == "predict":
        return Misuse(
            f"`Trainer.predict` requires `forward` method to run. Or `predict_step`: {name} has neither; expected a method"
            " predict_step(batch, batch_idx), or predict(..., predict_step=fn)"
        )
    said = _MINIMUM if fn == "fit" else f" to run `Trainer.{fn}`. It is missing"
    return Misuse(
        f"No `{step}()` method defined{said if plan.trained.is_lightning else ''} in {name}: expected a method {step}(batch,"
        f" batch_idx){' that returns the loss' if fn == 'fit' else ''}, or a function given as {fn}(..., {step}=fn) with"
        " fn(model, batch, batch_idx)"
    )


def no_optimizer(plan: Plan) -> Exception:
    """No optimizer for a fit."""
    return Misuse(
        f"No `configure_optimizers()` method defined{_MINIMUM if plan.trained.is_lightning else ''} in {plan.trained.name}, and"
        " fit got no optimizer: write fit(..., optimizer=torch.optim.Adam(model.parameters())) or a method"
        " configure_optimizers"
    )


def no_loader(plan: Plan, fn: str, stage: str) -> Exception:
    """No data for the verb."""
    trained, method = plan.trained, " or as datamodule="
    if trained.owner is trained.model or trained.datamodule is not None:
        home = trained.name if trained.datamodule is None else type(trained.datamodule).__name__
        method = f", as datamodule=, or write a method {stage}_dataloader in {home}"
    return MissingLoader(
        f"`{stage}_dataloader` must be implemented to be used with the Lightning Trainer. An invalid dataloader was passed to"
        f" `Trainer.{fn}({loader_argument(fn, stage)}=...)`. Found None: {fn} has no {stage} loader; give it as {fn}(model,"
        f" loader){method}"
    )


def two_sources(fn: str) -> Exception:
    """Loaders and a datamodule: one of them has to go.

    Example:
        >>> print(two_sources("test"))
        You cannot pass both `trainer.test(dataloaders=..., datamodule=...)`: expected one of them
    """
    both = f"You cannot pass both `trainer.{fn}(dataloaders=..., datamodule=...)`"
    if fn == "fit":
        both = "You cannot pass `train_dataloader` or `val_dataloaders` to `trainer.fit(datamodule=...)`"
    return Misuse(f"{both}: expected one of them")


def no_model(fn: str) -> Exception:
    """Nothing that was trained before, either."""
    return TypeError(
        f"`FabricLoop.{fn}()` requires a `LightningModule` when it hasn't been passed in a previous run: expected"
        f" {fn}(model, ...), with that or another model, or a fit before it"
    )


def one_by_one(step: str) -> Exception:
    """A step that wants to be called for each optimizer."""
    return RuntimeError(
        "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx` argument from"
        f" `{step}`, set `self.automatic_optimization = False` and access your optimizers in `{step}` with"
        " `opt1, opt2, ... = self.optimizers()`."
    )


def dropped(old: str, new: str, name: str) -> Exception:
    """A hook of Lightning 1."""
    return NotImplementedError(
        f"Support for `{old}` has been removed in v2.0.0. `{name}` implements this method. You can use the `{new}` hook"
        " instead. To access outputs, save them in-memory as instance attributes."
    )
