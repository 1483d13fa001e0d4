"""The position in a loader, so that a resumed run continues with the next batch.

How a loader is brought to its position, and what that costs:

- ``state_dict`` and ``load_state_dict`` (torchdata's StatefulDataLoader, loaders of your own): it does so itself.
- A map-style DataLoader: the indices of the batches that are done are drawn, no sample is read. With workers, at
  most ``num_workers - 1`` batches are read again, so that each batch is made by the worker that made it before.
- TensorLoader: the order is drawn, no batch is cut.
- Anything else, such as an IterableDataset: the batches that are done are read again and dropped.

Samplers with ``state_dict`` are restored, too. A sampler that draws each index from the global random numbers while
workers load ahead cannot be: its draws mix with those of the training steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..data.tensor_loader import TensorLoader
from .rng import capture_rng_state, pack_rng_state, restore_rng_state, unpack_rng_state


class ResumableLoader:
    """Iterates over a loader, and can start an iterator in the middle of a pass over it.

    The order of a pass depends on the random numbers at its start. They are captured there, and restored before
    the iterator of a resumed pass is made. Afterwards the random numbers are as they were before.

    Args:
        loader: A DataLoader, a TensorLoader or any iterable of batches.
        is_training: Record the random states of workers after each batch, too. For an evaluation this is
            needed only where workers live on from one pass to the next.

    Attributes:
        passes: Passes of this epoch. CombinedLoader starts a short loader several times.
        batches: Batches of this pass; of all passes for an iterator that does not start over.
    """

    def __init__(self, loader: Any, is_training: bool = True) -> None:
        self.loader = loader
        self.passes = self.batches = 0
        self._is_finished = False
        self._at_start: dict[str, Any] | None = None
        self._at_first_batch: dict[str, Any] | None = None
        self._samplers_at_start: list[Any] = []
        # A plain DataLoader can be given other samplers and functions while its iterator is made.
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        self._is_indexed = is_plain and not isinstance(loader.dataset, IterableDataset)
        self._is_persistent = is_plain and loader.persistent_workers
        is_recorded = is_plain and (is_training or self._is_persistent)
        self._num_workers = loader.num_workers if is_recorded else 0
        self._workers: list[Any] = [None] * self._num_workers
        # Workers take turns, a round is one batch of each. A pass is resumed at the start of a round.
        self._rounds: list[tuple[int, list[Any]]] = [(0, self._workers)]
        # Persistent workers start in one pass and live on in the later ones.
        self._had_workers = self._needs_workers = False
        self._restored: dict[str, Any] | None = None
        self._reader: Generator[Any] | None = None

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
        self._is_finished = False
        self._samplers_at_start = self._sampler_states()
        self._at_start, self._at_first_batch = self._capture(), None
        if self._is_persistent:
            self._had_workers = self.loader._iterator is not None
        else:
            self._workers = [None] * self._num_workers
        self._rounds = [(0, list(self._workers))]
        attributes = dict(getattr(self.loader, "__dict__", {}))
        iterator = self._iterate()
        if not isinstance(self.loader, Iterator) or has_changed(self.loader, attributes):
            self.batches = 0
        self._reader = self._read(iterator)
        return self._reader

    def _read(self, iterator: Iterator[Any]) -> Generator[Any]:
        if self._at_first_batch is None:
            self._at_first_batch = self._capture()
        # Not a for loop: it would call iter() again, which starts some iterators over.
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception:
                # The traceback would keep the workers alive.
                if isinstance(iterator, _MultiProcessingDataLoaderIter):
                    iterator._shutdown_workers()
                raise
            self.batches += 1
            if isinstance(batch, WorkerBatch):
                batch = self._unpack(batch)
            yield batch
        self._is_finished = True

    def _unpack(self, item: WorkerBatch) -> Any:
        """Keep the random state of the batch's worker, and of all workers at the start of a round."""
        if item.rng_state is not None:
            self._workers[item.worker] = item.rng_state
        # Where batches are read again, workers start as they did at the start of the pass.
        if self._is_indexed and self.batches % self._num_workers == 0:
            # The one before is needed where batches were read ahead of the training.
            self._rounds = [self._rounds[-1], (self.batches, list(self._workers))]
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
        if state["is_finished"]:
            self._restore_between_passes(state)
            return iter(())
        with self._unchanged_random_numbers():
            self._reader = self._start_at(state)
        self._restore_generators(state["generators"])
        self._restore_dataset(state)
        return self._reader

    def _start_at(self, state: dict[str, Any]) -> Generator[Any]:
        done = state["batches"]
        if "state" in state:
            self._stateful_part.load_state_dict(deepcopy(state["state"]))
            return self._read(iter(self.loader))
        self._restore_samplers(state["samplers_at_start"])
        if self._is_indexed:
            return self._start_at_index(state, done)
        if getattr(type(self.loader), "__iter__", None) is TensorLoader.__iter__:
            self._restore(self._at_start)
            return self._read(self.loader.iter_from(done))
        return self._read_again(done)

    def _start_at_index(self, state: dict[str, Any], done: int) -> Generator[Any]:
        if not getattr(self.loader, "in_order", True):
            warnings.warn(
                "resume: DataLoader(in_order=False) gives batches in the order in which its workers finish, so the"
                " continued epoch may repeat or miss samples. Leave in_order out for an exact resume.",
                stacklevel=2,
            )
        skipper = IndexSkipper(self._index_sampler)
        if self._needs_workers:
            self._start_persistent_workers(skipper)
        self._restore(self._at_start)
        count, states = state["round"]
        is_same = self._num_workers and len(states) == self._num_workers
        skipper.skip = start = min(count, done) if is_same else done
        # Without workers the order is drawn at the first batch, with workers as they are started.
        if not state["num_workers"]:
            skipper.start(lambda: self._restore(self._at_first_batch))
        iterator = self._iterate(skipper)
        if not self._num_workers:
            skipper.skip_items()
        self.batches = start
        return self._drop(iterator, done - start)

    def _read_again(self, done: int) -> Generator[Any]:
        """Start a pass and drop the batches that are done."""
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
        self.batches = 0
        return self._drop(iterator, done)

    def _drop(self, iterator: Iterator[Any], count: int) -> Generator[Any]:
        reader = self._read(iterator)
        for _ in islice(reader, count):
            pass
        return reader

    def _start_persistent_workers(self, skipper: IndexSkipper) -> None:
        """Start the workers of an earlier pass, with a pass that has no batch."""
        self._needs_workers = False
        skipper.is_empty = True
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
        batches = max(0, self.batches - dropped)
        count, states = next(
            (r for r in reversed(self._rounds) if r[0] <= batches), self._rounds[0]
        )
        position = {
            "passes": self.passes,
            "batches": batches,
            "is_finished": self._is_finished and not dropped,
            "at_start": self._at_start,
            "at_first_batch": self._at_first_batch,
            "had_workers": self._had_workers,
            "num_workers": self._num_workers,
            "workers": [plain_rng_state(state) for state in self._workers],
            "round": [count, [plain_rng_state(state) for state in states]],
            "generators": [generator.get_state() for generator in self._generators],
            "samplers": self._sampler_states(),
            "samplers_at_start": self._samplers_at_start,
        }
        if self._stateful_part is not None:
            position["state"] = self.part_state()
        elif self._stateful_dataset is not None:
            position["dataset"] = deepcopy(self._stateful_dataset.state_dict())
        return position

    def load_state_dict(self, state: dict[str, Any], is_in_pass: bool) -> None:
        """Restore a position; the next iterator starts there.

        Args:
            is_in_pass: Whether a pass is continued. Otherwise the next iterator starts a new pass.
        """
        self.passes, self.batches = state["passes"], state["batches"]
        self._is_finished = state["is_finished"]
        self._at_start, self._at_first_batch = state["at_start"], state["at_first_batch"]
        self._samplers_at_start = state["samplers_at_start"]
        self._had_workers = state["had_workers"]
        is_in_pass = is_in_pass and self._at_start is not None
        is_continued = is_in_pass and not self._is_finished
        count, states = state["round"]
        workers = states if is_continued else state["workers"]
        if len(workers) == self._num_workers:
            self._workers = list(workers)
        self._rounds = [(count, list(self._workers))]
        had_workers = self._had_workers if is_continued else self._at_start is not None
        self._needs_workers = self._is_persistent and had_workers
        if is_in_pass:
            self._restored = state
        else:
            self._restore_between_passes(state)

    def _restore_between_passes(self, state: dict[str, Any]) -> None:
        """Restore the state after a pass. The next iterator starts a new one."""
        if "state" in state:
            self._stateful_part.load_state_dict(deepcopy(state["state"]))
            # It continues the pass that has ended. The next iterator starts a new one.
            iter(self.loader)
        elif isinstance(self.loader, Iterator) and self._at_start is not None:
            with self._unchanged_random_numbers():
                self._reader = self._read_again(state["batches"])
        self._restore_samplers(state["samplers"])
        self._restore_generators(state["generators"])
        self._restore_dataset(state)

    @property
    def _stateful_dataset(self) -> Any:
        """The dataset, if it is used in this process and saves its state."""
        dataset = getattr(self.loader, "dataset", None)
        is_here = not getattr(self.loader, "num_workers", 0)
        return dataset if is_here and has_state(dataset) else None

    @property
    def _stateful_part(self) -> Any:
        """The loader, or its iterable dataset, if it saves its own position."""
        if has_state(self.loader):
            return self.loader
        dataset = self._stateful_dataset
        return dataset if isinstance(dataset, IterableDataset) else None

    def _restore_dataset(self, state: dict[str, Any]) -> None:
        if "dataset" in state and self._stateful_dataset is not None:
            self._stateful_dataset.load_state_dict(deepcopy(state["dataset"]))

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

    def _restore_samplers(self, states: list[Any]) -> None:
        for sampler, state in zip(self._samplers, states, strict=False):
            sampler.load_state_dict(deepcopy(state))

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
    """A sampler or batch sampler that leaves out the first items of its next pass.

    Args:
        sampler: The sampler of the loader. Persistent workers keep the skipper for later passes.

    Attributes:
        skip: How many items the next pass leaves out. They are drawn, because a sampler may draw random
            numbers for each.
        is_empty: Whether the next pass has no items at all.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.skip, self.is_empty = 0, False
        self._iterator: Iterator[Any] = iter(())
        self._is_started = False

    def start(self, before_first_item: Callable[[], None]) -> None:
        """Start the pass before the loader does, while the random state is set for it."""
        self._iterator, self._is_started = iter(self._sampler), True
        before_first_item()
        self.skip_items()

    def skip_items(self) -> None:
        """Leave out the items now."""
        skip, self.skip = self.skip, 0
        for _ in islice(self._iterator, skip):
            pass

    def __iter__(self) -> Iterator[Any]:
        # torch starts a pass with workers twice, and takes items from the second iterator only.
        if not self._is_started:
            self._iterator = iter(self._sampler)
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        self._is_started = False
        is_empty, self.is_empty = self.is_empty, False
        if not is_empty:
            self.skip_items()
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
        self._worker = worker

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


def has_changed(part: Any, attributes: dict[str, Any]) -> bool:
    """Return whether an object has other attributes than before."""
    current = getattr(part, "__dict__", {})
    return len(current) != len(attributes) or any(
        current.get(name) is not value for name, value in attributes.items()
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
