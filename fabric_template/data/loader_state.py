"""Save and restore the position in a loader, so that a resumed run continues with the next batch.

How a loader is restored depends on its type:

- A loader with ``state_dict`` and ``load_state_dict``, as in torchdata, restores its own position.
- A DataLoader with a map-style dataset skips the batches that were already used.
- Any other loader reads and drops the batches that were already used.

If all epochs of a loader read from one Python generator, a run cannot resume after the first epoch.
If a sampler draws random numbers between batches, a resumed run may read different samples.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from itertools import chain, islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..errors import CheckpointError
from ..plain_state import Part, PlainState
from ..rng_state import capture_rng_state, find_generators, restore_rng_state, unchanged_rng_state
from .loader_parts import (
    StreamState,
    find_restart_problem,
    find_stateful_part,
    is_of_library,
    objects_of_samples,
    parts_of_order,
    parts_of_samples,
    refers_to_model,
    samplers_of,
    warn_of_weights,
)
from .tensor_loader import TensorLoader

END: Any = object()
STICKY_POSITION = (
    "The loader's load_state_dict() seems to change the start of every later epoch, too. Reset the"
    " restored position at the end of __iter__."
)


class ResumableLoader:
    """Iterates over a loader, and continues after the last finished batch when a run resumes.

    To repeat a shuffled order, a resumed run restores the RNG states from the start of the epoch.

    Args:
        find_model_state: Returns the attributes of the model. If the loader refers to the model,
            the model may choose the order. The model's attributes are then saved and restored like
            the loader's attributes.
        is_saved: Whether checkpoints contain the position. If False, do not record the loader's
            attributes, which may take seconds for a large dataset.

    Attributes:
        passes: Number of times the loader was started in this epoch. CombinedLoader may start a
            short loader several times.
        batches: Number of batches read since the loader was last started.
        is_finished: Whether the loader has no batches left.
        restart_problem: The reason why checkpoints that are saved after the first epoch cannot be
            resumed, or "" if they can.
        workers: The RNG state of each worker after its last batch, or None before its first batch.
            Persistent workers keep their RNG states between epochs.
    """

    def __init__(
        self,
        loader: Any,
        find_model_state: Callable[[], PlainState] | None = None,
        is_saved: bool = True,
    ) -> None:
        self.loader = loader
        self._find_model_state = find_model_state if refers_to_model(loader) else None
        self.passes = self.batches = 0
        self.is_finished = False
        # A subclass of DataLoader with its own __iter__ may ignore a new sampler or collate_fn.
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        self._is_indexed = is_plain and not isinstance(loader.dataset, IterableDataset)
        self._is_persistent = is_plain and loader.persistent_workers
        self.workers: list[Any] = [None] * (loader.num_workers if is_plain else 0)
        self._workers_at_start = self.workers
        # The index of the worker that loads the first batch. With two workers, for example, a run
        # that resumes after three batches starts with worker 1.
        self._first_worker = 0
        # The RNG states and the loader's attributes just before the iterator was created.
        self._at_start: dict[str, Any] | None = None
        # The RNG states and the loader's attributes just before the first batch was requested.
        self._at_first_batch: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None
        self._reader: Generator[Any] | None = None
        stream = find_stateful_part(loader)
        self._stream = None if stream is None else StreamState(stream)
        # The number of batches to skip in the resumed epoch, and None in other epochs.
        self._resumed_at: int | None = None
        # The number of batches in the resumed epoch, and how many of them were read after resuming.
        self._resumed: tuple[int, int] | None = None
        # Whether load_state_dict() makes the loader skip batches even after the resumed epoch.
        self.is_sticky = False
        self._plain_states = {
            "order": PlainState(parts_of_order(loader) if is_saved else {}),
            "samples": PlainState(parts_of_samples(loader) if is_saved else {}),
        }
        # If a loader has its own __iter__, the RNG states of its workers are not recorded.
        self._hides_workers = not is_plain and getattr(loader, "num_workers", 0) > 0
        self.restart_problem = ""
        if stream is None:
            self.restart_problem = find_restart_problem(loader, self._hides_workers)
        # Whether the first epoch is over.
        self._has_continued = False

    def __iter__(self) -> Iterator[Any]:
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
        with unchanged_rng_state(), ExitStack() as stack:
            self._reader = self._resume_pass(state, stack)
        if state["batches"] > 0:
            warn_of_weights(self.loader)
        self._restore(state)
        self._drop_start_values()
        if state["passes"] > 0:
            return self._reader
        # If the resumed loader has no batches left, start it again, because CombinedLoader would
        # end the epoch if the loader yielded no batch.
        batch = next(self._reader, END)
        return self._start_pass() if batch is END else chain([batch], self._reader)

    @property
    def _model_state(self) -> PlainState | None:
        # Do not cache the model's PlainState, because the run replaces it before training.
        return None if self._find_model_state is None else self._find_model_state()

    @property
    def is_used(self) -> bool:
        """Return whether a batch has been requested from the current iterator."""
        return self.batches > 0 or self.is_finished

    def read_to_end(self) -> None:
        """Run the loader's code after the last batch, if exactly len(loader) batches were read."""
        reader, number = self._reader, self.batches
        if reader is None or self.is_finished or number != sized_len(self.loader):
            return
        if next(reader, END) is not END:
            warnings.warn(
                f"The loader yielded more than {number} batches, its length. The next batch was"
                " skipped. Return the correct length in __len__.",
                stacklevel=2,
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
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def draws_in_iter(self) -> bool:
        """Return whether iter(loader) draws sample indices before the first call to next()."""
        source = self.loader
        if isinstance(self.loader, DataLoader):
            batch_sampler = self.loader.batch_sampler
            source = self.loader.sampler if batch_sampler is None else batch_sampler
        is_lazy = inspect.isgeneratorfunction(getattr(type(source), "__iter__", None))
        return bool(self.workers) or not is_lazy

    @contextmanager
    def checked_order(self) -> Iterator[None]:
        """Warn if set_epoch() changes the sample order after the workers have started to read."""
        is_drawn = self.workers and self._reader is not None and not self.is_used
        order = self._plain_states["order"]
        before = order.digests() if is_drawn else {}
        yield
        if is_drawn and order.digests() != before:
            warnings.warn(
                "train_dataloaders: set_epoch() changes the sampler after the workers have started"
                " the first epoch, so a run resumed within this epoch may read different samples."
                " Shuffle in __iter__ instead.",
                stacklevel=2,
            )

    def _start_pass(self) -> Generator[Any]:
        self._drop_start_values()
        self.passes += 1
        self._has_continued = self._has_continued or self.is_used
        self.batches, self.is_finished = 0, False
        if not self._is_persistent:
            self.workers = [None] * len(self.workers)
        elif any(self.workers) and (self._first_worker or self.loader._iterator is None):
            self._start_persistent_workers(0)
        self._workers_at_start = list(self.workers)
        self._find_iterators()
        self._at_start, self._at_first_batch = self._capture(), None
        self._reader = self._read(self._iterate(0))
        return self._reader

    def _resume_pass(self, state: dict[str, Any], stack: ExitStack) -> Generator[Any]:
        done = state["batches"]
        self._find_iterators()
        if "stream" in state and self._stream is not None:
            with self._stream.loaded(state["stream"]):
                iterator = iter(self.loader)
            self._warn_of_workers(is_in_pass=True)
            self._resumed_at = done
            return self._read(iterator)
        # If only some workers have a saved RNG state, read the epoch's finished batches again. All
        # workers then repeat their random draws, and reach the missing states.
        is_partial = any(self.workers) and not all(self.workers)
        if is_partial or not self._is_indexed:
            self.batches, self.workers = 0, list(self._workers_at_start)
        if self._is_persistent and any(self._workers_at_start):
            self._start_persistent_workers(self.batches)
        self._restore_in_pass(self._at_start, stack)
        iterator = self._iterate(self.batches)
        if not self.workers and (done or self._at_first_batch):
            self._at_first_batch = self._at_first_batch or self._capture()
            self._restore_in_pass(self._at_first_batch, stack)
            if self._is_indexed:
                skip_indices(iterator, done, self.loader)
        if done and not (self._is_indexed or isinstance(self.loader, Sequence | TensorLoader)):
            warnings.warn(
                f"resume: {done} batches of {type(self.loader).__name__} are read again and"
                " dropped. To avoid this, use a loader with state_dict() and load_state_dict(),"
                " such as torchdata's StatefulDataLoader. The loader's samplers need both methods,"
                " too.",
                stacklevel=2,
            )
        reader = self._read(iterator)
        drop_batches(reader, done - self.batches, self.loader)
        return reader

    def _read(self, iterator: Any) -> Generator[Any]:
        if self._at_first_batch is None and not self.workers:
            # Without workers, some loaders do not shuffle until the first batch is requested.
            self._at_first_batch = self._capture()
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
            # Shut down the workers explicitly, because the exception's traceback refers to their
            # iterator and thereby keeps the workers alive.
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
        """Create the loader's iterator, whose workers start with the batch at index ``first``."""
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
            # sampler of the iterator.
            clone._iterator._index_sampler = indices
        iterator = iter(clone)
        self.loader._iterator, clone._iterator = clone._iterator, None
        return iterator

    def _start_persistent_workers(self, first: int) -> None:
        """Start the workers with their saved RNG states."""
        self.loader._iterator = None
        captured = {"rng": capture_rng_state(), **self._plain(has_attributes=False)}
        self._iterate(first, ())
        self._restore(captured)

    # Saving and restoring

    def state_dict(self, is_in_pass: bool, is_per_batch: bool = False) -> dict[str, Any]:
        """Return the position in the loader, with the RNG states that a resumed run needs.

        Args:
            is_in_pass: Whether a resumed run continues with the epoch's remaining batches.
            is_per_batch: Omit attributes if possible, because the loop calls this for each batch.
        """
        if self._restored is not None:
            return self._restored
        if self.batches > 0 and not is_per_batch:
            for part in self._plain_states.values():
                part.warn_of_iterators()
        is_over = self.is_finished or (self.is_used and not is_in_pass)
        # With a map-style dataset and no workers, a resumed run skips samples without calling
        # __getitem__. Therefore, save the attributes that __getitem__ may have changed.
        is_skipped_by_index = self._is_indexed and not self.workers
        state = {
            "is_in_pass": (is_in_pass or not self.is_used) and self._at_start is not None,
            "passes": self.passes,
            "batches": self.batches,
            "is_finished": self.is_finished,
            "at_start": self._at_start,
            "at_first_batch": self._at_first_batch,
            "workers": list(self.workers),
            "workers_at_start": self._workers_at_start,
            "is_indexed": self._is_indexed,
            **self._plain(has_attributes=is_skipped_by_index or not is_per_batch),
            "has_continued": self._has_continued or is_over,
        }
        if self._stream is not None:
            state["stream"] = {"state": self._stream.state(), "attributes": {}}
        return state if is_per_batch else self.with_attributes(state)

    def with_attributes(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add to a saved position the loader's attributes that have changed during the run."""
        if self._stream is None or "stream" not in state:
            return state
        return {
            **state,
            "stream": {**state["stream"], "attributes": self._stream.changed_attributes()},
        }

    def check_restart(self) -> None:
        """Raise an error if a loader, such as a generator, can resume only in the first epoch."""
        if self.restart_problem:
            text = "or use load= to start a new run from the weights."
            raise CheckpointError(f"resume: {self.restart_problem}, {text}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position at which the next iterator starts."""
        self.passes, self.batches = state["passes"], state["batches"]
        self.is_finished = state["is_finished"]
        self._has_continued = state["has_continued"]
        if self._has_continued:
            self.check_restart()
        self._at_start, self._at_first_batch = state["at_start"], state["at_first_batch"]
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

    def _find_iterators(self) -> None:
        """Find iterators in the loader, to warn later if their positions cannot be saved."""
        if self.restart_problem or self._stream is not None:
            return
        self._plain_states["order"].find_iterators()
        if not self.workers:
            self._plain_states["samples"].find_iterators()

    def _capture(self) -> dict[str, Any]:
        captured = {"rng": capture_rng_state(), **self._plain()}
        if self._model_state is not None:
            captured["model"] = self._model_state.state_dict()
        return captured

    def keep_start_values(self) -> None:
        """Copy the loader's attributes, because a hook such as on_train_start may change them."""
        for part in self._states_with_start_values():
            part.keep_start_values()

    def _drop_start_values(self) -> None:
        for part in self._states_with_start_values():
            part.drop_start_values()

    def _states_with_start_values(self) -> list[PlainState]:
        states = list(self._plain_states.values())
        return states if self._model_state is None else [*states, self._model_state]

    def _restore_in_pass(self, captured: Any, stack: ExitStack) -> None:
        """Restore the RNG states, and the attributes of the loader and the model."""
        if self._model_state is not None and "model" in captured:
            saved = captured["model"]["attributes"]
            attributes = self._model_state.changed_start_values(saved) | saved
            state = {**captured["model"], "attributes": attributes}
            stack.enter_context(self._model_state.replaced(state))
        for name, part in self._plain_states.items():
            if name in captured:
                saved = captured[name]["attributes"]
                part.load_attributes(part.changed_start_values(saved))
        self._restore(captured)

    def _restore(self, captured: Any) -> None:
        if "rng" in captured:
            restore_rng_state(captured["rng"])
        for name, part in self._plain_states.items():
            if name in captured:
                part.load_state_dict(captured[name])


def skip_indices(iterator: Any, done: int, loader: Any) -> None:
    """Skip the first ``done`` batches: draw their indices, but do not read their samples."""
    indices = iterator._sampler_iter
    # Samplers such as RandomSampler shuffle when the first index is requested. Request at least one
    # index now, while the saved RNG state is set.
    drawn = draw_items(indices, max(done, 1), loader)
    iterator._sampler_iter = chain(drawn[done:], indices)


def draw_items(indices: Iterator[Any], number: int, loader: Any) -> list[Any]:
    """Return a sampler's next items, and warn if it draws random numbers after the first item."""
    drawn = list(islice(indices, 1))
    state = capture_rng_state()
    drawn += islice(indices, number - 1)
    if has_drawn_numbers(state):
        own = loader.batch_sampler
        if own is None or is_of_library(own):
            own = getattr(loader.sampler, "given_sampler", loader.sampler)
        warnings.warn(
            f"resume: the sampler {type(own).__name__} draws random numbers during the epoch, so"
            " the rest of this epoch may have different samples. Draw all random numbers in"
            " __iter__ before the first yield.",
            stacklevel=2,
        )
    return drawn


def drop_batches(reader: Iterator[Any], number: int, loader: Any) -> None:
    """Read a loader's next batches again, and warn if it draws random numbers after the first."""
    deque(islice(reader, min(number, 1)), maxlen=0)
    state = capture_rng_state()
    deque(islice(reader, max(number - 1, 0)), maxlen=0)
    if has_drawn_numbers(state):
        warnings.warn(
            f"resume: {type(getattr(loader, 'dataset', loader)).__name__} draws random numbers"
            " during the epoch, so the rest of this epoch may have different samples. If random"
            " numbers choose the samples, use a random generator that is an attribute.",
            stacklevel=2,
        )


def has_drawn_numbers(state: dict[str, Any]) -> bool:
    """Return whether random numbers have been drawn since ``state`` was captured."""
    current = capture_rng_state()
    return any(current[name] != state[name] for name in ("torch", "python", "numpy"))


class SkippingSampler:
    """Iterates over a sampler, but skips its first items."""

    def __init__(self, sampler: Iterable[Any], first: int, loader: Any) -> None:
        self._sampler, self._first, self._loader = sampler, first, loader

    def __iter__(self) -> Iterator[Any]:
        # Like torch, call iter(sampler) before the first batch is requested, because some samplers
        # shuffle in iter().
        return self._skip(iter(self._sampler))

    def _skip(self, indices: Iterator[Any]) -> Iterator[Any]:
        if self._first:
            draw_items(indices, self._first, self._loader)
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
        # In a resumed run, this worker has the id of the worker whose batches it loads. WorkerInfo
        # forbids assignments.
        object.__setattr__(info, "seed", info.seed + self._worker - worker)
        object.__setattr__(info, "id", self._worker)
        if self._worker_init_fn is not None:
            self._worker_init_fn(self._worker)
        dataset: Any = info.dataset
        # Also record random generators in the dataset and the collate_fn.
        objects = objects_of_samples(dataset, self._collate_fn)
        parts = {
            name: Part(part, has_attributes=False)
            for name, part in objects.items()
            if not name.startswith("dataset ") or find_generators(vars(part))
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
