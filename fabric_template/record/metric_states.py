"""Metric states: what the torchmetrics objects of a module hold, for a checkpoint; wrappers and collections, too."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..files.errors import CheckpointError
from ..files.ordinary import tensors_in
from ..files.plain import is_plain
from .loggable import metrics_in

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class MetricStates:
    """The metrics of a module by name, and what of theirs a resume needs.

    That is the states that they declare, and any plain attribute that is no longer what it was as the run began: the
    extremes of a MinMaxMetric, the groups of a MetricCollection, the steps of a MetricTracker.

    Args:
        module: holds them; they are looked up again at each save, as a MetricTracker grows.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._as_found: dict[str, dict[str, Any]] = {}

    def note(self) -> None:
        """Note what they hold as the run begins."""
        self._as_found = {name: _held(part) for name, part in self.parts().items()}

    def parts(self) -> dict[str, Any]:
        """The metrics by name."""
        return metrics_in(self._module)

    def names(self) -> dict[int, str]:
        """The names by the metrics' ids."""
        return {id(part): name for name, part in self.parts().items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Copies of what they hold: torchmetrics leaves it out of its own state_dict."""
        states: dict[str, dict[str, Any]] = {}
        for name, part in self.parts().items():
            before, declared = self._as_found.get(name, {}), vars(part).get("_defaults", ())
            states[name] = {
                key: value
                for key, value in _held(part).items()
                if key in declared or key not in before or not _same(value, before[key])
            }
        return states

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        """Put it back into the metrics that are there; a MetricTracker makes its steps anew."""
        parts = self.parts()
        for name, state in states.items():
            tracker = parts.get(name.rpartition(".")[0])
            if name not in parts and callable(increment := getattr(tracker, "increment", None)):
                increment()
                parts = self.parts()
            for key, value in state.items() if name in parts else ():
                now = getattr(parts[name], key, None)  # of what is no plain attribute there, a file says nothing
                if not is_plain(now) or not _fits(now, value):
                    raise CheckpointError(
                        f"resume: the checkpoint's {name}.{key} does not fit {type(parts[name]).__name__}"
                    )
                setattr(parts[name], key, _copy(value, device))


def _fits(now: Any, value: Any) -> bool:
    """Whether a metric may have come from what it is now, as it is new, to this value."""
    if isinstance(now, Tensor) and isinstance(value, Tensor):  # some sums get their shape with the first batch
        same = value.shape == now.shape or now.numel() < 2
        return same and value.layout is torch.strided
    if isinstance(now, Tensor | list):  # batches one by one, or all as one
        parts = value if isinstance(value, list) else [value]
        return all(isinstance(part, Tensor) and part.layout is torch.strided for part in parts)
    return now is None or value is None or type(value) is type(now)


def _held(part: Any) -> dict[str, Any]:
    """Copies of a metric's plain attributes."""
    own = {key: value for key, value in vars(part).items() if key not in _OF_EVERY_MODULE}
    return {key: _copy(value) for key, value in own.items() if is_plain(value)}


def _copy(value: Any, device: torch.device | None = None) -> Any:
    """A value of its own, its tensors on the device, without their history."""
    memo = {id(part): part.detach().to(device or part.device, copy=True) for part in tensors_in(value)}
    return copy.deepcopy(value, memo)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    return numpy.array_equal(one, other) if isinstance(one, numpy.ndarray) else bool(one == other)
