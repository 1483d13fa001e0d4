"""Differences: what is other at a resume than in the run that goes on, or is forgotten; named in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.run import Run
from .errors import CheckpointError
from .fingerprint import kin


def tell_differences(run: Run, now: Mapping[str, Any]) -> None:
    """Name in one line what is other than in the run that goes on."""
    before = (run.origin.pending or {}).get("fingerprint")
    if not isinstance(before, Mapping) or not run.fabric.is_global_zero:
        return
    if found := differences(now, before):
        run.said.warn(
            f"resume: other than in the run that goes on: {'; '.join(found)}. It goes on with what it has now, and not with"
            " the numbers that it would have had"
        )


def differences(now: Mapping[str, Any], before: Any) -> list[str]:
    """What is other now, in words; what only one of them knows is no difference.

    Example:
        >>> differences({"batches": 6, "processes": 2}, {"batches": 5, "processes": 1})
        ['batches 6 (was 5)', 'processes 2 (was 1)']
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
