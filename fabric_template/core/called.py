"""Called: how a callback's hook wants to be called: with Trainer's arguments, or with what it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .overrides import HOOKS

# The names by which a callback that is no Lightning's may ask for what comes first.
LOOPS, MODULES = ("trainer", "loop"), ("module", "model", "pl_module")


def called(method: Callable, hook: str, is_lightnings: bool, trainer: Any, module: Any) -> Callable:
    """What calls a callback's method with the hook's own arguments: behind Trainer's first two, or with those that it names."""
    wanted = None if is_lightnings else keyword_names(method, hook)
    if wanted is None:  # Trainer's way: everything, by position

        def positional(*args: Any) -> Any:
            return method(trainer, module, *args)

        return positional

    def by_keyword(*args: Any) -> Any:  # Fabric's way: what the method names
        known = dict.fromkeys(LOOPS, trainer) | dict.fromkeys(MODULES, module)
        known |= dict(zip(HOOKS[hook], args, strict=False))
        return method(**{word: known[word] for word in wanted if word in known})

    return by_keyword


def keyword_names(method: Callable, hook: str) -> list[str] | None:
    """The arguments a callback's method asks for by name; None if it takes Trainer's by position, whatever their names.

    Raises:
        TypeError: it can be called in neither way.

    Example:
        >>> keyword_names(lambda loop, batch_idx: ..., "on_train_batch_start")
        ['loop', 'batch_idx']
        >>> keyword_names(lambda loop, net, batch, i: ..., "on_train_batch_start") is None
        True
    """
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    own = [p for p in signature.parameters.values() if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    names = [parameter.name for parameter in own]
    known = (*LOOPS, *MODULES, *HOOKS[hook])
    is_open = any(p.kind is kinds.VAR_POSITIONAL for p in signature.parameters.values())
    all_known = all(p.name in known or p.default is not kinds.empty for p in own)
    if all_known and not is_open and names[:1] != ["trainer"]:
        return names
    try:
        signature.bind(*(None,) * (2 + len(HOOKS[hook])))
    except TypeError:
        if all_known:
            return names
        raise TypeError(
            f"a callback's {hook}{signature} cannot be called: expected"
            f" {hook}(self, {', '.join(('trainer', 'module', *HOOKS[hook]))}) under whatever names, or only some of these names"
        ) from None
    return None
