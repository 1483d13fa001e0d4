"""Background: checkpoints of a model in parts whose pieces a thread writes while training goes on.

Imported only where it is asked for. A save begins with copies of the rank's parts on the CPU. It counts once all ranks have
written theirs, and agree on that where they agree on signals anyway: there the small files are written, as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.run import Run
from .checkpoint import OURS, in_pieces, state_of
from .errors import CheckpointError, cause_of
from .keeper import Keeper, place_of
from .ordinary import SHARDS
from .pieces import given_up, parted, write
from .shards import owned

PATIENCE = 30.0  # seconds that a rank waits for the others' pieces when an error ends the run


class BackgroundKeeper(Keeper):
    """Keeps the same checkpoints; training waits for copies, and for the small files. One save at a time is on its way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._writing = _Writing()
        self._waits: Callable[[], None] | None = None  # what is left to do of the save that is on its way
        self._run: Run | None = None
        self._step: int | None = None  # the steps in what is on its way to last.ckpt,
        self._perhaps: int | None = None  # and those in what rank zero alone writes after an error

    @property
    def saved_step(self) -> Any:
        """The optimizer steps in ``last.ckpt``; after an error only rank zero knows what of the last save has come there."""
        step, perhaps = super().saved_step, self._perhaps
        if perhaps is None:
            return step
        return f"{perhaps}{'' if step is None else f' (or {step})'}, if rank 0 could still write that"

    # ---- it begins

    def _keep(self, run: Run, *what: Any) -> None:
        self.settle(run)  # which may have been the best
        super()._keep(run, *what)

    def _save(self, run: Run, state: dict[str, Any] | None, epoch: int | None, **files: Any) -> None:
        self.settle(run)
        kept, place = state is not None, place_of(run)
        state = state_of(run, epoch=epoch) if state is None else state
        own = state[OURS]["ranks"]
        if run.stop.bad or self._made[0] is own or not in_pieces(run):  # not saved at all, there already, or one file
            self._put(run, state, place, kept, **files)
            return
        try:
            plain = self._writing.begin(self.folder, run, state)
        except CheckpointError as error:  # on all ranks
            plain, self._writing.failure = state, str(error)
        self._run, self._waits = run, partial(self._count, run, own, plain, place, kept, files)
        self._step = place[2] if files.get("last", True) else None

    # ---- it counts

    def commit(self) -> None:
        """All ranks have agreed that they are not busy."""
        if self._run is not None:
            self.settle(self._run)

    def is_busy(self) -> bool:
        """Whether this rank is writing."""
        return self._waits is not None and not self._writing.is_over()

    def settle(self, run: Run, alone: bool = False) -> None:
        """Wait for the save that is on its way, and let it count; on all ranks. ``alone``: after an error, rank zero's word."""
        waits, self._waits = self._waits, None
        if waits is None:
            return
        self._writing.wait(PATIENCE if alone else None)
        self.settling = "alone" if alone else "together"
        try:
            if not alone or run.fabric.is_global_zero:
                waits()
            elif self._writing.failure is None and self._writing.is_over():
                self._perhaps = self._step
        finally:
            self.settling = None

    def _count(self, run: Run, own: Any, plain: dict[str, Any], place: Any, kept: bool, files: dict[str, Any]) -> None:
        self._put(run, plain, place, kept, **files)
        if self._writing.failure is None:
            self._made = own, {**plain, SHARDS: self._writing.index}

    def _in_parts(self, run: Run, path: Path, state: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        if self.settling is None:
            return super()._in_parts(run, path, state)
        if self._writing.failure is not None:
            return state, given_up(path, self._writing.failure)
        return {**state, SHARDS: self._writing.index}, None

    def tidy(self, run: Run, known: dict[str, str] | None = None) -> None:
        """Remove pieces that no file names; not as a save counts, but as the next one begins: training would wait for it."""
        if self.settling is None:
            super().tidy(run, known)

    # ---- it is waited for

    def finish(self, run: Run, interrupted: bool) -> None:
        """Training is over: nothing is on its way any more."""
        self.settle(run)
        super().finish(run, interrupted)
        self.settle(run)
        self.tidy(run)
        self._writing.close()

    def save_failed(self, run: Run) -> Path | None:
        """An error ends the run: its state is on disk when this returns."""
        path = super().save_failed(run)
        self.settle(run, alone=True)
        return path


class _Writing:
    """A rank's part of one save: copies, and a thread that writes them and talks to the others' in a group of its own."""

    def __init__(self) -> None:
        self.index: dict[str, Any] | None = None  # what rank zero's files say of the pieces
        self.failure: str | None = None
        self._group: Any = None
        self._copies: dict[str, Tensor] = {}  # used again: new memory costs as much as the copy
        self._thread: threading.Thread | None = None

    def begin(self, folder: Path, run: Run, state: dict[str, Any]) -> dict[str, Any]:
        """Copy what is to be written, and begin to write it; returns the state without it, rank zero's for itself."""
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        plain, tensors, ways = parted(run, state)
        copies = {}
        for key, tensor in tensors.items():
            part, old = tensor.to_local().detach(), self._copies.get(key)
            if old is None or old.shape != part.shape or old.dtype != part.dtype:
                old = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            copies[key] = old.copy_(part, non_blocking=part.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize(run.fabric.device)
        self._copies, self.index, self.failure = copies, None, "it was not finished"
        plain = owned(plain) if run.fabric.is_global_zero else plain
        work = partial(self._write, folder, run.at.global_step, tensors, ways)
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return plain

    def _write(self, folder: Path, step: int, tensors: dict[str, Any], ways: list[list[Any]]) -> None:
        try:
            self.index = write(folder, step, tensors, ways, self._copies, self._group)
            self.failure = None
        except CheckpointError as error:
            self.failure = str(error)
        except Exception as error:  # another rank is gone
            self.failure = cause_of(error)

    def is_over(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None) -> None:
        """Wait for it, at most so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Give back the group, on all ranks, and the memory."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
        self._group, self._copies = None, {}
