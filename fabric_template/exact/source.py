"""Source: one loader, whose passes begin again in their middle with nothing loaded twice."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .indices import Indices, drop, has_state, load_states, stateful_parts
from .randomness import find_generators, generators_of, rng_state, set_rng_state
from .workers import Recorder

PARTS = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")  # of a DataLoader, that may draw numbers


class Source:
    """One loader, whose passes can begin again in their middle.

    How depends on the loader. One with ``state_dict`` and ``load_state_dict`` does it itself. A map-style DataLoader
    draws the indices of the batches that are done and loads none of them (with batch_size=None and workers, it loads fewer
    items again than it has workers). Any other is asked for its batches again.

    Samplers, batch samplers and datasets with ``state_dict`` and ``load_state_dict`` are put where the pass began, and go on
    from there as its batches are drawn again; a dataset whose items are not loaded again, where it stood.

    Nothing is lost by not loading if an item depends on its index and on random numbers: the libraries' own, or those of
    generators that the dataset or collate_fn holds. Of other traces that loading leaves in a dataset nothing is known.

    Args:
        loader: an iterable of batches.
        records: whether a checkpoint may ask for the position; if not, a pass is ``iter(loader)`` and no more.
        trains: whether a pass may have to begin in its middle; if not, only worker processes that stay are looked after.
        counts: whether several loaders make one pass, so that each counts its own batches.
    """

    def __init__(self, loader: Any, records: bool = False, trains: bool = False, counts: bool = False) -> None:
        self.loader, self.counts = loader, counts
        self.workers = loader.num_workers if isinstance(loader, DataLoader) else 0
        self.is_stateful = trains and has_state(loader)  # then it puts its workers where they were by itself
        self.keeps_workers = self.workers > 0 and loader.persistent_workers and not self.is_stateful
        self.index_parts, self.datasets_with_state = ([], []) if self.is_stateful else stateful_parts(loader)
        self.parts = self.index_parts + self.datasets_with_state
        self.records = records and (trains or self.keeps_workers or bool(self.parts))
        self.is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        takes_turns = not self.workers or getattr(loader, "in_order", True)
        is_plain = not self.is_stateful and getattr(type(loader), "__iter__", None) is DataLoader.__iter__
        self.is_indexed = self.is_map_style and takes_turns and is_plain
        self.datasets = [loader.dataset] if self.is_indexed else []
        self.index_name = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
        self.recorder: Recorder | None = None
        self.drawn_before: list[Any] | None = None  # indices of the batches that were drawn and not yet trained
        self.noted: list[int] = []  # batches that each worker had noted before the pass
        self.unsent = 0  # batches of the pass that no worker was sent
        self.indices: Indices | None = None  # of the pass with workers that is on
        self.parts_began: list[Any] = []  # states of the parts as the pass began
        self.taken: int | None = None  # batches since this one was begun
        self.earlier: list[int] = []  # batches each time before
        self.place: dict[str, Any] | None = None  # where the next pass begins
        self.skipped: deque[int] = deque()  # lengths of the passes before it that are not made again
        self.began: Any = None  # random numbers as the pass began,
        self.first: Any = None  # as its first batch was fetched (by this process),
        self.born: Any = None  # and as the worker processes were made
        self.is_born = False  # whether they were made with this pass

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        if not self.records:
            return begun(self.loader)
        if self.skipped:
            self.earlier.append(self.skipped[0])
            return repeat(None, self.skipped.popleft())
        if self.taken is not None:
            self.earlier.append(self.taken)
        place, self.place, self.taken = self.place, None, 0
        if place is None or "began" not in place:
            iterator = self._begin(place)
        else:
            iterator = self._go_on(place)
            if self.counts:
                iterator = chain(repeat(None, place["taken"]), iterator)
        return self._counted(iterator) if self.counts else iterator

    def begin(self) -> None:
        """A pass of all loaders begins, in which this one may be begun more than once."""
        self.taken, self.earlier = None, []

    def generators(self) -> list[Any]:
        """The random generators of the loader and its parts."""
        loader = self.loader
        parts = [getattr(loader, name, None) for name in PARTS] if isinstance(loader, DataLoader) else [loader]
        return find_generators(*parts)

    def put_back(self, state: dict[str, Any]) -> None:
        """Put random numbers back where they were noted."""
        set_rng_state(state, generators_of(state, self.generators, self.datasets))

    # ---- saved and resumed

    def position(self) -> dict[str, Any]:
        """Where the pass stands now; `state` makes a part of a checkpoint of it.

        What notes its random numbers and indices belongs to it: the batch that is looked at ahead may begin another pass.
        """
        names = ("began", "first", "born", "is_born", "taken", "parts_began", "recorder", "noted", "indices")
        position = {name: getattr(self, name) for name in names}
        position |= {"num_workers": self.workers, "earlier": list(self.earlier)}
        return position | ({"loader": self.loader.state_dict()} if self.is_stateful else {})

    def state(self, position: dict[str, Any] | None) -> dict[str, Any] | None:
        """The part of a checkpoint: for a position in a pass, or (None) for after it."""
        if not self.records or (position is not None and position["taken"] is None):
            return None
        if position is not None:
            position = dict(position)
            taken, (recorder, noted, indices) = position["taken"], map(position.pop, ("recorder", "noted", "indices"))
            workers, ahead = self._states_of_workers(recorder, noted, taken), _drawn_ahead(indices, taken)
            return {**position, "workers": workers, "ahead": ahead, "parts": self._states(self.parts)}
        state = {"loader": self.loader.state_dict()} if self.is_stateful else {}
        if self.parts:
            state["parts"] = self._states(self.parts)
        if self.keeps_workers and self.loader._iterator is not None:
            state |= {"born": self.born, "workers": self._states_of_workers(self.recorder, self.noted, self._sent())}
        return state or None

    def resume(self, state: dict[str, Any] | None) -> None:
        """Let the next pass begin there."""
        if state is None:
            return
        self.skipped = deque(state.get("earlier", ()))
        if "began" not in state:
            load_states(self.parts, state.get("parts"))
        if "began" in state or "born" in state:
            self.place = state
        elif "loader" in state:
            self.loader.load_state_dict(state["loader"])
            iter(self.loader)  # it stands at the end of a pass: the next call begins a new one

    # ---- how a pass begins

    def _begin(self, place: dict[str, Any] | None) -> Iterator:
        """A whole pass; with a place, after the worker processes of another run."""
        loader = self.loader
        if place is not None and len(place["workers"] or ()) not in (0, self.workers):
            self._tell_number(len(place["workers"]))
            place = {**place, "workers": None}
        self.parts_began = self._states(self.parts)
        self.began, self.first = rng_state(self.generators()), None
        self.is_born = not self.keeps_workers or loader._iterator is None
        if not self.workers:
            return chain.from_iterable(self._noting_first(begun(loader)))
        if not self.is_born:
            sent = self._sent()
            self.noted = [noted + self._share(sent, worker) for worker, noted in enumerate(self.noted)]
            self.unsent = 0
            return iter(loader)
        if place is None:
            self.born = self.began
            return self._with_workers()
        self.born, self.is_born = place["born"], False
        self.put_back(self.born)
        iterator = self._with_workers(states=place["workers"], began=self.began)
        if not self.is_indexed:
            self._tell()
            self.put_back(self.began)
        return iterator

    def _go_on(self, place: dict[str, Any]) -> Iterator:
        """The rest of a pass, of which some batches are done; random numbers are put back by the caller."""
        loader, done = self.loader, place["taken"]
        self.began, self.first, self.born = (place[name] for name in ("began", "first", "born"))
        self.is_born = place["is_born"]
        self.parts_began = place.get("parts_began", [])
        load_states(self.parts, self.parts_began)
        self.put_back(self.born or self.began)
        if self.is_stateful:
            loader.load_state_dict(place["loader"])
            return begun(loader)
        if not (has_as_many := place["num_workers"] == self.workers):
            self._tell_number(place["num_workers"])
            if self.keeps_workers:
                self.born = self.born or self.began  # they are made now, with these random numbers
        if self.is_indexed and not self.workers:
            indices = Indices(getattr(loader, self.index_name))
            with replaced(loader, **{self.index_name: indices}):
                iterator = iter(loader)
            if self.first is not None or not self.is_born:
                self.put_back(self.first or self.began)
            elif done:  # workers had drawn them, before they were asked for
                self.first = rng_state(self.generators())
            indices.drop(done)
            load_states(self.datasets_with_state, place.get("parts", [])[len(self.index_parts) :])
            return iterator if self.first is not None else chain.from_iterable(self._noting_first(iterator))
        if self.datasets_with_state and self.workers:
            warnings.warn(
                f"resume: {type(self.datasets_with_state[0]).__name__} has state_dict, but its copies in the worker processes"
                " change by themselves: in the rest of this epoch they go on from what it was as the epoch began; with"
                " num_workers=0, or in a loader with state_dict (StatefulDataLoader), it goes on exactly",
                stacklevel=2,
            )
        began = None if self.is_born else self.began
        if self.is_indexed and not has_as_many:
            return self._with_workers(done, None, self.first or began)
        if self.is_indexed:
            self.drawn_before = place.get("ahead")
            if place["workers"] is not None:
                return self._with_workers(done, place["workers"], began)
        return self._again(done)

    def _again(self, done: int) -> Iterator:
        """The batches that are done, asked for and thrown away."""
        is_cheap = isinstance(self.loader, Sequence) or hasattr(self.loader, "behind")  # not worth a warning
        self._tell(0 if is_cheap else done)
        jumps = _jumps(type(self.loader))
        iterator = self.loader.behind(done) if jumps else self._with_workers()
        if self.workers and not self.is_born and self.is_map_style:  # which draws its indices
            self.put_back(self.began)
            iterator = iter(self.loader)
        if self.first is not None:
            self.put_back(self.first)
        drop(iterator, 0 if jumps else done)
        return iterator

    def _tell_number(self, was: int) -> None:
        warnings.warn(
            f"resume: num_workers={self.workers} was {was} in the run that goes on: the batches are the same, random numbers"
            " drawn in loading them are not; give the same number for the same numbers",
            stacklevel=2,
        )

    def _tell(self, again: int = 0) -> None:
        """Warn of what takes time, so many batches that are asked for again, and of what is not as it was."""
        told = []
        if again:
            told.append(
                f"{type(self.loader).__name__} is asked again for the {again} batches of this epoch that were"
                " trained before, which takes the time of loading them; a loader with state_dict and load_state_dict"
                " (torchdata's StatefulDataLoader) goes on by itself, a map-style dataset need not be loaded again"
            )
        if again and not getattr(self.loader, "in_order", True):
            told.append(
                "which batches these are depends on which worker is faster (in_order=False), so that samples may come twice"
                " or not at all; leave in_order out for an exact resume"
            )
        if self.keeps_workers and not self.is_born:
            told.append(
                "random numbers that its workers draw begin anew (persistent_workers=True); leave persistent_workers out for"
                " the same numbers"
            )
        if told:
            warnings.warn(f"resume: {'. And '.join(told)}", stacklevel=2)

    def _with_workers(self, done: int = 0, states: list | None = None, began: Any = None) -> Iterator:
        """A pass with new worker processes, behind so many batches that are not loaded, and the workers' states after these.

        It begins with the random numbers ``began``, if not with those with which the processes are made.
        """
        loader = self.loader
        if not self.is_indexed:
            return begun(loader)
        # so many workers had one batch more: each is sent an empty one, to keep the turns; or, without batches, its last item
        idle = done % self.workers
        instead: list[Any]
        dropped, instead = (done - idle, []) if loader.batch_sampler is None else (done, [[]] * idle)
        self.recorder = Recorder(loader, states, idle)
        self.noted = [-self._share(done, worker) for worker in range(self.workers)]
        self.unsent = done - idle
        again = (self, dropped, instead, began) if done or began is not None else ()
        indices = Indices(getattr(loader, self.index_name), *again)
        if loader.batch_sampler is not None:
            indices.sent = deque(maxlen=self.workers * loader.prefetch_factor + 2)
            self.indices, indices.ahead, self.drawn_before = indices, self.drawn_before, None
        parts = {"collate_fn": self.recorder, "worker_init_fn": self.recorder.start, self.index_name: indices}
        with replaced(loader, **parts):
            iterator = iter(loader)
        for _ in range(idle):
            with suppress(Exception):  # some datasets cannot load nothing
                next(iterator)
        return iterator

    def _noting_first(self, iterator: Iterator) -> Iterator[Iterator]:
        self.first = rng_state(self.generators())
        yield iterator

    def _counted(self, iterator: Iterator) -> Iterator:
        for batch in iterator:
            self.taken = (self.taken or 0) + 1
            yield batch

    # ---- a DataLoader's insides

    def _sent(self) -> int:
        """Batches of the pass that its workers were sent, those included that nobody asked for.

        PyTorch keeps this number in a private name; tests/exact/test_position.py fails clearly if it goes.
        """
        return self.unsent + self.loader._iterator._send_idx

    def _share(self, batches: int, worker: int) -> int:
        """How many of the pass's first batches are this worker's: they take turns."""
        return (batches - worker + self.workers - 1) // self.workers

    @staticmethod
    def _states(parts: list[Any]) -> list[Any]:
        return [copy.deepcopy(part.state_dict()) for part in parts]

    def _states_of_workers(self, recorder: Recorder | None, noted: list[int], batches: int) -> list[Any] | None:
        if recorder is None:
            return None
        return recorder.read([before + self._share(batches, worker) for worker, before in enumerate(noted)])


def _drawn_ahead(indices: Indices | None, taken: int) -> list[Any] | None:
    """The indices that workers were sent ahead of what is trained; a sampler may have drawn them as they were sent."""
    if indices is None:
        return None
    drawn, ahead = list(indices.sent), indices.number - taken
    is_known = 0 < ahead <= len(drawn) and all(isinstance(i, int) for some in drawn for i in some)
    return drawn[-ahead:] if is_known else None


def begun(loader: Any) -> Iterator:
    """A pass over a loader, of which only `next` is asked from here on: one that is its own iterator would start over."""
    iterator = iter(loader)
    is_dataloaders = isinstance(loader, DataLoader) and iterator is not loader  # whose workers are ended by their name
    return iterator if is_dataloaders or type(iterator).__module__ == "builtins" else map(next, repeat(iterator))


@contextmanager
def replaced(loader: Any, **parts: Any) -> Iterator[None]:
    """Within, a loader has other parts; DataLoader's own way to set them refuses some."""
    own = {name: vars(loader)[name] for name in parts}
    vars(loader).update(parts)
    try:
        yield
    finally:
        vars(loader).update(own)


def _jumps(kind: type) -> bool:
    """Whether a loader's own `behind` begins a pass in its middle: of the class that says what a pass is (TensorLoader)."""
    says = [next((base for base in kind.__mro__ if name in vars(base)), None) for name in ("__iter__", "behind")]
    return says[0] is says[1] is not None
