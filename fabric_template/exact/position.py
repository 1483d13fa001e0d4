"""Position: where the passes over a stage's loaders stand together, and what a checkpoint holds of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..core.errors import Misuse
from .randomness import (
    generator_state,
    generators_of,
    pack_rng_state,
    set_generator_state,
    set_rng_state,
    unpack_rng_state,
)
from .source import Source


class Sources:
    """The loaders of one stage, and where the pass over all of them stands.

    Args:
        loaders: iterables of batches.
        combined: whether one batch is made of all of them.
        trains: whether a pass may have to begin in its middle.
        records: whether checkpoints hold where a pass stands.
    """

    def __init__(self, loaders: list[Any], combined: bool, trains: bool, records: bool) -> None:
        self.combined, self.trains, self.records = combined, trains, records
        self.each = [source_of(loader, records, trains, combined) for loader in loaders]
        self._resumed: dict[str, Any] | None = None
        self._ahead: Any = None  # positions and random numbers as the batch was fetched that was looked at ahead
        self._before_ahead: dict[str, Any] | None = None  # of a pass that goes on: the latter, from the checkpoint
        self._drawing: list[Any] | None = None  # the generators from which it may draw, once that is asked
        self.note = self._note if records and trains else None
        # to fetch a batch draws random numbers here, if only as another pass over one of several loaders begins with it
        self._draws_here = combined or not any(source.workers for source in self.each)

    def begin(self) -> dict[str, Any] | None:
        """A pass begins; returns what `resume` got, if it is the first one after that."""
        for source in self.each:
            source.begin()
        resumed, self._resumed = self._resumed, None
        self._before_ahead = resumed["ahead"] if resumed else None
        self._ahead = self._drawing = None
        return resumed

    def generators(self) -> list[Any]:
        """The random generators of all loaders."""
        return [generator for source in self.each for generator in source.generators()]

    def state(self, taken: int | None) -> dict[str, Any] | None:
        """Where the pass stands after so many batches (None: between two passes), for `resume`; None: nothing to tell."""
        if not self.records:
            return None
        positions: list[Any] = [None] * len(self.each)
        packed = None
        if taken is not None:
            positions, packed = self._ahead or ([source.position() for source in self.each], None)
            if not self.combined:
                positions = [{**positions[0], "taken": taken}]
        sources = [source.state(position) for source, position in zip(self.each, positions, strict=True)]
        generators, seeds = [generator_state(generator) for generator in self.generators()], self.seeds()
        if not (self.trains or generators or seeds or any(sources)):  # as if its loaders had not been made yet
            return None
        ahead = unpack_rng_state(packed) if packed else None
        return {"sources": sources, "ahead": ahead, "generators": generators, "seeds": seeds}

    def resume(self, state: dict[str, Any]) -> None:
        """Let the next pass begin there."""
        from .middle import resume

        if len(state["sources"]) != len(self.each):
            raise Misuse(
                f"resume: the checkpoint is of a run with {len(state['sources'])} loaders, this one has {len(self.each)}:"
                " give the same loaders, or use load= to start a new run from the weights"
            )
        self._resumed = state
        self.put_back_seeds(state.get("seeds", ()))
        for source, part in zip(self.each, state["sources"], strict=True):
            resume(source, part)

    def put_back_generators(self, state: dict[str, Any]) -> None:
        """Put the loaders' random generators where they were, if they are the same; this may draw random numbers."""
        for generator, part in zip(self._generators_of(state), state["generators"], strict=False):
            set_generator_state(generator, part)

    def _generators_of(self, state: dict[str, Any]) -> list[Any]:
        return generators_of(state, self.generators, [dataset for source in self.each for dataset in source.datasets])

    def loader_states(self) -> list[Any]:
        """What the loaders say of themselves that have a state, as the batch was fetched that is to be trained next."""
        positions = self._ahead[0] if self._ahead is not None else [source.position() for source in self.each]
        return [position["loader"] for position in positions if "loader" in position]

    def seeds(self) -> list[int]:
        """The seeds of samplers that shuffle by the epoch."""
        return [sampler.seed for sampler in self._seeded()]

    def put_back_seeds(self, seeds: Sequence[int]) -> None:
        """Put them back, as many as there are."""
        for sampler, seed in zip(self._seeded(), seeds, strict=False):
            sampler.seed = seed

    def _seeded(self) -> list[Any]:
        """The samplers whose order comes of a seed and the epoch, as those that share the samples among ranks."""
        told = [part for source in self.each for part in told_the_epoch(source.loader)]
        return [sampler for sampler in told if isinstance(getattr(sampler, "__dict__", {}).get("seed"), int)]

    def _note(self) -> None:
        """Called before a batch is fetched that is not to be trained yet: a checkpoint before that fetches it again."""
        if self._before_ahead is not None:
            set_rng_state(self._before_ahead, self._generators_of(self._before_ahead))
            self._before_ahead = None
        packed = None
        if self._draws_here:
            self._drawing = self.generators() if self._drawing is None else self._drawing
            packed = pack_rng_state(self._drawing)
        self._ahead = [source.position() for source in self.each], packed


def source_of(loader: Any, records: bool = False, trains: bool = False, counts: bool = False) -> Source:
    """A loader as a source, with worker processes or without."""
    if not (isinstance(loader, DataLoader) and loader.num_workers):
        return Source(loader, records, trains, counts)
    from .multiprocess import MultiprocessSource

    return MultiprocessSource(loader, records, trains, counts)


def told_the_epoch(loader: Any) -> list[Any]:
    """Those with set_epoch, of a loader, its sampler, its batch sampler, that one's sampler, and a TensorLoader's share."""
    holders = loader, getattr(loader, "batch_sampler", None)
    parts = [part for holder in holders for part in (holder, getattr(holder, "sampler", None))]
    parts.append(getattr(loader, "share", None))
    return list({id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}.values())
