"""Portions: what each rank writes of a model that all ranks have whole, where ``checkpoint="sharded"`` asks for it.

Imported only there. What DDP keeps alike on all ranks is shared out, as views: parameters, and what optimizers hold of each.
All else (buffers, numbers, what a hook has put in) is rank zero's, as in one file, and stays in the small one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..core.alike import WHY
from ..core.run import Run
from .errors import CheckpointError
from .shards import shares


def portions(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    """The state with tensors in parts in the place of those that are the same on all ranks; nothing is copied.

    Raises:
        CheckpointError: on all ranks, where the ranks have been found to be not alike.
    """
    ddp: Any = run.steps.ddp
    if run.steps.buckets is not None and (others := run.steps.buckets.parted):
        raise CheckpointError(
            f"rank {others[0]} has other weights or moments than rank 0, and each would write its part of them ({WHY}): leave"
            " out checkpoint='sharded'"
        )
    group: Any = torch.distributed.group.WORLD
    mesh = DeviceMesh.from_group(group, run.fabric.device.type)
    named, apart = ddp.module.named_parameters(), ddp.parameters_to_ignore
    alike = {(value.data_ptr(), value.shape) for name, value in named if name not in apart}

    def weight(value: Any) -> Any:
        is_alike = isinstance(value, Tensor) and (value.data_ptr(), value.shape) in alike
        return _shared(value, mesh) if is_alike else value

    made = dict(state)
    if isinstance(weights := state.get("state_dict"), dict):
        made["state_dict"] = type(weights)({name: weight(value) for name, value in weights.items()})
    if "optimizer_states" in state:
        pairs = zip(run.optimizing.optimizers, state["optimizer_states"], strict=True)
        made["optimizer_states"] = [_moments(*pair, lambda p: (p.data_ptr(), p.shape) in alike, mesh) for pair in pairs]
    return made


def _moments(optimizer: Any, state: Any, is_alike: Callable[[Tensor], bool], mesh: DeviceMesh) -> Any:
    """An optimizer's state, of which what has a parameter's shape is shared out."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    if hasattr(optimizer, "consolidate_state_dict"):  # rank zero alone has it, of all
        return state

    def part(number: Any, values: Any) -> Any:
        parameter = parameters.get(number)
        if parameter is None or not isinstance(values, dict) or not is_alike(parameter):
            return values
        fits = {key: isinstance(value, Tensor) and value.shape == parameter.shape for key, value in values.items()}
        return {key: _shared(value, mesh) if fits[key] else value for key, value in values.items()}

    return {**state, "state": {number: part(number, values) for number, values in state["state"].items()}}


def _shared(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor in parts; a number stays as it is."""
    if not tensor.dim():
        return tensor
    dim, parts = shares(tensor, mesh.size())
    words: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(parts[mesh.get_local_rank()], mesh, [Shard(dim)], run_check=False, **words)
