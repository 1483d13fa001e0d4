"""Save a sharded model with torch.distributed.checkpoint, as a small file and a folder of shards.

Each process writes its shards to a new folder, such as ``last.ckpt.step=400``, which is beside the
checkpoint file. The checkpoint file contains the name of the shard folder, and all values
that are not sharded. An old checkpoint at the same path stays intact until the new checkpoint is
written.
"""

from __future__ import annotations

import glob
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from ..distributed.strategies import gather_tensors
from ..errors import CheckpointError, DamagedCheckpointError
from ..files import sync_folder
from ..lightning_compat.private import saves_shards
from .checkpoint_io import replace_numpy

if TYPE_CHECKING:
    from ..training.run import Run

# The checkpoint key for the state that Trainer does not save, such as RNG states.
OWN_KEY = "fabric_template"
SHARDS_KEY = "fabric_template_shards"
_PLACEHOLDER = "sharded"


# Saving


def save_checkpoint(
    run: Run, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
) -> None:
    """Write the shards and the checkpoint file. All processes must call this function."""
    content = save_shards(run, checkpoint, path)
    if not run.fabric.is_global_zero:
        return
    # Convert NumPy values here, because a user's CheckpointIO may not convert them, and a resumed
    # run cannot load pickled NumPy objects.
    content = replace_numpy(content)
    try:
        run.loop.checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)
    except BaseException:
        if SHARDS_KEY in content:
            shutil.rmtree(shard_folder(content[SHARDS_KEY], path), ignore_errors=True)
        raise
    remove_shards(path, content)
    if OWN_KEY in checkpoint:
        run.checkpoints.folders.record_save(path, checkpoint[OWN_KEY]["saved_at"])


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint file and its shards. Ignore all errors."""
    with suppress(OSError):
        path.unlink()
    remove_shards(path)


def save_shards(run: Run, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a checkpoint's sharded tensors to a new folder. All processes must call this function.

    Returns:
        A copy of the checkpoint, with a placeholder for each sharded tensor. The SHARDS_KEY entry
        of the returned dict contains the name of the shard folder and the sizes of its files.
    """
    if not run.steps.is_model_parallel:
        return checkpoint
    if not saves_shards(run.fabric.strategy):
        return gather_tensors(checkpoint)
    tensors: dict[str, DTensor] = {}

    def take(name: str, item: Any) -> Any:
        if not isinstance(item, DTensor):
            return item
        tensors[name] = item
        return _PLACEHOLDER

    plain = {}
    for key, value in checkpoint.items():
        is_sharded = key in ("state_dict", "optimizer_states")
        plain[key] = map_items(take, value, key) if is_sharded else gather_tensors(value)
    if not tensors:
        return plain
    folder = run.fabric.broadcast(new_folder(path, run.progress.global_step))
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
    except CheckpointException as error:
        if run.fabric.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"process {rank}: {type(cause).__name__}: {cause}") from None
    sizes = {}
    if run.fabric.is_global_zero:
        sync_folder(folder)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    return {**plain, SHARDS_KEY: {"folder": folder.name, "files": sizes}}


