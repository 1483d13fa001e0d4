"""Give plain models the interface of a LightningModule, and run the step methods.

On one device, plain Fabric calls ``model.training_step`` without autocast, so ``bf16-mixed``
silently trains in float32. StepRunner runs every step with the run's precision,
strategy and torch.compile setting.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.restore import plain_name
from ..distributed.strategies import broadcast_network, no_gradient_sync, shard_network, wrap_step
from ..errors import ConfigurationError, ConfigurationTypeError, check_object, describe
from ..lightning_compat.overrides import is_instance_of, overridden
from ..plain_values import collect_metadata

_MODULE_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# The LightningModule methods that the loop calls on any model that defines them.
_HOOKS = ["setup", "teardown", "prepare_data", "backward", "optimizer_zero_grad"]
_HOOKS += [n for n in dir(LightningModule) if n.startswith(("on_", "configure_", "transfer_"))]
_HOOKS += [n for n in dir(LightningModule) if n.endswith(("_step", "_dataloader"))]


class ModuleAdapter(LightningModule):
    """Gives LightningModule's interface to a network, or to another object with step methods.

    Checkpoints have the keys of ``network.state_dict()``, without a prefix for the adapter.

    Args:
        model: The model that was passed to ``fit``.
        network: The module that holds the parameters.
        functions: Step functions ``fn(model, batch[, batch_idx])``, keyed by step name.
        is_manual: Whether the training step itself calls ``optimizer.step()``.
    """

    def __init__(
        self,
        model: Any,
        network: nn.Module,
        functions: Mapping[str, Callable],
        is_manual: bool = False,
    ) -> None:
        super().__init__()
        # Write to vars(self), because nn.Module.__setattr__ would register the model as a
        # submodule.
        attributes = vars(self)
        attributes |= {
            name: vars(network)[name] for name in ("_parameters", "_buffers", "_modules")
        }
        attributes |= {"model": model, "network": network, "functions": dict(functions)}
        attributes |= {name: getattr(model, name) for name in _HOOKS if overridden(model, name)}
        if "validation_step" in functions:
            functions = {"test_step": functions["validation_step"], **functions}
        attributes |= {name: partial(step, network) for name, step in functions.items()}
        is_automatic = getattr(model, "automatic_optimization", True)
        self.automatic_optimization = is_automatic and not is_manual

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
        is_manual = not self.automatic_optimization
        return (ModuleAdapter, (self.model, self.network, self.functions, is_manual))


class ObjectNetwork(nn.Module):
    """An nn.Module that collects the modules and parameters from another object's attributes.

    Modules in a list, tuple or dict are named as in nn.ModuleList or nn.ModuleDict. For example,
    the modules in ``self.nets = [a, {"b": b}]`` are named ``nets.0`` and ``nets.1.b``.
    """

    def collect(self, model: Any) -> None:
        self._parameters.clear()
        self._modules.clear()
        for name, value in list(getattr(model, "__dict__", {}).items()):
            self._add(name, value, name, set())
        self.training = any(child.training for child in self.children())

    def _add(self, name: str, value: Any, path: str, containers: set[int]) -> None:
        """Add a module, a parameter, or a container with modules or parameters to this network.

        Args:
            path: The name of the value in error messages, such as "nets[0]".
            containers: The ids of the containers around the value, to detect cycles.
        """
        # Set _parameters and _modules directly, because add_module() refuses names such as
        # "forward".
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        elif isinstance(value, nn.Module):
            self._modules[name] = value
        elif isinstance(value, _MODULE_CONTAINERS) and id(value) not in containers:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts, containers = ObjectNetwork(), containers | {id(value)}
            for key, part in items:
                if isinstance(part, (nn.Parameter, nn.Module, *_MODULE_CONTAINERS)):
                    parts._add(str(key), part, f"{path}[{key!r}]", containers)
            if not parts.is_empty():
                check_container(value, path)
                self._modules[name] = parts

    def is_empty(self) -> bool:
        return not self._modules and not self._parameters


def check_container(value: Any, path: str) -> None:
    """Raise an error if a container of modules is a set or has invalid module names as keys."""
    if isinstance(value, set | frozenset):
        raise ConfigurationTypeError(
            f"model: got a set of modules in the attribute {path}, expected a list or a dict. A set"
            " has no fixed order, so its modules have no fixed names in a checkpoint."
        )
    keys = [str(key) for key in value] if isinstance(value, dict) else []
    if any("." in key or not key for key in keys) or len(set(keys)) < len(keys):
        raise ConfigurationError(
            f"model: got a dict of modules with the keys {sorted(keys)} in the attribute {path},"
            " expected unique, non-empty keys without dots, as in nn.ModuleDict."
        )


def find_network(model: Any) -> nn.Module:
    """Return the model itself, or an ObjectNetwork if the model is not an nn.Module."""
    if isinstance(model, nn.Module):
        return model
    network = ObjectNetwork()
    network.collect(model)
    if not creates_modules(model):
        check_network(model, network)
    return network


def creates_modules(model: Any) -> bool:
    """Return whether the model has a hook that may create modules."""
    return any(overridden(model, name) is not None for name in ("setup", "configure_model"))


def check_network(model: Any, network: nn.Module) -> None:
    """Raise an error if a model is not an nn.Module and has no nn.Module as an attribute."""
    if isinstance(network, ObjectNetwork) and network.is_empty():
        raise ConfigurationTypeError(
            f"model: got {describe(model)}, expected a torch.nn.Module, or an object with a"
            " torch.nn.Module as an attribute, such as self.net."
        )


def unwrap(part: Any) -> Any:
    """Remove Fabric's wrapper, if there is one, from a model or optimizer."""
    if not is_wrapped(part):
        return part
    return part.module if isinstance(part, nn.Module) else getattr(part, "optimizer", part)


