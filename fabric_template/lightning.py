"""What a module expects around it while it runs: ``self.trainer``, ``self.log``, as long as it runs.

Attached for a run, detached after it.
"""

from __future__ import annotations

from typing import Any

import torch

from .metrics import Metrics

_LIGHTNING = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


def attach(owner: Any, loop: Any, metrics: Metrics, compiled: bool = False) -> None:
    """Give the module its trainer, which stays after the run so that its results can be read, and its log."""
    if isinstance(getattr(type(owner), "trainer", None), property):
        owner.trainer = loop
    attach_log(owner, metrics, compiled)


def attach_log(part: Any, metrics: Metrics, compiled: bool = False) -> None:
    """Give a module or callback its log.

    ``log`` and ``log_dict`` stand in the object's own ``__dict__``, before Lightning's methods, which are many times
    slower. One that overrides them keeps its own, which may end in ``super().log``; a plain object gets them if it has none.
    """
    own_log = getattr(type(part), "log", None)
    is_overridden = own_log is not None and not _is_lightnings(own_log)  # then Lightning's log_dict stays: it calls log
    for name in ("log", "log_dict"):
        own = getattr(type(part), name, None)
        if own is None or (_is_lightnings(own) and not is_overridden):
            call = getattr(metrics, name)
            # logging is Python's business, not the graph's
            vars(part)[name] = torch.compiler.disable(call) if compiled else call
    if is_overridden and any(_is_lightnings(vars(base).get("log")) for base in type(part).__mro__):
        vars(part)["log"] = OverriddenLog(part, metrics)


def detach_log(part: Any, metrics: Metrics) -> None:
    """Take the log away again."""
    for name in ("log", "log_dict"):
        own = getattr(part, "__dict__", {}).get(name)
        own = getattr(own, "__wrapped__", own)  # what torch.compiler.disable was given
        if own == getattr(metrics, name) or isinstance(own, OverriddenLog):
            del vars(part)[name]


def _is_lightnings(method: Any) -> bool:
    return getattr(method, "__module__", None) in _LIGHTNING


class OverriddenLog:
    """A module's own ``log``. Where it goes on to Lightning's, that one asks the module which hook runs (`ResultsView`)."""

    def __init__(self, owner: Any, metrics: Metrics) -> None:
        self.owner, self.metrics = owner, metrics

    def __call__(self, *args: Any, **words: Any) -> None:
        """Log, from the hook that runs now."""
        self.owner._current_fx_name = self.metrics.fx  # private, and the only place where Lightning looks for it
        type(self.owner).log(self.owner, *args, **words)
