"""Convert Trainer's strategies to Fabric's strategies, and shard networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import strategies
from lightning.fabric.plugins import precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, ModelParallelStrategy
from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ..errors import ConfigurationError
from ..lightning_compat.overrides import LIGHTNING_PACKAGES
from ..lightning_compat.private import has_communication_hook

if TYPE_CHECKING:
    from lightning.fabric import Fabric


_OF_TRAINER = tuple(f"{package}." for package in LIGHTNING_PACKAGES)
_CONVERTED = ("DDPStrategy", "SingleDeviceStrategy", "ModelParallelStrategy")


def convert_strategy(strategy: Any) -> Any:
    """Convert a Trainer strategy to a Fabric strategy, and return other strategies unchanged.

    Example:
        >>> type(convert_strategy("ddp_fork_find_unused_parameters_false")).__name__
        'DDPStrategy'
    """
    name = strategy.lower() if isinstance(strategy, str) else type(strategy).__name__
    if name.lower().startswith(("deepspeed", "fsdp")):
        raise ConfigurationError(
            f"strategy: got {name}, which FabricLoop does not support. Write strategy='ddp'. To"
            " shard the model, write strategy=ModelParallelStrategy(parallelize_fn) from"
            " lightning.fabric.strategies, and call fully_shard(model, mesh=mesh['data_parallel'])"
            " in parallelize_fn(model, mesh)."
        )
    if name == "single_device":
        return "auto"
    if name.startswith("ddp") and name not in STRATEGY_REGISTRY and name in StrategyRegistry:
        strategy = StrategyRegistry.get(name)
    return _convert_object(strategy) if _is_trainers(strategy) else strategy


def _is_trainers(part: Any) -> bool:
    return any(base.__module__.startswith(_OF_TRAINER) for base in type(part).__mro__)


def _convert_object(strategy: Any) -> Any:
    """Convert a Trainer strategy to the Fabric strategy with the same name and attributes."""
    name = type(strategy).__name__
    has_plugin = type(getattr(strategy, "precision_plugin", None)).__name__ != "Precision"
    if name not in _CONVERTED or has_plugin or has_communication_hook(strategy):
        raise ConfigurationError(
            f"strategy: got a Trainer {name} that FabricLoop cannot convert. Write a strategy"
            " from lightning.fabric.strategies, or a name such as 'ddp'. Pass precision plugins"
            " with the options precision and plugins."
        )
    # Fabric's ModelParallelStrategy requires a parallelize_fn. Pass one that does nothing, because
    # configure_model shards the module.
    arguments = [_return_model] if name == "ModelParallelStrategy" else []
    converted = getattr(strategies, name)(*arguments)
    vars(converted).update(
        {key: value for key, value in vars(strategy).items() if key in vars(converted)}
    )
    return converted


def _return_model(model: nn.Module, mesh: Any) -> nn.Module:
    return model


def convert_plugin(plugin: Any) -> Any:
    """Convert a Trainer precision plugin to a Fabric one, and return other plugins unchanged."""
    if not (isinstance(plugin, precision.Precision) and _is_trainers(plugin)):
        return plugin
    name = type(plugin).__name__
    own = getattr(precision, name, None)
    if own is None:
        raise ConfigurationError(
            f"plugins: got {name}, which only Trainer supports, expected a plugin from"
            " lightning.fabric.plugins.precision, or an instance of a subclass of such a plugin."
        )
    converted = object.__new__(own)
    vars(converted).update(vars(plugin))
    return converted


# Sharded networks


def has_mesh(strategy: Any) -> bool:
    """Return whether a strategy has already created its device mesh."""
    try:
        return isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh is not None
    except RuntimeError:
        # Reading device_mesh raises a RuntimeError if the strategy has not created its mesh yet.
        return False


def is_sharded(network: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def broadcast_network(fabric: Fabric, network: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all processes."""
    for tensor in (*network.parameters(), *network.buffers()):
        if not tensor.is_meta:
            value = tensor.detach().to(fabric.device).contiguous()
            torch.distributed.broadcast(value, src=0)
            tensor.detach().copy_(value)


def shard_network(fabric: Fabric, network: nn.Module, name: str) -> None:
    """Broadcast rank 0's weights, and shard the network in place with ``parallelize_fn``.

    Args:
        name: The model's name in error messages.
    """
    strategy: Any = fabric.strategy
    tensors = [*network.parameters(), *network.buffers()]
    is_on_meta = any(tensor.is_meta for tensor in tensors)
    if not is_sharded(network):
        broadcast_network(fabric, network)
    if is_on_meta or not is_sharded(network):
        # Fabric shards the network, and initializes the tensors that are on the meta device.
        returned = strategy.setup_module(network)
        if returned is not network:
            raise ConfigurationError(
                f"parallelize_fn: returned a new {type(returned).__name__}, expected the same"
                f" {name} object. Change the model in place. To compile the model, write"
                " compile=True."
            )
    check_sharding(strategy.device_mesh, network, name)


def check_sharding(mesh: Any, network: nn.Module, name: str) -> None:
    """Raise an error for unsharded parameters, because each process would train its own copy."""
    if not is_sharded(network):
        raise ConfigurationError(
            f"parallelize_fn: returned a {name} without sharded parameters. Call"
            " fully_shard(model, mesh=mesh['data_parallel']) or parallelize_module(model,"
            " mesh['tensor_parallel'], plan) in parallelize_fn."
        )
    if mesh["data_parallel"].size() == 1:
        return
    for parameter_name, parameter in network.named_parameters():
        mesh_of: Any = getattr(parameter, "device_mesh", None)
        is_whole = mesh_of is None or mesh_of.mesh_dim_names == ("tensor_parallel",)
        if is_whole and parameter.requires_grad:
            raise ConfigurationError(
                f"parallelize_fn: returned a {name} whose parameter {parameter_name!r} is not"
                f" sharded. Each of the {mesh['data_parallel'].size()} data-parallel"
                " processes would train its own copy of this parameter. Call fully_shard(model,"
                " mesh=mesh['data_parallel']) at the end of parallelize_fn."
            )


def wrap_step(network: nn.Module, step: Callable) -> Callable:
    """Return a function that calls ``step``, and gathers the sharded tensors that it returns."""

    def run_step(*args: Any, **kwargs: Any) -> Any:
        return gather_tensors(call(partial(step, *args, **kwargs)))

    call: Any = _call
    if isinstance(network, FSDPModule):
        # FSDP gathers the parameters before each call to a registered forward method.
        root: Any = network
        root.run_step = _call
        register_fsdp_forward_method(root, "run_step")
        call = root.run_step
        # Remove run_step from the network, so that deepcopy(network) does not copy the method.
        del root.run_step
    return run_step


def _call(function: Callable[[], Any]) -> Any:
    return function()


@contextmanager
def no_gradient_sync(network: nn.Module) -> Iterator[None]:
    """Keep FSDP from averaging gradients across processes during the `with` block."""
    parts = [module for module in network.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for part in parts:
            part.set_requires_gradient_sync(True)


def gather_tensors(item: Any) -> Any:
    """Replace the sharded tensors in ``item`` with full tensors.

    All processes must call this function.
    """
    return apply_to_collection(item, DTensor, DTensor.full_tensor)
