"""What a module expects around it while it runs: ``self.trainer``, ``self.log``, the strategy it asks for.

Attached for a run, detached after it.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import torch

from .metrics import Metrics
from .update import clip_gradients

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


class StrategyFace:
    """Fabric's strategy in the words of Trainer's, for modules and callbacks."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    @property
    def _lightning_optimizers(self) -> list[Any]:
        run = self._loop._fitted
        return run.loop_optimizers if run is not None else []  # LightningModule.optimizers() asks by this name

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        return self._loop.fabric.device

    @property
    def precision_plugin(self) -> Any:
        """Fabric's precision, which clips beside, for LightningModule.clip_gradients."""
        face = copy(self._loop.fabric.strategy.precision)
        face.__class__ = _clipping(type(face))
        face._loop = self._loop
        return face

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self._loop.lightning_module

    @property
    def model(self) -> Any:
        """The module, or its wrapper."""
        return self._loop.model

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return self._loop.optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers with their intervals and monitors."""
        return self._loop.lr_scheduler_configs

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Backward with its hooks, for LightningModule.manual_backward."""
        run = self._loop._required("backward")
        run.update.backward(loss, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Reduce a tensor over all processes."""
        return self._loop.fabric.all_reduce(tensor, group=group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) processes say yes."""
        return self._loop.fabric.strategy.reduce_boolean_decision(decision, all=all)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint file, on rank zero."""
        if self._loop.fabric.is_global_zero:
            self._loop.fabric.strategy.checkpoint_io.remove_checkpoint(filepath)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loop" not in vars(self):  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(self._loop.fabric.strategy, name)


class _Clips:
    """What Trainer's precision can do and Fabric's cannot."""

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        """Clip, for LightningModule.clip_gradients."""
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)  # Lightning's enum, or its word
        clip_gradients(self._loop._run, optimizer, clip_val, algorithm)


@cache
def _clipping(kind: type) -> type:
    return type(kind.__name__, (_Clips, kind), {})
