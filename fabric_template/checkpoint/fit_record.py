"""Before a run resumes, reset objects that an earlier call to ``fit`` has changed.

A checkpoint contains an attribute only if its value has changed since the run started. If an
earlier ``fit`` call has changed an attribute that a checkpoint lacks, restoring the checkpoint does
not undo the change. Before restoring a checkpoint, ``fit`` undoes the changes that earlier ``fit``
calls made to attributes. If the user has changed an attribute between two ``fit`` calls, the
attribute keeps the user's value. Attributes are reset only if an earlier ``fit`` call in the same
Python process saved checkpoints in the folder from which the run resumes.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..lightning_compat.overrides import CALLBACK_MODULES, is_instance_of
from ..plain_state import REMOVED, UNKNOWN, ListItem, Part, Place, PlainState
from ..plain_values import Identity, Reference, replace_content, shares_memory
from .start_point import StartPoint
from .state import OPTION_TYPES, make_plain_state

if TYPE_CHECKING:
    from ..loop import FabricLoop
    from ..training.run import Run

# Maps the name of an attribute, flag or option to a pair: the value's digest and encoded value.
Values = dict[Any, tuple[Any, Any]]
# Stores attribute values from earlier ``fit`` calls. The values of the model's attributes, for
# example, are in _EARLIER_FITS[model]["attributes"]. The keys are weak references, so that Python
# can free the model.
_EARLIER_FITS: Any = WeakIdKeyDictionary()
_MISSING = (REMOVED, REMOVED)
_MOST_RUNS = 4


class ObjectRecord:
    """Record an object's values, such as its attributes, before and after each ``fit`` call.

    Attributes:
        starts: The values at the start of each run, keyed by the folders of the run's checkpoints.
        end: The digests of the values at the end of the latest call.
        rebound: The names of attributes to which calls have assigned new objects.
    """

    def __init__(self) -> None:
        self.starts: dict[frozenset[Path], Values] = {}
        self.end: dict[Any, Any] = {}
        self.rebound: set[str] = set()

    def find_start_values(self, checkpoint: str | None, values: Values) -> Values:
        """Return the original values of attributes that ``fit``, not the user, changed last.

        Args:
            checkpoint: The path of the checkpoint from which the run resumes, or None.
            values: The object's current values.
        """
        self._keep_user_changes(values)
        folder = None if checkpoint is None else Path(checkpoint).resolve().parent
        starts = [start for folders, start in self.starts.items() if folder in folders]
        found: Values = {}
        for name in {**starts[-1], **values} if starts else ():
            first, current = starts[-1].get(name, _MISSING), values.get(name, _MISSING)
            are_objects = isinstance(current[0], Identity) and isinstance(first[0], Identity)
            if not are_objects and current[0] != first[0]:
                found[name] = first
        return found

    def _keep_user_changes(self, values: Values) -> None:
        """If the user changed an attribute after the latest ``fit`` call, keep the user's value."""
        for name in {**values, **self.end}:
            if values.get(name, _MISSING)[0] == self.end.get(name, REMOVED):
                continue
            for start in self.starts.values():
                start.pop(name, None)
                if name in values:
                    start[name] = values[name]

    def add_fit(self, run: frozenset[Path], start: Values, end: dict[Any, Any]) -> None:
        """Store attribute values from before a ``fit`` call, and digests from after the call."""
        known: Values = next(reversed(self.starts.values()), {})
        self.starts.pop(run, None)
        # Store equal values only once.
        self.starts[run] = {
            name: known[name] if known.get(name, _MISSING)[0] == pair[0] else pair
            for name, pair in start.items()
        }
        if len(self.starts) > _MOST_RUNS:
            del self.starts[next(iter(self.starts))]
        self.end = end

    def add_evaluation(self, start: Values, end: dict[Any, Any]) -> None:
        """Record changes by validate, test or predict, so that a later ``fit`` can undo them."""
        for name, (mark, _) in start.items():
            if mark == self.end.get(name, REMOVED):
                self.end[name] = end.get(name, REMOVED)


