"""Save and restore the torchmetrics objects of a module, which their own state_dict leaves out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .log_arguments import is_torchmetric

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, torch.dtype)
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))


def find_torchmetrics(module: Any) -> dict[str, Any]:
    """Return the torchmetrics objects of a module by name."""
    named = module.named_modules() if hasattr(module, "named_modules") else ()
    return {name: part for name, part in named if name and is_torchmetric(part)}


def torchmetrics_state(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return copies of the metrics' plain attributes.

    The declared states are among them, and what wrappers and collections count beside these.
    """
    state = {}
    for name, metric in metrics.items():
        own = {k: v for k, v in vars(metric).items() if k not in _ATTRIBUTES_OF_MODULES}
        plain = {k: v for k, v in own.items() if _is_plain(v)}
        state[name] = apply_to_collection(plain, Tensor, _copy)
    return state


def load_torchmetrics(module: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the metrics of a module. The arguments of their constructors stay as they are now."""
    metrics = find_torchmetrics(module)
    for name, attributes in state.items():
        tracker: Any = metrics.get(name.rpartition(".")[0])
        if name not in metrics and hasattr(tracker, "increment"):
            # A MetricTracker has a metric for each call of increment().
            tracker.increment()
            metrics = find_torchmetrics(module)
        metric = metrics.get(name)
        if metric is None:
            continue
        arguments = inspect.signature(type(metric)).parameters
        for key, value in attributes.items():
            # Some metrics set an argument that was not given with their first batch.
            if key not in arguments or getattr(metric, key, None) is None:
                setattr(metric, key, apply_to_collection(value, Tensor, _copy))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _is_plain(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) reads a value back. Subclasses may be unsafe."""
    if type(value) is dict:
        return all(_is_plain(part) for part in [*value.keys(), *value.values()])
    if type(value) in (list, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, Tensor) or type(value) in _PLAIN_TYPES
