"""The position in a loader, so that a resumed run continues with the next batch.

How a loader is brought to its position, and what that costs:

- ``state_dict`` and ``load_state_dict`` (torchdata's StatefulDataLoader, loaders of your own): it does so itself.
- A map-style DataLoader: the indices of the batches that are done are drawn, no sample is read. With workers, at
  most ``num_workers - 1`` batches are read again, so that each batch is made by the worker that made it before.
- TensorLoader: the order is drawn, no batch is cut.
- Anything else, such as an IterableDataset: the batches that are done are read again and dropped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..data.tensor_loader import TensorLoader
from .rng import capture_rng_state, pack_rng_state, restore_rng_state, unpack_rng_state


class ResumableLoader:
    """Iterates over a loader, and can start an iterator in the middle of a pass over it.

    The order of a pass depends on the random numbers at its start. They are noted there, and restored before
    the iterator of a resumed pass is made. Afterwards the random numbers are as they were before.

    Args:
        loader: A DataLoader, a TensorLoader or any iterable of batches.
        is_training: Note the random states of workers after each batch, too. For an evaluation this is
            needed only where workers live on from one pass to the next.

    Attributes:
        passes: Passes of this epoch. CombinedLoader starts a short loader several times.
        batches: Batches of this pass; of all passes for a loader that is its own iterator.
    """

    def __init__(self, loader: Any, is_training: bool = True) -> None:
        self.loader = loader
        self.passes = self.batches = 0
        self._is_finished = False
        self._at_start: dict[str, Any] | None = None
        self._at_first_batch: dict[str, Any] | None = None
        self._samplers_at_start: list[Any] = []
        # Persistent workers are started in one pass and used in later ones.
        self._at_worker_start: dict[str, Any] | None = None
        self._has_new_workers = self._needs_workers = False
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        self._is_persistent = is_plain and loader.persistent_workers
        self._num_workers = (
            loader.num_workers if is_plain and (is_training or self._is_persistent) else 0
        )
        self._is_indexed = is_plain and not isinstance(loader.dataset, IterableDataset)
        self._workers: list[Any] = [None] * self._num_workers
        self._workers_at_round = list(self._workers)
        self._restored: dict[str, Any] | None = None
        self._reader: Generator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def end_pass(self) -> None:
        """End a pass, also an early one. Workers shut down here, but for persistent ones."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        if self._is_persistent and not self._is_finished:
            # Workers have drawn random numbers for batches ahead, with which their next pass continues.
            # Read these batches without asking for more. torch drops errors in them, too.
            self.loader._iterator._sampler_iter = iter(())
            with suppress(Exception):
                for _ in reader:
                    pass
        reader.close()

    def close(self) -> None:
        """Close the iterator."""
        if self._reader is not None:
            self._reader.close()

    def start_epoch(self) -> None:
        """Forget the passes of the last epoch, but keep a position that was just restored."""
        if self._restored is None:
            self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        if self._restored is not None:
            return self._resume_pass()
        if self._needs_workers:
            with self._unchanged_random_numbers():
                self._start_persistent_workers(IndexSkipper(self._index_sampler))
        self.passes += 1
        if not isinstance(self.loader, Iterator):
            self.batches = 0
        self._at_start, self._at_first_batch = self._capture(), None
        self._samplers_at_start = self._sampler_states()
        self._is_finished = False
        self._note_worker_start()
        self._reader = self._read(self._iterate())
        return self._reader

    def _note_worker_start(self) -> None:
        if not self._is_persistent:
            self._workers = [None] * self._num_workers
        self._has_new_workers = self._is_persistent and self._at_worker_start is None
        if self._has_new_workers:
            self._at_worker_start = self._at_start
        self._workers_at_round = list(self._workers)

    def _read(self, iterator: Iterator[Any]) -> Generator[Any]:
        if self._at_first_batch is None:
            self._at_first_batch = self._capture()
        for batch in iterator:
            self.batches += 1
            if isinstance(batch, WorkerBatch):
                batch = self._unpack(batch)
            yield batch
        self._is_finished = True

    def _unpack(self, item: WorkerBatch) -> Any:
        """Note the random state of the batch's worker. Workers take turns, a round is one batch of each."""
        if item.rng_state is not None:
            self._workers[item.worker] = item.rng_state
        # Where batches are read again, workers start as they did at the start of the pass.
        if self._is_indexed and self.batches % self._num_workers == 0:
            self._workers_at_round = list(self._workers)
        return item.batch

    def _iterate(self, index_sampler: Any = None) -> Iterator[Any]:
        replaced: dict[str, Any] = {}
        if self._num_workers:
            recorder = WorkerRecorder(self.loader, self._workers)
            replaced = {"collate_fn": recorder.collate, "worker_init_fn": recorder.start_worker}
        if index_sampler is not None:
            replaced[self._index_name] = index_sampler
        with replaced_attributes(self.loader, replaced):
            return iter(self.loader)

    # Starting in the middle

    def _resume_pass(self) -> Iterator[Any]:
        state = self._restored
        assert state is not None
        if state["passes"] > 1:
            # CombinedLoader learns that this loader has ended before, and starts it again.
            self._restored = {**state, "passes": 1}
            return iter(())
        self._restored = None
        with self._unchanged_random_numbers():
            self._reader = iterator = self._start_at(state)
        self._restore_generators(state["generators"])
        return iter(()) if state["is_finished"] else iterator

    def _start_at(self, state: dict[str, Any]) -> Generator[Any]:
        done = state["batches"]
        if "state" in state:
            self._stateful_part.load_state_dict(deepcopy(state["state"]))
            return self._read(iter(self.loader))
        for sampler, sampler_state in zip(self._samplers, state["samplers_at_start"], strict=False):
            sampler.load_state_dict(deepcopy(sampler_state))
        if self._is_indexed:
            return self._start_at_index(state, done)
        if type(self.loader).__iter__ is TensorLoader.__iter__:
            self._restore(self._at_start)
            return self._read(self.loader.iter_from(done))
        if done and not isinstance(self.loader, Sequence):
            warnings.warn(
                f"resume: {done} batches of {type(self.loader).__name__} are read again and dropped, because it"
                " cannot start in the middle. A loader with state_dict() and load_state_dict(), such as"
                " torchdata's StatefulDataLoader, continues without that.",
                stacklevel=2,
            )
        if self._needs_workers:
            self._start_persistent_workers(IndexSkipper(self._index_sampler))
        self._restore(self._at_start)
        iterator = self._iterate()
        self._restore(self._at_first_batch)
        return self._drop(iterator, done)

    def _start_at_index(self, state: dict[str, Any], done: int) -> Generator[Any]:
        # Without workers the order is drawn at the first batch, with workers as they are started.
        was_drawn_at_start = state["num_workers"] > 0
        skipped = done - done % self._num_workers if self._num_workers else done
        skipper = IndexSkipper(self._index_sampler)
        if self._needs_workers:
            self._start_persistent_workers(skipper)
        self._restore(self._at_start)
        skipper.skip = skipped
        if not was_drawn_at_start and self._at_first_batch is not None:
            skipper.start()
            self._restore(self._at_first_batch)
            skipper.skip_batches()
        iterator = self._iterate(skipper)
        if done and not self._num_workers:
            skipper.skip_batches()
        self.batches = skipped
        return self._drop(iterator, done - skipped)

    def _drop(self, iterator: Iterator[Any], count: int) -> Generator[Any]:
        self.batches = self.batches if self._is_indexed else 0
        reader = self._read(iterator)
        for _ in islice(reader, count):
            pass
        return reader

    def _start_persistent_workers(self, skipper: IndexSkipper) -> None:
        """Start the workers of an earlier pass, with a pass that has no batch."""
        self._needs_workers = False
        self._restore(self._at_worker_start)
        skipper.skip = math.inf
        self._iterate(skipper)

    # State

    def part_state(self) -> Any:
        """Return the state of a loader that saves its own position, or None."""
        return None if self._stateful_part is None else deepcopy(self._stateful_part.state_dict())

    def state_dict(self, dropped: int = 0) -> dict[str, Any]:
        """Return the position.

        Args:
            dropped: Batches that were taken from the loader but count as not trained.
        """
        if self._restored is not None:
            return self._restored
        position = {
            "passes": self.passes,
            "batches": max(0, self.batches - dropped),
            "is_finished": self._is_finished and not dropped,
            "at_start": self._at_start,
            "at_first_batch": self._at_first_batch,
            "at_worker_start": self._at_worker_start,
            "has_new_workers": self._has_new_workers,
            "num_workers": self._num_workers,
            "workers": [plain_rng_state(state) for state in self._workers],
            "workers_at_round": [plain_rng_state(state) for state in self._workers_at_round],
            "generators": [generator.get_state() for generator in self._generators],
            "samplers": self._sampler_states(),
            "samplers_at_start": self._samplers_at_start,
        }
        if self._stateful_part is not None:
            position["state"] = self.part_state()
        return position

    def load_state_dict(self, state: dict[str, Any], is_in_pass: bool) -> None:
        """Restore a position; the next iterator starts there.

        Args:
            is_in_pass: Whether a pass is continued. Otherwise the next iterator starts a new pass.
        """
        is_own_iterator = isinstance(self.loader, Iterator) and "state" not in state
        self.passes, self.batches = state["passes"], state["batches"]
        self._at_start, self._at_first_batch = state["at_start"], state["at_first_batch"]
        self._at_worker_start, self._has_new_workers = (
            state["at_worker_start"],
            state["has_new_workers"],
        )
        self._samplers_at_start = state["samplers_at_start"]
        workers = state["workers_at_round" if is_in_pass else "workers"]
        if len(workers) == self._num_workers:
            self._workers, self._workers_at_round = list(workers), list(workers)
        self._needs_workers = (
            self._is_persistent
            and self._at_worker_start is not None
            and not (is_in_pass and self._has_new_workers)
        )
        if (is_in_pass or is_own_iterator) and self._at_start is not None:
            self._restored = state
            return
        self._restore_generators(state["generators"])
        for sampler, sampler_state in zip(self._samplers, state["samplers"], strict=False):
            sampler.load_state_dict(deepcopy(sampler_state))
        if "state" in state:
            self._stateful_part.load_state_dict(deepcopy(state["state"]))
            # It continues the pass that has ended. The next iterator starts a new one.
            iter(self.loader)

    @property
    def _stateful_part(self) -> Any:
        """The loader, or its iterable dataset in this process, if it saves its own position."""
        if has_state(self.loader):
            return self.loader
        dataset = getattr(self.loader, "dataset", None)
        is_here = isinstance(dataset, IterableDataset) and not getattr(
            self.loader, "num_workers", 0
        )
        return dataset if is_here and has_state(dataset) else None

    @property
    def _index_name(self) -> str:
        return "sampler" if self.loader.batch_sampler is None else "batch_sampler"

    @property
    def _index_sampler(self) -> Any:
        return getattr(self.loader, self._index_name)

    @property
    def _samplers(self) -> list[Any]:
        if has_state(self.loader):
            return []
        return [sampler for sampler in samplers_of(self.loader) if has_state(sampler)]

    def _sampler_states(self) -> list[Any]:
        return [deepcopy(sampler.state_dict()) for sampler in self._samplers]

    @property
    def _generators(self) -> list[torch.Generator]:
        owners = [self.loader, *samplers_of(self.loader)]
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _capture(self) -> dict[str, Any]:
        generators = [generator.get_state() for generator in self._generators]
        return {"rng": capture_rng_state(), "generators": generators}

    def _restore(self, captured: dict[str, Any] | None) -> None:
        if captured is not None:
            restore_rng_state(captured["rng"])
            self._restore_generators(captured["generators"])

    def _restore_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    @contextmanager
    def _unchanged_random_numbers(self) -> Iterator[None]:
        captured = self._capture()
        yield
        self._restore(captured)


