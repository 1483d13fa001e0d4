"""Loggable: what ``self.log`` takes, a number, a tensor of one element or a metric, and what it makes of it."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import Misuse


def check_loggable(name: str, value: Any) -> None:
    """Refuse what is neither a number, a tensor nor a metric."""
    if isinstance(value, Mapping):
        what = "nested dictionaries" if any(isinstance(part, Mapping) for part in value.values()) else "`dict` values"
        raise Misuse(f"`self.log({name}, {value})` was called, but {what} cannot be logged")
    if not (isinstance(value, Tensor | numbers.Number) or is_metric(value)):
        raise Misuse(f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged")


def is_metric(value: Any) -> bool:
    """Whether this is a torchmetrics object, or one of that shape."""
    return all(hasattr(value, name) for name in ("update", "compute", "reset")) and not isinstance(value, Mapping)


def metrics_in(module: Any) -> dict[str, Any]:
    """The metrics of a module by name."""
    named = module.named_modules() if hasattr(module, "named_modules") else ()
    return {name: part for name, part in named if name and is_metric(part)}


def of_one_element(name: str, value: Tensor) -> Tensor:
    """A tensor of one element without its dimensions."""
    if value.numel() != 1:
        raise Misuse(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    return value.squeeze()


def as_float(entry: Any, value: Tensor) -> Tensor:
    """An integer, or a narrow float, as what an entry sums it in."""
    if not value.is_floating_point() and not entry.live:
        warnings.warn(
            f"You called `self.log({entry.meta.name!r}, ...)` in your `{entry.meta.fx}` but the value needs to be"
            f" floating to be reduced. Converting it to {float_type()}. You can silence this warning by converting"
            " the value to floating point yourself. If you don't intend to reduce the value (for instance when logging the"
            f" global step or epoch) then you can use `self.logger.log_metrics({{'{entry.meta.name}': ...}})` instead.",
            stacklevel=4,
        )  # fmt: skip
    return value.to(float_type())


def float_type() -> torch.dtype:
    """The default dtype, but no narrower than float32, so that long sums stay exact enough."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32
