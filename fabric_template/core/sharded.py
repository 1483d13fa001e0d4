"""Sharded: a net whose weights lie in parts on the ranks (FSDP2, tensor parallelism), by the user's own ``parallelize_fn``.

Imported only where the strategy is a ModelParallelStrategy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from .errors import Misuse
from .functions import FunctionSteps
from .overrides import class_of

TENSOR_PARALLEL = "tensor_parallel"  # Fabric's name for that dimension of its mesh


class Sharded:
    """A net in parts: made, stepped through, clipped, and put together again."""

    def __init__(self, fabric: Fabric, net: nn.Module, owner: Any) -> None:
        self.fabric, self.net = fabric, net
        self.name = class_of(net if isinstance(owner, FunctionSteps) else owner).__name__
        self.through: Callable[..., Any] | None = None  # runs a step as a forward of the net; None: it has no hooks

    def set_up(self) -> None:
        """Give all ranks rank zero's weights, and each its part; what is sharded already stays as it is."""
        if not is_sharded(self.net):
            make_equal(self._tensors())
            self._make(self._shard)
        else:
            self._make(self._leave)
        self._check()
        if isinstance(self.net, FSDPModule):
            # a step is a forward of the whole, also where it calls the net's parts
            net: Any = self.net
            net.step_through = _call
            register_fsdp_forward_method(net, "step_through")
            self.through = net.step_through
            del net.step_through

    def _shard(self) -> nn.Module:
        strategy = self.fabric.strategy
        return strategy.setup_module(strategy.precision.convert_module(self.net))

    def _leave(self) -> nn.Module:
        """One that is in parts already, by its configure_model or a run before, gets memory where it has none."""
        strategy, bare = self.fabric.strategy, set[str]()
        if any(tensor.is_meta for tensor in self._tensors()):
            self.net.to_empty(device=strategy.root_device)
            for part in self.net.modules():
                if not [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                    continue
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
                else:
                    bare.add(type(part).__name__)
        if bare and self.fabric.is_global_zero:
            warnings.warn(
                f"no reset_parameters() in {', '.join(sorted(bare))}, made on the meta device: what lies in their weights is"
                " whatever was in memory, until a hook of yours fills them",
                stacklevel=2,
            )
        return strategy.precision.convert_module(self.net)

    def _make(self, make: Callable[[], nn.Module]) -> None:
        fabric = self.fabric
        empty = [name for name, tensor in self._named() if tensor.is_meta]
        # on the CPU each rank draws its own part: with one seed the parts would be copies of each other
        with torch.random.fork_rng(devices=[]) if empty else nullcontext(), warnings.catch_warnings():
            if empty:
                warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
                torch.manual_seed(torch.initial_seed() + fabric.global_rank)
            made = make()
        if made is not self.net:
            raise Misuse(
                f"parallelize_fn returned another object than {self.name}, a {type(made).__name__}: expected the model that it"
                " was given, changed in place; to compile it write compile=True"
            )
        if empty:
            now = dict(self._named())
            make_equal(now[name] for name in empty)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self.net.named_parameters(), self.net.named_buffers())

    def _tensors(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self._named())

    def _check(self) -> None:
        """Refuse a net of which a part would be trained by each rank for itself."""
        if not is_sharded(self.net):
            raise Misuse(
                f"parallelize_fn has sharded nothing of {self.name}: write fully_shard(model, mesh=mesh['data_parallel']) or"
                " parallelize_module(model, mesh['tensor_parallel'], plan) in it"
            )
        mesh: Any = self.fabric.strategy.device_mesh  # type: ignore[attr-defined]
        if mesh["data_parallel"].size() == 1:
            return
        for name, parameter in self.net.named_parameters():
            names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else (TENSOR_PARALLEL,)
            if parameter.requires_grad and names == (TENSOR_PARALLEL,):
                raise Misuse(
                    f"parallelize_fn left '{name}' of {self.name} whole in each of the {mesh['data_parallel'].size()}"
                    " data-parallel groups, which would train it apart: write fully_shard(model,"
                    " mesh=mesh['data_parallel']) with the whole model as its last line"
                )

    def step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A step as a forward of the whole net; what it returns is whole, as all that reads it expects."""

        def step(*args: Any) -> Any:
            output = method(*args) if self.through is None else self.through(partial(method, *args))
            return wholes(output)

        return step

    def backward(self, loss: Tensor, *args: Any, **words: Any) -> None:
        """Fabric's backward; what torch says of a loss that needs more around it is said in other words."""
        try:
            self.fabric.backward(loss, *args, **words)
        except RuntimeError as error:
            if "nll_loss_backward" not in str(error):
                raise
            raise Misuse(
                f"{self.name} computes its loss under loss_parallel(), which its backward needs, too: write a method"
                " backward(self, loss) beside training_step, with `with loss_parallel(): loss.backward()` in it"
            ) from error

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, gradients stay where they are; the last backward of a window sums them over the ranks."""
        parts = [part for part in self.net.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True, recurse=False)


def _call(call: Callable[[], Any]) -> Any:
    return call()


def is_sharded(net: nn.Module) -> bool:
    """Whether any of a net's parameters lies in parts."""
    return any(isinstance(parameter, DTensor) for parameter in net.parameters())


def make_equal(tensors: Iterable[Tensor]) -> None:
    """Give all ranks what the first one has, of each tensor or part that several of them hold alike."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            part, placements = tensor.to_local(), enumerate(tensor.placements)
            groups: list[Any] = [
                tensor.device_mesh.get_group(dim) for dim, place in placements if isinstance(place, Replicate)
            ]
        else:
            part, groups = tensor, [None]  # all ranks
        if part.is_meta or not part.numel():
            continue
        for group in groups:
            value = part.detach().contiguous().reshape(-1).view(torch.uint8)
            if torch.distributed.get_backend(group) == "nccl":
                value = value.cuda()
            torch.distributed.broadcast(value, group_src=0, group=group)
            with torch.no_grad():
                part.copy_(value.to(part.device).view(part.dtype).reshape(part.shape))


def clip_norm(parameters: Iterable[Tensor], most: float) -> None:
    """Limit the norm of all gradients together, over all ranks; torch's own does so for parameters of one mesh only."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [
        whole(torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])) for part in by_mesh.values()
    ]
    if norms:
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for part in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(part, most, total)


def whole(value: Any) -> Any:
    """A tensor put together from its parts, on all ranks; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def wholes(item: Any) -> Any:
    """What a step returns, with whole tensors, for a backward, too."""
    if type(item) is dict:
        return {key: wholes(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(map(wholes, item))
    return whole(item)
