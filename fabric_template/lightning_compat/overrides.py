"""Check whether an object overrides a hook, is an instance of a Lightning class, or has state."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set, ValuesView
from typing import Any

LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# is_instance_of() accepts only classes of Lightning and torch.
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
CALLBACK_MODULES = tuple(f"{package}.callbacks." for package in LIGHTNING_PACKAGES)
# overridden() ignores hooks that are defined in these modules, because Lightning's own hooks are
# empty.
_EMPTY_HOOKS = tuple(
    f"{package}.{module}"
    for package in LIGHTNING_PACKAGES
    for module in ("callbacks.callback", "core.hooks", "core.module", "core.datamodule")
)


def overridden(part: Any, name: str) -> Callable | None:
    """Return an object's method, or None if it is missing or one of Lightning's empty hooks."""
    method = getattr(part, name, None)
    if not callable(method):
        return None
    is_inherited = getattr(method, "__module__", None) in _EMPTY_HOOKS
    return None if is_inherited and name not in getattr(part, "__dict__", ()) else method


def is_instance_of(part: Any, *class_names: str) -> bool:
    """Return whether an object is an instance of a Lightning or torch class with a given name."""
    # Compare class names, because ``lightning`` and ``pytorch_lightning`` each define classes such
    # as Timer. Compare packages, too, because a user's class may have the same name as a Lightning
    # class.
    found = [base for base in type(part).__mro__ if base.__name__ in class_names]
    return any(base.__module__.partition(".")[0] in _PACKAGES for base in found)


def find_callbacks(callbacks: list[Any], kind: str) -> list[Any]:
    """Return the callbacks that are instances of Lightning's class named ``kind``."""
    return [callback for callback in callbacks if is_instance_of(callback, kind)]


def has_state(part: Any) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict`` methods."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(part, name, None)) for name in names)


def as_list(given: Any) -> list[Any]:
    if given is None or given is False:
        return []
    is_many = isinstance(given, Sequence | Set | ValuesView) and not isinstance(given, str)
    return list(given) if is_many else [given]