def unwrap_compiled(model: Any, functions: Mapping[str, Any]) -> tuple[Any, Any]:
    """Remove a ``torch.compile`` wrapper, unless a step function calls the compiled model.

    Returns:
        The model inside the wrapper, and a function that compiles steps with the same torch.compile
        arguments as the wrapper. If the model is returned unchanged, the function is None.
    """
    if not is_instance_of(model, "OptimizedModule"):
        return model, None
    inner: Any = model._orig_mod
    if any(functions.values()) and not is_instance_of(inner, "LightningModule"):
        return model, None
    # Like Trainer, compile a LightningModule's steps instead of its forward().
    return inner, model.dynamo_ctx


def adapt_model(
    model: Any, functions: Mapping[str, Callable | None], is_manual: bool
) -> tuple[Any, nn.Module]:
    """Give the model and the user's step functions the interface of a LightningModule.

    Returns:
        The LightningModule or ModuleAdapter, and the nn.Module that contains the parameters.
    """
    check_object("model", model)
    given = {name: function for name, function in functions.items() if function is not None}
    for name, function in given.items():
        if not callable(function):
            raise ConfigurationTypeError(
                f"{name}: got {describe(function)}, expected a function fn(model, batch) or"
                " fn(model, batch, batch_idx)."
            )
    if is_instance_of(model, "LightningModule") and not given:
        return model, model
    network = find_network(model)
    return ModuleAdapter(model, network, given, is_manual), network


# Step arguments


def parameters_of(method: Callable) -> Mapping[str, inspect.Parameter]:
    """Return a method's parameters by name, or {} for a built-in function without a signature."""
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}


def takes_dataloader_idx(method: Callable) -> bool:
    """Return whether a method has ``*args`` or the argument ``dataloader_idx``."""
    parameters = parameters_of(method)
    has_args = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return has_args or "dataloader_idx" in parameters


def takes_batch_idx(step: Callable) -> bool:
    """Return whether a step function takes ``(batch, batch_idx)`` instead of only ``(batch)``."""
    count = 0
    for name, parameter in parameters_of(step).items():
        is_positional = name != "dataloader_idx" and parameter.kind < parameter.KEYWORD_ONLY
        if parameter.kind is parameter.VAR_POSITIONAL or (is_positional and name == "batch_idx"):
            return True
        # A partial contains a step function that was passed to the loop. Do not count arguments of
        # this function with default values, which may be options, as in step(net, batch, scale=2).
        is_own = isinstance(step, partial) and parameter.default is not parameter.empty
        if is_positional and not is_own:
            count += 1
    return count >= 2


# Running steps


