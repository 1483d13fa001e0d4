"""Listeners: who has a hook, and what calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .overrides import class_of, overrides

_BY_STAGE = ("setup", "teardown")  # Trainer gives these their stage by name


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
        if method is not None and name in _BY_STAGE:
            method = _by_stage(method)
        return method and self.timed(method, f"[LightningModule]{class_of(self._module).__name__}.{name}")

    def of_callback(self, callback: Any, name: str) -> Callable | None:
        """A callback's hook; None if it has none."""
        method = overrides(callback, name)
        if method is None:
            return None
        from .called import called

        module = self._module if self._shown is None else self._shown(callback, self._trainer)
        key = getattr(callback, "state_key", type(callback).__name__)
        if (is_lightnings := hasattr(callback, "state_key")) and name in _BY_STAGE:
            method = _by_stage(method)
        return self.timed(called(method, name, is_lightnings, self._trainer, module), f"[Callback]{key}.{name}")


def _by_stage(method: Callable) -> Callable:
    def call(*args: Any) -> Any:
        return method(*args[:-1], stage=args[-1])

    return call
