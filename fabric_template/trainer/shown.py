"""Shown: a plain module or object as Lightning's own callbacks expect it; an optimizer as a module sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import MisuseOfType
from ..core.run import Run
from ..core.trained import Trained
from .shows import shows

# What a user's own functions or hooks are called through: they are given what `fit` was given.
_OF_USERS = ("callbacks.callback", "callbacks.lambda_function")


def shown_to(trained: Trained, callback: Any, trainer: Any) -> Any:
    """What a callback finds in the module's place: what was given; Lightning's own, a LightningModule in any case."""
    package = None if trained.is_lightning else package_of(callback)
    return trained.model if package is None else face_of(trained.model, trained.net, package, trainer)


def package_of(callback: Any) -> str | None:
    """The package of Lightning's whose own callback this is, or inherits from; None for a user's own.

    Example:
        >>> from lightning.pytorch.callbacks import Callback, EarlyStopping
        >>> package_of(EarlyStopping("val_loss")), package_of(Callback())
        ('lightning.pytorch', None)
    """
    for base in type(callback).__mro__:
        for package in ("lightning.pytorch", "pytorch_lightning"):
            if base.__module__.startswith(f"{package}.callbacks.") and not base.__module__.endswith(_OF_USERS):
                return package
    return None


def face_of(model: Any, net: nn.Module, package: str, trainer: Any) -> Any:
    """The model as a LightningModule of this package: another class over the very same attributes.

    Where the model is no module, what the net lacks is found there. The package is imported: somebody has made its callback.
    """
    base = sys.modules[package].LightningModule
    words = {name: value for name, value in vars(base()).items() if name not in vars(nn.Module())}
    words |= {
        "_trainer": trainer,
        "_automatic_optimization": getattr(model, "automatic_optimization", True),
        "_example_input_array": getattr(model, "example_input_array", None),
        "device": property(lambda self: next((p.device for p in self.parameters()), torch.device("cpu"))),
    }
    if model is not net:

        def from_model(self: Any, name: str) -> Any:
            return getattr(model, name) if hasattr(model, name) else nn.Module.__getattr__(self, name)

        words["__getattr__"] = from_model
    kind: Any = type(type(model).__name__, (_Unheard, *([type(net)] if model is net else []), base), words)
    face = kind.__new__(kind)
    object.__setattr__(face, "__dict__", vars(net))
    return face


class _Unheard:
    """Classes of users that note who inherits from them are not told of a face."""

    def __init_subclass__(cls, **words: Any) -> None:
        pass


class _Around:
    """What is called before or after an optimizer's step: ours, or what a module puts in its place for the batch at hand.

    Modules with two optimizers do so to have the steps of one of them not counted in ``global_step``.
    """

    def __init__(self, usual: Callable[[Any], Any]) -> None:
        self._usual = usual

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        if optimizer is None:
            return self
        batch, put = vars(optimizer).get(self._name, (None, None))
        return put if batch == optimizer._run.at.total_batches else partial(self._usual, optimizer)

    def __set__(self, optimizer: Any, put: Callable[[], Any]) -> None:
        vars(optimizer)[self._name] = optimizer._run.at.total_batches, put


class LoopOptimizer:
    """An optimizer as a module sees it: itself, but ``step`` goes through the run's precision, hooks and counter.

    It passes ``isinstance`` checks for the optimizer's own class, and for Lightning's class of wrapped optimizers.
    """

    _on_before_step = _Around(lambda self: None)
    _on_after_step = _Around(lambda self: self._run.update.stepped(self._optimizer))

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self._optimizer, self._run = optimizer, run
        rooms = [sys.modules.get(f"{package}.core.optimizer") for package in ("lightning.pytorch", "pytorch_lightning")]
        wrappers = [room.LightningOptimizer for room in rooms if room is not None]
        bases = (LoopOptimizer, type(optimizer), *dict.fromkeys(wrappers))
        self.__class__ = type(f"Lightning{type(optimizer).__name__}", bases, {})

    optimizer = shows("_optimizer", "The optimizer itself.")
    state_dict = shows("_optimizer.state_dict", "The optimizer's own.")
    load_state_dict = shows("_optimizer.load_state_dict", "The optimizer's own.")
    zero_grad = shows("_optimizer.zero_grad", "The optimizer's own.")

    def step(self, closure: Callable | None = None, **arguments: Any) -> Any:
        """Step the optimizer, with a closure or without."""
        if closure is not None and not callable(closure):
            raise MisuseOfType("When `optimizer.step(closure)` is called, the closure should be callable")
        self._on_before_step()
        output = self._run.update.step_with(self._optimizer, closure, **arguments)
        self._on_after_step()
        return output

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters require gradients inside; see LightningOptimizer.toggle_model."""
        module, run = self._run.trained.owner, self._run
        alone = not sync_grad and run.steps.syncs
        with run.steps.no_sync() if alone else nullcontext():
            module.toggle_optimizer(self)
            yield
            module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __repr__(self) -> str:
        return f"Lightning{self._optimizer!r}"
