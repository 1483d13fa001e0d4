"""Hooks: the calls of each, callbacks before the module.

Who overrides what is found once, when a run starts: a hook that nobody listens to costs a look into a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from .listeners import Listeners
from .overrides import is_a
from .telling import Telling


class Hooks:
    """Calls each hook's listeners.

    ``metrics`` is told which hook runs, as ``self.log`` depends on it; ``shown(callback, trainer)`` is what that callback gets
    in the module's place.

    Example:
        >>> class Print:
        ...     def on_train_epoch_end(self, module): print("epoch over", module)
        >>> Hooks(None, [Print()], module="net").call("on_train_epoch_end")
        epoch over net
    """

    def __init__(
        self, trainer: Any, callbacks: Iterable[Any], module: Any, metrics: Any = None, profiler: Any = None,
        shown: Callable[[Any, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.callbacks = Telling(callbacks, self._look_again)
        self._metrics, self.profiler = metrics or SimpleNamespace(fx=None), profiler
        self._who = Listeners(trainer, module, profiler, shown)
        self.timed, self.own = self._who.timed, self._who.own
        self._listeners: dict[str, tuple[list[Callable], Callable | None]] = {}
        self._unheard: set[str] = set()
        self.changed: Callable[[], Any] = bool  # whoever has asked who is heard asks again

    def call(self, name: str, *args: Any) -> Any:
        """Call the callbacks' hook, then the module's; returns what the module's returned."""
        if name in self._unheard:
            return None
        callbacks, own = self._listeners.get(name) or self._listen(name)
        metrics = self._metrics
        before, metrics.fx = metrics.fx, name
        for call in callbacks:
            call(*args)
        result = own(*args) if own is not None else None
        metrics.fx = before
        return result

    def named(self, name: str, method: Callable) -> Callable:
        """The same call, during which this hook runs; after an error it stays the one that runs."""
        metrics = self._metrics

        def call(*args: Any, **words: Any) -> Any:
            before, metrics.fx = metrics.fx, name
            result = method(*args, **words)
            metrics.fx = before
            return result

        return call

    def enter(self, name: str | None) -> str | None:
        """This hook runs now, or none; returns the one before."""
        before, self._metrics.fx = self._metrics.fx, name
        return before

    def caller(self, name: str) -> Callable | None:
        """What calls this hook's listeners, as they are now; None where there are none."""
        return partial(self.call, name) if self.heard(name) else None

    def call_epoch_end(self, name: str) -> None:
        """Call the module before the callbacks that monitor, so that they see what the module logs here."""
        monitors = [callback for callback in self.callbacks if is_a(callback, "EarlyStopping", "Checkpoint")]
        others = [callback for callback in self.callbacks if callback not in monitors]
        first, last = ([self._who.of_callback(callback, name) for callback in part] for part in (others, monitors))
        self._call(name, [*first, self._who.of_module(name), *last])

    def call_callbacks(self, name: str, *args: Any) -> None:
        """Call the callbacks' hook only."""
        callbacks, _ = self._listeners.get(name) or self._listen(name)
        self._call(name, callbacks, *args)

    def call_one(self, callback: Any, name: str, *args: Any) -> None:
        """Call one callback's hook only."""
        if call := self._who.of_callback(callback, name):
            call(*args)

    def call_module(self, name: str, *args: Any) -> Any:
        """Call the module's hook only."""
        _, own = self._listeners.get(name) or self._listen(name)
        return self._call(name, [own], *args)

    def _call(self, name: str, listeners: Sequence[Callable | None], *args: Any) -> Any:
        result, before = None, self.enter(name)
        for call in filter(None, listeners):
            result = call(*args)
        self.enter(before)
        return result

    def heard(self, name: str) -> bool:
        """Whether anybody listens to this hook."""
        if name not in self._listeners:
            self._listen(name)
        return name not in self._unheard

    def _look_again(self, before: list[Any]) -> None:
        """The callbacks have changed: one that is new at the end hears the hook that runs, too, as under Trainer."""
        size = len(before)
        if self.callbacks[:size] != before:
            self._listeners = {}
        for name, (callbacks, _) in self._listeners.items():
            callbacks += self._calls(self.callbacks[size:], name)
        self._unheard = {name for name, listeners in self._listeners.items() if listeners == ([], None)}
        self.changed()

    def _calls(self, callbacks: Iterable[Any], name: str) -> list[Callable]:
        return [call for callback in callbacks if (call := self._who.of_callback(callback, name))]

    def _listen(self, name: str) -> tuple[list[Callable], Callable | None]:
        self._listeners[name] = listeners = (self._calls(self.callbacks, name), self._who.of_module(name))
        if listeners == ([], None):
            self._unheard.add(name)
        return listeners
