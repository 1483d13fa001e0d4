"""Fabric's strategies and plugins under the names, and from the objects, that Trainer takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins import precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigurationError, ConfigurationTypeError
from ..training.hooks import is_instance_of
from ..training.optimizers import is_optimizer

if TYPE_CHECKING:
    from ..training.run_state import RunState

_StartMethod = Literal["popen", "spawn", "fork"]
_START_METHODS: dict[str, _StartMethod] = {
    "": "popen",
    "_spawn": "spawn",
    "_fork": "fork",
    "_notebook": "fork",
}
_OF_TRAINER = ("lightning.pytorch.", "pytorch_lightning.")
_MODEL_PARALLEL = (
    "Use strategy=ModelParallelStrategy(parallelize_fn, data_parallel_size=...) of"
    " lightning.fabric.strategies, with fully_shard(model, mesh=mesh['data_parallel']) in"
    " parallelize_fn(model, mesh), or strategy='ddp'."
)
# What a strategy of Trainer may bring, and the option that takes it here.
_OPTIONS = {
    "_accelerator": "accelerator",
    "_precision_plugin": "precision",
    "_checkpoint_io": "plugins",
}
_TRAINER_ONLY = {
    "_ddp_comm_hook": "ddp_comm_hook",
    "_model_averaging_period": "model_averaging_period",
}


def convert_strategy(strategy: Any) -> Any:
    """Return Fabric's strategy for one of Trainer's. Anything else is for Fabric to judge.

    Raises:
        ConfigurationError: Fabric has no equivalent.

    Example:
        >>> type(convert_strategy("ddp_fork_find_unused_parameters_false")).__name__
        'DDPStrategy'
    """
    is_name = isinstance(strategy, str)
    names = [strategy] if is_name else [base.__name__ for base in type(strategy).__mro__]
    if any(name.lower().startswith(("deepspeed", "fsdp")) for name in names):
        raise ConfigurationError(
            f"strategy: got {names[0]}, which FabricLoop does not run. {_MODEL_PARALLEL}"
        )
    if is_name:
        return _convert_name(strategy)
    if not any(base.__module__.startswith(_OF_TRAINER) for base in type(strategy).__mro__):
        check_ddp_arguments(strategy)
        return strategy
    return _convert_object(strategy)


def _convert_name(name: str) -> Any:
    if name.lower() == "single_device":
        return "auto"
    pattern = "ddp(|_spawn|_fork|_notebook)_find_unused_parameters_(true|false)"
    found = re.fullmatch(pattern, name.lower())
    if found is None:
        return name
    return DDPStrategy(
        start_method=_START_METHODS[found[1]], find_unused_parameters=found[2] == "true"
    )


def _convert_object(strategy: Any) -> Any:
    """Return Fabric's strategy with the arguments of one of Trainer's."""
    name = type(strategy).__name__
    # What a class of one's own overrides would be lost.
    is_own = not type(strategy).__module__.startswith(_OF_TRAINER)
    if is_own or name not in ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"):
        raise ConfigurationError(
            f"strategy: got {name}, which is made for Trainer, expected a strategy of"
            " lightning.fabric.strategies or a name, such as 'ddp', 'ddp_spawn' or 'ddp_notebook'."
        )
    for key, argument in _TRAINER_ONLY.items():
        if getattr(strategy, key, None) is not None:
            raise ConfigurationError(
                f"strategy: got {name}({argument}=...), which Fabric's {name} does not have. Leave it out."
            )
    for key, option in _OPTIONS.items():
        if getattr(strategy, key, None) is not None:
            raise ConfigurationError(
                f"strategy: got {name}(...) with its own {option}. Write FabricLoop({option}=...) instead."
            )
    if name == "SingleDeviceStrategy":
        return SingleDeviceStrategy(strategy.root_device)
    shared = {
        "parallel_devices": strategy.parallel_devices,
        "cluster_environment": strategy.cluster_environment,
    }
    if name == "DDPStrategy":
        return DDPStrategy(
            process_group_backend=strategy.process_group_backend,
            timeout=strategy._timeout,
            start_method=strategy._start_method,
            **shared,
            **strategy._ddp_kwargs,
        )
    made = ModelParallelStrategy(
        _shard_nothing,
        data_parallel_size=strategy._data_parallel_size,
        tensor_parallel_size=strategy._tensor_parallel_size,
        save_distributed_checkpoint=strategy._save_distributed_checkpoint,
        process_group_backend=strategy._process_group_backend,
        timeout=strategy._timeout,
    )
    for attribute, value in shared.items():
        setattr(made, attribute, value)
    return made


def _shard_nothing(model: nn.Module, mesh: Any) -> nn.Module:
    """Modules written for Trainer are sharded in their ``configure_model``, by ``self.device_mesh``."""
    return model


def check_ddp_arguments(strategy: Any) -> None:
    """Refuse arguments that Fabric's DDPStrategy passes on to torch, which does not know them."""
    known = inspect.signature(DistributedDataParallel).parameters
    for argument in sorted(getattr(strategy, "_ddp_kwargs", {}).keys() - known):
        raise ConfigurationTypeError(
            f"strategy: got {type(strategy).__name__}({argument}=...), which torch's"
            " DistributedDataParallel does not have. Leave it out."
        )


