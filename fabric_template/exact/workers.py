"""Workers: the random numbers in a DataLoader's worker processes, noted there after each batch and put back on resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, get_worker_info

from .randomness import find_generators, generators_of, pack_rng_state, set_rng_state, unpack_rng_state

HEADER = 16  # bytes before each state: the number of batches it follows, and its size
TOO_LONG = -1  # as a size: the state did not fit
PATIENCE = 30.0  # seconds to wait for what a worker is about to note


class Recorder:
    """Stands in for a loader's collate_fn and worker_init_fn, so that each worker notes its random state after a batch.

    A worker's random numbers depend on all that it has loaded. Which of its batches have been trained is known in the
    training process only, and workers load ahead: so each writes its state after every batch into memory that it shares
    with the training process, where the last few remain readable. The training process does nothing until it saves.

    Args:
        loader: a map-style DataLoader with workers.
        states: the states to begin with, one for each worker, None for as seeded.
        idle: the workers below this number are sent an empty batch first, which stands for one that is not loaded; in a
            loader without batches (batch_size=None), an item that was trained before.
    """

    def __init__(self, loader: DataLoader, states: Sequence[Any] | None = None, idle: int = 0) -> None:
        self.collate, self.init = loader.collate_fn, loader.worker_init_fn
        self.has_batches = loader.batch_sampler is not None
        self.states, self.idle = states or [None] * loader.num_workers, idle
        self.patience = PATIENCE
        size = HEADER + 4 * len(pack_rng_state(find_generators(loader.dataset, self.collate)))  # room for some more
        # a row for each batch that is loaded ahead, for the one that is trained, and for the one before it
        most = (loader.prefetch_factor or 2) + 2
        self.rows = torch.zeros(loader.num_workers, most, size, dtype=torch.uint8).share_memory_()

    # ---- in a worker

    def start(self, worker_id: int) -> None:
        """What worker_init_fn does; then the state to begin with."""
        if self.init is not None:
            self.init(worker_id)
        self.own_rows, self.batches, self.idles = self.rows[worker_id].numpy(), 0, worker_id < self.idle
        worker, state = get_worker_info(), self.states[worker_id]
        assert worker is not None  # this is one
        self.dataset = worker.dataset
        if state is not None:
            set_rng_state(state, generators_of(state, self._find, [self.dataset]))
        self.began = pack_rng_state(self._find())
        self.seeded = self.began if state is None else None
        self._note()

    def __call__(self, items: Any) -> Any:
        """What collate_fn does; then a note."""
        if self.idles:
            self.idles = False
            if not self.has_batches:
                set_rng_state(unpack_rng_state(self.began), self.generators)
            if not self.has_batches or items == []:
                return None
        batch = self.collate(items)
        self.batches += 1
        self._note()
        return batch

    def _find(self) -> list[Any]:
        return find_generators(self.dataset, self.collate)

    def _note(self) -> None:
        if self.batches & (self.batches - 1) == 0:  # 0, 1, 2, 4, 8, ...: it takes long in some datasets
            self.generators = self._find()  # some are made with the first item only
        state = pack_rng_state(self.generators)
        if state == self.seeded:  # nothing was drawn: a checkpoint need not hold it
            state = b""
        else:
            self.seeded = None
        row = self.own_rows[self.batches % len(self.own_rows)]
        size = len(state) if HEADER + len(state) <= len(row) else TOO_LONG
        if size != TOO_LONG:
            row[HEADER : HEADER + size] = numpy.frombuffer(state, dtype=numpy.uint8)
        # the header last: by it the state becomes readable
        row[:HEADER] = numpy.array([self.batches + 1, size], dtype="int64").view(numpy.uint8)

    # ---- in the training process

    def read(self, batches: Sequence[int]) -> list[Any] | None:
        """Each worker's state after so many of its batches, None for as seeded; None in all if one did not note it."""
        give_up = time.monotonic() + self.patience
        states = []
        for rows, done in zip(self.rows.numpy(), batches, strict=True):
            row = rows[done % len(rows)]
            while (header := row[:HEADER].view("int64"))[0] != done + 1:
                if header[0] > done + 1:
                    return None
                if time.monotonic() > give_up:  # it failed, in a batch that nobody asks for: no other save waits
                    self.patience = 0.0
                    return None
                time.sleep(0.001)  # the worker is starting, or loads a batch ahead
            if header[1] == TOO_LONG:
                return None
            packed = row[HEADER : HEADER + header[1]].tobytes()
            states.append(unpack_rng_state(packed) if packed else None)
        return states
