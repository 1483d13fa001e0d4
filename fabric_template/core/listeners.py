"""Listeners: who has a hook, and how each wants to be called: with Trainer's arguments, or with what it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .overrides import HOOKS, class_of, overrides

# The names by which a callback that is no Lightning's may ask for what comes first.
LOOPS, MODULES = ("trainer", "loop"), ("module", "model", "pl_module")

_BY_KEYWORD = ("setup", "teardown")  # Trainer gives these their stage by name


class Listeners:
    """The hooks of one run's module, callbacks and datamodule, under its profiler if there is one."""

    def __init__(
        self, trainer: Any, module: Any, profiler: Any = None, shown: Callable[[Any, Any], Any] | None = None
    ) -> None:
        self._trainer, self._module, self._profiler, self._shown = trainer, module, profiler, shown

    def timed(self, call: Callable, action: str) -> Callable:
        """The same call under the profiler, if there is one."""
        if self._profiler is None:
            return call

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._profiler.profile(action):
                return call(*args, **kwargs)

        return timed

    def own(self, part: Any, name: str) -> Callable | None:
        """The module's or a datamodule's own method of this name, timed like a hook; None if it has none."""
        method = overrides(part, name)
        kind = "LightningModule" if part is self._module else "LightningDataModule"
        return method and self.timed(method, f"[{kind}]{type(part).__name__}.{name}")

    def of_module(self, name: str) -> Callable | None:
        """The module's hook; None if it has none."""
        method = overrides(self._module, name)
        if method is not None and name in _BY_KEYWORD:
            method = _by_stage(method)
        return method and self.timed(method, f"[LightningModule]{class_of(self._module).__name__}.{name}")

    def of_callback(self, callback: Any, name: str) -> Callable | None:
        """A callback's hook: with Trainer's arguments, or with those that it names; None if it has none."""
        method = overrides(callback, name)
        if method is None:
            return None
        key = getattr(callback, "state_key", type(callback).__name__)
        is_lightnings = hasattr(callback, "state_key")
        wanted = None if is_lightnings else keyword_names(method, name)
        trainer, module = self._trainer, self._shown(callback, self._trainer) if self._shown else self._module
        if wanted is None:  # Trainer's way: everything, by position
            if name in _BY_KEYWORD and is_lightnings:
                method = _by_stage(method)

            def positional(*args: Any) -> Any:
                return method(trainer, module, *args)

            return self.timed(positional, f"[Callback]{key}.{name}")

        def by_keyword(*args: Any) -> Any:  # Fabric's way: what the method names
            known = dict.fromkeys(LOOPS, trainer) | dict.fromkeys(MODULES, module)
            known |= dict(zip(HOOKS[name], args, strict=False))
            return method(**{word: known[word] for word in wanted if word in known})

        return self.timed(by_keyword, f"[Callback]{key}.{name}")


def _by_stage(method: Callable) -> Callable:
    def call(*args: Any) -> Any:
        return method(*args[:-1], stage=args[-1])

    return call


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
    if not is_open and all(p.name in known or p.default is not kinds.empty for p in own) and names[:1] != ["trainer"]:
        return names
    try:
        signature.bind(*(None,) * (2 + len(HOOKS[hook])))
    except TypeError:
        if all(p.name in known or p.default is not kinds.empty for p in own):
            return names
        raise TypeError(
            f"a callback's {hook}{signature} cannot be called: expected"
            f" {hook}(self, {', '.join(('trainer', 'module', *HOOKS[hook]))}) under whatever names, or only some of these names"
        ) from None
    return None
