"""Give a LightningModule's interface to functions and objects, and run their steps.

On one device, plain Fabric calls ``model.training_step`` without autocast. With ``bf16-mixed``, the
model then trains in float32 without a warning. StepRunner applies the precision, the strategy and
torch.compile to every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.strategies import no_gradient_sync, shard_network, wrap_step
from ..errors import ConfigurationTypeError, check_object, describe
from ..lightning_compat.overrides import is_instance_of, overridden

# The methods of a LightningModule that users override.
_HOOKS = ["setup", "teardown", "prepare_data", "backward", "optimizer_zero_grad"]
_HOOKS += [
    name
    for name in dir(LightningModule)
    if name.startswith(("on_", "configure_", "transfer_"))
    or name.endswith(("_step", "_dataloader"))
]


class ModuleAdapter(LightningModule):
    """Adapts a network with step functions, or an object with step methods, to LightningModule.

    The adapter has the network's parameters, buffers and submodules under their own names. A
    checkpoint therefore has the keys of ``network.state_dict()``.

    Args:
        model: The model that was given to ``fit``.
        network: The module that holds the parameters.
        functions: Step functions ``fn(model, batch[, batch_idx])``, keyed by the name of the step.
    """

    def __init__(self, model: Any, network: nn.Module, functions: Mapping[str, Callable]) -> None:
        super().__init__()
        # Set attributes in vars(), because nn.Module would register the model as a submodule.
        attributes = vars(self)
        for name in ("_parameters", "_buffers", "_modules"):
            attributes[name] = vars(network)[name]
        attributes |= {"model": model, "network": network, "functions": dict(functions)}
        attributes |= {name: getattr(model, name) for name in _HOOKS if overridden(model, name)}
        if "validation_step" in functions:
            functions = {"test_step": functions["validation_step"], **functions}
        attributes |= {name: partial(step, network) for name, step in functions.items()}
        self.automatic_optimization = getattr(model, "automatic_optimization", True)

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


def find_network(model: Any) -> nn.Module:
    """Return the model if it is an nn.Module. Otherwise, return its modules as one nn.Module."""
    if isinstance(model, nn.Module):
        return model
    network = nn.Module()
    for name, value in getattr(model, "__dict__", {}).items():
        if isinstance(value, nn.Parameter):
            network.register_parameter(name, value)
        elif isinstance(value, nn.Module):
            network.add_module(name, value)
    if not list(network.children()) and not list(network.parameters()):
        raise ConfigurationTypeError(
            f"model: got {describe(model)}, expected a torch.nn.Module, or an object with a"
            " torch.nn.Module as an attribute, such as self.net."
        )
    return network


def unwrap(part: Any) -> Any:
    """Return the model or optimizer inside Fabric's wrapper, and other objects unchanged."""
    if not is_wrapped(part):
        return part
    return part.module if isinstance(part, nn.Module) else getattr(part, "optimizer", part)


def adapt_model(model: Any, functions: Mapping[str, Callable | None]) -> tuple[Any, nn.Module]:
    """Return the LightningModule or ModuleAdapter to run, and the nn.Module with the parameters."""
    check_object("model", model)
    given = {name: function for name, function in functions.items() if function is not None}
    for name, function in given.items():
        if not callable(function):
            raise ConfigurationTypeError(
                f"{name}: got {describe(function)}, expected a function fn(model, batch[, batch_idx])."
            )
    if is_instance_of(model, "LightningModule") and not given:
        return model, model
    network = find_network(model)
    return ModuleAdapter(model, network, given), network


# Step arguments


def parameters_of(method: Callable) -> Mapping[str, inspect.Parameter]:
    """Return a method's parameters by name, or an empty dict for a builtin without a signature."""
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}


def takes_argument(method: Callable, name: str) -> bool:
    """Return whether a method has an argument of this name, or takes any number of arguments."""
    parameters = parameters_of(method)
    return name in parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


def takes_batch_idx(step: Callable) -> bool:
    """Return whether a step takes ``(batch, batch_idx)`` instead of only ``(batch)``.

    In a step function, an argument that has a default value does not count as ``batch_idx``.
    """
    if takes_argument(step, "batch_idx"):
        return True
    count = 0
    for name, parameter in parameters_of(step).items():
        is_positional = name != "dataloader_idx" and parameter.kind < parameter.KEYWORD_ONLY
        is_own = isinstance(step, partial) and parameter.default is not parameter.empty
        if is_positional and not is_own:
            count += 1
    return count >= 2


