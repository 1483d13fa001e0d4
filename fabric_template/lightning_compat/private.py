"""The underscored names of Lightning that this package reads or sets, each with its reason.

The names that Lightning reads from a Trainer are in trainer_api.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer


def wrap_optimizer(optimizer: Any, strategy: Any) -> LightningOptimizer:
    """Return an optimizer whose ``step`` goes through ``strategy.optimizer_step``.

    Trainer wraps optimizers so for manual optimization. The strategy has no public setter.
    """
    wrapped = LightningOptimizer(optimizer)
    wrapped._strategy = strategy
    return wrapped


def set_step_callback(optimizer: LightningOptimizer, callback: Callable[[], None]) -> None:
    """Call a function after each step of a wrapped optimizer.

    Trainer sets both names before each batch of manual optimization, and modules set them inside of one.
    """
    optimizer._on_before_step = _do_nothing
    optimizer._on_after_step = callback


def _do_nothing() -> None:
    pass


def set_current_hook(module: Any, hook: str | None) -> None:
    """Tell ``LightningModule.log`` from which hook it is called. It looks under this name only."""
    module._current_fx_name = hook


def hyperparameters_name(part: Any) -> str | None:
    """Return the argument that ``save_hyperparameters`` was given as one dict, for load_from_checkpoint."""
    return getattr(part, "_hparams_name", None)


def logs_hyperparameters(part: Any) -> bool:
    """Return whether ``save_hyperparameters(logger=True)`` was called."""
    return getattr(part, "_log_hyperparams", False)


def combined_mode(combined: Any) -> str:
    """Return the mode of a CombinedLoader, which decides how many batches it has."""
    return combined._mode


def set_profiled_module(profiler: Any, module: Any) -> None:
    """Set the module whose layers PyTorchProfiler names."""
    profiler._lightning_module = module


def last_checkpoints(callback: Any, trainer: Any) -> set[str]:
    """Return what ModelCheckpoint would resume for "last". It has no public way to ask."""
    return callback._find_last_checkpoints(trainer)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set what ``LightningModule.device_mesh`` returns, by which ``configure_model`` shards a module."""
    module._device_mesh = mesh


def has_communication_hook(strategy: Any) -> bool:
    """Return whether Trainer's DDPStrategy was given a ``ddp_comm_hook``, which Fabric's does not have."""
    return getattr(strategy, "_ddp_comm_hook", None) is not None


def saves_shards(strategy: Any) -> bool:
    """Return the argument ``save_distributed_checkpoint`` of a ModelParallelStrategy."""
    return getattr(strategy, "_save_distributed_checkpoint", True)
