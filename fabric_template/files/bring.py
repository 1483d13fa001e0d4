"""Bring: what each rank reads of a checkpoint for a model in parts: its own part of each tensor, from pieces or from one file.

Imported only where a model is sharded; by torch.distributed.checkpoint's plans, without a word to the other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..core.ranks import gather
from ..core.run import Run
from .errors import CheckpointError
from .ordinary import SHARDS
from .reading import check_mapped
from .shards import check_pieces, dtype_of, empty, put, read_part


def bring(run: Run, checkpoint: dict[str, Any], path: str | Path, key: str) -> None:
    """Fill what the file holds under this key: in parts like those that the run has, the rest whole; on all ranks."""
    failure = None
    try:
        _bring(_targets(run, key), checkpoint, Path(path), key)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
    except CheckpointError as error:
        failure = error
    told = [f"rank {rank}: {text}" for rank, text in enumerate(gather(run.fabric, failure and str(failure))) if text]
    if told:
        raise failure if isinstance(failure, CheckpointError) else CheckpointError(told[0]) from failure


_Target = Callable[[list[Any], tuple[int, ...], torch.dtype], Any]  # by the way to a tensor, its size and dtype


def _bring(target_of: _Target, checkpoint: dict[str, Any], path: Path, key: str) -> None:
    index = checkpoint.get(SHARDS) or {"folder": "", "tensors": []}
    targets: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}  # what the file itself has,
    parts: dict[str, Any] = {}  # and where in the pieces the rest lies
    for way, tensor in list(_plain_in(checkpoint[key], [key])):
        if isinstance(target := target_of(way, tuple(tensor.shape), tensor.dtype), DTensor):
            number = str(len(targets))
            targets[number], held[number] = target, tensor
            put(checkpoint, way, target)
        elif key == "optimizer_states":  # which keep it, and the file may be mapped
            check_mapped(path)
            put(checkpoint, way, tensor.clone())
    for entry in [entry for entry in index["tensors"] if entry["at"][0] == key]:
        target, number = target_of(entry["at"], tuple(entry["size"]), dtype_of(entry)), str(len(targets))
        targets[number], parts[number] = empty(entry) if target is None else target, entry
        put(checkpoint, entry["at"], targets[number])
    index["tensors"] = [entry for entry in index["tensors"] if entry["at"][0] != key]
    for sources, reader in ((held, _Whole(held, path)), (parts, _Pieces(parts, index, path.parent / index["folder"]))):
        if sources:
            with warnings.catch_warnings():  # of what is meant: each rank reads for itself
                warnings.simplefilter("ignore")
                dcp.load({number: targets[number] for number in sources}, storage_reader=reader, no_dist=True)
    check_mapped(path)


def _targets(run: Run, key: str) -> _Target:
    """Finds the weights themselves, or a part like that of the parameter to which a state belongs; None: neither."""
    own = run.trained.net.state_dict() if key == "state_dict" else {}
    groups = [optimizer.param_groups for optimizer in run.optimizing.optimizers if key == "optimizer_states"]
    parameters = [dict(enumerate(p for group in groups_of for p in group["params"])) for groups_of in groups]

    def target(way: list[Any], size: tuple[int, ...], dtype: torch.dtype) -> Any:
        if key == "state_dict":
            found = own.get(way[1]) if len(way) == 2 else None
            return found if isinstance(found, Tensor) and tuple(found.shape) == size else None
        if len(way) < 4 or way[2] != "state" or way[1] >= len(parameters):
            return None
        found = parameters[way[1]].get(way[3])
        is_part = isinstance(found, DTensor) and tuple(found.shape) == size
        return torch.empty_like(found.detach(), dtype=dtype) if is_part else None

    return target


def _plain_in(item: Any, way: list[Any]) -> Iterator[tuple[list[Any], Tensor]]:
    """The whole tensors in a nest."""
    if isinstance(item, Tensor):
        if not isinstance(item, DTensor):
            yield way, item
    elif isinstance(item, dict | list | tuple):
        for key, value in list(item.items() if isinstance(item, dict) else enumerate(item)):
            yield from _plain_in(value, [*way, key])


class _Reader(dcp.StorageReader):
    """Where dcp.load finds the parts of tensors: whole ones here."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.sources = sources

    def kind(self, key: str) -> tuple[torch.dtype, list[int]]:
        """What kind of tensor this is."""
        return self.sources[key].dtype, list(self.sources[key].shape)

    def chunks(self, key: str) -> list[tuple[list[int], list[int]]]:
        """Where each of its parts begins, and how large it is."""
        return [([0] * self.sources[key].dim(), list(self.sources[key].shape))]

    def part(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        """One of its parts."""
        return self.sources[key]

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between two loads."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Nothing is found by a name."""
        return False

    def read_metadata(self, *args: Any, **words: Any) -> Metadata:
        """What there is to read."""
        found: dict[str, Any] = {}
        for key in self.sources:
            dtype, size = self.kind(key)
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in self.chunks(key)]
            found[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **words: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs."""
        self.begin(plan)
        for item in plan.items:
            index = item.storage_index
            part = self.part(index.fqn, tuple(index.offset or ()))
            for dim, (begin, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, begin, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def begin(self, plan: LoadPlan) -> None:
        """Before anything is read."""


class _Whole(_Reader):
    """Tensors in memory, or mapped from a file, each in one part."""

    def __init__(self, sources: Mapping[str, Any], path: Path) -> None:
        super().__init__(sources)
        self.path = path

    def part(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        check_mapped(self.path)
        return super().part(key, offsets)


class _Pieces(_Reader):
    """Tensors whose parts lie in pieces, each of which is checked as a whole before anything of it is read."""

    def __init__(self, sources: Mapping[str, Any], index: dict[str, Any], folder: Path) -> None:
        super().__init__(sources)
        self.index, self.folder = index, folder
        self.at = {(key, tuple(at)): (piece, offset, sizes)
                   for key, entry in sources.items() for piece, offset, _, at, sizes in entry["chunks"]}  # fmt: skip

    def kind(self, key: str) -> tuple[torch.dtype, list[int]]:
        return dtype_of(self.sources[key]), self.sources[key]["size"]

    def chunks(self, key: str) -> list[tuple[list[int], list[int]]]:
        return [(at, sizes) for _, _, _, at, sizes in self.sources[key]["chunks"]]

    def begin(self, plan: LoadPlan) -> None:
        needed = {self.at[item.storage_index.fqn, tuple(item.storage_index.offset or ())][0] for item in plan.items}
        check_pieces(self.index, self.folder, only=needed)

    def part(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        piece, offset, sizes = self.at[key, offsets]
        return read_part(self.folder / piece, offset, sizes, self.kind(key)[0])
