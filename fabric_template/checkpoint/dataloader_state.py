"""Save and restore random generators and the position in a loader, to resume with the next batch.

The cost of a resume depends on the loader:

- A loader with ``state_dict`` and ``load_state_dict`` (StatefulDataLoader) restores itself.
- A map-style DataLoader draws the indices of the finished batches again, and reads no samples.
- A map-style DataLoader with workers also reads up to ``num_workers - 1`` finished batches again.
- Any other loader, such as one of an IterableDataset, reads all finished batches again.

In two cases, the position in the loader cannot be restored exactly:

- The iterator of the loader continues in the next epoch instead of starting over.
- The loader has workers, and its sampler draws each batch from the global random generator.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, IterableDataset

from ..data.tensor_loader import TensorLoader

# Random generators


def capture_rng_state() -> dict[str, Any]:
    """Return the states of this process's random generators, which can be compared with ==."""
    numpy_state: Any = np.random.get_state()
    name, keys, *position = numpy_state
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": (name, keys.tobytes(), *position),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set every random generator to a captured state."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    random.setstate(state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *position))
    if "cuda" in state and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(state["cuda"][:count])


@contextmanager
def unchanged_rng_state() -> Iterator[None]:
    """Restore every random generator at the end of a block."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)


# Loaders


class ResumableLoader:
    """Iterates over a loader, and can resume in the middle of a pass.

    When a loader's iterator is created, the random generators determine the order of the samples.
    A resume therefore restores the saved random states before the iterator is created.

    Attributes:
        passes: Number of passes in this epoch. CombinedLoader repeats a short loader.
        batches: Number of batches read in this pass.
        is_read_ahead: Whether the next batch is read before training reaches it.
        workers: The random state of each worker after its last batch. Persistent workers keep
            their states between passes, and if a reload returns the same loader.
    """

    def __init__(self, loader: Any, workers: list[Any] | None = None) -> None:
        self.loader = loader
        self.passes = self.batches = 0
        self.is_read_ahead = self._is_finished = False
        # The random states before the loader's iterator was created, and before the sampler drew
        # the order of the samples.
        self._at_start: dict[str, Any] | None = None
        self._at_order: Any = None
        # The newest batch may be read before training reaches it. A checkpoint then contains these
        # states, from before that batch was read.
        self._rng_before_last: dict[str, Any] | None = None
        self._state_before_last: Any = None
        self._restored: dict[str, Any] | None = None
        self._restored_rng: dict[str, Any] | None = None
        self._reader: Generator[Any] | None = None
        # A subclass of DataLoader may ignore the sampler and the collate_fn that _iterate() sets.
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        self._is_indexed = is_plain and not isinstance(loader.dataset, IterableDataset)
        self._is_persistent = is_plain and loader.persistent_workers
        self.workers = workers or [None] * (loader.num_workers if is_plain else 0)
        # A resume starts where all workers had sent equally many batches. Keep the last two of these
        # positions, because training may not have reached the newest batch.
        self._rounds: list[tuple[int, list[Any]]] = [(0, self.workers)]
        self._stateful_part = find_stateful_part(loader)
        parts = (loader, *samplers_of(loader))
        generators = [getattr(part, "generator", None) for part in parts]
        self._generators = [part for part in generators if isinstance(part, torch.Generator)]

    def __iter__(self) -> Iterator[Any]:
        self.end_pass()
        self.close()
        if self._restored is not None:
            return self._resume_pass(self._restored)
        self.passes += 1
        self.batches, self._is_finished = 0, False
        if not self._is_persistent:
            self.workers = [None] * len(self.workers)
        self._rounds = [(0, list(self.workers))]
        self._at_start, self._at_order = self._capture(), None
        self._reader = self._read(self._iterate(self._indices_for_workers()))
        return self._reader

    @property
    def is_used(self) -> bool:
        """Return whether a batch of this pass was read, or the pass has ended."""
        return self.batches > 0 or self._is_finished

    def start_epoch(self) -> None:
        if self._restored is None:
            self.passes = 0

    def end_pass(self) -> None:
        """End a pass. As in Trainer, the loader's workers shut down when the next pass starts."""
        if self._reader is None or self._is_finished or not self._is_persistent:
            return
        # Stop the prefetching with an empty sampler.
        self.loader._iterator._sampler_iter = iter(())
        # Read the prefetched batches, to get the random states of the persistent workers.
        with suppress(Exception):
            for _ in self._reader:
                pass

    def close(self) -> None:
        """Close the iterator. The loader's workers shut down, except for persistent workers."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, iterator: Iterator[Any]) -> Generator[Any]:
        if self._at_order is None and not self.workers:
            # Without workers, some loaders shuffle only when the first batch is requested.
            self._at_order = self._capture()
        fetch = self._read_ahead if self.is_read_ahead else next
        # A for loop would call iter() again, which restarts some iterators.
        while True:
            try:
                batch = fetch(iterator)
            except StopIteration:
                break
            except Exception:
                # Shut down the workers, which the traceback of the error would keep alive.
                if self.workers and not self._is_persistent:
                    iterator._shutdown_workers()  # type: ignore[attr-defined]
                raise
            self.batches += 1
            if isinstance(batch, WorkerBatch):
                batch = self._unpack(batch)
            yield batch
        self._is_finished = True

    def _read_ahead(self, iterator: Iterator[Any]) -> Any:
        """Read the next batch. The first read after a resume uses the saved random state."""
        self._state_before_last = self._part_state()
        restored, self._restored_rng = self._restored_rng, None
        if restored is None:
            self._rng_before_last = capture_rng_state()
            return next(iterator)
        self._rng_before_last = restored
        with unchanged_rng_state():
            restore_rng_state(restored)
            return next(iterator)

    def _unpack(self, item: WorkerBatch) -> Any:
        """Return the batch, and record the random state of its worker."""
        if item.rng_state is not None:
            self.workers[item.worker] = item.rng_state
        if self._is_indexed and self.batches % len(self.workers) == 0:
            self._rounds = [self._rounds[-1], (self.batches, list(self.workers))]
        return item.batch

    def _iterate(self, indices: Iterable[Any] | None) -> Iterator[Any]:
        """Create the loader's iterator, over the given indices or those of its sampler."""
        replaced: dict[str, Any] = {}
        if self.workers:
            recorder = WorkerRecorder(self.loader, self.workers)
            replaced = {"collate_fn": recorder.collate, "worker_init_fn": recorder.start_worker}
        if indices is not None:
            has_batches = self.loader.batch_sampler is not None
            replaced["batch_sampler" if has_batches else "sampler"] = indices
        given = {name: getattr(self.loader, name) for name in replaced}
        if replaced:
            # Bypass DataLoader.__setattr__, which does not allow changes of samplers.
            vars(self.loader).update(replaced)
        try:
            if self._is_persistent and self.loader._iterator is not None:
                # Replace the sampler of the first pass, which persistent workers would use again.
                self.loader._iterator._index_sampler = self.loader._index_sampler
            return iter(self.loader)
        finally:
            if given:
                vars(self.loader).update(given)

    def _indices_for_workers(self) -> Iterator[Any] | None:
        has_indices = self._is_indexed and self.workers
        return self._captured(self.loader._index_sampler) if has_indices else None

    def _captured(self, sampler: Iterable[Any]) -> Iterator[Any]:
        """Save the random states before the sampler is used, and yield its indices."""
        self._at_order = self._capture()
        yield from sampler

    def _draw_again(self, sampler: Iterable[Any], first: int, done: int) -> Iterator[Any]:
        """Draw the indices of the restored pass, and yield them from batch ``first`` on."""
        # Workers prefetch, so the saved run had drawn the indices of more than ``done`` batches.
        ahead = len(self.workers) * (self.loader.prefetch_factor or 0)
        with unchanged_rng_state():
            self._restore(self._at_order)
            order = iter(sampler)
            # Request at least one item, because a sampler shuffles when the first is requested.
            drawn = list(islice(order, max(done + ahead, 1)))
        # An uninterrupted run also draws the indices of later batches in the current random state.
        yield from drawn[first:]
        yield from order

    # Skipping batches

    def _resume_pass(self, state: dict[str, Any]) -> Iterator[Any]:
        if state["passes"] > 1:
            # Return no batch, so that CombinedLoader repeats this loader, as in the saved run.
            self._restored = {**state, "passes": 1}
            return iter(())
        self._restored = None
        if state["is_finished"]:
            self._restore_between_passes(state)
            return iter(())
        with unchanged_rng_state():
            self._reader = self._start_at(state)
        self._restored_rng = state["rng_before_next"]
        self._restore(state)
        return self._reader

    def _start_at(self, state: dict[str, Any]) -> Generator[Any]:
        done = state["batches"]
        if "state" in state:
            self._stateful_part.load_state_dict(deepcopy(state["state"]))
            return self._read(iter(self.loader))
        self.batches, indices = 0, self._indices_for_workers()
        if self._is_indexed and self._at_order is not None:
            is_same = len(state["workers"]) == len(self.workers) > 0
            self.batches = state["round_start"] if is_same else done
            indices = self._draw_again(self.loader._index_sampler, self.batches, done)
        self._restore(state["at_start"])
        iterator = self._iterate(indices)
        if self._at_order is not None and not self._is_indexed:
            self._restore(self._at_order)
        if done and not (self._is_indexed or isinstance(self.loader, Sequence | TensorLoader)):
            warnings.warn(
                f"resume: {done} batches of {type(self.loader).__name__} are read again and dropped, because it"
                " cannot start in the middle. A loader with state_dict() and load_state_dict(), such as"
                " torchdata's StatefulDataLoader, continues without that.",
                stacklevel=2,
            )
        reader = self._read(iterator)
        for _ in islice(reader, done - self.batches):
            pass
        return reader

    # State

    def state_dict(self, is_in_pass: bool = False, dropped: int = 0) -> dict[str, Any]:
        """Return the position in the loader.

        Args:
            is_in_pass: Whether a resumed run continues this pass. Otherwise it starts a new one.
            dropped: Number of the last batches read that the resumed run has to read again.
        """
        if self._restored is not None:
            return self._restored
        if self._is_finished and dropped:
            # This loader had ended, so the last combined batch contains no batch from this loader.
            dropped -= 1
        done = max(0, self.batches - dropped)
        is_finished = self._is_finished and not dropped
        round_start, workers = self._rounds[-1 if self._rounds[-1][0] <= done else 0]
        if not is_in_pass or is_finished:
            workers = self.workers
        position = {
            "is_in_pass": is_in_pass and self._at_start is not None,
            "passes": self.passes,
            "batches": done,
            "is_finished": is_finished,
            "at_start": self._at_start,
            "at_order": self._at_order,
            "round_start": min(round_start, done),
            "workers": list(workers),
            "rng_before_next": self._rng_before_last if dropped == 1 else self._restored_rng,
            "generators": self._generator_states(),
        }
        if self._stateful_part is not None:
            is_last_dropped = dropped and self.is_read_ahead
            position["state"] = self._state_before_last if is_last_dropped else self._part_state()
        return position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position at which the next iterator starts."""
        self.passes, self.batches = state["passes"], state["batches"]
        self._is_finished = state["is_finished"]
        self._at_start, self._at_order = state["at_start"], state["at_order"]
        if len(state["workers"]) == len(self.workers):
            self.workers = list(state["workers"])
        self._rounds = [(state["round_start"], list(self.workers))]
        if self._is_persistent and any(self.workers):
            with unchanged_rng_state():
                # Start the persistent workers here, in their saved random states.
                self._iterate(())
        if state["is_in_pass"]:
            self._restored = state
        else:
            self._restore_between_passes(state)

    def _restore_between_passes(self, state: dict[str, Any]) -> None:
        if "state" in state:
            self._stateful_part.load_state_dict(deepcopy(state["state"]))
            # The loader has no batches left in the restored epoch. This iterator ends that epoch, so
            # the next iterator starts a new epoch.
            iter(self.loader)
            # A sampler of torchdata moves to its restored position when an index is requested.
            for sampler in samplers_of(self.loader):
                next(iter(sampler), None)
        self._restore(state)

    def _part_state(self) -> Any:
        """Return the state of a loader that saves its own position, or None."""
        return None if self._stateful_part is None else deepcopy(self._stateful_part.state_dict())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _capture(self) -> dict[str, Any]:
        return {"rng": capture_rng_state(), "generators": self._generator_states()}

    def _restore(self, captured: Mapping[str, Any]) -> None:
        if "rng" in captured:
            restore_rng_state(captured["rng"])
        for generator, state in zip(self._generators, captured["generators"], strict=False):
            generator.set_state(state)


class WorkerBatch(NamedTuple):
    """A batch and its worker's random state, or None for an unchanged state."""

    batch: Any
    worker: int
    rng_state: dict[str, Any] | None