def map_items(function: Callable[[str, Any], Any], value: Any, name: str) -> Any:
    """Return a copy of nested dicts and lists, with each item replaced by ``function(name, item)``.

    Args:
        name: The name of ``value``, such as "state_dict". An item's name is the path to the item,
            such as "state_dict/weight".
    """
    if isinstance(value, dict):
        return {key: map_items(function, item, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [map_items(function, item, f"{name}/{i}") for i, item in enumerate(value)]
    return function(name, value)


def new_folder(path: Path, step: int) -> Path:
    """Return an unused path for a shard folder, beside the checkpoint file at ``path``."""
    folder, number = path.with_name(f"{path.name}.step={step}"), 1
    while folder.exists():
        folder = path.with_name(f"{path.name}.step={step}-{number}")
        number += 1
    return folder


def remove_shards(path: Path, keep: dict[str, Any] | None = None) -> None:
    """Remove the shard folders of the checkpoint file at ``path``.

    Args:
        keep: The new checkpoint, whose shard folder is not removed.
    """
    kept = (keep or {}).get(SHARDS_KEY, {}).get("folder")
    with suppress(OSError):
        for folder in path.parent.glob(f"{glob.escape(path.name)}.step=*"):
            if folder.name != kept:
                # Ignore errors, because the next save to ``path`` tries to remove the folder again.
                shutil.rmtree(folder, ignore_errors=True)


# Verifying


def shard_folder(index: dict[str, Any], path: str | Path) -> Path:
    """Return the path of the shard folder that the checkpoint file at ``path`` refers to."""
    for name in (index["folder"], *index["files"]):
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: the checkpoint refers to files outside of its folder. Use a different"
                " checkpoint."
            )
    return Path(path).with_name(index["folder"])


def verify_shards(path: str | Path, index: dict[str, Any]) -> None:
    """Check that all shard files exist and have the sizes that the checkpoint file lists.

    Args:
        index: The folder name and the file sizes from the checkpoint file.

    Raises:
        DamagedCheckpointError: A file is missing, or its size is wrong.
    """
    folder = shard_folder(index, path)
    for name, size in index["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise DamagedCheckpointError(
                f"{path}: the file {folder.name}/{name} of this checkpoint"
                f" {'is missing' if found is None else f'has {found} bytes, expected {size}'}."
            )


# Loading


def load_shards(run: Run, checkpoint: dict[str, Any], key: str) -> None:
    """Load the sharded tensors of a checkpoint into ``checkpoint[key]``.

    All processes must call this function. If the saved run had a different number of processes, the
    tensors are resharded.

    Args:
        key: Either "state_dict" or "optimizer_states".
    """
    if key not in checkpoint:
        return
    own = collect_tensors(run, key)
    if SHARDS_KEY in checkpoint:
        folder = shard_folder(checkpoint[SHARDS_KEY], str(run.plan.start.path))
        checkpoint[key] = read_shards(folder, checkpoint[key], key, own)

    def shard(name: str, item: Any) -> Any:
        like = find_sharded_tensor(own, name, item.shape) if type(item) is torch.Tensor else None
        if like is None:
            return item
        return distribute_tensor(item.to(like.device), like.device_mesh, like.placements)

    checkpoint[key] = map_items(shard, checkpoint[key], key)


def read_shards(folder: Path, value: Any, key: str, own: dict[str, Any]) -> Any:
    """Replace the placeholders in ``value`` with this process's shards from ``folder``."""
    reader = dcp.FileSystemReader(folder)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors: dict[str, torch.Tensor] = {}

    def make_empty(name: str, item: Any) -> Any:
        if name not in saved:
            return item
        size, dtype = saved[name].size, saved[name].properties.dtype
        like = find_sharded_tensor(own, name, size)
        if like is None:
            tensors[name] = torch.empty(size, dtype=dtype)
        else:
            tensors[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        return tensors[name]

    value = map_items(make_empty, value, key)
    with warnings.catch_warnings():
        # Hide torch's warning that there is no process group. A single process needs none.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader)
    return value


def collect_tensors(run: Run, key: str) -> dict[str, Any]:
    """Return this run's tensors, which define the sharding of the loaded tensors.

    Returns:
        The model's weights or the optimizers' parameters, keyed by names such as
        "state_dict/layer.weight".
    """
    if key == "state_dict":
        return {f"{key}/{name}": tensor for name, tensor in run.network.state_dict().items()}
    found: dict[str, Any] = {}
    for index, optimizer in enumerate(run.optimization.optimizers):
        parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        found |= {f"{key}/{index}/state/{number}": p for number, p in enumerate(parameters)}
    return found


def find_sharded_tensor(own: dict[str, Any], name: str, size: torch.Size) -> DTensor | None:
    # Optimizer states such as "exp_avg" are sharded in the same way as their parameters.
    found = own.get(name, own.get(name.rpartition("/")[0]))
    return found if isinstance(found, DTensor) and found.shape == size else None
