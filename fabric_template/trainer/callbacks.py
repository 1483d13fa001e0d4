"""Callbacks: the list that a loop was given, checked, and in the order in which Trainer calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set, ValuesView
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ..core.called import keyword_names
from ..core.config import LoopConfig
from ..core.errors import Misuse, MisuseOfType
from ..core.inputs import check_object
from ..core.overrides import HOOKS, is_a, overrides

_REFUSED = {
    "BatchSizeFinder": "it trains by Trainer's tuner: `fabric-template tune` finds the size, for your loader",
    "LearningRateFinder": "it trains by Trainer's tuner: `fabric-template tune --lr` finds the rate, for your optimizer",
}


def parse_callbacks(given: Any, config: LoopConfig, plugged: Iterable[Any] = ()) -> list[Any]:
    """The callbacks as a list, those that save last: Lightning's, or any objects with methods named like hooks.

    Behind what was given come those that are ``plugged`` in by packages.

    Raises:
        Misuse, TypeError, RuntimeError: for what cannot work, in the cases in which Trainer refuses it, too.

    Example:
        >>> from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
        >>> callbacks = parse_callbacks([ModelCheckpoint(), EarlyStopping("val_loss")], LoopConfig())
        >>> [type(callback).__name__ for callback in callbacks]
        ['EarlyStopping', 'ModelCheckpoint']
    """
    callbacks = [] if given is None or given is False else listed(given)
    _check_words(callbacks, config)
    callbacks += plugged
    for callback in callbacks:
        _check(callback)
    _check_keys(callbacks)
    return in_order(callbacks)


def listed(given: Any) -> list[Any]:
    """Those of a list, also of Hydra's own kind of list and of a dict's values; else the one alone."""
    return list(given) if isinstance(given, Sequence | Set | ValuesView) and not isinstance(given, str) else [given]


def _check(callback: Any) -> None:
    """Refuse what is no callback, or one that cannot work here."""
    check_object("callbacks", callback)
    is_wrong = isinstance(callback, str | dict | FunctionType | BuiltinFunctionType | None)
    if is_wrong or not (hasattr(callback, "state_key") or any(hasattr(callback, hook) for hook in HOOKS)):
        raise MisuseOfType(
            f"callbacks got a {type(callback).__name__}: expected objects with methods named like hooks, such as"
            " callbacks=[EarlyStopping('val_loss')]"
        )
    for hook in HOOKS if not hasattr(callback, "state_key") else ():
        if (method := overrides(callback, hook)) is not None:
            keyword_names(method, hook)  # raises where it could not be called
    for kind, reason in _REFUSED.items():
        if is_a(callback, kind):
            raise Misuse(f"{type(callback).__name__} cannot work here: {reason}")


def _check_words(callbacks: list[Any], config: LoopConfig) -> None:
    """Refuse callbacks that exclude each other, or a word of the configuration."""
    bars = [type(callback).__name__ for callback in callbacks if is_a(callback, "ProgressBar")]
    if len(bars) > 1:
        raise Misuse(
            "You added multiple progress bar callbacks to the Trainer, but currently only one progress bar is supported. Leave"
            f" one of {', '.join(bars)}"
        )
    savers = [type(callback).__name__ for callback in callbacks if is_a(callback, "Checkpoint")]
    for word, found in (("enable_progress_bar", bars), ("enable_checkpointing", savers)):
        if found and (getattr(config, word) is False or config.barebones):
            raise Misuse(
                f"FabricLoop was configured with `{word}=False` but found `{found[0]}` in callbacks list: leave one of"
                " them out"
            )


def _check_keys(callbacks: list[Any]) -> None:
    """Refuse two states under one key, which would be one in a checkpoint."""
    keys = set()
    for callback in callbacks:
        if overrides(callback, "state_dict") is None or not hasattr(callback, "state_key"):
            continue
        if callback.state_key in keys:
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}`. In the current configuration,"
                " this callback does not support being saved alongside other instances of the same type. Give them different"
                " arguments, or a `state_key` of their own"
            )
        keys.add(callback.state_key)


def in_order(callbacks: Iterable[Any]) -> list[Any]:
    """The callbacks as they are called: those that save checkpoints after the others, whose state they save."""
    return sorted(callbacks, key=lambda callback: is_a(callback, "Checkpoint"))


def add_callbacks(own: Any, callbacks: list[Any]) -> list[Any]:
    """The callbacks with those that a module's ``configure_callbacks`` returned in the place of those of their classes."""
    if not own:
        return callbacks
    own = listed(own)
    for callback in own:
        _check(callback)
    kinds = {base for callback in own for base in type(callback).__mro__ if base.__name__ != "Callback"}
    return in_order([callback for callback in callbacks if type(callback) not in kinds] + own)
