"""Clipping: gradients that are limited, all together by their norm or each by its value."""

from __future__ import annotations

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch.optim import Optimizer

from .optimizing import unscales_itself
from .run import Run


def clip_gradients(run: Run, optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
    """Limit the gradients of an optimizer's parameters: all together ("norm", the default) or each ("value")."""
    if not value or value <= 0:
        return
    precision = run.fabric.strategy.precision
    if isinstance(precision, MixedPrecision) and unscales_itself(optimizer):
        raise RuntimeError(
            f"The current optimizer, {type(optimizer).__qualname__}, does not allow for gradient clipping because it"
            " performs unscaling of gradients internally. HINT: Are you using a 'fused' optimizer?"
        )
    parameters = precision.main_params(optimizer)
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    elif run.steps.sharded is not None:
        from .sharded import clip_norm

        clip_norm(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)
