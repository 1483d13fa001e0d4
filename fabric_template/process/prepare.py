"""Prepare: every check that can be made before anything is launched, wrapped or written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric import is_wrapped
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.optim import Optimizer

from ..core.errors import Misuse, MisuseOfType
from ..core.functions import FunctionSteps, takes_batch_idx
from ..core.inputs import check_names, check_object, check_parameters, check_path, check_signature, length_of
from ..core.limits import is_endless
from ..core.net import net_of
from ..core.origin import Origin
from ..core.overrides import overrides
from ..core.passes import INFINITE
from ..core.run import Run
from ..core.steps import is_shared_out
from ..core.trained import Trained
from ..data.feed import Given, loader_argument
from ..data.loaders import check_iterable, loaders_in, names_of, no_fraction
from ..files.checkpoint import hyperparameters_of
from ..trainer.attributes import TrainerFace
from ..trainer.shows import Word
from .build import Plan
from .home import choose_place
from .signals import starts_processes
from .world import check_launched, come_by_themselves

STEP_OF = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
LOADER_OF = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


def prepare(
    loop: TrainerFace, fn: str, model: Any, loaders: dict[str, Any], datamodule: Any, *, resume: Any = None, load: Any = None,
    optimizer: Any = None, functions: dict[str, Callable | None] | None = None, ckpt_path: Any = None,
    weights_only: bool | None = None,
) -> Plan:  # fmt: skip
    """Check everything that can be checked and make the run's plain part.

    Raises:
        Misuse, MisuseOfType: one line that says what is wrong, where, and what to write instead.
    """
    if fn == "fit":
        check_launched(loop.fabric, writes=bool(loop.config.enable_checkpointing or loop.loggers))
    check_path("resume", resume, ("last", "best", "auto"))
    check_path("load", load, ("last", "best"))
    check_path("ckpt_path", ckpt_path, ("last", "best"))
    if ckpt_path is resume is load is None:
        ckpt_path = loop._set_path
    elif loop._set_path is not None:
        from .missing import tell_not_taken

        tell_not_taken(loop, fn, next(path for path in (ckpt_path, resume, load) if path is not None))
    resume, load = _files(fn, resume, load, ckpt_path)
    if fn != "fit" and model is None:
        from .missing import from_last_run

        model, load = from_last_run(loop, fn, load)
    check_object("model", model)
    check_object("datamodule", datamodule)
    loaders, datamodule = _sources(fn, loaders, datamodule)
    last = loop._run if fn != "fit" else None
    owner, net = _owner_of(model, functions or {}, last)
    optimizer = optimizer.optimizer if is_wrapped(optimizer) else optimizer
    if isinstance(owner, FunctionSteps) and isinstance(optimizer, list | tuple):
        from ..core.optimizers import are_several

        if are_several(optimizer):  # whoever gives several steps them
            owner.automatic_optimization = False
    given = Given(loaders, owner if datamodule is None else datamodule)
    if last is not None and datamodule is None:  # the last one stays, as under Trainer, and its hooks are called;
        datamodule = last.trained.datamodule
        if datamodule is not None and not given.has(LOADER_OF[fn]):  # its loaders where there are no others
            given.source = datamodule
    origin = Origin(
        may_lack=ckpt_path == "last", trusted=loop.config.trusted if weights_only is None else not weights_only
    )
    # a word that hooks may compare with Trainer's enum, or ask for its value
    plan = Plan(Word(fn), loop.config, Trained(owner, net, datamodule), given, origin, optimizer)
    if last is not None:
        plan.keeper, plan.last = last.keeper, last.at
        plan.again = loop._runs[fn].at if fn in loop._runs else None
    _check_steps(plan, fn)
    _check_loaders(plan, fn)
    if is_shared_out(loop.fabric):
        from .sharding import check_sharded

        check_sharded(loop, plan)
    if loop.loggers and plan.trained.datamodule is not None:
        from .merged import check_hyperparameters

        check_hyperparameters(plan)
    if fn == "fit":
        _check_fit(loop, plan)
    # find and check the checkpoint, choose the version, prove that logs can be written
    if resume is not None or load is not None or come_by_themselves(loop.fabric):
        from .choose import choose_checkpoint

        choose_checkpoint(loop, plan, resume, load)
    alone = loop.fabric.strategy.launcher is None and not come_by_themselves(loop.fabric)
    if alone or starts_processes(loop.fabric):
        choose_place(loop, plan)  # elsewhere all ranks run this already, and have to agree first
    return plan


def _files(fn: str, resume: Any, load: Any, ckpt_path: Any) -> tuple[Any, Any]:
    """(resume, load), one of them at most; ``ckpt_path`` is Trainer's word for it, in calls that packages make themselves."""
    if ckpt_path is not None:
        if resume is not None or load is not None:
            raise Misuse(f"{fn} got ckpt_path= and {'resume' if load is None else 'load'}=: expected one of them")
        return (ckpt_path, None) if fn == "fit" else (None, ckpt_path)
    if resume is not None and load is not None:
        raise Misuse(
            f"{fn}(resume={str(resume)!r}, load={str(load)!r}): expected one of them; resume= continues a run with its"
            " optimizer and counters, load= takes the weights only and starts a new one"
        )
    return resume, load


