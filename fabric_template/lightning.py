"""What a module expects around it while it runs: ``self.trainer``, ``self.log``; attached for a run, detached after it."""

from __future__ import annotations

from typing import Any

import torch

from .metrics import Metrics

_LIGHTNING = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


def attach(owner: Any, loop: Any, metrics: Metrics, compiled: bool = False) -> None:
    """Give the module its trainer and its log.

    ``log`` and ``log_dict`` stand in the module's own ``__dict__``, before Lightning's methods, which are many times
    slower. A module that overrides them keeps its own; a plain object gets them if it has none.
    """
    if isinstance(getattr(type(owner), "trainer", None), property):
        owner.trainer = loop
    for name in ("log", "log_dict"):
        own = getattr(type(owner), name, None)
        if own is None or getattr(own, "__module__", None) in _LIGHTNING:
            call = getattr(metrics, name)
            # logging is Python's business, not the graph's
            vars(owner)[name] = torch.compiler.disable(call) if compiled else call


def detach(owner: Any, metrics: Metrics) -> None:
    """Take the log away again; the trainer stays, as with Trainer, so that its results can be read."""
    for name in ("log", "log_dict"):
        own = vars(owner).get(name)
        if own is not None and (own == getattr(metrics, name) or hasattr(own, "_torchdynamo_orig_callable")):
            del vars(owner)[name]
