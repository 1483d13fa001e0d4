"""What a module expects around it while it runs: ``self.trainer``, ``self.log``, as long as it runs.

Attached for a run, detached after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..record.metrics import Metrics

if TYPE_CHECKING:
    from ..core import services

_LOGS = ("log", "log_dict")
_LIGHTNING = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


def attach(owner: Any, loop: Any, metrics: services.Metrics, found: ExitStack, compiling: Any = None) -> None:
    """Give the module its log and its trainer, which stays after a run that went well so that its results can be read."""
    if isinstance(getattr(type(owner), "trainer", None), property):
        # its setter gives it to modules inside, too
        for part in owner.modules() if isinstance(owner, nn.Module) else ():
            if hasattr(part, "_trainer"):
                after_error(found, setattr, part, "_trainer", part._trainer)
        owner.trainer = loop
    attach_log(owner, metrics, found, compiling)


def after_error(found: ExitStack, give_back: Callable, *args: Any) -> None:
    """Note what gives back a thing that is about to change; after an error only."""
    found.push(lambda kind, *_: give_back(*args) if kind is not None else None)


def attach_log(part: Any, metrics: services.Metrics, found: ExitStack, compiling: Any = None) -> None:
    """Give a module or callback its log, until what was found is given back.

    ``log`` and ``log_dict`` stand in the object's own ``__dict__``, before Lightning's methods, which are many times
    slower. One that overrides them keeps its own, which may end in ``super().log``; a plain object gets them if it has none.
    """
    found.callback(_detach_log, vars(part), {name: vars(part)[name] for name in _LOGS if name in vars(part)})
    own_log = getattr(type(part), "log", None)
    is_overridden = own_log is not None and not _is_lightnings(own_log)  # then Lightning's log_dict stays: it calls log
    for name in _LOGS:
        own = getattr(type(part), name, None)
        has_own = name in vars(part) and not _is_ours(vars(part)[name])  # a plain object's
        if not has_own and (own is None or (_is_lightnings(own) and not is_overridden)):
            call = getattr(metrics, name)
            vars(part)[name] = call if compiling is None else compiling.left_alone(call)
    if is_overridden and any(_is_lightnings(vars(base).get("log")) for base in type(part).__mro__):
        vars(part)["log"] = partial(_overridden_log, part, metrics)


def _detach_log(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Take the log away again; a run around this one has its own."""
    for name in _LOGS:
        if _is_ours(attributes.get(name)):
            del attributes[name]
            attributes.update({name: before[name]} if name in before else {})


def _is_ours(log: Any) -> bool:
    log = getattr(log, "__wrapped__", log)  # what torch.compiler.disable was given
    return getattr(log, "func", None) is _overridden_log or isinstance(getattr(log, "__self__", None), Metrics)


def _is_lightnings(method: Any) -> bool:
    return getattr(method, "__module__", None) in _LIGHTNING


def _overridden_log(owner: Any, metrics: services.Metrics, *args: Any, **words: Any) -> None:
    """A module's own ``log``. Where it goes on to Lightning's, that one asks the module which hook runs (`ResultsView`)."""
    owner._current_fx_name = metrics.fx  # private, and the only place where Lightning looks for it
    type(owner).log(owner, *args, **words)
