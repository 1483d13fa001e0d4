"""Check whether an object overrides a hook, is an instance of a class, or has a state_dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set, ValuesView
from typing import Any

# Users can import Lightning's classes from either of these packages.
LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# The function is_instance_of recognizes only classes from these packages.
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
CALLBACK_MODULES = tuple(f"{package}.callbacks." for package in LIGHTNING_PACKAGES)
# The modules that define Lightning's base classes. The hooks of the base classes have empty bodies,
# so a method from these modules does not count as an override.
_EMPTY_HOOKS = tuple(
    f"{package}.{module}"
    for package in LIGHTNING_PACKAGES
    for module in ("callbacks.callback", "core.hooks", "core.module", "core.datamodule")
)


def overridden(part: Any, name: str) -> Callable | None:
    """Return an object's method, or None if the object neither defines nor inherits it.

    Return None for an empty hook that the object inherits from a class such as LightningModule.
    """
    method = getattr(part, name, None)
    if not callable(method):
        return None
    is_inherited = getattr(method, "__module__", None) in _EMPTY_HOOKS
    return None if is_inherited and name not in getattr(part, "__dict__", ()) else method


def is_instance_of(part: Any, *class_names: str) -> bool:
    """Return whether an object is an instance of a Lightning or torch class with a given name.

    Unlike isinstance(), this function also recognizes Lightning's classes from the
    ``pytorch_lightning`` package. A user's class that only has the name of a Lightning class, such
    as "Timer", is not recognized.
    """
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
