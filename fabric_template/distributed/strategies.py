"""Trainer's strategies as Fabric's, and networks whose parameters are sharded (FSDP2 and tensor parallel)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..errors import ConfigurationError
from ..training.hooks import is_instance_of
from ..training.optimizers import is_optimizer

try:
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import FSDPModule, register_fsdp_forward_method

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..training.run_state import RunState

_TENSOR_PARALLEL = "tensor_parallel"
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
# Arguments of Trainer's strategies that Fabric's lack, by the attribute that holds them.
_TRAINER_ONLY = {
    "_accelerator": "accelerator",
    "_precision_plugin": "precision_plugin",
    "_checkpoint_io": "checkpoint_io",
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
    return _convert_object(strategy) if _is_trainers(strategy) else strategy


def _is_trainers(part: Any) -> bool:
    return any(base.__module__.startswith(_OF_TRAINER) for base in type(part).__mro__)


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
    if name not in ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"):
        raise ConfigurationError(
            f"strategy: got {name}, which is made for Trainer, expected a strategy of"
            " lightning.fabric.strategies or a name, such as 'ddp', 'ddp_spawn' or 'ddp_notebook'."
        )
    for key, argument in _TRAINER_ONLY.items():
        if getattr(strategy, key, None) is not None:
            raise ConfigurationError(
                f"strategy: got {name}({argument}=...), which Fabric's {name} does not have. Leave it out; the"
                " accelerator, the precision and plugins are options of FabricLoop."
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
    given = plugins if isinstance(plugins, list | tuple) else [plugins]
    return [_convert_precision(plugin) for plugin in given]


def _convert_precision(plugin: Any) -> Any:
    if not (isinstance(plugin, precision.Precision) and _is_trainers(plugin)):
        return plugin
    name = type(plugin).__name__
    own = getattr(precision, name, None)
    if own is None:
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
    is_static = getattr(strategy, "_ddp_kwargs", {}).get("static_graph")
    if is_static and run.accumulate_grad_batches != 1:
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


# Sharded networks


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
