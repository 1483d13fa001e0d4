"""Train a network whose parameters are sharded: FSDP2 and tensor parallel, by the user's ``parallelize_fn``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_TENSOR_PARALLEL = "tensor_parallel"


def has_mesh(strategy: Any) -> bool:
    """Return whether the strategy has joined its processes into a mesh."""
    try:
        return isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh is not None
    except RuntimeError:
        # Lightning raises it before there is a mesh.
        return False


def is_sharded(network: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def shard_network(fabric: Fabric, network: nn.Module, name: str) -> None:
    """Let ``parallelize_fn`` shard a network in place. One that is sharded already stays as it is.

    All processes start with the weights of the first one.

    Args:
        name: What messages call the model.

    Raises:
        ConfigurationError: Processes would train parameters for themselves.
    """
    strategy: Any = fabric.strategy
    on_meta = [n for n, tensor in _tensors(network) if tensor.is_meta]
    with _own_random_numbers(fabric) if on_meta else nullcontext():
        # What is on the meta device gets its memory here, and draws its weights.
        if is_sharded(network):
            materialize(network, strategy.root_device)
        else:
            synchronize(tensor for _, tensor in _tensors(network))
            made = strategy.setup_module(network)
            if made is not network:
                raise ConfigurationError(
                    f"parallelize_fn: got another object, a {type(made).__name__}, expected {name} itself,"
                    " changed in place. To compile it use compile=True."
                )
    synchronize(tensor for n, tensor in _tensors(network) if n in on_meta)
    check_sharding(strategy.device_mesh, network, name)


def materialize(network: nn.Module, device: torch.device) -> None:
    """Give memory and weights to a network that was sharded on the meta device."""
    if not any(tensor.is_meta for _, tensor in _tensors(network)):
        return
    network.to_empty(device=device)
    for module in network.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


@contextmanager
def _own_random_numbers(fabric: Fabric) -> Iterator[None]:
    """Draw other numbers in each process: with one seed the shards would be copies of each other."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # On the CPU each process draws its own numbers anyway.
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        torch.manual_seed(torch.initial_seed() + fabric.global_rank)
        yield


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(network.named_parameters(), network.named_buffers())


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Give all processes the first one's values of each tensor, or of the part that several hold."""
    for tensor in tensors:
        local: Tensor = tensor
        groups: list[Any] = [None]
        if isinstance(tensor, DTensor):
            mesh, local = tensor.device_mesh, tensor.to_local()
            dims = [
                dim for dim, placed in enumerate(tensor.placements) if isinstance(placed, Replicate)
            ]
            groups = [mesh.get_group(dim) for dim in dims]
        if local.is_meta or not local.numel():
            continue
        for group in groups:
            value = local.detach().clone().contiguous()
            torch.distributed.broadcast(value, group_src=0, group=group)
            with torch.no_grad():
                local.copy_(value)


def check_sharding(mesh: Any, network: nn.Module, name: str) -> None:
    """Refuse a network of which a part would be trained by each process for itself."""
    if not is_sharded(network):
        raise ConfigurationError(
            f"parallelize_fn: got {name} back without sharded parameters. Write fully_shard(model,"
            " mesh=mesh['data_parallel']) or parallelize_module(model, mesh['tensor_parallel'], plan) in it."
        )
    if mesh["data_parallel"].size() == 1:
        return
    for parameter_name, parameter in network.named_parameters():
        mesh_of: Any = getattr(parameter, "device_mesh", None)
        names = (_TENSOR_PARALLEL,) if mesh_of is None else mesh_of.mesh_dim_names
        if parameter.requires_grad and names == (_TENSOR_PARALLEL,):
            raise ConfigurationError(
                f"parallelize_fn: got {name} back with the parameter {parameter_name!r} whole in each of the"
                f" {mesh['data_parallel'].size()} data-parallel processes, which would train it apart. Write"
                " fully_shard(model, mesh=mesh['data_parallel']) with the whole model as its last line."
            )


def wrap_step(network: nn.Module, step: Callable) -> Callable:
    """Return a step that runs as a forward of the whole network, and returns whole tensors."""

    def run_step(*args: Any, **kwargs: Any) -> Any:
        return gather_tensors(call(partial(step, *args, **kwargs)))

    call: Any = _call
    if isinstance(network, FSDPModule):
        # FSDP gathers parameters in the hooks of the network's forward. A step may call parts of it.
        root: Any = network
        root.run_step = _call
        register_fsdp_forward_method(root, "run_step")
        call = root.run_step
        del root.run_step
    return run_step


def _call(function: Callable[[], Any]) -> Any:
    return function()


@contextmanager
def no_gradient_sync(network: nn.Module) -> Iterator[None]:
    """Keep gradients in their process. The last backward of an accumulation window reduces them."""
    parts = [module for module in network.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_requires_gradient_sync(True, recurse=False)


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Limit the norm of all gradients, over all processes. torch's own needs parameters of one mesh."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    groups = list(by_mesh.values())
    grads = [[p.grad for p in group if p.grad is not None] for group in groups]
    norms = [gather_tensors(torch.nn.utils.get_total_norm(group)) for group in grads]
    if not norms:
        return
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)


def gather_tensors(item: Any) -> Any:
    """Return nested containers with whole tensors in place of sharded ones, on all processes."""
    if isinstance(item, DTensor):
        return item.full_tensor()
    if isinstance(item, dict):
        return {key: gather_tensors(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(gather_tensors(value) for value in item)
    return item
