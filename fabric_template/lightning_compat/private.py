"""Read and set private attributes of Lightning's objects.

The trainer_api.py module defines the private attributes that Lightning reads from a Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer


class OptimizerOfLoop(LightningOptimizer):
    """Blocks gradient synchronization in ``toggle_model(sync_grad=False)``.

    LightningOptimizer does this only for subclasses of Trainer's ParallelStrategy.
    """

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        strategy: Any = self._strategy
        with nullcontext() if sync_grad else strategy.block_backward_sync(), super().toggle_model():
            yield


def wrap_optimizer(optimizer: Any, strategy: Any) -> LightningOptimizer:
    """Return a LightningOptimizer whose ``step`` calls ``strategy.optimizer_step``."""
    wrapped = OptimizerOfLoop(optimizer)
    wrapped._strategy = strategy
    return wrapped


def set_step_callback(optimizer: LightningOptimizer, callback: Callable[[], None]) -> None:
    """Register a function that the optimizer calls after each step."""
    optimizer._on_after_step = callback


def set_current_hook(module: Any, hook: str | None) -> None:
    """Store the name of the running hook, which LightningModule.log reads."""
    module._current_fx_name = hook


def hyperparameters_name(part: Any) -> str | None:
    """Return the name of the __init__ argument that holds hyperparameters, such as "hparams"."""
    return getattr(part, "_hparams_name", None)


def logs_hyperparameters(part: Any) -> bool:
    """Return whether an object has called ``save_hyperparameters(logger=True)``."""
    return getattr(part, "_log_hyperparams", False)


def combined_mode(combined: Any) -> str:
    """Return the mode of a CombinedLoader, such as "max_size_cycle"."""
    return combined._mode


def set_profiled_module(profiler: Any, module: Any) -> None:
    """Set the module for PyTorchProfiler's ``record_module_names`` option."""
    profiler._lightning_module = module


def last_checkpoints(callback: Any, trainer: Any) -> set[str]:
    """Return the paths that a ModelCheckpoint finds for ckpt_path="last"."""
    return callback._find_last_checkpoints(trainer)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set ``LightningModule.device_mesh``, which ``configure_model`` uses to shard the module."""
    module._device_mesh = mesh


def has_communication_hook(strategy: Any) -> bool:
    """Return whether a DDPStrategy has a ``ddp_comm_hook``, which Fabric does not support."""
    return getattr(strategy, "_ddp_comm_hook", None) is not None


def saves_shards(strategy: Any) -> bool:
    """Return whether a ModelParallelStrategy was created with save_distributed_checkpoint=True."""
    return getattr(strategy, "_save_distributed_checkpoint", True)
