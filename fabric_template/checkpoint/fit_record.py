"""Before a run resumes, reset objects that an earlier call to ``fit`` has changed.

A checkpoint contains only values that have changed since the run started. A script may resume a run
with objects that an earlier ``fit`` call in the same process has changed, such as the model or a
callback. Therefore, ``fit`` first resets these objects to their values at the start of the run.
Values that the user has changed after the earlier ``fit`` call are kept. If no earlier call in this
process saved to the checkpoint's folder, nothing is reset.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from ..lightning_compat.overrides import CALLBACK_MODULES, is_instance_of
from ..plain_state import (
    REMOVED,
    UNKNOWN,
    Identity,
    ListItem,
    Part,
    Place,
    PlainState,
    is_same_digest,
    replace_content,
    shares_memory,
)
from .restore import restore_network
from .start_point import StartPoint
from .state import OPTION_TYPES, make_plain_state

if TYPE_CHECKING:
    from ..loop import FabricLoop
    from ..training.run import Run

# Maps the names of attributes, flags or options to pairs of a digest and an encoded value.
Values = dict[Any, tuple[Any, Any]]
# The EarlierFits of each object, keyed by a kind such as "attributes". This dict holds only weak
# references to the objects.
_EARLIER_FITS: Any = WeakIdKeyDictionary()
_MISSING = (REMOVED, REMOVED)
_MOST_RUNS = 4  # The maximum number of runs whose start values are kept for each object.


class EarlierFits(NamedTuple):
    """The values of an object in earlier calls to ``fit``.

    Attributes:
        starts: The values at the start of each run, keyed by the folders of the run's checkpoints.
        end: The digests at the end of the latest call.
    """

    starts: dict[frozenset[Path], Values]
    end: dict[Any, Any]


class RecordedObject(NamedTuple):
    """An object of the current run.

    Attributes:
        read: Returns the current digests.
        start: The values at the start of ``fit``.
    """

    instance: Any
    read: Callable[[], dict[Any, Any]]
    start: Values


class FitRecord:
    """Records the state of a run's objects at the start and at the end of a call.

    Args:
        checkpoint: The path of the checkpoint from which the run resumes, or None for a new run.
        saved: The state of this process in the checkpoint.
        model: The run's model.
        is_training: Whether the call is a call to ``fit``. Otherwise, only objects of earlier
            ``fit`` calls are recorded.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        saved: Any = None,
        model: Any = None,
        is_training: bool = True,
    ) -> None:
        self._checkpoint, self._saved = checkpoint, set(find_saved_names(saved))
        self._model, self._is_training = model, is_training
        # The key contains an object's id and a kind such as "attributes".
        self._objects: dict[tuple[int, str], RecordedObject] = {}
        # Functions that revert the resets if the run cannot resume.
        self._reverts: list[Callable[[], Any]] = []

    def reset_and_record_attributes(self, state: PlainState) -> None:
        """Reset the attributes that earlier ``fit`` calls have changed, and record all attributes.

        Skip objects whose attributes are already recorded.

        Args:
            state: A PlainState that has just been created.
        """
        values: dict[str, Values] = {name: {} for name in self._find_new_parts(state.parts)}
        for (name, attribute), pair in state.start_values(values).items():
            values[name][attribute] = pair
        changed: dict[Place, Any] = {}
        for name, start in values.items():
            part = state.parts[name]
            owner, kind = find_object_and_kind(name, part, self._model)
            found = self._find_start_values(owner, kind, start)
            read = partial(state.digests_of, part)
            self._objects[id(owner), kind] = RecordedObject(
                owner, read, replace_values(start, found)
            )
            changed.update(((name, attribute), pair[1]) for attribute, pair in found.items())
        if changed := self._choose_restorable(state, changed, values):
            self._reverts.append(make_restore_function(state, changed))
            state.load_attributes(changed)

    def reset_and_record_parts(self, parts: dict[str, Part]) -> None:
        """Like ``reset_and_record_attributes``, for objects outside the run's PlainState."""
        if new := self._find_new_parts(parts):
            self.reset_and_record_attributes(PlainState(new))

    def _find_new_parts(self, parts: dict[str, Part]) -> dict[str, Part]:
        found: dict[tuple[int, str], str] = {}
        for name, part in parts.items():
            owner, kind = find_object_and_kind(name, part, self._model)
            is_recorded = (id(owner), kind) in self._objects
            is_known = self._is_training or owner in _EARLIER_FITS
            if is_known and not is_recorded and (part.has_attributes or part.has_buffers):
                found.setdefault((id(owner), kind), name)
        return {name: parts[name] for name in found.values()}

    def _find_start_values(self, owner: Any, kind: str, values: Values) -> Values:
        return find_start_values(self._checkpoint, owner, kind, values) if self._is_training else {}

    def _choose_restorable(
        self, state: PlainState, changed: dict[Place, Any], values: dict[str, Values]
    ) -> dict[Place, Any]:
        """Leave out values that cannot be restored, and warn about them."""
        chosen = {}
        for (name, attribute), value in changed.items():
            place, current = f"{name}.{attribute}", values[name].get(attribute, _MISSING)[0]
            # If the checkpoint restores an object that training has created, keep the object.
            if place in self._saved and (value == UNKNOWN or isinstance(current, Identity)):
                continue
            if value != UNKNOWN:
                chosen[name, attribute] = value
                continue
            attributes = state.parts[name].namespace()
            # The checkpoint restores a tensor that shares its memory with a weight.
            is_weight = shares_memory(attributes.get(attribute), state.addresses_of_network())
            if current != REMOVED and not is_weight:
                warn_of_changed_attribute(place)
        return chosen

    def reset_and_record_values(
        self,
        owner: Any,
        kind: str,
        read: Callable[[], dict[Any, Any]],
        restore: Callable[[dict[Any, Any]], Any] | None = None,
    ) -> None:
        """Reset flags that earlier ``fit`` calls have changed, and record all of them.

        A second call for the same object and kind only adds values for new names.

        Args:
            restore: Sets the flags. If it is None, the values are only recorded.
        """
        current = read()
        values = make_pairs(current)
        if (id(owner), kind) in self._objects:
            start = self._objects[id(owner), kind].start
            start.update((name, pair) for name, pair in values.items() if name not in start)
            return
        if restore is not None and (found := self._find_start_values(owner, kind, values)):
            # Keep the flags of modules that an earlier call to fit created.
            found = {name: pair for name, pair in found.items() if pair is not _MISSING}
            self._reverts.append(partial(restore, current))
            restore({name: value for name, (_, value) in found.items()})
            values.update(found)
        self._objects[id(owner), kind] = RecordedObject(owner, read, values)

    def keep_resets(self) -> None:
        """Keep the reset values from now on, because the checkpoint has been restored."""
        self._reverts = []

    def store(self, folders: Iterable[Any]) -> None:
        """Store the recorded start values and the current digests for later ``fit`` calls.

        If the run could not resume, first revert the resets.

        Args:
            folders: The folders of the run's checkpoints.
        """
        for revert in reversed(self._reverts):
            with suppress(Exception):
                revert()
        run = frozenset(Path(folder).resolve() for folder in folders if folder)
        for (_, kind), recorded in self._objects.items():
            # The code of a user's class may raise any error.
            with suppress(Exception):
                store_values(recorded, kind, run if self._is_training else None)
        # Drop all references, so that Python can free the objects.
        self._objects, self._reverts, self._model = {}, [], None