def _sources(fn: str, loaders: dict[str, Any], datamodule: Any) -> tuple[dict[str, Any], Any]:
    """(loaders, datamodule), of which one is given; a datamodule may come in the loaders' place."""
    first = LOADER_OF[fn]
    if any(hasattr(loaders.get(first), f"{stage}_dataloader") for stage in LOADER_OF.values()):
        if datamodule is not None:
            raise Misuse(f"{fn} got two datamodules: give it as datamodule= only")
        datamodule, loaders = loaders[first], {**loaders, first: None}
    if datamodule is not None and any(given is not None for given in loaders.values()):
        from .missing import two_sources

        raise two_sources(fn)
    return loaders, datamodule


def _owner_of(model: Any, functions: dict[str, Callable | None], last: Run | None) -> tuple[Any, nn.Module]:
    """The object that has the steps, and the module that has the parameters; the functions of a fit of it still count."""
    if is_wrapped(model):  # by `setup`, of rung 1
        model = model.module
    if hasattr(model, "_orig_mod") and isinstance(model, nn.Module):  # torch.compile'd: train what is inside
        model = model._orig_mod
    given = {name: function for name, function in functions.items() if function is not None}
    for name, function in given.items():
        if not callable(function):
            raise MisuseOfType(f"{name}={function!r}: expected a function fn(model, batch, batch_idx)")
    net = net_of(model)
    if last is not None and last.trained.net is net and isinstance(last.trained.owner, FunctionSteps):
        given = last.trained.owner.functions | given
    owner = FunctionSteps(net, **given) if given else model
    for name, function in given.items():
        if name == "epoch_end":
            from ..core.epoch_end import check_epoch_end

            check_epoch_end(function)
        else:
            check_signature(function, name, takes_net=True, takes_idx=takes_batch_idx(getattr(owner, name)))
    return owner, net


def _check_steps(plan: Plan, fn: str) -> None:
    step, owner = STEP_OF[fn], plan.trained.owner
    is_there = overrides(owner, step) is not None
    if fn == "predict":  # what has no step is called with the batch
        is_there = any(callable(getattr(owner, word, None)) for word in (step, "forward"))
    if not is_there:
        from .missing import no_step

        raise no_step(plan, fn, step)
    if fn == "predict":
        return
    if fn == "fit":
        _check_validation(plan)
    if "optimizer_idx" in inspect.signature(getattr(owner, step)).parameters:
        from .missing import one_by_one

        raise one_by_one(step)
    steps = {step, "validation_step"} if fn == "fit" and plan.given.has("val") else {step}
    for each in sorted(name for name in steps if overrides(owner, name) is not None):
        method = getattr(owner, each)
        check_signature(method, each, takes_idx=takes_batch_idx(method))
    for old in ("training_epoch_end", "validation_epoch_end", "test_epoch_end"):
        if plan.trained.is_lightning and callable(getattr(owner, old, None)):
            from .missing import dropped

            raise dropped(old, f"on_{old.replace('training', 'train')}", plan.trained.name)