class FitRecord:
    """Records attributes and flags such as ``requires_grad`` before and after a ``fit`` call.

    Args:
        checkpoint: The path of the checkpoint from which the run resumes, or None for a new run.
        saved: The state of this process in the checkpoint.
        model: The run's model.
        is_training: Whether the call is a call to ``fit``. A validate, test or predict call records
            only objects that an earlier ``fit`` call has recorded.
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
        # Each entry holds a recorded object, a function that reads its attributes, and the
        # attributes' values before training.
        self._objects: dict[tuple[int, str], tuple[Any, Callable[[], Any], Values]] = {}
        # The objects to which the attributes of each recorded object refer before training.
        self._references: dict[tuple[int, str], tuple[Part, dict[str, Reference]]] = {}
        # If the run fails before the checkpoint is restored, these functions undo the attribute
        # changes that this FitRecord has made.
        self._reverts: list[Callable[[], Any]] = []

    def reset_and_record_attributes(self, state: PlainState) -> None:
        """On resume, reset attributes that an earlier ``fit`` changed. Record all attributes.

        Args:
            state: A PlainState that has just been created.
        """
        changed: dict[Place, Any] = {}
        rebound: dict[Place, int] = {}
        names = self._find_new_parts(state.parts)
        for name, values in state.start_values(names).items():
            part = state.parts[name]
            owner, kind = find_object_and_kind(name, part, self._model)
            found = self._record(owner, kind, partial(state.digests_of, part), values)
            for attribute, (_, value) in found.items():
                current = values.get(attribute, _MISSING)[0]
                if self._is_restorable(state, (name, attribute), value, current):
                    changed[name, attribute] = value
                    record = find_record(owner, kind)
                    if record is not None and attribute in record.rebound:
                        # Others may refer to the current object, so do not change it in place.
                        rebound[name, attribute] = len(rebound)
        if changed:
            self._reverts.append(make_restore_function(state, changed))
            state.load_attributes(changed, rebound=rebound)
            state.record_objects()
        for name, part in names.items():
            owner, kind = find_object_and_kind(name, part, self._model)
            references = {name: Reference(value) for name, value in part.attributes().items()}
            self._references[id(owner), kind] = part, references

    def reset_and_record_parts(self, parts: dict[str, Part]) -> None:
        """Call ``reset_and_record_attributes`` for objects that have not been recorded yet."""
        if new := self._find_new_parts(parts):
            self.reset_and_record_attributes(PlainState(new))

    def reset_and_record_values(
        self,
        owner: Any,
        kind: str,
        read: Callable[[], dict[Any, Any]],
        restore: Callable[[dict[Any, Any]], Any] | None = None,
    ) -> None:
        """Like ``reset_and_record_attributes``, but for values such as ``requires_grad``.

        Args:
            kind: The kind of values, such as "flags" or "options".
            read: Returns the object's current values.
            restore: Sets the object's values before a resume. If ``restore`` is None, no changes
                are undone.
        """
        if (id(owner), kind) in self._objects:
            return
        current = read()
        found = self._record(owner, kind, read, make_pairs(current))
        if found and restore is not None:
            self._reverts.append(partial(restore, current))
            restore({name: value for name, (_, value) in found.items() if value != REMOVED})

    def _find_new_parts(self, parts: dict[str, Part]) -> dict[str, Part]:
        found: dict[tuple[int, str], str] = {}
        for name, part in parts.items():
            owner, kind = find_object_and_kind(name, part, self._model)
            is_recorded = (id(owner), kind) in self._objects
            is_known = self._is_training or owner in _EARLIER_FITS
            if is_known and not is_recorded and (part.has_attributes or part.has_buffers):
                found.setdefault((id(owner), kind), name)
        return {name: parts[name] for name in found.values()}

    def _record(self, owner: Any, kind: str, read: Callable[[], Any], values: Values) -> Values:
        """Record an object's values at the start of the run.

        Args:
            read: Returns digests of the object's current values.
            values: The object's current values.

        Returns:
            The original values that earlier ``fit`` calls have changed, which the caller restores.
        """
        found: Values = {}
        if self._is_training and (record := find_record(owner, kind)):
            found = record.find_start_values(self._checkpoint, values)
        start = {name: pair for name, pair in {**values, **found}.items() if pair is not _MISSING}
        self._objects[id(owner), kind] = owner, read, start
        return found

    def _is_restorable(self, state: PlainState, place: Place, value: Any, current: Any) -> bool:
        """Return whether an attribute can be reset to its value from before an earlier ``fit``.

        Args:
            current: The digest of the attribute's current value.
        """
        name, attribute = place
        path = f"{name}.{attribute}"
        # If an attribute contains an object that the checkpoint restores, do not reset the
        # attribute.
        if path in self._saved and (value == UNKNOWN or isinstance(current, Identity)):
            return False
        if value != UNKNOWN:
            return True
        attributes = state.parts[name].namespace()
        # Do not warn about an attribute that refers to a weight, because the checkpoint restores
        # weights.
        is_weight = shares_memory(attributes.get(attribute), state.addresses_of_network())
        if current != REMOVED and not is_weight:
            warn_of_changed_attribute(path)
        return False

    def keep_resets(self) -> None:
        """Make the attribute resets permanent after the checkpoint has been restored."""
        self._reverts = []

    def store(self, folders: Iterable[Any]) -> None:
        """Store the recorded attributes and flags, so that a later ``fit`` call can reset them.

        Args:
            folders: The folders of the run's checkpoints.
        """
        # If the run failed before the checkpoint was restored, undo the attribute resets in
        # self._reverts. Otherwise, keep_resets() has emptied this list.
        for revert in reversed(self._reverts):
            with suppress(Exception):
                revert()
        run = frozenset(Path(folder).resolve() for folder in folders if folder)
        for (_, kind), (owner, read, start) in self._objects.items():
            # The code of a user's class may raise any error.
            with suppress(Exception):
                end = read()
                part, references = self._references.get((id(owner), kind), (None, {}))
                values = {} if part is None else part.attributes()
                record = _EARLIER_FITS.setdefault(owner, {}).setdefault(kind, ObjectRecord())
                record.rebound.update(
                    n for n in references if not references[n].refers_to_object(values.get(n))
                )
                if self._is_training:
                    record.add_fit(run, start, end)
                else:
                    record.add_evaluation(start, end)
        # Remove the references to the model, so that Python can free its memory.
        self._objects, self._references, self._reverts, self._model = {}, {}, [], None


def find_record(owner: Any, kind: str) -> ObjectRecord | None:
    return _EARLIER_FITS[owner].get(kind) if owner in _EARLIER_FITS else None


def find_object_and_kind(name: str, part: Part, model: Any) -> tuple[Any, str]:
    """Return the two dict keys of an object's record: the object, and a kind such as "buffers"."""
    owner, kind = part.instance, "buffers" if part.has_buffers else "attributes"
    # Each run wraps list items in new ListItem objects. Use the wrapped item as the key, so that a
    # later run finds the item's record.
    if isinstance(owner, ListItem):
        owner, kind = owner.item, "item"
    # The first key must support weak references. If the object does not, use the model as the first
    # key, and include the object's name in the second key.
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
    """Yield a path such as "model.ema.value", and then its parents "model.ema" and "model"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def make_pairs(values: dict[Any, Any]) -> Values:
    return {name: (value, value) for name, value in values.items()}


def make_restore_function(state: PlainState, places: Iterable[Place]) -> Callable[[], None]:
    """Copy the given attributes, and return a function that restores the copied values."""
    kept = []
    for name, attribute in places:
        part = state.parts[name]
        value = part.namespace().get(attribute, REMOVED)
        kept.append((part, attribute, value, copy_content(value)))

    def restore() -> None:
        for part, attribute, value, content in kept:
            attributes = part.namespace()
            if value is REMOVED:
                attributes.pop(attribute, None)
            else:
                attributes[attribute] = value
                replace_content(value, content)

    return restore


def copy_content(value: Any) -> Any:
    """Copy a value that ``load_attributes`` may change in place."""
    if type(value) in (Tensor, nn.Parameter):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy(value) if isinstance(value, np.ndarray | list | dict | set | deque) else value


def undo_earlier_fits(run: Run) -> FitRecord:
    """Before a resume, reset model and callback attributes that earlier ``fit`` calls changed.

    Returns:
        A new FitRecord, to which other objects such as optimizers are added later.
    """
    if run.stage != "fit":
        record = FitRecord(model=run.model, is_training=False)
        if run.model in _EARLIER_FITS:
            record.reset_and_record_attributes(make_plain_state(run))
        return record
    start = run.plan.start
    saved = start.state_of_process(run.fabric.global_rank)
    record = FitRecord(path_of(start), [saved.get("plain_state"), saved.get("data")], run.model)
    # Only record options such as max_epochs here, because make_plan has already reset them.
    record.reset_and_record_values(run.loop, "options", partial(read_options, run.loop))
    reset_and_record_flags(run, record)
    record.reset_and_record_attributes(make_plain_state(run))
    record.reset_and_record_parts(find_lightning_callbacks(run))
    return record


def path_of(start: StartPoint) -> str | None:
    return str(start.path) if start.resumes else None


def find_lightning_callbacks(run: Run) -> dict[str, Part]:
    """Return the callbacks whose state_dict() is defined in Lightning, such as EarlyStopping."""
    found = {}
    for index, callback in enumerate(run.hooks.callbacks):
        method = getattr(type(callback), "state_dict", None)
        is_lightnings = getattr(method, "__module__", "").startswith(CALLBACK_MODULES)
        # Do not reset checkpoint callbacks, because their attributes describe saved files.
        if is_lightnings and not is_instance_of(callback, "ProgressBar", "Checkpoint"):
            found[f"callbacks.{index}.{type(callback).__qualname__}"] = Part(callback)
    return found


def reset_and_record_flags(run: Run, record: FitRecord) -> None:
    """Reset flags such as ``requires_grad`` that an earlier ``fit`` changed. Record all flags."""
    for module in run.network.modules():
        record.reset_and_record_values(
            module, "flags", partial(read_flags, module), partial(restore_flags, module)
        )


def read_flags(module: nn.Module) -> dict[str, bool]:
    parameters = module.named_parameters(recurse=False)
    return {"training": module.training, **{name: p.requires_grad for name, p in parameters}}


def restore_flags(module: nn.Module, flags: dict[str, bool]) -> None:
    module.training = flags.get("training", module.training)
    for name, parameter in module.named_parameters(recurse=False):
        parameter.requires_grad = flags.get(name, parameter.requires_grad)


def read_options(loop: FabricLoop) -> dict[str, Any]:
    values = vars(loop.config).items()
    return {name: value for name, value in values if isinstance(value, OPTION_TYPES)}


def reset_options(loop: FabricLoop, start: StartPoint) -> None:
    """Reset the loop options that hooks have changed during earlier ``fit`` calls."""
    if record := find_record(loop, "options"):
        found = record.find_start_values(path_of(start), make_pairs(read_options(loop)))
        for name, (_, value) in found.items():
            if value != REMOVED:
                setattr(loop, name, value)


def warn_of_changed_attribute(place: str) -> None:
    # With ``python -W error``, a warning raises an error, which must not stop the run.
    with suppress(Warning):
        warnings.warn(
            f"resume: an earlier fit in this process changed the attribute {place}, and the loop"
            " cannot restore its value. A resumed run may differ. Create the model, the loaders"
            " and the callbacks again.",
            stacklevel=2,
        )


def store_fit_record(run: Run) -> None:
    """At the end of a run, store its FitRecord for later ``fit`` calls."""
    # Ignore all errors, because a FitRecord that cannot be stored must not stop the user's script.
    with suppress(Exception):
        callbacks = run.hooks.callbacks_of("Checkpoint")
        folders = [run.checkpoints.folder, *(getattr(part, "dirpath", None) for part in callbacks)]
        run.fit_record.store(folders)