# Running steps


class _CallStep(nn.Module):
    """The module that the strategy wraps. Its forward() runs a step, such as training_step."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def needs_no_strategy(fabric: Fabric) -> bool:
    """Return whether the run uses one device and float32. Fabric then changes nothing."""
    strategy = fabric.strategy
    return type(strategy) is SingleDeviceStrategy and type(strategy.precision) is Precision


class StepRunner:
    """Prepares the network for its device and strategy, and calls steps on it.

    Args:
        module: The LightningModule or adapter whose methods are the steps.
        network: The module that holds the parameters.
    """

    def __init__(
        self, fabric: Fabric, module: Any, network: nn.Module, compile: Any = False
    ) -> None:
        self.fabric, self.module, self.network, self.compile = fabric, module, network, compile
        self.precision = fabric.strategy.precision
        name = str(self.precision.precision)
        self.converts_dtype = name.endswith("-true") and name != "32-true"
        self.needs_no_strategy = needs_no_strategy(fabric)
        self.is_model_parallel = isinstance(fabric.strategy, ModelParallelStrategy)
        self.wrapped: Any = None

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP wrapper, which reduces gradients across processes, or None."""
        return self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else None

    def convert_network(self) -> None:
        if self.converts_dtype:
            self.precision.convert_module(self.network)

    def setup(self, is_training: bool) -> None:
        """Shard the network, or move it to its device. For training, wrap it for the strategy."""
        self.convert_network()
        if self.is_model_parallel:
            shard_network(self.fabric, self.network, type(self.module).__name__)
            return
        has_parameters = any(parameter.requires_grad for parameter in self.network.parameters())
        self.fabric.to_device(self.network)
        is_alone = isinstance(self.fabric.strategy, SingleDeviceStrategy)
        if is_training and has_parameters and not is_alone:
            self.wrapped = self.fabric.strategy.setup_module(_CallStep(self.network))
        for module in self.network.modules():
            # Moving a network does not call the overridden to() of a submodule, so call to() here.
            # Call to(device) last, because to(device) resets the dtype of torchmetrics objects.
            if type(module).to is not nn.Module.to:
                if self.converts_dtype:
                    self.precision.convert_module(module)
                module.to(self.fabric.device)

    def get(self, name: str, method: Callable) -> Callable:
        """Wrap a step for the compilation, the strategy and the precision of this run."""
        if self.compile is not False:
            mode = None if self.compile is True else self.compile
            options = self.compile if isinstance(self.compile, dict) else {"mode": mode}
            method = torch.compile(method, **options)
        if self.is_model_parallel:
            method = wrap_step(self.network, method)
        if self.wrapped is not None:
            method = self._call_wrapped(method, name == "training_step")
        context = self._precision_context()
        if context is None:
            return method

        def step(*args: Any, **kwargs: Any) -> Any:
            with context():
                return method(*args, **kwargs)

        return step

    def _call_wrapped(self, method: Callable, is_training: bool) -> Callable:
        """Return a function that runs ``method`` in the forward method of DDP or another wrapper.

        In manual optimization, forward must not prepare DDP's reducer, because backward does so.
        """
        ddp = self.ddp
        is_automatic = self.module.automatic_optimization
        if ddp is None or is_automatic or not is_training:
            return lambda *args, **kwargs: self.wrapped(partial(method, *args, **kwargs))

        def step(*args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                output = method(*args, **kwargs)
                ddp.require_backward_grad_sync = False
                return output

            try:
                return ddp(call)
            finally:
                ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True

        return step

    def _precision_context(self) -> Callable[[], AbstractContextManager] | None:
        """Return a function that creates a step's precision context, or None if none is needed."""
        if isinstance(self.precision, MixedPrecision):
            is_bfloat16 = self.precision.precision == "bf16-mixed"
            dtype = torch.bfloat16 if is_bfloat16 else torch.float16
            # As in Trainer, do not cache casts. A weight that is used twice is cast twice.
            return partial(torch.autocast, self.precision.device, dtype=dtype, cache_enabled=False)
        return None if self.precision.precision == "32-true" else self.precision.forward_context

    def no_backward_sync(self) -> AbstractContextManager:
        if self.is_model_parallel:
            return no_gradient_sync(self.network)
        return nullcontext() if self.ddp is None else self.ddp.no_sync()
