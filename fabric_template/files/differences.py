"""Differences: what is other at a resume than in the run that goes on, or is forgotten; named in one line."""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from itertools import zip_longest
from types import CodeType, MethodType
from typing import Any

from ..core.overrides import HOOKS, overrides
from ..core.run import Run
from .errors import CheckpointError
from .fingerprint import kin
from .noticed import LIBRARIES, Noticed, is_own

_STARTS = ("training_step", "validation_step", *(name for name in HOOKS if name.endswith("_start")))


def tell_differences(run: Run, now: Mapping[str, Any]) -> None:
    """Name in one line what is other than in the run that goes on."""
    before = (run.origin.pending or {}).get("fingerprint")
    if not isinstance(before, Mapping) or not run.fabric.is_global_zero:
        return
    if kept := differences(now["settings"], before.get("settings")):
        run.said.warn(
            f"resume: in the code, and otherwise in the run that goes on: {'; '.join(kept)}. It goes on with what it was; to"
            " change that, set it in on_train_start (for group in loop.optimizers[0].param_groups: group['lr'] = 0.01), or"
            " write load= in the place of resume= to start a new run from the weights"
        )
    if found := differences({name: part for name, part in now.items() if name != "settings"}, before):
        run.said.warn(
            f"resume: other than in the run that goes on: {'; '.join(found)}. It goes on with what it has now, and not with"
            " the numbers that it would have had"
        )


def differences(now: Mapping[str, Any], before: Any) -> list[str]:
    """What is other now, in words; what only one of them knows is no difference.

    Example:
        >>> differences({"batches": 6, "versions": {"torch": "2.9"}}, {"batches": 5, "versions": {"torch": "2.8"}})
        ['batches 6 (was 5)', 'torch 2.9 (was 2.8)']
    """
    if not isinstance(before, Mapping):
        return []
    told: list[str] = []
    for name, value in now.items():
        other = before.get(name, value)
        if isinstance(value, Mapping):
            told += differences(value, other)
        elif value and isinstance(value, list) and isinstance(value[0], Mapping) and isinstance(other, list):
            told += [f"{len(value)} loaders (were {len(other)})"] * (len(value) != len(other))
            told += [text for one, two in zip(value, other, strict=False) for text in differences(one, two)]
        elif value != other and None not in (value, other):
            told.append(f"{name} {_words(value)} (was {_words(other)})")
    return told


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(item[0] if isinstance(item, list) else str(item) for item in value) or "none"
    return str(value)


# ---- optimizers of another kind


def check_optimizers(run: Run, before: Any) -> None:
    """Refuse the states of optimizers of another kind; a renamed or derived class takes them."""
    before = before.get("optimizers", ()) if isinstance(before, Mapping) else ()
    for optimizer, theirs in zip(run.optimizing.optimizers, before, strict=False):
        own = kin(optimizer)
        if own and theirs and not set(own) & set(theirs):
            raise _another(run, f"the optimizer {theirs[0]}, this one has {own[0]}", theirs[0])


def check_loaded(run: Run, optimizer: Any) -> None:
    """The same, once its state is loaded, for a file that says nothing of its optimizers."""
    for group in optimizer.param_groups:
        told = getattr(optimizer, "defaults", {}).keys() - {"differentiable"}  # torch adds it to those that lack it
        if missing := sorted(told - group.keys()):
            what = f"another optimizer than {type(optimizer).__name__} (no {', '.join(missing)} in it)"
            raise _another(run, what, "that one")


def _another(run: Run, what: str, instead: str) -> CheckpointError:
    return CheckpointError(
        f"resume={str(run.origin.resume_path)!r}: the file is of a run with {what}: go on with {instead}, or write load= in the"
        " place of resume= to start a new run from the weights"
    )


# ---- what no state_dict has brought back


def tell_forgotten(run: Run, noticed: Noticed, state: Mapping[str, str]) -> None:
    """Say in one line what is not as it was, and that ``on_train_epoch_start`` is not called for an epoch that goes on."""
    in_epoch = not run.at.between_epochs
    names = _forgotten(noticed, state, in_epoch)
    listens = [
        type(p).__name__
        for p in (*run.hooks.callbacks, run.trained.owner)
        if is_own(p) and overrides(p, "on_train_epoch_start")
    ]
    told = []
    if in_epoch and listens:
        told.append(
            f"on_train_epoch_start of {', '.join(listens)} was called before, and is not called again in this epoch"
        )
    if names:
        more = f" and {len(names) - 10} more" * (len(names) > 10)
        told.append(
            f"{', '.join(names[:10])}{more} had changed in training, which no state_dict has brought back: keep such values"
            " in a buffer, a state_dict, or on_save_checkpoint and on_load_checkpoint"
        )
    if told and run.fabric.is_global_zero:
        text = f"resume: {'; '.join(told)}"
        run.said.warn(text) if names else print(text, file=sys.stderr)


def _forgotten(noticed: Noticed, state: Mapping[str, str], in_epoch: bool) -> list[str]:
    """The attributes that have other values than when this was saved, but for those that are made anew before use."""
    now = noticed.digests()
    noticed.kept = set(state)
    names = [name for name, text in state.items() if now.get(name) != text]
    owners = {name.rpartition(".")[0] for name in names} & noticed.parts.keys()
    anew = {key: _made_anew(noticed.parts[key], in_epoch) for key in owners}
    return [name for name in names if (split := name.rpartition("."))[0] in owners and split[2] not in anew[split[0]]]


def _made_anew(part: Any, in_epoch: bool) -> set[str]:
    """The attributes that a library's class sets, and those that a hook or step to come sets before it looks at them."""
    methods = [overrides(part, name) for name in _STARTS if not (in_epoch and name == "on_train_epoch_start")]
    for base in type(part).__mro__:
        methods += vars(base).values() if base.__module__.startswith(LIBRARIES) else ()
    return {name for method in methods for name, is_set in _uses(method).items() if is_set}


def _uses(method: Any) -> dict[str, bool]:
    """The attributes that a function's code names, and whether the first that it does is to set or clear them."""
    function = method.__func__ if isinstance(method, MethodType) else method
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    uses: dict[str, bool] = {}
    steps = list(dis.get_instructions(code)) if isinstance(code, CodeType) else []
    for step, after in zip_longest(steps, steps[1:]):
        if step.opname in ("STORE_ATTR", "LOAD_ATTR", "LOAD_METHOD"):
            clears = getattr(after, "argval", None) == "clear"
            uses.setdefault(step.argval, step.opname == "STORE_ATTR" or clears)
    return uses