class IndexSkipper:
    """A sampler or batch sampler that leaves out the first items of its first pass.

    Args:
        sampler: The sampler of the loader.

    Attributes:
        skip: How many items the next pass leaves out; infinite for all of them.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.skip: float = 0
        self._iterator: Iterator[Any] = iter(())
        self._is_ready = False

    def start(self) -> None:
        """Start the pass before the loader does, while the random state is set for it."""
        self._iterator, self._is_ready = iter(self._sampler), True

    def skip_batches(self) -> None:
        """Leave out the items now. They are drawn, because a sampler may draw random numbers for each."""
        skip, self.skip = self.skip, 0
        for _ in islice(self._iterator, int(skip)):
            pass

    def __iter__(self) -> Iterator[Any]:
        if not self._is_ready:
            self._iterator = iter(self._sampler)
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        self._is_ready = False
        if self.skip == math.inf:
            self.skip = 0
            return
        self.skip_batches()
        yield from self._iterator

    def __len__(self) -> int:
        return len(self._sampler)


class WorkerBatch(NamedTuple):
    """A batch with the random state of its worker; None where the state has not changed."""

    batch: Any
    worker: int
    rng_state: bytes | None


class WorkerRecorder:
    """Takes the place of collate_fn and worker_init_fn, so that each batch brings its worker's random state.

    Workers load ahead, and only the training process knows which batches were trained. A batch costs its
    worker about 80 microseconds more, and 10 kB where samples draw random numbers.

    Args:
        loader: The loader whose functions are called.
        states: The state that each worker starts with. None: as it was seeded.
    """

    def __init__(self, loader: DataLoader, states: list[Any]) -> None:
        self._collate_fn, self._worker_init_fn = loader.collate_fn, loader.worker_init_fn
        self._states = states
        self._worker, self._packed = 0, b""

    def start_worker(self, worker: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        state = self._states[worker]
        if state is not None:
            restore_rng_state(plain_rng_state(state))
        self._worker, self._packed = worker, pack_rng_state()

    def collate(self, samples: Any) -> WorkerBatch:
        batch = self._collate_fn(samples)
        packed = pack_rng_state()
        has_changed, self._packed = packed != self._packed, packed
        return WorkerBatch(batch, self._worker, packed if has_changed else None)


def plain_rng_state(state: Any) -> Any:
    """Return the random state of a worker as a checkpoint holds it."""
    return unpack_rng_state(state) if isinstance(state, bytes) else state


def has_state(part: Any) -> bool:
    """Return whether an object implements ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


@contextmanager
def replaced_attributes(loader: Any, values: dict[str, Any]) -> Iterator[None]:
    """Give a loader other attributes while an iterator is made, which keeps them."""
    previous = {name: getattr(loader, name) for name in values}
    # A DataLoader refuses to change its samplers through its own __setattr__.
    for name, value in values.items():
        object.__setattr__(loader, name, value)
    try:
        yield
    finally:
        for name, value in previous.items():
            object.__setattr__(loader, name, value)
