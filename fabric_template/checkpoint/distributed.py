"""Write checkpoints of sharded models as a small file and a folder of torch.distributed.checkpoint.

Each process writes its shards into a new folder beside the file, such as ``last.ckpt.step=400``. The file
names the folder and holds everything that is not sharded. The file is renamed into place last, so
that a killed save leaves the previous file and its folder intact.
"""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from ..distributed.strategies import gather_tensors
from ..errors import CheckpointError, DamagedCheckpointError
from ..lightning_compat.private import saves_shards
from .checkpoint_io import sync_folder

if TYPE_CHECKING:
    from ..training.run_state import RunState

SHARDS_KEY = "fabric_template_shards"
_PLACEHOLDER = "sharded"


# Saving


def save_checkpoint(
    run: RunState, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
) -> None:
    """Write the shards of a sharded model, then the checkpoint file. All processes must call it."""
    content = save_shards(run, checkpoint, path)
    if not run.fabric.is_global_zero:
        return
    try:
        run.loop.checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)
    except BaseException:
        if SHARDS_KEY in content:
            shutil.rmtree(shard_folder(content[SHARDS_KEY], path), ignore_errors=True)
        raise
    remove_shards(path, content)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint file and its shards. A file that cannot be removed stays."""
    with suppress(OSError):
        path.unlink()
    remove_shards(path)


def save_shards(run: RunState, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write the sharded tensors of a checkpoint into a new folder, on all processes.

    Returns:
        The content of the file: the checkpoint without sharded tensors, and the folder's name.
    """
    if not run.steps.is_model_parallel:
        return checkpoint
    if not saves_shards(run.fabric.strategy):
        return gather_tensors(checkpoint)
    tensors: dict[str, DTensor] = {}
    places: dict[str, list[Any]] = {}
    plain = {}
    for key, value in checkpoint.items():
        if key in ("state_dict", "optimizer_states"):
            plain[key] = _take_sharded(value, [key], tensors, places)
        else:
            plain[key] = gather_tensors(value)
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
    return {**plain, SHARDS_KEY: {"folder": folder.name, "files": sizes, "places": places}}


def _take_sharded(
    item: Any, place: list[Any], tensors: dict[str, DTensor], places: dict[str, list[Any]]
) -> Any:
    """Replace sharded tensors by placeholders, and add the sharded tensors to ``tensors``."""
    if isinstance(item, DTensor):
        name = "/".join(map(str, place))
        tensors[name], places[name] = item, place
        return _PLACEHOLDER
    if isinstance(item, dict):
        return {k: _take_sharded(v, [*place, k], tensors, places) for k, v in item.items()}
    if isinstance(item, list):
        return [_take_sharded(v, [*place, i], tensors, places) for i, v in enumerate(item)]
    return item


def new_folder(path: Path, step: int) -> Path:
    """Return an unused path for a folder of shards beside a file."""
    folder, number = path.with_name(f"{path.name}.step={step}"), 1
    while folder.exists():
        folder = path.with_name(f"{path.name}.step={step}-{number}")
        number += 1
    return folder


def remove_shards(path: Path, keep: dict[str, Any] | None = None) -> None:
    """Remove the folders of shards of a file, except the one that its new content names.

    A folder that cannot be removed is left for the next save.
    """
    kept = (keep or {}).get(SHARDS_KEY, {}).get("folder")
    with suppress(OSError):
        for folder in path.parent.glob(f"{path.name}.step=*"):
            if folder.name != kept:
                shutil.rmtree(folder, ignore_errors=True)


# Verifying


def shard_folder(index: dict[str, Any], path: str | Path) -> Path:
    """Return the folder of shards that a checkpoint file names. The folder is beside the file."""
    for name in (index["folder"], *index["files"]):
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: it names files outside of its folder. Use another file."
            )
    return Path(path).with_name(index["folder"])


def verify_shards(path: str | Path, index: dict[str, Any]) -> None:
    """Check that the files of a folder exist and have their sizes.

    Args:
        index: The value of SHARDS_KEY in the checkpoint file.

    Raises:
        DamagedCheckpointError: A file is missing or has another size.
    """
    folder = shard_folder(index, path)
    for name, size in index["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise DamagedCheckpointError(
                f"{path}: its file {folder.name}/{name} has {found} bytes, expected {size}."
            )


# Loading


def load_shards(run: RunState, checkpoint: dict[str, Any], key: str) -> None:
    """Load the sharded tensors into a checkpoint, in place. All processes must call this.

    A sharded model reads only its own shards, also if another number of processes saved them.
    A model without shards reads full tensors in each process.

    Args:
        key: "state_dict" or "optimizer_states".
    """
    index = checkpoint.get(SHARDS_KEY)
    if index is not None:
        path = str(run.checkpoint_path)
        reader = dcp.FileSystemReader(shard_folder(index, path))
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
        places = {name: place for name, place in index["places"].items() if place[0] == key}
        tensors = {n: _empty(run, place, saved[n]) for n, place in places.items()}
        with warnings.catch_warnings():
            # A single process may read without torch.distributed.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader)
        for name, place in places.items():
            container = checkpoint
            for part in place[:-1]:
                container = container[part]
            container[place[-1]] = tensors[name]
    if run.steps.is_model_parallel and key in checkpoint:
        checkpoint[key] = distribute(run, checkpoint[key], [key])


def distribute(run: RunState, item: Any, place: list[Any]) -> Any:
    """Shard the full tensors in nested containers in the same way as the run's own tensors."""
    if isinstance(item, dict):
        return type(item)((key, distribute(run, v, [*place, key])) for key, v in item.items())
    if isinstance(item, list):
        return [distribute(run, value, [*place, index]) for index, value in enumerate(item)]
    reference = _counterpart(run, place) if type(item) is torch.Tensor else None
    if not isinstance(reference, DTensor) or reference.shape != item.shape:
        return item
    value = item.to(reference.device)
    return distribute_tensor(value, reference.device_mesh, reference.placements)


def _empty(run: RunState, place: list[Any], saved: TensorStorageMetadata) -> torch.Tensor:
    """Return an empty tensor to read into, either a shard like the run's own or a full tensor."""
    reference, dtype = _counterpart(run, place), saved.properties.dtype
    if isinstance(reference, DTensor) and reference.shape == saved.size:
        return torch.empty_like(reference, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype)


def _counterpart(run: RunState, place: list[Any]) -> Any:
    """Return the parameter or buffer of the run that a tensor of a checkpoint belongs to."""
    if place[0] == "state_dict":
        source = run.module if run.is_lightning_module else run.network
        return source.state_dict().get(place[1])
    if len(place) != 5 or place[2] != "state":
        return None
    groups = run.optimizers[place[1]].param_groups if place[1] < len(run.optimizers) else []
    parameters = [parameter for group in groups for parameter in group["params"]]
    return parameters[place[3]].detach() if place[3] < len(parameters) else None
