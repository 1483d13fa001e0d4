"""Faces: a plain module or object as Lightning's own callbacks expect it: a LightningModule that shares all it has."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..core.trained import Trained

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
