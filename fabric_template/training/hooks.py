"""Call the hooks of the callbacks, the module and the datamodule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn

from ..lightning_compat.overrides import (
    CALLBACK_MODULES,
    find_callbacks,
    is_instance_of,
    overridden,
)


class Hooks:
    """Like Trainer, calls each hook on the callbacks first and then on the module.

    For speed, Hooks remembers which methods override a hook until the list of callbacks changes.

    Args:
        loop: The FabricLoop, which callbacks get as the ``trainer`` argument.
        module: The LightningModule or ModuleAdapter of the run.
        model: The model passed to the loop. Lightning's own callbacks get ``module`` as their
            ``pl_module`` argument, and all other callbacks get ``model``.
        datamodule: The datamodule of the run, or None.

    Attributes:
        profiler: The loop's profiler, or None if it is a PassThroughProfiler, which does nothing.
        current: The name of the running hook or step, which determines the defaults of
            ``self.log``.
    """

    def __init__(self, loop: Any, module: Any, model: Any, datamodule: Any) -> None:
        self.loop, self.module, self.model, self.datamodule = loop, module, model, datamodule
        is_measuring = not isinstance(loop.profiler, PassThroughProfiler)
        self.profiler: Any = loop.profiler if is_measuring else None
        self.current: str | None = None
        self._known_callbacks: list[Any] = []
        self._methods: dict[str, tuple[list[Callable], Callable | None]] = {}

    @property
    def callbacks(self) -> list[Any]:
        """The loop's current callbacks, in the order in which their hooks are called."""
        return self.loop.callbacks

    def call(self, name: str, *args: Any) -> Any:
        """Call a hook on the callbacks and the module, and return the module's result."""
        callbacks = self.loop.callbacks
        if callbacks != self._known_callbacks:
            self._known_callbacks = list(callbacks)
            self._methods.clear()
        if name not in self._methods:
            found = [self._callback_method(callback, name) for callback in callbacks]
            callback_methods = [method for method in found if method is not None]
            self._methods[name] = (callback_methods, self.module_method(name))
        callback_methods, module_method = self._methods[name]
        if callback_methods:
            previous, self.current = self.current, name
            for method in callback_methods:
                method(*args)
            self.current = previous
        return None if module_method is None else module_method(*args)

    def is_used(self, name: str) -> bool:
        """Return whether the module or a callback overrides a hook, or True if this is unknown."""
        # The first call to a hook looks up the methods that override it. Before, they are unknown.
        is_known = self.callbacks == self._known_callbacks and name in self._methods
        return not is_known or self._methods[name] != ([], None)

    def call_callbacks(
        self, name: str, *args: Any, callbacks: list[Any] | None = None, **kwargs: Any
    ) -> None:
        """Call a hook on the callbacks, including callbacks that are added during the call.

        Args:
            callbacks: The callbacks to call. If None, call all callbacks.
        """
        previous, self.current = self.current, name
        for callback in self.callbacks if callbacks is None else callbacks:
            method = self._callback_method(callback, name)
            if method is not None:
                method(*args, **kwargs)
        self.current = previous

    def call_train_epoch_end(self) -> None:
        """Call ``on_train_epoch_end``, with EarlyStopping and checkpoint callbacks last."""
        name, callbacks = "on_train_epoch_end", list(self.callbacks)
        # Call EarlyStopping and checkpoint callbacks after the module, because the module may log
        # the metric that they monitor.
        monitors = [c for c in callbacks if is_instance_of(c, "EarlyStopping", "Checkpoint")]
        self.call_callbacks(name, callbacks=[c for c in callbacks if c not in monitors])
        self.call_module(name)
        self.call_callbacks(name, callbacks=monitors)

    def call_module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = self.module_method(name)
        return None if method is None else method(*args, **kwargs)

    def callbacks_of(self, kind: str) -> list[Any]:
        return find_callbacks(self.callbacks, kind)

    def call_datamodule(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.datamodule, name, None)
        if not callable(method):
            return None
        action = f"[LightningDataModule]{type(self.datamodule).__name__}.{name}"
        return self.inside(name, self.with_profiler(action, method))(*args, **kwargs)

    def call_with_stage(self, name: str, stage: str) -> None:
        """Call ``setup`` or ``teardown`` on the datamodule, the callbacks and the module."""
        function = TrainerFn(stage)
        self.call_datamodule(name, stage=function)
        self.call_callbacks(name, stage=function)
        self.call_module(name, stage=function)

    def is_overridden(self, name: str) -> bool:
        return overridden(self.module, name) is not None

    def module_method(self, name: str, is_profiled: bool = True) -> Callable | None:
        """Return the module's method for a hook, or None if the module does not override it."""
        method = overridden(self.module, name)
        if method is None:
            return None
        if is_profiled:
            method = self.with_profiler(
                f"[LightningModule]{type(self.module).__name__}.{name}", method
            )
        return self.inside(name, method)

    def _callback_method(self, callback: Any, name: str) -> Callable | None:
        """Return a callback's hook with its trainer and pl_module arguments already bound."""
        method = overridden(callback, name)
        if method is None:
            return None
        key = getattr(callback, "state_key", type(callback).__qualname__)
        call = partial(method, self.loop, self._module_for(callback))
        return self.with_profiler(f"[Callback]{key}.{name}", call)

    def _module_for(self, callback: Any) -> Any:
        """Return the object that a callback's hooks get as the ``pl_module`` argument."""
        bases = [base for base in type(callback).__mro__ if base.__name__ != "Callback"]
        is_lightnings = any(base.__module__.startswith(CALLBACK_MODULES) for base in bases)
        return self.module if is_lightnings else self.model

    def leave(self) -> None:
        """After an error in a hook, record that no hook is running."""
        self.current = None

    def inside(self, name: str, method: Callable) -> Callable:
        """Wrap a method so that ``Hooks.current`` is ``name`` while the method runs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            previous, self.current = self.current, name
            result = method(*args, **kwargs)
            self.current = previous
            return result

        return call

    def profiled(self, action: str) -> Any:
        return nullcontext() if self.profiler is None else self.profiler.profile(action)

    def with_profiler(self, action: str, method: Callable) -> Callable:
        """Wrap a method so that the profiler, if there is one, measures its time."""
        if self.profiler is None:
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.profiler.profile(action):
                return method(*args, **kwargs)

        return call