def find_object_and_kind(name: str, part: Part, model: Any) -> tuple[Any, str]:
    """Return the object of a Part, and the kind of its values, such as "buffers"."""
    owner, kind = part.instance, "buffers" if part.has_buffers else "attributes"
    # PlainState wraps the same list item in a new ListItem in each run.
    if isinstance(owner, ListItem):
        owner, kind = owner.item, "item"
    # Objects of some classes, such as SimpleNamespace, do not support weak references. Record these
    # objects by name, together with the model.
    return (owner, kind) if type(owner).__weakrefoffset__ else (model, f"{kind} of {name}")


def find_saved_names(saved: Any) -> Iterator[str]:
    """Yield the names of all objects, attributes and random generators in a saved state."""
    if isinstance(saved, list):
        for item in saved:
            yield from find_saved_names(item)
    if not isinstance(saved, dict):
        return
    for key, value in saved.items():
        if key == "generators" and isinstance(value, dict):
            for name in value:
                yield from parents_of(str(name))
        elif isinstance(key, tuple) and len(key) == 2:
            yield from parents_of(f"{key[0]}.{key[1]}")
        else:
            yield from find_saved_names(value)


def parents_of(name: str) -> Iterator[str]:
    """Yield a path such as "model.ema.value", and the paths of all objects that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


# Values


def make_pairs(values: dict[Any, Any]) -> Values:
    return {name: (value, value) for name, value in values.items()}


def replace_values(values: Values, found: Values) -> Values:
    """Return a copy of ``values`` with the values in ``found``."""
    pairs = {**values, **found}
    return {name: pair for name, pair in pairs.items() if pair is not _MISSING}


def keep_user_changes(earlier: EarlierFits, values: Values) -> None:
    """In all earlier runs, replace the start values that the user has changed since the last call.

    Args:
        values: The current values.
    """
    for name in {**values, **earlier.end}:
        current = values.get(name, _MISSING)
        if is_same_digest(current[0], earlier.end.get(name, REMOVED)):
            continue
        for start in earlier.starts.values():
            if name in values:
                start[name] = current
            else:
                start.pop(name, None)


def find_start_values(checkpoint: Any, owner: Any, kind: str, values: Values) -> Values:
    """Return the original values of all attributes that earlier ``fit`` calls have changed.

    Leave out attributes that the user has changed since the latest ``fit`` call.

    Args:
        checkpoint: The path of the checkpoint from which the run resumes, or None.
        values: The current values.
    """
    if owner not in _EARLIER_FITS or kind not in _EARLIER_FITS[owner]:
        return {}
    earlier: EarlierFits = _EARLIER_FITS[owner][kind]
    keep_user_changes(earlier, values)
    folder = None if checkpoint is None else Path(checkpoint).resolve().parent
    starts = [start for folders, start in earlier.starts.items() if folder in folders]
    found: Values = {}
    for name in {**starts[-1], **values} if starts else ():
        first = starts[-1].get(name, _MISSING)
        current = values.get(name, _MISSING)[0]
        are_objects = isinstance(current, Identity) and isinstance(first[0], Identity)
        if not are_objects and not is_same_digest(current, first[0]):
            found[name] = first
    return found


def store_values(recorded: RecordedObject, kind: str, run: frozenset[Path] | None) -> None:
    """Store the values that an object had at the start and at the end of a call.

    Args:
        run: The folders of the run's checkpoints, or None if the call was no call to ``fit``.
    """
    of_owner = _EARLIER_FITS.setdefault(recorded.instance, {})
    starts, end = of_owner.get(kind, ({}, {}))
    current = recorded.read()
    if run is None:
        # Changes by an evaluation are not the user's changes.
        for name, (digest, _) in recorded.start.items():
            if is_same_digest(digest, end.get(name, REMOVED)):
                end[name] = current.get(name, REMOVED)
        return
    known: Values = next(reversed(starts.values()), {})
    starts.pop(run, None)
    # Store equal values only once.
    starts[run] = {
        name: known[name] if is_same_digest(known.get(name, _MISSING)[0], pair[0]) else pair
        for name, pair in recorded.start.items()
    }
    if len(starts) > _MOST_RUNS:
        del starts[next(iter(starts))]
    of_owner[kind] = EarlierFits(starts, current)


def make_restore_function(state: PlainState, places: Iterable[Place]) -> Callable[[], None]:
    """Return a function that restores the current values of the given attributes."""
    kept: dict[Place, tuple[Any, Any]] = {}
    for name, attribute in places:
        attributes = state.parts[name].namespace()
        if attribute in attributes:
            value = attributes[attribute]
            kept[name, attribute] = value, copy_content(value)

    def restore() -> None:
        for name, attribute in places:
            attributes = state.parts[name].namespace()
            if (name, attribute) not in kept:
                attributes.pop(attribute, None)
                continue
            attributes[attribute], content = kept[name, attribute]
            replace_content(attributes[attribute], content)

    return restore


def copy_content(value: Any) -> Any:
    """Copy a tensor, an array or a container whose content ``load_attributes`` may replace."""
    if type(value) in (Tensor, Parameter):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy(value) if isinstance(value, np.ndarray | list | dict | set | deque) else value


# The record of a run


def undo_earlier_fits(run: Run) -> FitRecord:
    """If the run resumes, undo changes that earlier ``fit`` calls made to its objects.

    Returns:
        The record to which later code adds further objects, such as optimizers.
    """
    if run.stage != "fit":
        record = FitRecord(model=run.model, is_training=False)
        if run.model in _EARLIER_FITS:
            record.reset_and_record_attributes(make_plain_state(run))
        return record
    start = run.plan.start
    saved = start.state_of_process(run.fabric.global_rank)
    record = FitRecord(path_of(start), [saved.get("plain_state"), saved.get("data")], run.model)
    # Only record the options, because make_plan has already reset them.
    record.reset_and_record_values(run.loop, "options", partial(read_options, run.loop))
    reset_and_record_flags(run, record)
    record.reset_and_record_attributes(make_plain_state(run))
    record.reset_and_record_parts(find_lightning_callbacks(run))
    return record


def path_of(start: StartPoint) -> str | None:
    return str(start.path) if start.resumes else None


def find_lightning_callbacks(run: Run) -> dict[str, Part]:
    """Return the callbacks with a state_dict() of Lightning, which may leave out attributes.

    Leave out progress bars, and ModelCheckpoint, which continues to save to the same folder.
    """
    found = {}
    for index, callback in enumerate(run.hooks.callbacks):
        method = getattr(type(callback), "state_dict", None)
        is_lightnings = getattr(method, "__module__", "").startswith(CALLBACK_MODULES)
        if is_lightnings and not is_instance_of(callback, "ProgressBar", "Checkpoint"):
            found[f"callbacks.{index}.{type(callback).__qualname__}"] = Part(callback)
    return found


def reset_and_record_flags(run: Run, record: FitRecord) -> None:
    # A model that is not an nn.Module gets a new network in each run.
    record.reset_and_record_values(
        run.model, "flags", partial(read_flags, run), partial(restore_flags, run)
    )


def read_flags(run: Run) -> dict[tuple[str, str], bool]:
    flags = run.steps.flags(run.optimization.named_parameters())
    return {(kind, name): value for kind in flags for name, value in flags[kind].items()}


def restore_flags(run: Run, values: dict[tuple[str, str], bool]) -> None:
    flags: dict[str, dict[str, bool]] = {"requires_grad": {}, "training": {}}
    for (kind, name), value in values.items():
        flags[kind][name] = value
    restore_network(run, flags, {})


def read_options(loop: FabricLoop) -> dict[str, Any]:
    values = vars(loop.config).items()
    return {name: value for name, value in values if isinstance(value, OPTION_TYPES)}


def reset_options(loop: FabricLoop, start: StartPoint) -> None:
    """Reset the loop options that hooks have changed during earlier ``fit`` calls."""
    values = make_pairs(read_options(loop))
    for name, pair in find_start_values(path_of(start), loop, "options", values).items():
        if pair is not _MISSING:
            setattr(loop, name, pair[1])


def warn_of_changed_attribute(place: str) -> None:
    # Continue the run even if a warning filter turns the warning into an error.
    with suppress(Warning):
        warnings.warn(
            f"resume: an earlier fit in this process changed the attribute {place}, and the loop"
            " cannot restore its value. A resumed run may differ. Create the model, the loaders"
            " and the callbacks again.",
            stacklevel=2,
        )


def store_fit_record(run: Run) -> None:
    """Store the values at the end of a call. Ignore errors, so that they do not stop a script."""
    with suppress(Exception):
        callbacks = run.hooks.callbacks_of("Checkpoint")
        folders = [run.checkpoints.folder, *(getattr(part, "dirpath", None) for part in callbacks)]
        run.fit_record.store(folders)
