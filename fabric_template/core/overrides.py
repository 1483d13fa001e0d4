"""Overrides: the hooks by name, in the order in which they fire; who has one of its own."""

from __future__ import annotations

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


def class_of(part: Any) -> type:
    """The class that a user knows an object by; fully_shard gives a module one of its own, FSDPLinear in Linear's place."""
    kind = type(part)
    return kind.__bases__[-1] if kind.__name__.startswith("FSDP") and is_a(part, "FSDPModule") else kind


def is_a(callback: Any, *kinds: str) -> bool:
    """Whether a callback's class, or one of those it inherits from, has one of these names.

    By name: Lightning's callbacks come from `lightning.pytorch` or `pytorch_lightning`, and need not be imported.
    """
    return not {base.__name__ for base in type(callback).__mro__}.isdisjoint(kinds)
