"""Call the hooks of callbacks, module and datamodule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

# Lightning's base classes define every hook with an empty body. A method that was inherited from one
# of these modules is not overridden.
_EMPTY_HOOKS = tuple(
    f"{package}.{module}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module in ("callbacks.callback", "core.hooks", "core.module", "core.datamodule")
)

_LOOP_NAMES = ("loop", "trainer")
_MODULE_NAMES = ("module", "model", "pl_module")
_EVALUATION_BATCH = ("batch", "batch_idx", "dataloader_idx")
HOOK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "on_train_batch_start": ("batch", "batch_idx"),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    "on_before_zero_grad": ("optimizer",),
    "on_before_backward": ("loss",),
    "on_before_optimizer_step": ("optimizer",),
    "setup": ("stage",),
    "teardown": ("stage",),
    "on_exception": ("exception",),
    "on_save_checkpoint": ("checkpoint",),
    "on_load_checkpoint": ("checkpoint",),
    **{f"on_{stage}_batch_start": _EVALUATION_BATCH for stage in ("validation", "test", "predict")},
    **{
        f"on_{stage}_batch_end": ("outputs", *_EVALUATION_BATCH)
        for stage in ("validation", "test", "predict")
    },
}
OTHER_HOOKS = (
    *(
        "on_fit_start",
        "on_fit_end",
        "on_sanity_check_start",
        "on_sanity_check_end",
        "on_train_start",
    ),
    *("on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_after_backward"),
    *(
        f"on_{stage}_{moment}"
        for stage in ("validation", "test", "predict")
        for moment in ("start", "epoch_start", "epoch_end", "end", "model_eval", "model_train")
    ),
)


def overridden(part: Any, name: str) -> Callable | None:
    """Return the method of this name, or None if the part has none or only Lightning's empty one.

    Example:
        >>> class Mine:
        ...     def on_fit_start(self): ...
        >>> overridden(Mine(), "on_fit_start") is not None, overridden(Mine(), "on_fit_end")
        (True, None)
    """
    method = getattr(part, name, None)
    if not callable(method):
        return None
    is_inherited = getattr(method, "__module__", None) in _EMPTY_HOOKS
    return None if is_inherited and name not in getattr(part, "__dict__", ()) else method


def is_instance_of(part: Any, *class_names: str) -> bool:
    """Return whether a part's class, or one of its bases, has one of these names.

    Lightning's classes exist twice, in ``lightning.pytorch`` and in ``pytorch_lightning``.
    """
    return any(base.__name__ in class_names for base in type(part).__mro__)


def is_monitor(callback: Any) -> bool:
    """Return whether a callback is called after the others at the end of an epoch."""
    return is_instance_of(callback, "EarlyStopping", "Checkpoint")


class Hooks:
    """Calls each hook of the callbacks first, then of the module, as Trainer does.

    Which parts override a hook is looked up at its first call. A hook that nothing overrides costs
    one dictionary lookup afterwards.

    Args:
        loop: What callbacks get as their trainer.
        callbacks: The list of callbacks, in the order of their calls.
        source: The object whose methods are the module's hooks.
        module_for: Returns what a callback gets as its module.
        profiler: A profiler of Lightning, or None.
    """

    def __init__(
        self,
        loop: Any,
        callbacks: Iterable[Any],
        source: Any,
        module_for: Callable[[Any], Any],
        profiler: Any = None,
    ) -> None:
        self.loop, self.source, self.profiler = loop, source, profiler
        self._module_for = module_for
        self.callbacks = CallbackList(callbacks, self.reset_cache)
        self.current: str | None = None
        self._cache: dict[str, tuple[list[Callable], Callable | None]] = {}
        self._not_overridden: set[str] = set()

    def reset_cache(self) -> None:
        """Look the overridden hooks up again, because the callbacks have changed."""
        self._cache.clear()
        self._not_overridden.clear()

    def call(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks, then of the module. Returns what the module returned."""
        if name in self._not_overridden:
            return None
        of_callbacks, of_module = self._cache.get(name) or self._find(name)
        previous, self.current = self.current, name
        num_callbacks = len(self.callbacks)
        for method in of_callbacks:
            method(*args)
        if len(self.callbacks) > num_callbacks:
            self._call_each(self.callbacks[num_callbacks:], name, *args)
        result = of_module(*args) if of_module is not None else None
        self.current = previous
        return result

    def call_callbacks(self, name: str, *args: Any, only_monitors: bool | None = None) -> None:
        """Call a hook of the callbacks only.

        Args:
            only_monitors: True: of early stopping and checkpoint callbacks; False: of the others.
        """
        previous, self.current = self.current, name
        called = list(self.callbacks)
        if only_monitors is not None:
            called = [c for c in called if is_monitor(c) == only_monitors]
        num_callbacks = len(self.callbacks)
        self._call_each(called, name, *args)
        self._call_each(self.callbacks[num_callbacks:], name, *args)
        self.current = previous

    def _call_each(self, callbacks: list[Any], name: str, *args: Any) -> None:
        """Call a hook of these callbacks. A hook may append others, which hear of the same hook."""
        for callback in callbacks:
            method = self._callback_method(callback, name)
            if method is not None:
                method(*args)

    def call_callback(self, callback: Any, name: str, *args: Any) -> None:
        """Call a hook of one callback."""
        previous, self.current = self.current, name
        self._call_each([callback], name, *args)
        self.current = previous

    def call_module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the module only."""
        method = self.module_method(name)
        if method is None:
            return None
        previous, self.current = self.current, name
        result = method(*args, **kwargs)
        self.current = previous
        return result

    def call_with_stage(self, name: str, stage: str, datamodule: Any) -> None:
        """Call ``setup`` or ``teardown`` of the datamodule, the callbacks and the module."""
        self.call_datamodule(datamodule, name, stage=stage)
        self.call_callbacks(name, stage)
        self.call_module(name, stage=stage)

    def call_datamodule(self, datamodule: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the datamodule, if there is one."""
        method = getattr(datamodule, name, None)
        if not callable(method):
            return None
        with self.profiled(f"[LightningDataModule]{type(datamodule).__name__}.{name}"):
            return method(*args, **kwargs)

    def is_used(self, name: str) -> bool:
        """Return whether any callback or the module overrides a hook."""
        if name not in self._cache:
            self._find(name)
        return name not in self._not_overridden

    def is_overridden(self, name: str) -> bool:
        """Return whether the module overrides a method."""
        return overridden(self.source, name) is not None

    def module_method(self, name: str) -> Callable | None:
        """Return the module's own method of this name, or None if it has none."""
        method = overridden(self.source, name)
        if method is None or self.profiler is None:
            return method
        return self._with_profiler(f"[LightningModule]{type(self.source).__name__}.{name}", method)

    def inside(self, name: str, method: Callable) -> Callable:
        """Return the method with the current hook set, which ``self.log`` asks for."""

        def call(*args: Any, **kwargs: Any) -> Any:
            previous, self.current = self.current, name
            result = method(*args, **kwargs)
            self.current = previous
            return result

        return call

    def profiled(self, action: str) -> Any:
        """Return a context manager in which the profiler measures this action."""
        return nullcontext() if self.profiler is None else self.profiler.profile(action)

    def with_profiler(self, action: str, method: Callable) -> Callable:
        """Return the method, measured by the profiler if there is one."""
        return method if self.profiler is None else self._with_profiler(action, method)

    def _with_profiler(self, action: str, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.profiler.profile(action):
                return method(*args, **kwargs)

        return call

    def _find(self, name: str) -> tuple[list[Callable], Callable | None]:
        found = [self._callback_method(callback, name) for callback in self.callbacks]
        entry = ([method for method in found if method is not None], self.module_method(name))
        self._cache[name] = entry
        if entry == ([], None):
            self._not_overridden.add(name)
        return entry

    def _callback_method(self, callback: Any, name: str) -> Callable | None:
        """Return a callback's hook with the trainer and the module filled in."""
        method = overridden(callback, name)
        if method is None:
            return None
        module = self._module_for(callback)
        call = bind_callback_hook(method, name, self.loop, module, hasattr(callback, "state_key"))
        if self.profiler is None:
            return call
        key = getattr(callback, "state_key", type(callback).__qualname__)
        return self._with_profiler(f"[Callback]{key}.{name}", call)


def bind_callback_hook(
    method: Callable, name: str, loop: Any, module: Any, is_lightning_callback: bool
) -> Callable:
    """Return a callback's hook as a function of the hook's own arguments.

    Lightning's callbacks get ``(trainer, module, *arguments)`` by position. A plain object may name
    only what it needs: ``on_train_batch_start(self, loop, batch_idx)``.
    """
    names = None if is_lightning_callback else _named_arguments(method, name)

    def call_by_position(*args: Any) -> Any:
        if is_lightning_callback and name in ("setup", "teardown"):
            return method(loop, module, stage=args[0])
        return method(loop, module, *args)

    def call_by_name(*args: Any) -> Any:
        known = dict.fromkeys(_LOOP_NAMES, loop) | dict.fromkeys(_MODULE_NAMES, module)
        known |= dict(zip(HOOK_ARGUMENTS.get(name, ()), args, strict=False))
        return method(**{key: known[key] for key in names or () if key in known})

    return call_by_position if names is None else call_by_name


def _named_arguments(method: Callable, name: str) -> list[str] | None:
    """Return the arguments that a plain callback asks for by name; None for Trainer's order."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    names = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    ]
    known = {*_LOOP_NAMES, *_MODULE_NAMES, *HOOK_ARGUMENTS.get(name, ())}
    is_known = all(p.name in known or p.default is not p.empty for p in parameters)
    return names if is_known and names[:1] != ["trainer"] else None


class CallbackList(list):
    """A list that reports when a callback is added or removed while a run is on."""

    def __init__(self, callbacks: Iterable[Any], on_change: Callable[[], None]) -> None:
        super().__init__(callbacks)
        self._on_change = on_change

    def append(self, callback: Any) -> None:
        super().append(callback)
        self._on_change()

    def extend(self, callbacks: Iterable[Any]) -> None:
        super().extend(callbacks)
        self._on_change()

    def insert(self, index: Any, callback: Any) -> None:
        super().insert(index, callback)
        self._on_change()

    def remove(self, callback: Any) -> None:
        super().remove(callback)
        self._on_change()

    def pop(self, index: Any = -1) -> Any:
        callback = super().pop(index)
        self._on_change()
        return callback

    def clear(self) -> None:
        super().clear()
        self._on_change()

    def reverse(self) -> None:
        super().reverse()
        self._on_change()

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        super().sort(key=key, reverse=reverse)
        self._on_change()

    def __iadd__(self, callbacks: Iterable[Any]) -> CallbackList:  # type: ignore[misc]
        self.extend(callbacks)
        return self

    def __setitem__(self, index: Any, callback: Any) -> None:
        super().__setitem__(index, callback)
        self._on_change()

    def __delitem__(self, index: Any) -> None:
        super().__delitem__(index)
        self._on_change()
