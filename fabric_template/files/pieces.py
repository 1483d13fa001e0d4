"""Pieces: what each rank writes and reads of a model in parts, by torch.distributed.checkpoint's plans.

Imported only where a model is sharded. torch's own list of what lies where is a pickle that any program can stand in: here it
is plain values in the small file, see shards.py.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..core.ranks import gather
from ..core.run import Run
from ..core.sharded import whole
from .disk import BINARY, NOT_A_LINK, fs, fsync_folder
from .errors import CheckpointError, cause_of
from .ordinary import SHARDS
from .shards import ELSEWHERE, blocks_of, check_pieces, empty, make_fresh, put, read_part, remove
from .storage import Stream


def for_file(run: Run, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What a file is to hold of a run's state: all of it, or, as the strategy's word asks, pieces; on all ranks."""
    if SHARDS in state:
        return state
    shares = getattr(run.fabric.strategy, "_save_distributed_checkpoint", True)
    return apart(run, path, state) if shares else together(run, state)


def apart(run: Run, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What the file is to hold of a state with tensors in parts, whose pieces are on disk by then; on all ranks.

    Raises:
        CheckpointError: on all ranks; nothing is left of it.
    """
    plain, tensors, ways = parted(state)
    try:
        return {**plain, SHARDS: write(path.parent, run.at.global_step, tensors, ways)}
    except CheckpointError as error:
        raise CheckpointError(given_up(path, str(error))) from None


def given_up(path: Path, why: str) -> str:
    """What is said where a file cannot be written, as its pieces could not."""
    kept = "the old file is unchanged" if path.is_file() else "nothing was written"
    return f"could not save '{path}': {why}; {kept}. Mend that, or save to another folder."


def parted(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor], list[list[Any]]]:
    """What of a state is plain, its tensors in parts by a number, and the way to where each of them stood."""
    tensors: dict[str, DTensor] = {}
    ways: list[list[Any]] = []

    def into_pieces(way: list[Any], tensor: DTensor) -> str:
        tensors[str(len(ways))] = tensor
        ways.append(way)
        return ELSEWHERE

    return _mapped(state, [], into_pieces), tensors, ways


def write(
    beside: Path, step: int, tensors: dict[str, DTensor], ways: list[list[Any]], copies: Mapping[str, Tensor] | None = None,
    group: Any = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Write pieces, on all ranks; rank zero gets the list of them for their file, which grows with the ranks.

    Args:
        beside: the folder of the file.
        step: after which the state is, for the name of the pieces' folder.
        tensors: by number, of each rank its part,
        ways: and where each stands in the file.
        copies: what this rank has of them, where they may change while they are written.
        group: by which the ranks talk.

    Raises:
        CheckpointError: on all ranks, why; nothing is left of it.
    """
    writer = _Writer(beside, step)
    try:
        dcp.save(tensors, storage_writer=writer, planner=_Planner(copies or {}), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if writer.folder is not None:
            remove(writer.folder)
        raise CheckpointError(f"rank {rank}: {cause_of(cause)}") from None
    if writer.index is None:
        return None
    found = writer.index["tensors"]
    return {**writer.index, "tensors": [{"at": way, **found[str(number)]} for number, way in enumerate(ways)]}


def together(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    """The state with every tensor whole, on the CPU of rank zero; on all ranks."""

    def gathered(way: list[Any], tensor: DTensor) -> Any:
        value = whole(tensor)
        return value.cpu() if run.fabric.is_global_zero else None

    return _mapped(state, [], gathered)


def _mapped(item: Any, way: list[Any], change: Callable[[list[Any], DTensor], Any]) -> Any:
    """The same nest with other values in the place of tensors in parts."""
    if isinstance(item, DTensor):
        return change(way, item)
    if isinstance(item, dict):
        made = {key: _mapped(value, [*way, key], change) for key, value in item.items()}
        return made if type(item) is dict or way[:1] != ["state_dict"] else type(item)(made)
    if type(item) in (list, tuple):
        return type(item)(_mapped(value, [*way, index], change) for index, value in enumerate(item))
    return item


class _Planner(dcp.DefaultSavePlanner):
    """Takes the data of tensors from copies, where there are some."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written for a part."""
        return self.copies[index.fqn] if index.fqn in self.copies else super().lookup_object(index)


class _Writer(dcp.StorageWriter):
    """One file for each rank: the bytes of its parts, one behind the other. What lies where goes to rank zero."""

    def __init__(self, beside: Path, step: int) -> None:
        self.beside, self.step = beside, step
        self.folder: Path | None = None  # on rank zero, as what follows
        self.index: dict[str, Any] | None = None  # tensors by their number

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer writes once."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Nothing is found by a name."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **words: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """A new folder, and each rank's file in it."""
        self.folder = folder = make_fresh(self.beside, self.step)
        return [replace(plan, storage_data=folder / f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's piece, on the disk when this returns."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        path, at, crc, ends = plan.storage_data, 0, 0, []
        fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOT_A_LINK | BINARY, 0o666)
        try:
            stream = Stream(fd)
            for item in plan.items:
                part: Any = planner.resolve_data(item)
                for block in blocks_of(part):
                    crc, at = zlib.crc32(block, crc), at + len(block)
                    stream.write(block)
                ends.append(at)
            stream.flush()
            if stream.error is not None:
                raise stream.error
            fs.fsync(fd)
        finally:
            fs.close(fd)
        begins, piece = [0, *ends], (path.name, at, crc)
        return [
            WriteResult(item.index, end - begin, (piece, begin))
            for item, begin, end in zip(plan.items, begins, ends, strict=False)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every rank has written its piece."""
        assert self.folder is not None
        stored = {(one.index.fqn, tuple(one.index.offset or ())): one for part in results for one in part}
        tensors, pieces = {}, {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                one = stored[key, tuple(chunk.offsets)]
                (name, size, crc), at = one.storage_data
                pieces[name] = [size, crc]
                chunks.append([name, at, one.size_in_bytes, list(chunk.offsets), list(chunk.sizes)])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
        self.index = {"folder": self.folder.name, "pieces": pieces, "tensors": tensors}
        check_pieces(self.index, self.folder, read=False)  # where nodes do not share the folder
        fsync_folder(self.folder)


# ---- back


def bring(run: Run, checkpoint: dict[str, Any], path: str | Path, key: str) -> None:
    """Fill what the file holds under this key: in parts like those that the run has, the rest whole; on all ranks."""
    targets: dict[str, Tensor] = {}
    sources: dict[str, Any] = {}
    failure = None
    try:
        if (index := checkpoint.get(SHARDS)) is None:
            for way, tensor in _tensors_in(checkpoint[key], [key]):
                target = _target(run, way, tuple(tensor.shape), tensor.dtype)
                if isinstance(target, DTensor):
                    number = str(len(targets))
                    targets[number], sources[number] = target, tensor
                    put(checkpoint, way, target)
        else:
            mine = [entry for entry in index["tensors"] if entry["at"][0] == key]
            index["tensors"] = [entry for entry in index["tensors"] if entry["at"][0] != key]
            for entry in mine:
                target = _target(run, entry["at"], tuple(entry["size"]), getattr(torch, entry["dtype"]))
                number = str(len(targets))
                targets[number], sources[number] = empty(entry) if target is None else target, entry
                put(checkpoint, entry["at"], targets[number])
        reader = _Whole(sources) if index is None else _Pieces(sources, index, Path(path).parent / index["folder"])
        if targets:
            with warnings.catch_warnings():  # of what is meant: each rank reads for itself
                warnings.simplefilter("ignore")
                dcp.load(dict(targets), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
    except CheckpointError as error:
        failure = error
    told = [f"rank {rank}: {text}" for rank, text in enumerate(gather(run.fabric, failure and str(failure))) if text]
    if told:
        raise failure if isinstance(failure, CheckpointError) else CheckpointError(told[0]) from failure


def _target(run: Run, way: list[Any], size: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The weights themselves, or a part like that of the parameter to which a state of this size belongs; None: neither."""
    if way[0] == "state_dict":
        found = run.trained.net.state_dict().get(way[1]) if len(way) == 2 else None
        return found if isinstance(found, Tensor) and tuple(found.shape) == size else None
    if way[0] != "optimizer_states" or len(way) < 4 or way[2] != "state":
        return None
    groups = run.optimizing.optimizers[way[1]].param_groups if way[1] < len(run.optimizing.optimizers) else ()
    found = dict(enumerate(parameter for group in groups for parameter in group["params"])).get(way[3])
    if not isinstance(found, DTensor) or tuple(found.shape) != size:
        return None
    return torch.empty_like(found.detach(), dtype=dtype)


def _tensors_in(item: Any, way: list[Any]) -> Iterator[tuple[list[Any], Tensor]]:
    if isinstance(item, Tensor):
        yield way, item
    elif isinstance(item, dict | list | tuple):
        for key, value in list(item.items() if isinstance(item, dict) else enumerate(item)):
            yield from _tensors_in(value, [*way, key])


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
    """Tensors in memory, each in one part."""


class _Pieces(_Reader):
    """Tensors whose parts lie in pieces, each of which is checked as a whole before anything of it is read."""

    def __init__(self, sources: Mapping[str, Any], index: dict[str, Any], folder: Path) -> None:
        super().__init__(sources)
        self.index, self.folder = index, folder
        self.at = {(key, tuple(at)): (piece, offset, sizes)
                   for key, entry in sources.items() for piece, offset, _, at, sizes in entry["chunks"]}  # fmt: skip

    def kind(self, key: str) -> tuple[torch.dtype, list[int]]:
        return getattr(torch, self.sources[key]["dtype"]), self.sources[key]["size"]

    def chunks(self, key: str) -> list[tuple[list[int], list[int]]]:
        return [(at, sizes) for _, _, _, at, sizes in self.sources[key]["chunks"]]

    def begin(self, plan: LoadPlan) -> None:
        needed = {self.at[item.storage_index.fqn, tuple(item.storage_index.offset or ())][0] for item in plan.items}
        check_pieces(self.index, self.folder, only=needed)

    def part(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        piece, offset, sizes = self.at[key, offsets]
        return read_part(self.folder / piece, offset, sizes, self.kind(key)[0])