def convert_plugins(plugins: Any) -> Any:
    """Return Fabric's precision plugins in place of Trainer's, and other plugins as they are.

    Raises:
        ConfigurationError: A class derived from Trainer's.

    Example:
        >>> from lightning.pytorch.plugins import DoublePrecision
        >>> type(convert_plugins([DoublePrecision()])[0]).__module__
        'lightning.fabric.plugins.precision.double'
    """
    if plugins is None:
        return None
    is_many = isinstance(plugins, Sequence) and not isinstance(plugins, str)
    given = plugins if is_many else [plugins]
    return [_convert_precision(plugin) for plugin in given]


def _convert_precision(plugin: Any) -> Any:
    is_trainers = any(base.__module__.startswith(_OF_TRAINER) for base in type(plugin).__mro__)
    if not (is_trainers and isinstance(plugin, precision.Precision)):
        return plugin
    name = type(plugin).__name__
    own = getattr(precision, name, None)
    if own is None or not type(plugin).__module__.startswith(_OF_TRAINER):
        raise ConfigurationError(
            f"plugins: got {name}, which is made for Trainer, expected a class of"
            " lightning.fabric.plugins.precision or one derived from it."
        )
    made = object.__new__(own)
    vars(made).update(vars(plugin))
    return made


def check_strategy(run: RunState) -> None:
    """Refuse combinations that would train something else, before anything is launched."""
    strategy, callbacks = run.fabric.strategy, run.loop.callbacks
    accumulates = run.accumulate_grad_batches != 1 or any(
        is_instance_of(callback, "GradientAccumulationScheduler") for callback in callbacks
    )
    if accumulates and getattr(strategy, "_ddp_kwargs", {}).get("static_graph"):
        raise ConfigurationError(
            "strategy: got DDPStrategy(static_graph=True) with"
            f" accumulate_grad_batches={run.accumulate_grad_batches}, which torch cannot combine. Leave"
            " static_graph out."
        )
    if not isinstance(strategy, ModelParallelStrategy):
        return
    given = run.given_optimizer
    if given is not None and (is_optimizer(given) or not callable(given)):
        raise ConfigurationError(
            "fit: got optimizer= with ModelParallelStrategy, which replaces the model's parameters, so that it"
            " would train none of them. Write optimizer=lambda model: torch.optim.Adam(model.parameters()), or a"
            " method configure_optimizers."
        )
    for callback in callbacks:
        if is_instance_of(callback, "WeightAveraging", "StochasticWeightAveraging", "ModelPruning"):
            raise ConfigurationError(
                f"callbacks: got {type(callback).__name__} with ModelParallelStrategy, but it needs whole"
                " weights, and each process has a shard of them. Leave it out."
            )
