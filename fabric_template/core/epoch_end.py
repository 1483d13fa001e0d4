"""EpochEnd: metrics of a whole validation or test, by a function of all that its step returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .errors import MisuseOfType


class EpochEnd:
    """What ``epoch_end=fn(model, outputs)`` is going to get, and what is logged of it.

    Outputs are what the step returned, by batch, on their device; of several loaders a list of such lists, or a dict of them
    under the names that the loaders were given.

    Example:
        >>> end = EpochEnd(lambda outputs: {"batches": len(outputs)}, loaders=1, names=[], prefix="val")
        >>> end.keep(0.5, 0); end.keep(0.7, 0); end.values()
        {'val_batches': 2}
    """

    def __init__(self, function: Callable[[Any], Any], loaders: int, names: list[str], prefix: str) -> None:
        self._function, self._names, self._prefix = function, names, prefix
        self._outputs: list[list[Any]] = [[] for _ in range(loaders)]

    def keep(self, output: Any, loader: int) -> None:
        """Keep what a step returned."""
        self._outputs[loader].append(output)

    def values(self) -> dict[str, Any]:
        """What the function says, under names like those of what a step returns: ``val_<key>``, or a loader's."""
        outputs: Any = self._outputs
        if self._names:
            outputs = dict(zip(self._names, self._outputs, strict=True))
        found = self._function(outputs[0] if len(self._outputs) == 1 and not self._names else outputs)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise MisuseOfType(
                f"epoch_end returned a {type(found).__name__}: expected a dict of numbers: write return {{'f1': f1}}"
            )
        known = tuple(f"{name}_" for name in (self._prefix, *self._names))
        return {name if name.startswith(known) else f"{self._prefix}_{name}": value for name, value in found.items()}


def check_epoch_end(function: Any) -> None:
    """Refuse what cannot be called with the model and the outputs."""
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # of a builtin: it is called as it is
        return
    except TypeError as error:
        raise MisuseOfType(
            f"epoch_end{inspect.signature(function)} cannot be called ({error}): expected epoch_end(model, outputs), which"
            " returns a dict of numbers; outputs is the list of what validation_step returned"
        ) from None
