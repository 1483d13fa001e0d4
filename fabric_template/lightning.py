"""What a module expects around it while it runs: ``self.trainer``, ``self.log``; attached for a run, detached after it."""

from __future__ import annotations

from typing import Any

from .metrics import Metrics

_LIGHTNING = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


class Log:
    """``self.log`` or ``self.log_dict``: a way into the run's metrics.

    It stands in the module's own ``__dict__``, before Lightning's method, which is many times slower. Copies of the
    module (EMA, pruning) share it instead of copying the run.
    """

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._call = getattr(metrics, name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Log:
        return self

    def __reduce__(self) -> tuple:
        return (_gone, ())


def _gone(*args: Any, **kwargs: Any) -> None:
    """What is left of self.log in a pickled module."""


def attach(owner: Any, loop: Any, metrics: Metrics, compiled: bool = False) -> None:
    """Give the module its trainer and its log.

    A module that overrides ``log`` itself keeps its own; a plain object gets ``log`` and ``log_dict`` if it has none.
    """
    if isinstance(getattr(type(owner), "trainer", None), property):
        owner.trainer = loop
    for name in ("log", "log_dict"):
        own = getattr(type(owner), name, None)
        if own is None or getattr(own, "__module__", None) in _LIGHTNING:
            call = Log(metrics, name)
            if compiled:
                import torch

                call = torch.compiler.disable(call.__call__)  # logging is Python's business, not the graph's
            vars(owner)[name] = call


def detach(owner: Any) -> None:
    """Take the log away again; the trainer stays, as with Trainer, so that its results can be read."""
    for name in ("log", "log_dict"):
        own = vars(owner).get(name)
        if isinstance(own, Log) or isinstance(getattr(own, "__self__", None), Log):
            del vars(owner)[name]
