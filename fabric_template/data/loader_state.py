"""Save and restore the position in a loader, so that a resumed run continues with the next batch.

How a loader is restored depends on its type:

- A loader with ``state_dict`` and ``load_state_dict`` methods restores its own position.
- A DataLoader with a map-style dataset skips the batches that were already used.
- Any other loader reads and drops the batches that were already used.

A run records the RNG states and the loader's changed attributes at three points in each epoch:
before set_epoch(), before iter(loader), and before the first batch. A resumed run has new loader
objects and restores the recorded values at the same points.

If a loader reads every epoch from the same Python generator, a run cannot resume after the first
epoch.
If a sampler draws random numbers between batches, a resumed run may read different samples.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from itertools import chain, islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..errors import CheckpointError, ConfigurationError
from ..plain_state import Part, PlainState
from ..rng_state import capture_rng_state, find_generators, restore_rng_state, unchanged_rng_state
from .loader_parts import (
    StreamState,
    find_iterators,
    find_stateful_part,
    is_of_library,
    may_read_model,
    parts_of_loader,
    parts_of_samples,
    samplers_of,
)
from .tensor_loader import TensorLoader

END: Any = object()
STICKY_POSITION = (
    "The loader seems to start every later epoch at the position that load_state_dict() has set."
    " Reset this position at the end of __iter__."
)
_DRAWING_SAMPLER = "Draw all random numbers in __iter__ before the first yield."
_DRAWING_STREAM = (
    "If the samples are chosen at random, use a random generator that is stored in an attribute."
)


class ResumableLoader:
    """Iterates over a loader and continues after the last finished batch when a run resumes.

    Args:
        is_saved: Whether checkpoints contain the position. If False, the loader's attributes are
            not recorded, because recording a large dataset may take seconds.
        find_model_state: A function that returns the state of the model's attributes. The loader
            may read these attributes. Small ones are saved together with the loader's attributes.

    Attributes:
        length: The length of the loader when its batches were counted, or None.
        passes: Number of times the loader was started in this epoch. CombinedLoader may start a
            short loader several times.
        batches: Number of batches read since the loader was last started.
        is_finished: Whether the loader has no batches left.
        restart_problem: The reason why a run cannot resume from checkpoints that are saved after
            the first epoch, or "" if it can. The reason is known after the first batch.
        workers: The RNG state of each worker after its last batch, or None before its first batch.
            Persistent workers keep their RNG states between epochs.
    """

    def __init__(
        self,
        loader: Any,
        is_saved: bool = True,
        find_model_state: Callable[[], PlainState] | None = None,
    ) -> None:
        self.loader, self.length = loader, sized_len(loader)
        self._find_model_state = find_model_state if may_read_model(loader) else None
        self.passes = self.batches = 0
        self.is_finished = False
        self.restart_problem = ""
        # The iterators found in the loader. iter(loader) replaces most of them.
        self._iterators = find_iterators(loader)
        # A subclass of DataLoader with its own __iter__ may ignore a new sampler or collate_fn.
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        # If a dataset reads from an iterator, a resumed run must read the finished batches again.
        is_indexed = is_plain and not isinstance(loader.dataset, IterableDataset)
        self._is_indexed = is_indexed and not self._iterators
        self._is_persistent = is_plain and loader.persistent_workers
        self.workers: list[Any] = [None] * (loader.num_workers if is_plain else 0)
        self._workers_at_start = self.workers
        # If a loader has its own __iter__, the RNG states of its workers are not recorded.
        self._hides_workers = not is_plain and getattr(loader, "num_workers", 0) > 0
        # The index of the worker that loads the first batch. With two workers, for example, a run
        # that resumes after three batches starts with worker 1.
        self._first_worker = 0
        # The states recorded before set_epoch(), iter(loader) and the first batch, keyed by
        # "set_epoch", "iter" and "first_batch".
        self._snapshots: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None
        self._resumed_state: dict[str, Any] | None = None
        # The iterator of a resumed epoch, if it was created before on_train_start.
        self._early_iterator: Any = None
        self._reader: Generator[Any] | None = None
        stream = find_stateful_part(loader)
        self._stream = None if stream is None else StreamState(loader, stream)
        # The number of batches to skip in the resumed epoch, or None in other epochs.
        self._resumed_at: int | None = None
        # The number of batches in the resumed epoch, and the number read after resuming.
        self._resumed: tuple[int, int] | None = None
        # Whether load_state_dict() makes the loader skip batches even after the resumed epoch.
        self.is_sticky = False
        found = parts_of_loader(loader) if is_saved else {}
        self._plain_states = {name: PlainState(parts) for name, parts in found.items()}
        self._start_values = {
            n: part.encode_small_attributes() for n, part in self._plain_states.items()
        }
        # Whether the first epoch is over.
        self._has_continued = False

    def __iter__(self) -> Iterator[Any]:
        early = self._early_iterator
        self.end_pass()
        self.close()
        if self._stream is not None:
            self._stream.end_pass()
        state, self._restored = self._restored, None
        if state is None:
            return self._start_pass()
        self.passes = max(self.passes, state["passes"])
        if state["passes"] > 1:
            # Return an empty iterator, so that CombinedLoader treats the loader as exhausted, as in
            # the saved run.
            self._restored = {**state, "passes": 0}
            return iter(())
        if state["is_finished"]:
            self._restore_between_passes(state)
            return iter(())
        model = None if self._find_model_state is None else self._find_model_state()
        current = None if model is None else model.state_dict(is_small=True)
        with unchanged_rng_state():
            self._reader = self._resume_pass(state, early)
        self._restore(state)
        self._resumed_state = self._plain()
        if model is not None and current is not None:
            # Reading the finished batches again requires the model's old attributes, which are now
            # set. Restore the current values.
            model.load_state_dict(current)
        if state["passes"] > 0:
            return self._reader
        # If the resumed loader has no batches left, start it again, because CombinedLoader would
        # end the epoch if the loader yielded no batch.
        batch = next(self._reader, END)
        return self._start_pass() if batch is END else chain([batch], self._reader)

    def restore_again(self) -> None:
        """Restore the samplers and the dataset again, after the model may have changed them."""
        if self._resumed_state is not None:
            self._restore(self._resumed_state)

    @property
    def is_used(self) -> bool:
        """Return whether a batch has been requested from the current iterator."""
        return self.batches > 0 or self.is_finished

    def read_to_end(self) -> None:
        """After the last batch, request one more item, so that the loader's remaining code runs."""
        reader, number = self._reader, self.batches
        if reader is None or self.is_finished or number != self.length:
            return
        if next(reader, END) is not END:
            raise ConfigurationError(
                f"loader: got more than {number} batches, but len(loader) was {number} at the"
                " start. Return the right length, or pass an iterable without __len__."
            )

    def end_pass(self) -> None:
        """Read all prefetched batches to get the latest RNG states of persistent workers."""
        if self._is_persistent and self._reader is not None and not self.is_finished:
            # Use an empty sampler iterator, so that the workers prefetch no more batches.
            self.loader._iterator._sampler_iter = iter(())
            with suppress(Exception):
                for _ in self._reader:
                    pass

    def close(self) -> None:
        """Close the iterator, which shuts down all workers that are not persistent."""
        self._early_iterator = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def prepare_set_epoch(self) -> None:
        """Record the state before set_epoch(), or restore it if the run resumes in this epoch."""
        if self._restored is None:
            self._snapshots["set_epoch"] = self._capture()
        elif "set_epoch" in self._snapshots:
            self._restore(self._snapshots["set_epoch"])

    def create_iterator_early(self) -> None:
        """If possible, create a resumed epoch's iterator before on_train_start, as in a new run."""
        state = self._restored
        if state is None or state["passes"] != 1 or state["is_finished"] or "stream" in state:
            return
        self._early_iterator = self._create_resumed_iterator(state["batches"])

    def mark_changes(self) -> None:
        """Always save the loader attributes that on_train_start has changed."""
        for part in self._plain_states.values():
            part.mark_changes()

    def _start_pass(self) -> Generator[Any]:
        self.passes += 1
        self._record_restart_problem()
        self._has_continued = self._has_continued or self.is_used
        self.batches, self.is_finished = 0, False
        if not self._is_persistent:
            self.workers = [None] * len(self.workers)
        elif any(self.workers) and (self._first_worker or self.loader._iterator is None):
            self._start_persistent_workers(0)
        self._workers_at_start = list(self.workers)
        self._iterators = find_iterators(self.loader)
        self._snapshots["iter"] = self._capture()
        self._snapshots.pop("first_batch", None)
        self._reader = self._read(self._iterate(0))
        return self._reader

    def _create_resumed_iterator(self, done: int) -> Any:
        # If only some workers have a saved RNG state, read the epoch's finished batches again. All
        # workers then repeat their random draws and reach the missing states.
        is_partial = any(self.workers) and not all(self.workers)
        if is_partial or not self._is_indexed:
            self.batches, self.workers = 0, list(self._workers_at_start)
        if self._is_persistent and any(self._workers_at_start):
            self._start_persistent_workers(self.batches)
        self._iterators = find_iterators(self.loader)
        self._restore(self._snapshots["iter"])
        iterator = self._iterate(self.batches)
        if done and not self.workers and "first_batch" not in self._snapshots:
            # The saved run had workers, which start reading as soon as the iterator is created. The
            # state before the first batch is therefore the current state.
            self._snapshots["first_batch"] = self._capture()
        return iterator

    def _resume_pass(self, state: dict[str, Any], early: Any) -> Generator[Any]:
        done = state["batches"]
        if "stream" in state and self._stream is not None:
            with self._stream.loaded(state["stream"]):
                iterator = iter(self.loader)
            self._warn_of_workers(is_in_pass=True)
            self._resumed_at = done
            return self._read(iterator)
        iterator = self._create_resumed_iterator(done) if early is None else early
        if not self.workers and "first_batch" in self._snapshots:
            self._restore(self._snapshots["first_batch"])
            if self._is_indexed:
                skip_indices(iterator, done, self.loader)
        if done and not (self._is_indexed or isinstance(self.loader, Sequence | TensorLoader)):
            warnings.warn(
                f"resume: {done} batches of {type(self.loader).__name__} are read again and"
                " dropped. To avoid this, use a loader with state_dict() and load_state_dict(),"
                " such as torchdata's StatefulDataLoader. The loader's samplers must also define"
                " both methods.",
                stacklevel=2,
            )
        reader = self._read(iterator)
        if done > self.batches:
            name = type(getattr(self.loader, "dataset", self.loader)).__name__
            skip_items(reader, done - self.batches, name, _DRAWING_STREAM)
        return reader

    def _read(self, iterator: Any) -> Generator[Any]:
        if "first_batch" not in self._snapshots and not self.workers:
            # Without workers, some loaders do not shuffle until the first batch is requested.
            self._snapshots["first_batch"] = self._capture()
        if self._stream is not None:
            self._stream.start_reading()
        try:
            # A for loop would call iter() again, which restarts some iterators.
            while (batch := next(iterator, END)) is not END:
                if self.workers:
                    batch, worker, rng_state = batch
                    if rng_state is not None:
                        self.workers[worker] = rng_state
                if batch is DroppedBatch:
                    continue
                self.batches += 1
                yield batch
        except Exception:
            # Shut down the workers explicitly. Otherwise, they would stay alive, because the
            # exception's traceback refers to their iterator.
            if self.workers and not self._is_persistent:
                iterator._shutdown_workers()
            raise
        self.is_finished = True
        if self._stream is not None:
            self._check_length()

    def _check_length(self) -> None:
        """Warn if the loader still skips batches in the epoch that follows the resumed epoch."""
        if self._resumed_at is not None:
            self._resumed = (self.batches, self.batches - self._resumed_at)
            self._resumed_at = None
            return
        resumed, self._resumed = self._resumed, None
        self.is_sticky = resumed is not None and self.batches == resumed[1] < resumed[0]
        if resumed is not None and self.is_sticky and self.batches > 0:
            warnings.warn(
                f"resume: {type(self.loader).__name__} has {resumed[0]} batches in the resumed"
                f" epoch, but only {self.batches} in the next epoch. {STICKY_POSITION}",
                stacklevel=2,
            )

    def _iterate(self, first: int, sampler: Iterable[Any] | None = None) -> Any:
        """Create the loader's iterator. Its workers, if any, start with batch number ``first``."""
        if not self.workers:
            return iter(self.loader)
        self._first_worker = first % len(self.workers)
        recorder = WorkerRecorder(self.loader, self.workers, self._first_worker)
        sampler = self.loader._index_sampler if sampler is None else sampler
        clone, indices = copy(self.loader), SkippingSampler(sampler, first, self.loader)
        # Set the samplers through vars(), because DataLoader.__setattr__ forbids new samplers.
        vars(clone)["sampler" if clone.batch_sampler is None else "batch_sampler"] = indices
        vars(clone).update(collate_fn=recorder.collate, worker_init_fn=recorder.start_worker)
        if self._is_persistent and not self._is_indexed:
            # A worker sends its RNG state in collate_fn. With drop_last=True, the worker would not
            # call collate_fn for an incomplete last batch, so set drop_last=False.
            vars(clone)["drop_last"] = False
        if clone._iterator is not None:
            # With persistent_workers=True, DataLoader reuses its iterator, so also replace the
            # iterator's sampler.
            clone._iterator._index_sampler = indices
        iterator = iter(clone)
        self.loader._iterator, clone._iterator = clone._iterator, None
        return iterator

    def _start_persistent_workers(self, first: int) -> None:
        """Start the workers with their saved RNG states."""
        generator = self.loader.generator
        state = None if generator is None else generator.get_state()
        self.loader._iterator = None
        with unchanged_rng_state():
            self._iterate(first, ())
        if generator is not None:
            generator.set_state(state)

    # Saving and restoring

    def state_dict(self, is_in_pass: bool, is_per_batch: bool = False) -> dict[str, Any]:
        """Return the position in the loader, with the RNG states that a resumed run needs.

        Args:
            is_in_pass: Whether a resumed run continues with the epoch's remaining batches.
            is_per_batch: Whether the loop calls this method for every batch. If so, attributes are
                omitted if possible, to save time.
        """
        if self._restored is not None:
            return self._restored
        self._record_restart_problem()
        is_over = self.is_finished or (self.is_used and not is_in_pass)
        # With a map-style dataset and no workers, a resumed run skips samples without calling
        # __getitem__. Therefore, save the attributes that __getitem__ may have changed.
        is_skipped_by_index = self._is_indexed and not self.workers
        plain = self._plain(has_attributes=is_skipped_by_index or not is_per_batch)
        state = {
            "is_in_pass": (is_in_pass or not self.is_used) and "iter" in self._snapshots,
            "passes": self.passes,
            "batches": self.batches,
            "is_finished": self.is_finished,
            "snapshots": {
                name: self._with_start_values(snapshot, plain)
                for name, snapshot in self._snapshots.items()
            },
            "workers": list(self.workers),
            "workers_at_start": self._workers_at_start,
            "is_indexed": self._is_indexed,
            **plain,
            "restart_problem": self.restart_problem if self._has_continued or is_over else "",
        }
        if self._stream is not None:
            state["stream"] = {"state": self._stream.state(), "attributes": {}}
        return state if is_per_batch else self.with_attributes(state)

    def with_attributes(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a saved position, extended by the loader attributes that the run has changed."""
        if self._stream is None or "stream" not in state:
            return state
        return {
            **state,
            "stream": {**state["stream"], "attributes": self._stream.changed_attributes()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position at which the next iterator starts."""
        if self._early_iterator is not None:
            return
        if state["restart_problem"]:
            raise make_restart_error(state["restart_problem"])
        self.passes, self.batches = state["passes"], state["batches"]
        self.is_finished = state["is_finished"]
        self._snapshots = dict(state["snapshots"])
        if len(state["workers"]) == len(self.workers):
            self.workers, self._workers_at_start = list(state["workers"]), state["workers_at_start"]
        if state["is_in_pass"]:
            self._restored = state
        else:
            self._restore_between_passes(state)

    def _restore_between_passes(self, state: dict[str, Any]) -> None:
        if "stream" in state and self._stream is not None:
            with unchanged_rng_state(), self._stream.loaded(state["stream"]):
                # The resumed epoch has no batches left. Create an iterator for this epoch, and
                # discard it, so that the next iterator starts a new epoch.
                iter(self.loader)
                # torchdata's samplers move to their restored position only when an index is
                # requested.
                for sampler in samplers_of(self.loader):
                    next(iter(sampler), None)
            self._stream.end_pass()
            self._warn_of_workers(is_in_pass=False)
            self._resumed = (state["batches"], 0) if state["is_finished"] else None
        self._restore(state)

    def _warn_of_workers(self, is_in_pass: bool) -> None:
        is_persistent = getattr(self.loader, "persistent_workers", False)
        if self._hides_workers and (is_in_pass or is_persistent):
            warnings.warn(
                f"resume: {type(self.loader).__name__} does not save the RNG states of its workers."
                " If the dataset draws random numbers in a worker, use num_workers=0 to resume"
                " exactly.",
                stacklevel=2,
            )

    def _plain(self, has_attributes: bool = True) -> dict[str, Any]:
        return {name: part.state_dict(has_attributes) for name, part in self._plain_states.items()}

    def _record_restart_problem(self) -> None:
        """Record iterators that iter(loader) does not replace. Their positions are not saved."""
        if self._stream is not None or not self.is_used:
            return
        kind, iterators = type(self.loader).__name__, find_iterators(self.loader)
        names = [name for name in iterators if self._iterators.get(name) is iterators[name]]
        if self._is_indexed and not self.workers:
            # A resumed run skips the finished samples by their index, without calling __getitem__.
            # An iterator that __getitem__ creates would therefore start from the beginning.
            created = [name for name in iterators if name.startswith("dataset.")]
            self._has_continued = self._has_continued or bool(created)
            names = list(dict.fromkeys(names + created))
        if self._hides_workers and getattr(self.loader, "persistent_workers", False):
            self.restart_problem = (
                f"{kind} has persistent workers, whose RNG states are not saved. Write"
                " persistent_workers=False"
            )
        elif names:
            self.restart_problem = describe_iterators(self.loader, names)

    def _capture(self) -> dict[str, Any]:
        captured = {"rng": capture_rng_state(), **self._plain()}
        if self._find_model_state is not None:
            captured["model"] = self._find_model_state().state_dict(is_small=True)
        return captured

    def _with_start_values(
        self, snapshot: dict[str, Any], current: dict[str, Any]
    ) -> dict[str, Any]:
        """Add the old values of the attributes that have changed since the snapshot was recorded.

        A resumed run may get the same loader again, whose attributes have already changed.
        """
        result = snapshot
        for name, start in self._start_values.items():
            saved = snapshot[name]["attributes"]
            places = [p for p in current[name]["attributes"] if p in start and p not in saved]
            if places:
                attributes = {**saved, **{place: start[place] for place in places}}
                result = {**result, name: {**snapshot[name], "attributes": attributes}}
        return result

    def _restore(self, captured: dict[str, Any]) -> None:
        if "rng" in captured:
            restore_rng_state(captured["rng"])
        for name, part in self._plain_states.items():
            if name in captured:
                part.load_state_dict(captured[name])
        if "model" in captured and self._find_model_state is not None:
            self._find_model_state().load_state_dict(captured["model"])


def describe_iterators(loader: Any, names: Iterable[str]) -> str:
    return (
        f"{type(loader).__name__} contains an iterator that continues across epochs"
        f" ({', '.join(names)}), and its position is not saved. Create the iterator in __iter__ (in"
        " a map-style dataset, in a local variable of __getitem__), or define state_dict() and"
        " load_state_dict() in the loader or its dataset"
    )


def make_restart_error(problem: str) -> CheckpointError:
    return CheckpointError(f"resume: {problem}, or use load= to start a new run from the weights.")


def skip_indices(iterator: Any, done: int, loader: Any) -> None:
    """Skip the first ``done`` batches. Draw their indices, but do not read their samples."""
    indices = iterator._sampler_iter
    if done:
        skip_items(indices, done, describe_sampler(loader), _DRAWING_SAMPLER)
        return
    # Samplers such as RandomSampler shuffle when the first index is requested, so request this
    # index now, while the saved RNG state is set.
    iterator._sampler_iter = chain(list(islice(indices, 1)), indices)


def describe_sampler(loader: Any) -> str:
    """Return the class name of the user's own sampler or batch sampler for a warning."""
    own = loader.batch_sampler
    if own is None or is_of_library(own):
        own = getattr(loader.sampler, "given_sampler", loader.sampler)
    return f"the sampler {type(own).__name__}"


def skip_items(items: Iterator[Any], number: int, what: str, advice: str) -> None:
    """Skip the next items and warn if random numbers are drawn after the first item."""
    next(items, None)
    before = capture_rng_state()
    deque(islice(items, number - 1), maxlen=0)
    current = capture_rng_state()
    if any(current[name] != before[name] for name in ("torch", "python", "numpy")):
        warnings.warn(
            f"resume: {what} draws random numbers during the epoch, so the rest of this epoch may"
            f" contain different samples. {advice}",
            stacklevel=2,
        )


class SkippingSampler:
    """Iterates over a sampler but skips its first items."""

    def __init__(self, sampler: Iterable[Any], first: int, loader: Any) -> None:
        self._sampler, self._first, self._loader = sampler, first, loader

    def __iter__(self) -> Iterator[Any]:
        # Like torch, call iter(sampler) before the first batch is requested, because some samplers
        # shuffle in iter().
        return self._skip(iter(self._sampler))

    def _skip(self, indices: Iterator[Any]) -> Iterator[Any]:
        if self._first:
            skip_items(indices, self._first, describe_sampler(self._loader), _DRAWING_SAMPLER)
        yield from indices


class DroppedBatch:
    """A marker that workers send in place of an incomplete last batch if ``drop_last`` is True."""


class WorkerRecorder:
    """Replaces collate_fn and worker_init_fn to send a worker's RNG state with each batch.

    The main process needs the RNG state after each batch, because workers prefetch batches that a
    resumed run must load again.

    Args:
        states: The RNG state with which each worker starts, or None to keep the worker's seed.
        first: The index of the worker that loads the first batch.
    """

    def __init__(self, loader: DataLoader, states: list[Any], first: int) -> None:
        self._collate_fn, self._worker_init_fn = loader.collate_fn, loader.worker_init_fn
        self._states, self._first = states, first
        self._smallest_batch = (loader.batch_size or 0) if loader.drop_last else 0
        self._worker = 0
        self._rng_state: dict[str, Any] = {}
        self._plain_state = PlainState({})

    def start_worker(self, worker: int) -> None:
        # Ctrl-C and the timeout command send a signal to the whole process group. Leave the group,
        # because the main process can save a checkpoint only if the workers keep running.
        with suppress(AttributeError, OSError):
            os.setpgid(0, 0)
        self._worker = (worker + self._first) % len(self._states)
        info: Any = get_worker_info()
        # In a resumed run, this worker may load the batches of a different worker of the saved run.
        # Use that worker's id and seed. Assign them through object.__setattr__, because WorkerInfo
        # forbids assignments.
        object.__setattr__(info, "seed", info.seed + self._worker - worker)
        object.__setattr__(info, "id", self._worker)
        if self._worker_init_fn is not None:
            self._worker_init_fn(self._worker)
        dataset: Any = info.dataset
        # Also save the random generators of the dataset, of the collate_fn, and of the objects
        # that these contain.
        parts = {
            name: Part(part.instance, has_attributes=False)
            for name, part in parts_of_samples(dataset, self._collate_fn).items()
            if "." not in name or find_generators(part.namespace())
        }
        self._plain_state = PlainState(parts)
        state = self._states[self._worker]
        if state is not None:
            restore_rng_state(state)
            self._plain_state.load_generator_states(state["own"])

    def collate(self, samples: Any) -> tuple[Any, int, dict[str, Any] | None]:
        """Return the batch, the worker's index, and the worker's RNG state if it has changed."""
        is_short = self._smallest_batch > 0 and len(samples) < self._smallest_batch
        batch = DroppedBatch if is_short else self._collate_fn(samples)
        # Recording the RNG state costs 80 microseconds per batch.
        own = self._plain_state.generator_states()
        previous, self._rng_state = self._rng_state, {**capture_rng_state(), "own": own}
        # Send the RNG state (10 kB) to the main process only if it has changed. If the state
        # contains CUDA tensors, which != cannot compare, always send it.
        has_changed = "cuda" in self._rng_state or self._rng_state != previous
        return batch, self._worker, self._rng_state if has_changed else None
