"""Source: one loader, and where the pass over it stands, noted so that it can be taken up again in its middle."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .randomness import find_generators, generators_of, rng_state, set_rng_state

PARTS = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")  # of a DataLoader, that may draw numbers


class Source:
    """One loader, whose passes can begin again in their middle (middle.py); with worker processes see multiprocess.py.

    Samplers, batch samplers and datasets with ``state_dict`` and ``load_state_dict`` are put where the pass began, and go on
    from there as its batches are drawn again; a dataset whose items are not loaded again, where it stood.

    Args:
        loader: an iterable of batches.
        records: whether a checkpoint may ask for the position; if not, a pass is ``iter(loader)`` and no more.
        trains: whether a pass may have to begin in its middle; if not, only worker processes that stay are looked after.
        counts: whether several loaders make one pass, so that each counts its own batches.
    """

    workers = 0
    keeps_workers = False  # between passes (persistent_workers)

    def __init__(self, loader: Any, records: bool = False, trains: bool = False, counts: bool = False) -> None:
        self.loader, self.counts = loader, counts
        self.is_stateful = trains and has_state(loader)  # then it puts its workers where they were by itself
        self.index_parts, self.datasets_with_state = ([], []) if self.is_stateful else stateful_parts(loader)
        self.parts = self.index_parts + self.datasets_with_state
        self.records = records and (trains or bool(self.parts))
        self.is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        is_plain = not self.is_stateful and getattr(type(loader), "__iter__", None) is DataLoader.__iter__
        self.is_indexed = self.is_map_style and is_plain
        self.datasets = [loader.dataset] if self.is_indexed else []
        self.index_name = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
        self.parts_began: list[Any] = []  # states of the parts as the pass began
        self.taken: int | None = None  # batches since this one was begun
        self.earlier: list[int] = []  # batches each time before
        self.rest: Callable[[], Iterator] | None = None  # begins the next pass, where it is the rest of one
        self.skipped: deque[int] = deque()  # lengths of the passes before it that are not made again
        self.began: Any = None  # random numbers as the pass began,
        self.first: Any = None  # as its first batch was fetched (by this process),
        self.born: Any = None  # and as the worker processes were made
        self.is_born = True  # whether they were made with this pass

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
        rest, self.rest, self.taken = self.rest, None, 0
        if rest is None:
            self.note_beginning()
        iterator = self.whole() if rest is None else rest()
        return self._counted(iterator) if self.counts else iterator

    def begin(self) -> None:
        """A pass of all loaders begins, in which this one may be begun more than once."""
        self.taken, self.earlier = None, []

    def note_beginning(self) -> None:
        """Note how things stand as a whole pass begins."""
        self.parts_began = self._states(self.parts)
        self.began, self.first, self.is_born = rng_state(self.generators()), None, True

    def whole(self) -> Iterator:
        """A whole pass."""
        return self.noting_first(begun(self.loader))

    def with_workers(
        self, done: int = 0, states: list | None = None, began: Any = None, ahead: list | None = None
    ) -> Iterator:
        """A pass with new worker processes; here there are none."""
        return begun(self.loader)

    def noting_first(self, iterator: Iterator) -> Iterator:
        """The same, and the random numbers are noted as its first batch is asked for."""

        def noting() -> Iterator[Iterator]:
            self.first = rng_state(self.generators())
            yield iterator

        return chain.from_iterable(noting())

    def generators(self) -> list[Any]:
        """The random generators of the loader and its parts."""
        loader = self.loader
        parts = [getattr(loader, name, None) for name in PARTS] if isinstance(loader, DataLoader) else [loader]
        return find_generators(*parts)

    def put_back(self, state: dict[str, Any]) -> None:
        """Put random numbers back where they were noted."""
        set_rng_state(state, generators_of(state, self.generators, self.datasets))

    # ---- for a checkpoint

    def position(self) -> dict[str, Any]:
        """Where the pass stands now; `state` makes a part of a checkpoint of it.

        What notes its random numbers and indices belongs to it: the batch that is looked at ahead may begin another pass.
        """
        names = ("began", "first", "born", "is_born", "taken", "parts_began")
        position = {name: getattr(self, name) for name in names}
        position |= {"num_workers": self.workers, "earlier": list(self.earlier)}
        return position | ({"loader": self.loader.state_dict()} if self.is_stateful else {})

    def state(self, position: dict[str, Any] | None) -> dict[str, Any] | None:
        """The part of a checkpoint: for a position in a pass, or (None) for after it."""
        if not self.records or (position is not None and position["taken"] is None):
            return None
        if position is not None:
            return {**position, "workers": None, "ahead": None, "parts": self._states(self.parts)}
        state = {"loader": self.loader.state_dict()} if self.is_stateful else {}
        if self.parts:
            state["parts"] = self._states(self.parts)
        return state or None

    def _counted(self, iterator: Iterator) -> Iterator:
        for batch in iterator:
            self.taken = (self.taken or 0) + 1
            yield batch

    @staticmethod
    def _states(parts: list[Any]) -> list[Any]:
        return [copy.deepcopy(part.state_dict()) for part in parts]


def begun(loader: Any) -> Iterator:
    """A pass over a loader, of which only `next` is asked from here on: one that is its own iterator would start over."""
    iterator = iter(loader)
    is_dataloaders = isinstance(loader, DataLoader) and iterator is not loader  # whose workers are ended by their name
    return iterator if is_dataloaders or type(iterator).__module__ == "builtins" else map(next, repeat(iterator))


def stateful_parts(loader: Any) -> tuple[list[Any], list[Any]]:
    """The samplers, and the datasets, with state_dict and load_state_dict in a DataLoader."""
    if not isinstance(loader, DataLoader):
        return [], []
    samplers = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    datasets = [loader.dataset, getattr(loader.dataset, "dataset", None)]
    return _with_state(samplers), _with_state(datasets)


def _with_state(parts: list[Any]) -> list[Any]:
    return list({id(part): part for part in parts if has_state(part)}.values())


def has_state(part: Any) -> bool:
    """Whether this can be put where it was, by state_dict and load_state_dict."""
    return all(callable(getattr(part, f"{verb}state_dict", None)) for verb in ("", "load_"))
