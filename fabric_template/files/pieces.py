"""Pieces: what each rank writes of a checkpoint in parts, by torch.distributed.checkpoint's plans.

Imported only where there are such. torch's own list of what lies where is a pickle that any program can stand in: here it
is plain values in the small file, see shards.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..core.run import Run
from ..core.sharded import whole
from .disk import fsync_folder
from .errors import CheckpointError, cause_of
from .ordinary import SHARDS
from .shards import ELSEWHERE, check_pieces, make_fresh, remove, write_piece


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
    try:
        plain, tensors, ways = parted(run, state)
        return {**plain, SHARDS: write(path.parent, run.at.global_step, tensors, ways)}
    except CheckpointError as error:
        raise CheckpointError(given_up(path, str(error))) from None


def given_up(path: Path, why: str) -> str:
    """What is said where a file cannot be written, as its pieces could not."""
    kept = "the old file is unchanged" if path.is_file() else "nothing was written"
    return f"could not save '{path}': {why}; {kept}. Mend that, or save to another folder."


def parted(run: Run, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor], list[list[Any]]]:
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
        dcp.save(tensors, storage_writer=writer, planner=_Planner(copies or {}, ways), process_group=group)
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
    """Takes the data of tensors from copies, where there are some; refuses ranks that would write parts of other states."""

    def __init__(self, copies: Mapping[str, Tensor], ways: list[list[Any]]) -> None:
        super().__init__(flatten_state_dict=False)
        self.copies, self.ways = copies, ways

    def create_local_plan(self) -> SavePlan:
        """With the names of what this rank has."""
        return replace(super().create_local_plan(), planner_data=self.ways)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Only where all have the same: tensors are known by their number."""
        for rank, plan in enumerate(all_plans):
            ours, theirs = self.ways, plan.planner_data
            if ours != theirs:
                other = next(way for way in [*ours, *theirs] if way not in ours or way not in theirs)
                raise CheckpointError(
                    f"only one of rank 0 and rank {rank} has '{'.'.join(map(str, other))}' in its state: on_save_checkpoint has"
                    " to change a checkpoint in the same way on all ranks"
                )
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written for a part."""
        return self.copies[index.fqn] if index.fqn in self.copies else super().lookup_object(index)


class _Writer(dcp.StorageWriter):
    """One file for each rank: the bytes of its parts, one behind the other. What lies where goes to rank zero."""

    def __init__(self, beside: Path, step: int) -> None:
        self.beside, self.step = beside, step
        self.folder: Any = None  # a path, on rank zero, as what follows
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
        path: Path = plan.storage_data
        parts: Iterator[Any] = map(planner.resolve_data, plan.items)
        ends, crc = write_piece(path, parts)
        begins, piece = [0, *ends], (path.name, ends[-1], crc)
        return [
            WriteResult(item.index, end - begin, (piece, begin))
            for item, begin, end in zip(plan.items, begins, ends, strict=False)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every rank has written its piece."""
        stored = {(one.index.fqn, tuple(one.index.offset or ())): one for part in results for one in part}
        tensors, pieces = {}, {}
        written: Mapping[str, Any] = metadata.state_dict_metadata  # of tensors only: nothing else was given
        for key, tensor in written.items():
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