class _CallStep(nn.Module):
    """Calls a step method from ``forward``, because DDP wraps only ``forward``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def needs_no_strategy(fabric: Fabric) -> bool:
    """Return whether Fabric uses a single device and float32."""
    strategy = fabric.strategy
    return type(strategy) is SingleDeviceStrategy and type(strategy.precision) is Precision


class StepRunner:
    """Moves the network to the device, sets up the strategy, and wraps the step methods.

    Args:
        module: The LightningModule or ModuleAdapter that has the step methods.
        network: The module that holds the parameters.
        compile: The ``compile`` option, or the compiler of the model's torch.compile wrapper.
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
        self._synchronized: set[nn.Parameter] = set()
        self._modes: dict[str, bool] | None = None
        self._flags_at_start: dict[str, dict[str, bool]] = {"requires_grad": {}, "training": {}}
        self._metadata_at_start: dict[str, Any] = {}
        # The default dtype from before the step that is running, or None between steps.
        self._outer_dtype: torch.dtype | None = None

    def unwrap(self) -> None:
        """Delete the strategy's wrapper around the network, such as DDP."""
        self.wrapped = None

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP wrapper, which averages gradients over the processes, or None without DDP."""
        return self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else None

    def sum_unsynchronized(self) -> dict[str, float]:
        """Return the sums of the trainable parameters whose gradients DDP never averages."""
        return {
            name: part.detach().double().sum().item()
            for name, part in (self.network.named_parameters() if self.ddp is not None else ())
            if part.requires_grad and part not in self._synchronized
        }

    def training_modes(self) -> dict[str, bool]:
        """Return the ``training`` flag that each module has outside of evaluations."""
        if self._modes is not None:
            return self._modes
        return {name: module.training for name, module in self.network.named_modules()}

    def set_training_modes(self, modes: Mapping[str, bool]) -> None:
        for name, module in self.network.named_modules():
            if name in modes:
                module.training = modes[name]

    def call_train(self, modes: Mapping[str, bool]) -> None:
        """Restore modes by calling ``train``, because a module may merge weights in ``train``."""
        # A module comes before its submodules, so train() is usually called only once.
        for name, module in self.network.named_modules():
            if module.training != modes.get(name, module.training):
                module.train(modes[name])

    def start_training(self) -> None:
        """Call ``train``, as a hand-written loop does, but keep frozen modules in eval mode."""
        modes = self.training_modes()
        parts = [part for part in self.network.modules() if not isinstance(part, ObjectNetwork)]
        has_training_parts = any(part.training for part in parts)
        # Call train() on the whole network, which may override train(), for example to keep
        # BatchNorm in eval mode.
        self.network.train()
        if has_training_parts:
            # If only some modules are in eval mode, the user has probably frozen them on purpose.
            current = self.training_modes()
            self.call_train({name: modes[name] and current[name] for name in modes})

    def flags(self, parameters: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
        """Return each module's ``training`` flag and each parameter's ``requires_grad`` flag."""
        requires_grad = {name: part.requires_grad for name, part in parameters.items()}
        return {"requires_grad": requires_grad, "training": self.training_modes()}

    def record_tensor_metadata(self) -> None:
        """Record the dtype, shape and strides of each parameter and buffer."""
        tensors = {} if self.is_model_parallel else collect_metadata(self.network)
        self._metadata_at_start = {plain_name(name): tensors[name] for name in tensors}

    def changed_tensor_metadata(self) -> dict[str, Any]:
        """Return the original dtype, shape and strides of each tensor that no longer has them."""
        start = self._metadata_at_start
        tensors = collect_metadata(self.network) if start else {}
        current = {plain_name(name): tensors[name] for name in tensors}
        return {name: start[name] for name in start if current.get(name) != start[name]}

    def record_flags(self, parameters: Mapping[str, Any]) -> None:
        self._flags_at_start = self.flags(parameters)

    def mark_changed_flags(self, parameters: Mapping[str, Any]) -> None:
        """Mark the flags that on_train_start has changed, so that checkpoints contain them.

        The flags are each module's ``training`` and each parameter's ``requires_grad``.
        """
        for kind, flags in self.flags(parameters).items():
            unchanged = flags.items() & self._flags_at_start[kind].items()
            self._flags_at_start[kind] = dict(unchanged)

    def changed_flags(self, parameters: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
        """Return the ``training`` and ``requires_grad`` flags that have changed during the run."""
        return {
            kind: dict(sorted(flags.items() - self._flags_at_start[kind].items()))
            for kind, flags in self.flags(parameters).items()
        }

    def load_flags(
        self, flags: Mapping[str, Mapping[str, bool]], parameters: Mapping[str, Any]
    ) -> None:
        """Restore the ``training`` and ``requires_grad`` flags from a checkpoint.

        Later checkpoints also contain these flags.
        """
        self.set_training_modes(flags["training"])
        for name, parameter in parameters.items():
            parameter.requires_grad = flags["requires_grad"].get(name, parameter.requires_grad)
        for kind, known in self._flags_at_start.items():
            self._flags_at_start[kind] = {n: v for n, v in known.items() if n not in flags[kind]}

    @contextmanager
    def captured_modes(self) -> Iterator[Callable[[], None]]:
        """Store each module's mode (train or eval) before an evaluation switches to eval mode.

        Yields:
            A function that restores each module's previous mode (train or eval).
        """
        self._modes = self.training_modes()
        is_plain = isinstance(self.module, ModuleAdapter)
        set_modes = self.call_train if is_plain else self.set_training_modes
        restore = partial(set_modes, self._modes)
        try:
            yield restore
        except BaseException:
            restore()
            raise
        finally:
            self._modes = None

    def convert_network(self) -> None:
        if self.converts_dtype:
            self.precision.convert_module(self.network)

    def setup(self, is_training: bool) -> None:
        """Move the network to the device, and shard or wrap the network for the strategy."""
        self.convert_network()
        if self.is_model_parallel:
            shard_network(self.fabric, self.network, type(self.module).__name__)
            return
        self.fabric.to_device(self.network)
        if not is_training and isinstance(self.fabric.strategy, DDPStrategy):
            broadcast_network(self.fabric, self.network)
        if is_training and not isinstance(self.fabric.strategy, SingleDeviceStrategy):
            if not any(parameter.requires_grad for parameter in self.network.parameters()):
                raise ConfigurationError(
                    f"strategy: got {type(self.fabric.strategy).__name__} for a model in which no"
                    " parameter requires a gradient, expected at least one trainable parameter."
                    " The buffers would differ between the processes. Train with devices=1."
                )
            self.wrapped = self.fabric.strategy.setup_module(_CallStep(self.network))
            parameters = self.network.parameters()
            self._synchronized = {part for part in parameters if part.requires_grad}
        for module in self.network.modules():
            # network.to() does not call a submodule's overridden to() method, so call it here. Like
            # Trainer, call convert_module() first, because to(device) resets the dtype of a
            # torchmetrics object.
            if type(module).to is not nn.Module.to:
                if self.converts_dtype:
                    self.precision.convert_module(module)
                module.to(self.fabric.device)

    def get(self, name: str, method: Callable) -> Callable:
        """Wrap a step method so that it uses torch.compile, the strategy and the precision."""
        if callable(self.compile):
            method = self.compile(method)
        elif self.compile is not False:
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
            previous = self._outer_dtype
            self._outer_dtype = previous or torch.get_default_dtype()
            try:
                with context():
                    return method(*args, **kwargs)
            finally:
                self._outer_dtype = previous

        return step

    @contextmanager
    def outer_dtype(self) -> Iterator[None]:
        """In a `with` block, use the default dtype from before the step that is running."""
        current = torch.get_default_dtype()
        torch.set_default_dtype(self._outer_dtype or current)
        try:
            yield
        finally:
            torch.set_default_dtype(current)

    def _call_wrapped(self, method: Callable, is_training: bool) -> Callable:
        """Make a step method run inside the ``forward`` of a wrapper such as DDP."""
        ddp = self.ddp
        is_automatic = self.module.automatic_optimization
        if ddp is None or is_automatic or not is_training:
            return lambda *args, **kwargs: self.wrapped(partial(method, *args, **kwargs))

        def step(*args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                output = method(*args, **kwargs)
                # In manual optimization, loop.backward(loss) prepares DDP for each backward pass,
                # so skip this preparation in DDP's forward().
                ddp.require_backward_grad_sync = False
                return output

            try:
                return ddp(call)
            finally:
                ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True

        return step

    def _precision_context(self) -> Callable[[], AbstractContextManager] | None:
        """Return a function that creates a context such as torch.autocast, or None for float32."""
        if isinstance(self.precision, MixedPrecision):
            is_bfloat16 = self.precision.precision == "bf16-mixed"
            dtype = torch.bfloat16 if is_bfloat16 else torch.float16
            # Like Trainer, do not let autocast cache converted weights.
            return partial(torch.autocast, self.precision.device, dtype=dtype, cache_enabled=False)
        return None if self.precision.precision == "32-true" else self.precision.forward_context

    def no_backward_sync(self) -> AbstractContextManager:
        if self.is_model_parallel:
            return no_gradient_sync(self.network)
        return nullcontext() if self.ddp is None else self.ddp.no_sync()
