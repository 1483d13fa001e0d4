"""Set up, log, save and load in a loop of your own (level 1 of FabricLoop)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .data.tensor_loader import TensorLoader
from .distributed.launch import join_processes
from .errors import ConfigurationError, ConfigurationTypeError, describe
from .loggers.csv_logger import to_cell

if TYPE_CHECKING:
    from .training.run_state import RunState

# Columns of a row that are not metrics.
_COORDINATES = ("epoch", "step")


def check_type(method: str, value: Any, kind: Any, expected: str) -> None:
    """Refuse an argument of the wrong type. The message shows the right call."""
    if not isinstance(value, kind):
        raise ConfigurationTypeError(f"loop.{method}: got {describe(value)}, expected {expected}.")


def needs_no_wrapper(fabric: Fabric) -> bool:
    """Return whether Fabric's wrappers would do nothing, as on one device in float32."""
    strategy = fabric.strategy
    return type(strategy) is SingleDeviceStrategy and type(strategy.precision) is Precision


def setup_parts(fabric: Fabric, model: nn.Module, optimizer: Any, loaders: tuple[Any, ...]) -> Any:
    """Return model, optimizer and loaders, prepared for the device, the precision and the strategy."""
    expected = "loop.setup(model, optimizer, *loaders)"
    check_type("setup", model, nn.Module, f"an nn.Module: {expected}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        check_type("setup", optimizer, Optimizer, f"an optimizer: {expected}")
    join_processes(fabric)
    given: list[Any] = [model] if optimizer is None else [model, optimizer]
    prepared: Any = fabric.setup(*given)
    if needs_no_wrapper(fabric):
        parts: list[Any] = given
    else:
        parts = [prepared] if optimizer is None else list(prepared)
    parts += [_setup_loader(fabric, loader) for loader in loaders]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _setup_loader(fabric: Fabric, loader: Any) -> Any:
    if isinstance(loader, DataLoader):
        return fabric.setup_dataloaders(loader)
    if not isinstance(loader, TensorLoader):
        return loader
    loader = loader.to(fabric.device)
    if fabric.world_size == 1:
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    return loader.for_rank(fabric.global_rank, fabric.world_size, seed=seed)


def to_scalars(fabric: Fabric, metrics: Mapping[str, Any], sync_dist: bool) -> dict[str, Any]:
    """Return metrics as numbers. With ``sync_dist``, return their means over the processes."""
    expected = "a dict of numbers: loop.log_dict({'epoch': 0, 'train_loss': loss})"
    check_type("log_dict", metrics, Mapping, expected)
    scalars = {name: to_cell(name, value) for name, value in metrics.items()}
    measured = [name for name in scalars if name not in _COORDINATES]
    if sync_dist and fabric.world_size > 1 and measured:
        values = [float(scalars[name]) for name in measured]
        own = torch.tensor(values, dtype=torch.float64, device=fabric.device)
        means: Any = fabric.all_reduce(own)
        scalars.update(zip(measured, means.tolist(), strict=True))
    return scalars


def log_in_run(run: RunState, scalars: dict[str, Any], step: int | None) -> None:
    """Log values from a hook or a step, in the row of the current epoch or a row of steps.csv."""
    is_of_row = run.stage == "fit" and run.progress.is_in_epoch
    if is_of_row and scalars.get("epoch") == run.progress.epochs_done:
        values = {name: value for name, value in scalars.items() if name not in _COORDINATES}
        run.results.row.update(values)
        run.loggers.log_metrics(values, step)
    else:
        run.loggers.log_metrics(scalars, step, row=scalars)


def log_rows(loggers: list[Any], scalars: dict[str, Any], step: int | None) -> None:
    """Log values outside of a run. With a key "epoch", they are a row of metrics.csv."""
    for logger in loggers:
        if "epoch" in scalars and hasattr(logger, "log_epoch"):
            coordinates = {} if step is None else {"epoch": scalars["epoch"], "step": step}
            logger.log_epoch(coordinates | scalars)
        else:
            logger.log_metrics(scalars, step)


def save_parts(fabric: Fabric, io: CheckpointIO, path: Any, state: dict[str, Any]) -> None:
    """Write a checkpoint of modules, optimizers and values atomically."""
    check_type("save", path, str | os.PathLike, "a path and a dict: loop.save('mine.ckpt', state)")
    join_processes(fabric)
    use_checkpoint_io(fabric, io)
    try:
        fabric.save(path, state)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigurationError(
            f"loop.save: got a value that cannot be pickled, expected tensors and plain values. {error}"
        ) from error


def use_checkpoint_io(fabric: Fabric, io: CheckpointIO) -> None:
    """Use ``io``, which is atomic and verified, unless the user has given a CheckpointIO."""
    # Strategies that shard a model write folders without a CheckpointIO.
    with suppress(NotImplementedError):
        if type(fabric.strategy.checkpoint_io) is TorchCheckpointIO:
            fabric.strategy.checkpoint_io = io


def load_parts(
    fabric: Fabric, io: CheckpointIO, path: Any, state: dict[str, Any]
) -> dict[str, Any]:
    """Restore modules and optimizers from a checkpoint. Returns the other values in it."""
    check_type("load", path, str | os.PathLike, "a path and a dict: loop.load('mine.ckpt', state)")
    join_processes(fabric)
    use_checkpoint_io(fabric, io)
    return fabric.load(path, state)
