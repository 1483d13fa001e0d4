"""Overrides: the hooks by name, in the order in which they fire; who has one of its own, and how it wants to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# In the order of a run. Callbacks get (trainer, module, *these); modules get these.
HOOKS: dict[str, tuple[str, ...]] = {
    "on_fit_start": (),
    "on_sanity_check_start": (),
    "on_sanity_check_end": (),
    "on_train_start": (),
    "on_train_epoch_start": (),
    "on_train_batch_start": ("batch", "batch_idx"),
    "on_before_zero_grad": ("optimizer",),
    "on_before_backward": ("loss",),
    "on_after_backward": (),
    "on_before_optimizer_step": ("optimizer",),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    "on_validation_start": (),
    "on_validation_epoch_start": (),
    "on_validation_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_validation_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_validation_epoch_end": (),
    "on_validation_end": (),
    "on_train_epoch_end": (),
    "on_train_end": (),
    "on_fit_end": (),
    "on_test_start": (),
    "on_test_epoch_start": (),
    "on_test_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_test_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_test_epoch_end": (),
    "on_test_end": (),
    "on_validation_model_eval": (),
    "on_validation_model_train": (),
    "on_test_model_eval": (),
    "on_test_model_train": (),
    "on_predict_model_eval": (),
    "on_predict_model_train": (),
    "on_predict_start": (),
    "on_predict_epoch_start": (),
    "on_predict_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_predict_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_predict_epoch_end": (),
    "on_predict_end": (),
    "setup": ("stage",),
    "teardown": ("stage",),
    "on_exception": ("exception",),
    "on_save_checkpoint": ("checkpoint",),
    "on_load_checkpoint": ("checkpoint",),
}

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

# The names by which a callback that is no Lightning's may ask for what comes first.
LOOPS, MODULES = ("trainer", "loop"), ("module", "model", "pl_module")

# Lightning's base classes define every hook, empty; a method that comes from one of these is not somebody's own.
_EMPTY = tuple(
    f"{package}.{room}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for room in ("callbacks.callback", "core.hooks", "core.module", "core.datamodule")
)


def overrides(owner: Any, name: str) -> Callable | None:
    """The owner's method of this name; None if it has none or only inherits an empty one from Lightning.

    Example:
        >>> class Mine:
        ...     def on_fit_start(self): ...
        >>> overrides(Mine(), "on_fit_start") is not None, overrides(Mine(), "on_fit_end")
        (True, None)
    """
    method = getattr(owner, name, None)
    if not callable(method):
        return None
    inherited = getattr(method, "__module__", None) in _EMPTY and name not in getattr(owner, "__dict__", ())
    return None if inherited else method


def is_a(callback: Any, *kinds: str) -> bool:
    """Whether a callback's class, or one of those it inherits from, has one of these names.

    By name: Lightning's callbacks come from `lightning.pytorch` or `pytorch_lightning`, and need not be imported.
    """
    return not {base.__name__ for base in type(callback).__mro__}.isdisjoint(kinds)


def keyword_names(method: Callable, hook: str) -> list[str] | None:
    """The arguments a callback's method asks for by name; None if it takes Trainer's by position, whatever their names.

    Raises:
        TypeError: it can be called in neither way.

    Example:
        >>> keyword_names(lambda loop, batch_idx: ..., "on_train_batch_start")
        ['loop', 'batch_idx']
        >>> keyword_names(lambda loop, net, batch, i: ..., "on_train_batch_start") is None
        True
    """
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    own = [p for p in signature.parameters.values() if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    names = [parameter.name for parameter in own]
    known = (*LOOPS, *MODULES, *HOOKS[hook])
    is_open = any(p.kind is kinds.VAR_POSITIONAL for p in signature.parameters.values())
    if not is_open and all(p.name in known or p.default is not kinds.empty for p in own) and names[:1] != ["trainer"]:
        return names
    try:
        signature.bind(*(None,) * (2 + len(HOOKS[hook])))
    except TypeError:
        if all(p.name in known or p.default is not kinds.empty for p in own):
            return names
        raise TypeError(
            f"a callback's {hook}{signature} cannot be called: expected"
            f" {hook}(self, {', '.join(('trainer', 'module', *HOOKS[hook]))}) under whatever names, or only some of these names"
        ) from None
    return None
