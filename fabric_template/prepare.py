"""Prepare: every check that can be made before anything is launched, wrapped or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .data import INFINITE, length_of
from .errors import Misuse, MisuseOfType
from .hooks import overrides
from .optimizers import parse_optimizers
from .place import choose_place
from .resume import choose_checkpoint
from .run import Run
from .steps import FunctionSteps, net_of

if TYPE_CHECKING:
    from .loop import FabricLoop

STEP_OF = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
LOADER_OF = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


def prepare(
    loop: FabricLoop, fn: str, model: Any, loaders: dict[str, Any], datamodule: Any, *, resume: Any = None, load: Any = None,
    optimizer: Any = None, functions: dict[str, Callable | None] | None = None,
) -> Run:  # fmt: skip
    """Check everything that can be checked and make the run's plain part.

    Raises:
        Misuse, MisuseOfType: one line that says what is wrong, where, and what to write instead.
    """
    first = LOADER_OF[fn]
    if hasattr(loaders.get(first), f"{first}_dataloader"):  # a datamodule in the loaders' place
        if datamodule is not None:
            raise Misuse(f"{fn} got two datamodules: give it as datamodule= only")
        datamodule, loaders = loaders[first], {**loaders, first: None}
    if datamodule is not None and any(given is not None for given in loaders.values()):
        raise Misuse(f"{fn} got dataloaders and a datamodule: expected one of them")
    if resume is not None and load is not None:
        raise Misuse(
            f"{fn}(resume={str(resume)!r}, load={str(load)!r}): expected one of them; resume= continues a run with its"
            " optimizer and counters, load= takes the weights only and starts a new one"
        )
    owner, net = _owner_of(model, functions or {})
    run = Run(fn, loop.config, owner, net, datamodule, list(loop.callbacks))
    run.given, run.given_optimizer = loaders, optimizer
    _check_steps(run, fn)
    _check_loaders(run, fn)
    if fn == "fit":
        _check_optimizer(run)
    _find_files(run, loop, resume, load)
    return run


def _owner_of(model: Any, functions: dict[str, Callable | None]) -> tuple[Any, nn.Module]:
    """The object that has the steps, and the module that has the parameters."""
    if hasattr(model, "_orig_mod") and isinstance(model, nn.Module):  # torch.compile'd: train what is inside
        model = model._orig_mod
    given = {name: function for name, function in functions.items() if function is not None}
    for name, function in given.items():
        if not callable(function):
            raise MisuseOfType(f"{name}={function!r}: expected a function fn(model, batch, batch_idx)")
    net = net_of(model)
    return (FunctionSteps(net, **given) if given else model), net


def _check_steps(run: Run, fn: str) -> None:
    step = STEP_OF[fn]
    name = run.name
    if fn == "predict":
        if not callable(getattr(run.owner, "predict_step", None)) and not isinstance(run.owner, nn.Module):
            raise Misuse(
                f"predict requires `forward` method to run, or `predict_step`: {name} has neither; expected a method"
                " predict_step(batch, batch_idx)"
            )
        return
    if overrides(run.owner, step) is None:
        raise Misuse(
            f"No `{step}()` method defined in {name}: expected a method {step}(batch, batch_idx)"
            + (
                " that returns the loss, or a function given as fit(..., training_step=fn) with fn(model, batch, batch_idx)"
                if fn == "fit"
                else f"; {fn} needs it"
            )
        )
    if fn == "fit" and run.given.get("val") is not None and overrides(run.owner, "validation_step") is None:
        raise Misuse(
            f"fit got val_dataloaders but {name} has no validation_step: expected a method validation_step(batch,"
            " batch_idx) (or validation_step=fn); leave val_dataloaders out to train without validation"
        )


def _check_loaders(run: Run, fn: str) -> None:
    stage = LOADER_OF[fn]
    if not run.has_loader(stage):
        raise Misuse(
            f"{fn} has no {stage} loader: give it as {fn}(model, loader), as datamodule=, or write a method"
            f" {stage}_dataloader in {run.name}"
        )
    given = run.given.get(stage)
    if fn == "fit" and given is not None and length_of(given) == 0:
        raise Misuse(f"fit got an empty train loader ({type(given).__name__} of length 0): expected at least one batch")
    for name in ("train", "val") if fn == "fit" else (stage,):
        limit = getattr(run.config, f"limit_{name}_batches")
        loader = run.given.get(name)
        if (
            loader is not None
            and isinstance(limit, float)
            and limit not in (0.0, 1.0)
            and length_of(loader) == INFINITE
        ):
            raise Misuse(
                f"limit_{name}_batches={limit}: the {name} loader ({type(loader).__name__}) has no length, so there is no"
                f" fraction of it; expected 1.0 or an int, write limit_{name}_batches=100"
            )


def _check_optimizer(run: Run) -> None:
    has_own = overrides(run.owner, "configure_optimizers") is not None
    if run.given_optimizer is None and not has_own:
        raise Misuse(
            f"No `configure_optimizers()` method defined in {run.name}, and fit got no optimizer: write"
            " fit(..., optimizer=torch.optim.Adam(model.parameters())) or a method configure_optimizers"
        )
    if run.given_optimizer is not None:
        parse_optimizers(run.given_optimizer, automatic=run.is_automatic)
    if not run.is_automatic:
        if run.config.gradient_clip_val:
            raise Misuse(
                "Automatic gradient clipping is not supported for manual optimization. Remove"
                f" gradient_clip_val={run.config.gradient_clip_val} or switch to automatic optimization."
            )
        if run.config.accumulate_grad_batches != 1:
            raise Misuse(
                "Automatic gradient accumulation is not supported for manual optimization. Remove"
                f" accumulate_grad_batches={run.config.accumulate_grad_batches} or switch to automatic optimization."
            )


def _find_files(run: Run, loop: FabricLoop, resume: Any, load: Any) -> None:
    """Find and check the checkpoint, choose the version, prove that logs can be written."""
    choose_checkpoint(loop, run, resume, load)
    launcher = loop.fabric.strategy.launcher
    if launcher is None or type(launcher).__name__ == "_MultiProcessingLauncher":
        choose_place(loop, run)  # elsewhere all ranks run this already, and have to agree first
    run.loggers = loop.loggers
