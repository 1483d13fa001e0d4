"""Middle: a pass that goes on behind the batches that are done, as a checkpoint has noted them."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from .indices import Indices, drop, replaced
from .randomness import rng_state
from .source import Source, begun


def resume(source: Source, state: dict[str, Any] | None) -> None:
    """Let the next pass over this loader begin where its `state` was noted.

    How depends on the loader. One with ``state_dict`` and ``load_state_dict`` does it itself. A map-style DataLoader
    draws the indices of the batches that are done and loads none of them (with batch_size=None and workers, it loads fewer
    items again than it has workers). Any other is asked for its batches again.

    Nothing is lost by not loading if an item depends on its index and on random numbers: the libraries' own, or those of
    generators that the dataset or collate_fn holds. Of other traces that loading leaves in a dataset nothing is known.
    """
    if state is None:
        return
    source.skipped = deque(state.get("earlier", ()))
    if "began" in state:
        source.rest = partial(_go_on, source, state)
        return
    _load_states(source.parts, state.get("parts"))
    if "born" in state:
        source.rest = partial(_behind_others, source, state)
    elif "loader" in state:
        source.loader.load_state_dict(state["loader"])
        iter(source.loader)  # it stands at the end of a pass: the next call begins a new one


def _behind_others(source: Source, place: dict[str, Any]) -> Iterator:
    """A whole pass, after the worker processes of another run."""
    states = place["workers"]
    if len(states or ()) not in (0, source.workers):
        _tell_number(source, len(states))
        states = None
    source.note_beginning()
    if not source.workers or not source.is_born:
        return source.whole()
    source.born, source.is_born = place["born"], False
    source.put_back(source.born)
    iterator = source.with_workers(states=states, began=source.began)
    if not source.is_indexed:
        _tell(source)
        source.put_back(source.began)
    return iterator


def _go_on(source: Source, place: dict[str, Any]) -> Iterator:
    iterator = _rest(source, place)
    return chain(repeat(None, place["taken"]), iterator) if source.counts else iterator


def _rest(source: Source, place: dict[str, Any]) -> Iterator:
    """The rest of a pass, of which some batches are done; random numbers are put back by the caller."""
    loader, done = source.loader, place["taken"]
    source.began, source.first, source.born = (place[name] for name in ("began", "first", "born"))
    source.is_born = place["is_born"]
    source.parts_began = place.get("parts_began", [])
    _load_states(source.parts, source.parts_began)
    source.put_back(source.born or source.began)
    if source.is_stateful:
        loader.load_state_dict(place["loader"])
        return begun(loader)
    if not (has_as_many := place["num_workers"] == source.workers):
        _tell_number(source, place["num_workers"])
        if source.keeps_workers:
            source.born = source.born or source.began  # they are made now, with these random numbers
    if source.is_indexed and not source.workers:
        indices = Indices(getattr(loader, source.index_name))
        with replaced(loader, **{source.index_name: indices}):
            iterator = iter(loader)
        if source.first is not None or not source.is_born:
            source.put_back(source.first or source.began)
        elif done:  # workers had drawn them, before they were asked for
            source.first = rng_state(source.generators())
        indices.drop(done)
        _load_states(source.datasets_with_state, place.get("parts", [])[len(source.index_parts) :])
        return iterator if source.first is not None else source.noting_first(iterator)
    if source.datasets_with_state and source.workers:
        warnings.warn(
            f"resume: {type(source.datasets_with_state[0]).__name__} has state_dict, but its copies in the worker processes"
            " change by themselves: in the rest of this epoch they go on from what it was as the epoch began; with"
            " num_workers=0, or in a loader with state_dict (StatefulDataLoader), it goes on exactly",
            stacklevel=2,
        )
    began = None if source.is_born else source.began
    if source.is_indexed and not has_as_many:
        return source.with_workers(done, None, source.first or began)
    if source.is_indexed and place["workers"] is not None:
        return source.with_workers(done, place["workers"], began, place.get("ahead"))
    return _again(source, done)


def _again(source: Source, done: int) -> Iterator:
    """The batches that are done, asked for and thrown away."""
    loader, jumps = source.loader, _jumps(type(source.loader))
    is_cheap = isinstance(loader, Sequence) or hasattr(loader, "behind")  # not worth a warning
    _tell(source, 0 if is_cheap else done)
    iterator = loader.behind(done) if jumps else source.with_workers()
    if source.workers and not source.is_born and source.is_map_style:  # which draws its indices
        source.put_back(source.began)
        iterator = iter(loader)
    if source.first is not None:
        source.put_back(source.first)
    drop(iterator, 0 if jumps else done)
    return iterator


def _jumps(kind: type) -> bool:
    """Whether a loader's own `behind` begins a pass in its middle: of the class that says what a pass is (TensorLoader)."""
    says = [next((base for base in kind.__mro__ if name in vars(base)), None) for name in ("__iter__", "behind")]
    return says[0] is says[1] is not None


def _load_states(parts: list[Any], states: list[Any] | None) -> None:
    """Put parts back where they were, as many as there are states."""
    for part, state in zip(parts, states or (), strict=False):
        part.load_state_dict(copy.deepcopy(state))


def _tell_number(source: Source, was: int) -> None:
    warnings.warn(
        f"resume: num_workers={source.workers} was {was} in the run that goes on: the batches are the same, random numbers"
        " drawn in loading them are not; give the same number for the same numbers",
        stacklevel=2,
    )


def _tell(source: Source, again: int = 0) -> None:
    """Warn of what takes time, so many batches that are asked for again, and of what is not as it was."""
    told = []
    if again:
        told.append(
            f"{type(source.loader).__name__} is asked again for the {again} batches of this epoch that were"
            " trained before, which takes the time of loading them; a loader with state_dict and load_state_dict"
            " (torchdata's StatefulDataLoader) goes on by itself, a map-style dataset need not be loaded again"
        )
    if again and not getattr(source.loader, "in_order", True):
        told.append(
            "which batches these are depends on which worker is faster (in_order=False), so that samples may come twice"
            " or not at all; leave in_order out for an exact resume"
        )
    if source.keeps_workers and not source.is_born:
        told.append(
            "random numbers that its workers draw begin anew (persistent_workers=True); leave persistent_workers out for"
            " the same numbers"
        )
    if told:
        warnings.warn(f"resume: {'. And '.join(told)}", stacklevel=2)
