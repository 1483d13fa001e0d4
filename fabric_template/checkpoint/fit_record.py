"""Before a run resumes, reset objects that an earlier call to ``fit`` has changed.

A checkpoint contains only values that have changed since the run started. A script may resume a run
with objects that an earlier ``fit`` call in the same process has changed, such as the model or a
callback. Therefore, ``fit`` first resets these objects to their values at the start of the run.
Values that the user has changed after the earlier ``fit`` call are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from ..plain_state import REMOVED, UNKNOWN, Place, PlainState
from .restore import restore_network
from .state import OPTION_TYPES, make_plain_state

if TYPE_CHECKING:
    from ..loop import FabricLoop
    from ..training.run import Run

# Maps the names of attributes, flags or options to pairs of a digest and an encoded value.
Values = dict[str, tuple[Any, Any]]
# For each object: the values at the start of each run, keyed by checkpoint folder (None for the
# first run), and digests of the values at the end of the latest run. This dict holds only weak
# references to the objects.
_EARLIER_FITS: Any = WeakIdKeyDictionary()
_MISSING = (REMOVED, REMOVED)


class FitRecord:
    """Records the state of a run's objects at the start and at the end of ``fit``.

    Args:
        checkpoint: The path of the checkpoint from which the run resumes, or None for a new run.
        saved: The state of this process in the checkpoint.
    """

    def __init__(self, checkpoint: str | None = None, saved: Any = None) -> None:
        self._checkpoint, self._saved = checkpoint, set(names_in(saved))
        self._states: list[PlainState] = []
        self._readers: dict[tuple[int, str], tuple[Any, Callable[[], dict[str, Any]]]] = {}
        # The values at the start of fit, keyed by the object's id and a kind such as "attributes".
        self._starts: dict[tuple[int, str], Values] = {}

    def watch(self, state: PlainState) -> None:
        """Reset the attributes that earlier ``fit`` calls have changed, and record all attributes.

        Skip objects whose attributes are already recorded.
        """
        owners = owners_of(state)
        new = [
            name for name, (part, kind) in owners.items() if (id(part), kind) not in self._starts
        ]
        values = state.values()
        changed: dict[Place, Any] = {}
        for name in new if self._checkpoint is not None else ():
            found = find_start_values(self._checkpoint, *owners[name], values[name])
            changed.update(((name, attribute), value) for attribute, value in found.items())
        if changed:
            state.load_attributes(self._choose_restorable(changed, values))
            values = state.values()
        for name in new:
            part, kind = owners[name]
            self._starts[id(part), kind] = values[name]
        self._states.append(state)

    def _choose_restorable(
        self, changed: dict[Place, Any], values: dict[str, Values]
    ) -> dict[Place, Any]:
        """Leave out values that cannot be restored, and warn about them."""
        chosen = {}
        for (name, attribute), value in changed.items():
            place, (current, _) = f"{name}.{attribute}", values[name].get(attribute, _MISSING)
            # If the checkpoint restores an object that training has created, keep the object.
            if place in self._saved and (value == UNKNOWN or current == UNKNOWN):
                continue
            if value != UNKNOWN:
                chosen[name, attribute] = value
            elif current != REMOVED:
                warnings.warn(
                    f"resume: an earlier fit in this process changed the attribute {place}, and the"
                    " loop cannot restore its value. A resumed run may differ. Create the model,"
                    " the loaders and the callbacks again.",
                    stacklevel=2,
                )
        return chosen

    def watch_values(
        self,
        owner: Any,
        kind: str,
        read: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        """Reset flags or options that earlier ``fit`` calls have changed, and record all of them.

        A second call for the same object and kind only adds values for new names.
        """
        if self._checkpoint is not None and (id(owner), kind) not in self._starts:
            values = {name: (value, value) for name, value in read().items()}
            found = find_start_values(self._checkpoint, owner, kind, values)
            restore({name: value for name, value in found.items() if value != REMOVED})
        start = self._starts.setdefault((id(owner), kind), {})
        for name, value in read().items():
            start.setdefault(name, (value, value))
        self._readers[id(owner), kind] = owner, read

    def end(self, folders: Iterable[Any]) -> None:
        """Store the recorded start values and the current values for later ``fit`` calls.

        Args:
            folders: The folders of the run's checkpoints.
        """
        ends: dict[tuple[int, str], tuple[Any, dict[str, Any]]] = {}
        for state in self._states:
            values = state.values()
            for name, (owner, kind) in owners_of(state).items():
                digests = {attribute: pair[0] for attribute, pair in values[name].items()}
                ends[id(owner), kind] = owner, digests
        ends.update((key, (owner, read())) for key, (owner, read) in self._readers.items())
        runs = [Path(folder).resolve() for folder in folders if folder]
        for key, (owner, digests) in ends.items():
            # Objects of some classes with __slots__ do not support weak references.
            with suppress(TypeError):
                store_values(owner, key[1], runs, self._starts[key], digests)
        # Drop all references, so that Python can free the objects.
        self._states, self._readers, self._starts = [], {}, {}


def owners_of(state: PlainState) -> dict[str, tuple[Any, str]]:
    """Return the object and the kind ("buffers" or "attributes") for each name in a PlainState."""
    found = {}
    for name, part in state.parts.items():
        owner = part.instance
        # PlainState wraps each list item in a new SimpleNamespace.
        if type(owner) is SimpleNamespace and "item" in vars(owner):
            owner = vars(owner)["item"]
        found[name] = owner, "buffers" if part.has_buffers else "attributes"
    return found


def names_in(saved: Any) -> Iterator[str]:
    """Yield the names of all objects, attributes and random generators in a saved state."""
    if isinstance(saved, list):
        for item in saved:
            yield from names_in(item)
    if not isinstance(saved, dict):
        return
    for key, value in saved.items():
        if key == "generators" and isinstance(value, dict):
            for name in value:
                yield from (name, str(name).rpartition(".")[0])
        elif isinstance(key, tuple) and len(key) == 2:
            yield from (key[0], f"{key[0]}.{key[1]}")
        else:
            yield from names_in(value)


def store_values(
    owner: Any, kind: str, runs: list[Path], start: Values, end: dict[str, Any]
) -> None:
    """Store the values that an object had at the start and at the end of ``fit``."""
    of_owner = _EARLIER_FITS.setdefault(owner, {})
    starts = of_owner[kind][0] if kind in of_owner else {None: start}
    first = starts[None]
    # Store equal values only once.
    shared = {
        name: first[name] if first.get(name, _MISSING)[0] == pair[0] else pair
        for name, pair in start.items()
    }
    starts.update(dict.fromkeys(runs, shared))
    of_owner[kind] = starts, end


def find_start_values(checkpoint: Any, owner: Any, kind: str, values: Values) -> dict[str, Any]:
    """Return the original values of all attributes that earlier ``fit`` calls have changed.

    Leave out attributes that the user has changed since the latest ``fit`` call.

    Args:
        checkpoint: The path of the checkpoint from which the run resumes.
        values: The current values.
    """
    if owner not in _EARLIER_FITS or kind not in _EARLIER_FITS[owner]:
        return {}
    starts, end = _EARLIER_FITS[owner][kind]
    start = starts.get(Path(checkpoint).resolve().parent, starts[None])
    found = {}
    for name in {**start, **values}:
        current, (first, encoded) = values.get(name, _MISSING)[0], start.get(name, _MISSING)
        if current == end.get(name, REMOVED) and current != first:
            found[name] = encoded
    return found


# The record of a run


def start_fit_record(run: Run) -> FitRecord:
    """Undo changes that earlier ``fit`` calls made to the model, callbacks and datamodule."""
    start = run.plan.start
    path = start.path if start.resumes else None
    saved = start.state_of_process(run.fabric.global_rank)
    record = FitRecord(path, [saved.get("plain_state"), saved.get("data")])
    # Only record the options, because make_plan has already reset them.
    record.watch_values(run.loop, "options", partial(read_options, run.loop))
    watch_flags(run, record)
    record.watch(make_plain_state(run))
    return record


def watch_flags(run: Run, record: FitRecord) -> None:
    for kind in ("requires_grad", "training"):
        read, restore = partial(read_flags, run, kind), partial(restore_flags, run, kind)
        record.watch_values(run.network, kind, read, restore)


def read_flags(run: Run, kind: str) -> dict[str, bool]:
    return run.steps.flags(run.optimization.named_parameters())[kind]


def restore_flags(run: Run, kind: str, values: dict[str, bool]) -> None:
    restore_network(run, {"requires_grad": {}, "training": {}, kind: values}, {})


def read_options(loop: FabricLoop) -> dict[str, Any]:
    values = vars(loop.config).items()
    return {name: value for name, value in values if isinstance(value, OPTION_TYPES)}


def reset_options(loop: FabricLoop, checkpoint: str) -> None:
    """Reset the loop options that hooks have changed during earlier ``fit`` calls."""
    values = {name: (value, value) for name, value in read_options(loop).items()}
    for name, value in find_start_values(checkpoint, loop, "options", values).items():
        setattr(loop, name, value)


def end_fit_record(run: Run) -> None:
    """Store the values at the end of ``fit``. Ignore errors, so that they do not stop a script."""
    callbacks = run.hooks.callbacks_of("Checkpoint")
    folders = [run.checkpoints.folder, *(getattr(part, "dirpath", None) for part in callbacks)]
    with suppress(Exception):
        run.fit_record.end(folders)