def _check_validation(plan: Plan) -> None:
    """A step and its loader come together; a LightningModule that has one of them trains without validation."""
    owner, name, is_lightning = plan.trained.owner, plan.trained.name, plan.trained.is_lightning
    has_step, has_loader = overrides(owner, "validation_step") is not None, plan.given.has("val")
    if isinstance(owner, FunctionSteps) and "epoch_end" in owner.functions and not has_loader:
        raise Misuse(
            "fit got epoch_end=, which is told what validation_step returned, but no val_dataloaders: give both"
        )
    if has_loader and not has_step and is_lightning:
        plan.said.warn(f"You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop of {name}.")
    elif has_loader and not has_step and plan.given.loaders.get("val") is not None:
        raise Misuse(
            f"fit got val_dataloaders but {name} has no validation_step: expected a method validation_step(batch,"
            " batch_idx) (or validation_step=fn); leave val_dataloaders out to train without validation"
        )
    if has_step and not has_loader and is_lightning:
        plan.said.warn(
            f"You defined a `validation_step` but have no `val_dataloader`. Skipping val loop of {name}.",
            PossibleUserWarning,
        )


def _check_loaders(plan: Plan, fn: str) -> None:
    stage = LOADER_OF[fn]
    if not plan.given.has(stage):
        from .missing import no_loader

        raise no_loader(plan, fn, stage)
    given = plan.given.loaders.get(stage)
    if fn == "fit" and given is not None and all(length_of(loader) == 0 for loader in loaders_in(given)):
        raise Misuse(f"fit got an empty train loader ({type(given).__name__} of length 0): expected at least one batch")
    if not plan.trained.is_lightning and isinstance(plan.given.loaders.get("val"), Mapping):
        check_names(names_of(plan.given.loaders["val"]))
    for name in ("train", "val") if fn == "fit" else (stage,):
        limit = getattr(plan.config, f"limit_{name}_batches")
        needs_length = isinstance(limit, float) and limit not in (0.0, 1.0)
        for loader in loaders_in(plan.given.loaders[name]) if plan.given.loaders.get(name) is not None else ():
            check_iterable(loader, f"passed to `Trainer.{fn}({loader_argument(fn, name)}=...)`")
            if needs_length and length_of(loader) == INFINITE:
                raise Misuse(no_fraction(loader, limit, name))


def _check_fit(loop: TrainerFace, plan: Plan) -> None:
    """What is asked of a fit only: optimizers, and what the strategy and the checkpoints want of it."""
    _check_optimizer(plan)
    if not isinstance(loop.fabric.strategy, SingleDeviceStrategy):
        from ..trainer.strategies import check_window

        check_window(loop.fabric.strategy, loop.callbacks, plan.config.accumulate_grad_batches)
    if plan.config.enable_checkpointing or loop.checkpoint_callbacks:
        for part in (plan.trained.owner, plan.trained.datamodule):
            hyperparameters_of(part, plan.config.trusted, plan.said)
    if plan.config.max_epochs is None and not is_endless(plan.config, loop.callbacks):
        plan.said.warn(
            "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set `max_epochs=-1`.",
            PossibleUserWarning,
        )


def _check_optimizer(plan: Plan) -> None:
    has_own = overrides(plan.trained.owner, "configure_optimizers") is not None
    if plan.optimizer is None and not has_own:
        from .missing import no_optimizer

        raise no_optimizer(plan)
    given = _given_optimizers(plan)
    if overrides(plan.trained.owner, "configure_model") is None:  # which may make the parameters
        check_parameters(given, plan.trained.net, plan.trained.name)
    if not plan.trained.is_automatic:
        if plan.config.gradient_clip_val:
            raise Misuse(
                "Automatic gradient clipping is not supported for manual optimization. Remove"
                f" `Trainer(gradient_clip_val={plan.config.gradient_clip_val})` or switch to automatic optimization."
            )
        if plan.config.accumulate_grad_batches != 1:
            raise Misuse(
                "Automatic gradient accumulation is not supported for manual optimization. Remove `Trainer("
                f"accumulate_grad_batches={plan.config.accumulate_grad_batches})` or switch to automatic optimization."
            )


def _given_optimizers(plan: Plan) -> list[Any]:
    """Those that fit was given; none as long as a function is to make them."""
    given = plan.optimizer
    if given is None or isinstance(given, Optimizer):
        return [] if given is None else [given]
    from ..core.optimizers import is_maker, parse_optimizers

    return [] if is_maker(given) else parse_optimizers(given, automatic=plan.trained.is_automatic)[0]