class WorkerRecorder:
    """Replaces collate_fn and worker_init_fn, to send a worker's random state with each batch.

    A worker prefetches batches, so the worker's current state belongs to a later batch.
    Recording the state costs 80 microseconds per batch. A worker sends the state (10 kB) only if
    the dataset has drawn random numbers for the batch.

    Args:
        states: The random state in which each worker starts. None: its state after seeding.
    """

    def __init__(self, loader: DataLoader, states: list[Any]) -> None:
        self._collate_fn, self._worker_init_fn = loader.collate_fn, loader.worker_init_fn
        self._states = states
        self._worker = 0
        self._rng_state: dict[str, Any] = {}

    def start_worker(self, worker: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        state = self._states[worker]
        if state is not None:
            restore_rng_state(state)
        self._worker = worker

    def collate(self, samples: Any) -> WorkerBatch:
        batch = self._collate_fn(samples)
        previous, self._rng_state = self._rng_state, capture_rng_state()
        has_changed = self._rng_state != previous
        return WorkerBatch(batch, self._worker, self._rng_state if has_changed else None)


def has_state(part: Any) -> bool:
    """Return whether an object implements ``state_dict`` and ``load_state_dict``."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(part, name, None)) for name in names)


def find_stateful_part(loader: Any) -> Any:
    """Return the object that saves the position: the loader, or an iterable dataset, or None."""
    if isinstance(getattr(loader, "sampler", None), DistributedSamplerWrapper):
        # The state of a loader does not contain the order that DistributedSamplerWrapper has drawn.
        return None
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset) and not getattr(loader, "num_workers", 0)
    parts = [loader, dataset] if is_stream else [loader]
    return next(filter(has_state, parts), None)


def samplers_of(loader: Any) -> list[Any]:
    """Return a loader's samplers without duplicates."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, inner)
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())
