"""Parts: rung 1 of the ladder, what a loop of your own takes from ours: setup, backward, the logger, save and load."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..core.errors import Misuse, MisuseOfType
from ..core.ranks import share_of
from ..core.run import Run
from ..core.steps import is_plain
from ..files.storage import AtomicCheckpointIO, door
from ..record.tables import number_of
from ..trainer.attributes import TrainerFace
from .world import meet_anew

_PLACE = ("epoch", "step")  # where a row stands, which is no measurement


class Parts(TrainerFace):
    """What FabricLoop offers by itself, without `fit`.

    Example:
        >>> from fabric_template import FabricLoop
        >>> loop = FabricLoop(accelerator="cpu")
        >>> net = torch.nn.Linear(2, 1)
        >>> net, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        >>> loop.backward(net(torch.ones(1, 2)).sum())
        >>> optimizer.step()
    """

    def setup(self, model: Any, optimizer: Any = None, *loaders: Any) -> Any:
        """Move model and loaders to their devices and wrap them for the strategy, as ``fabric.setup`` does.

        On one device in float32 model and optimizer come back as they are. Elsewhere the model's wrapper has its names and
        its class in ``isinstance``; ``torch.save`` writes the model alone.

        To clip, write ``loop.fabric.clip_gradients(model, optimizer, max_norm=1.0)``, which knows of scaled gradients; it adds
        them up in the optimizer's order, and so to other last bits than ``clip_grad_norm_(model.parameters(), 1.0)``.
        """
        from ..data.tensors import TensorLoader

        _check("setup", model, torch.nn.Module, "an nn.Module: loop.setup(model, optimizer, *loaders)")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            _check("setup", optimizer, torch.optim.Optimizer, "an optimizer: loop.setup(model, optimizer, *loaders)")
        self._launch_parts()
        parts = list(self.fabric.setup(model, optimizer)) if optimizer is not None else [self.fabric.setup(model)]
        if is_plain(self.fabric):  # a wrapper would do nothing
            parts = [model] if optimizer is None else [model, optimizer]
        else:  # Fabric's own setattr would set the model's as well
            object.__setattr__(parts[0], "__class__", _with_own_names(parts[0].__class__))
        for loader in loaders:
            if isinstance(loader, torch.utils.data.DataLoader):
                loader = self.fabric.setup_dataloaders(loader)
            elif isinstance(loader, TensorLoader):
                loader = loader.to(self.fabric.device)
                ways, mine = share_of(self.fabric)
                if ways > 1:
                    loader.distribute(ways, mine, shuffle=loader.shuffle)
            parts.append(loader)
        return parts[0] if len(parts) == 1 else tuple(parts)

    def backward(self, loss: torch.Tensor) -> None:
        """``fabric.backward``: in the loop's precision."""
        _check("backward", loss, torch.Tensor, "the loss, a tensor: loop.backward(loss)")
        run = self._run
        by_hand = run is not None and run.at.stage == "train" and not run.trained.is_automatic
        (run.update if run is not None and by_hand else self.fabric).backward(loss)

    def no_backward_sync(self, model: Any, enabled: bool = True) -> Any:
        """A context for all but the last backward of an accumulation: gradients are not added over the processes there."""
        return nullcontext() if is_plain(self.fabric) else self.fabric.no_backward_sync(model, enabled)

    def log(self, name: str, value: Any, **words: Any) -> None:
        """Log a value inside a step function or a hook: a LightningModule's ``self.log``, with all of its words.

        Example:
            >>> def training_step(net, batch):
            ...     loss = net(batch).sum()
            ...     loop.log("norm", batch.norm(), on_epoch=True)
            ...     return loss
        """
        self._required("log").metrics.log(name, value, **words)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None, sync_dist: bool = False) -> None:
        """Give values to the loggers, once for all processes; with an "epoch" among them they are a row of metrics.csv.

        ``sync_dist=True`` gives their means over the processes, all of which have to call it.
        In a hook or step of a run they join the row of the epoch that runs, or are a row of steps.csv.
        """
        _check("log_dict", metrics, Mapping, "a dict of numbers: loop.log_dict({'epoch': 0, 'train_loss': loss})")
        scalars = {name: number_of(name, value) for name, value in metrics.items()}
        if sync_dist and self.fabric.world_size > 1 and scalars:
            own = torch.tensor(
                [float(value) for value in scalars.values()], dtype=torch.float64, device=self.fabric.device
            )
            means: Any = self.fabric.all_reduce(own)
            means_by_name = dict(zip(scalars, means.tolist(), strict=True))
            scalars |= {name: mean for name, mean in means_by_name.items() if name not in _PLACE}
        if (run := self._run) is not None and run.at.stage is not None:
            _log_beside(run, scalars, step)
            return
        for logger in self.loggers:
            if "epoch" in scalars and hasattr(logger, "log_epoch"):
                place = {"epoch": scalars["epoch"], **({} if step is None else {"step": step})}
                logger.log_epoch({**place, **scalars})
            else:
                logger.log_metrics(scalars, step)

    def save(self, path: str | Path, state: dict[str, Any]) -> None:
        """Write a checkpoint of modules, optimizers and values, whole or not at all."""
        _check("save", path, str | os.PathLike, "a path and a dict: loop.save('mine.ckpt', {'net': net})")
        self._launch_parts()
        self.fabric.save(path, state)
        io = door(self.fabric)
        if isinstance(io, AtomicCheckpointIO) and self.fabric.is_global_zero and (problem := io.complaint(path)):
            raise Misuse(problem)

    def load(self, path: str | Path, state: dict[str, Any]) -> dict[str, Any]:
        """Put a checkpoint's content back into the same modules and optimizers; returns what else it holds."""
        from ..core.states import states_as_saved

        self._launch_parts()
        with states_as_saved(getattr(part, "optimizer", part) for part in state.values()):  # unwrapped
            return self.fabric.load(path, state)

    def _launch_parts(self) -> None:
        is_launched = os.environ.get("LT_CLI_USED") == "1" or torch.distributed.is_initialized()
        if self.fabric.world_size > 1 and not is_launched:
            store = meet_anew()
            self.fabric.launch()
            del store  # which had to stay until the ranks have met


@cache
def _with_own_names(kind: type) -> type:
    """Fabric's wrapper, in which modules, parameters and buffers have the names that the model gives them.

    It passes for the model's class, and what is pickled is the model.
    """
    own = {
        "named_modules": lambda self, *args, **words: self.module.named_modules(*args, **words),
        "__class__": property(lambda self: type(self.module)),
        "__reduce_ex__": lambda self, protocol: self.module.__reduce_ex__(protocol),
        "__deepcopy__": _copied,
    }
    return type(kind.__name__, (kind,), own)


def _log_beside(run: Run, scalars: dict[str, Any], step: int | None) -> None:
    """Of a hook or a step; with the epoch that runs among them, they join that one's row."""
    if joins := run.fn == "fit" and not run.at.between_epochs and scalars.get("epoch") == run.at.current_epoch:
        run.metrics.row.update({name: value for name, value in scalars.items() if name not in _PLACE})
    run.log.values(scalars, step, by_row=not joins)


def _copied(wrapper: Any, memo: dict[int, Any]) -> Any:
    copied = memo[id(wrapper)] = object.__new__(type(wrapper))
    object.__setattr__(copied, "__dict__", copy.deepcopy(vars(wrapper), memo))
    return copied


def _check(method: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise MisuseOfType(f"loop.{method} got a {type(value).__name__}: expected {expected}")
