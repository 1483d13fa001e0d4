"""Functions, modules and plain objects as a LightningModule, so that the loop has one case."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.fabric import is_wrapped
from lightning.pytorch import LightningModule
from torch import nn

from ..errors import ConfigurationTypeError, check_object, describe
from .hooks import is_instance_of

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class ModuleAdapter(LightningModule):
    """Gives a network with step functions, or an object with step methods, a LightningModule's interface.

    It shares the parameters, buffers and submodules of the network under the network's own names, so
    that checkpoints hold them as the user knows them.

    Args:
        model: What was given to ``fit``.
        network: The module that holds the parameters.
        functions: Step functions ``fn(model, batch[, batch_idx])`` by the name of their method.
    """

    def __init__(self, model: Any, network: nn.Module, functions: Mapping[str, Callable]) -> None:
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = network.__dict__[name]
        self.__dict__["model"], self.__dict__["network"] = model, network
        self.__dict__["functions"] = dict(functions)
        self.__dict__["source"] = StepSource(model, network, functions)
        self.__dict__["_automatic_optimization"] = getattr(model, "automatic_optimization", True)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")
        if model is not None and hasattr(model, name):
            return getattr(model, name)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)

    def train(self, mode: bool = True) -> ModuleAdapter:
        self.network.train(mode)
        return self

    def __reduce__(self) -> Any:
        return (ModuleAdapter, (self.model, self.network, self.functions))


class StepSource:
    """The object whose methods are the steps and hooks of an adapted model."""

    def __init__(self, model: Any, network: nn.Module, functions: Mapping[str, Callable]) -> None:
        self._model = model
        for name, function in functions.items():
            setattr(self, name, partial(function, network))

    def __getattr__(self, name: str) -> Any:
        if name == "test_step" and "validation_step" in self.__dict__:
            return self.__dict__["validation_step"]
        return getattr(self.__dict__["_model"], name)


def find_network(model: Any) -> nn.Module:
    """Return the module that holds a model's parameters: itself, or all modules among its attributes.

    Example:
        >>> class Plain:
        ...     def __init__(self): self.net = nn.Linear(2, 1)
        >>> list(find_network(Plain()).state_dict())
        ['net.weight', 'net.bias']
    """
    if isinstance(model, nn.Module):
        return model
    network = nn.Module()
    for name, value in getattr(model, "__dict__", {}).items():
        if isinstance(value, nn.Parameter):
            network.register_parameter(name, value)
        elif (module := _as_module(value)) is not None:
            network.add_module(name, module)
    if not list(network.children()) and not list(network.parameters()):
        raise ConfigurationTypeError(
            f"model: got {describe(model)}, expected a torch.nn.Module, or an object with modules among"
            " its attributes. Write self.net = ... in its __init__."
        )
    return network


def _as_module(value: Any) -> nn.Module | None:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, nn.Module) for v in value):
        return nn.ModuleList(value)
    if isinstance(value, dict) and value and all(isinstance(v, nn.Module) for v in value.values()):
        return nn.ModuleDict(value)
    return None


def unwrap(part: Any) -> Any:
    """Return the model or optimizer inside Fabric's wrapper; anything else as it is."""
    if not is_wrapped(part):
        return part
    return part.module if isinstance(part, nn.Module) else getattr(part, "optimizer", part)


def adapt_model(model: Any, functions: Mapping[str, Callable | None]) -> tuple[Any, Any, nn.Module]:
    """Return (module, source, network) of what was given to ``fit``.

    The module is a LightningModule: the model itself or an adapter. The source is the object whose
    methods are called.
    """
    check_object("model", model)
    given = {name: function for name, function in functions.items() if function is not None}
    for name, function in given.items():
        if not callable(function):
            raise ConfigurationTypeError(
                f"{name}: got {describe(function)}, expected a function fn(model, batch[, batch_idx])."
            )
    if is_instance_of(model, "LightningModule") and not given:
        return model, model, model
    network = find_network(model)
    adapter = ModuleAdapter(model, network, given)
    return adapter, adapter.source, network


def takes_argument(method: Callable, name: str) -> bool:
    """Return whether a method has an argument of this name, or takes any number of arguments."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return True
    has_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return name in parameters or has_any


def takes_batch_idx(step: Callable) -> bool:
    """Return whether a step takes ``(batch, batch_idx)`` and not ``(batch)`` alone.

    Arguments of a step function that have a default are the function's own.

    Example:
        >>> takes_batch_idx(partial(lambda model, batch, factor=0.5: ..., None))
        False
    """
    if takes_argument(step, "batch_idx"):
        return True
    parameters = [
        parameter
        for parameter in inspect.signature(step).parameters.values()
        if parameter.name != "dataloader_idx" and parameter.kind < parameter.KEYWORD_ONLY
    ]
    if isinstance(step, partial):
        parameters = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return len(parameters) >= 2


def takes_iterator(step: Callable) -> bool:
    """Return whether a step fetches its batches itself, from an argument ``dataloader_iter``."""
    try:
        return "dataloader_iter" in inspect.signature(step).parameters
    except (TypeError, ValueError):
        return False
