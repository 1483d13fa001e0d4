"""Sharding: what a model or a checkpoint in parts cannot have, refused by its name before anything is launched."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from ..core.errors import Misuse
from ..core.optimizers import is_maker
from ..core.overrides import is_a
from ..files.storage import AtomicCheckpointIO
from ..trainer.attributes import TrainerFace
from ..trainer.strategies import check_plugin
from .build import Plan

_CALLBACKS = {  # which read or change whole weights while each rank has its part of them
    "WeightAveraging": "average the weights of checkpoints afterwards",
    "StochasticWeightAveraging": "average the weights of checkpoints afterwards",
    "ModelPruning": "prune the model that a checkpoint gives, on one device",
}


def take_plugin(fabric: Fabric, io: Any, trusted: bool) -> Any:
    """What writes files where checkpoint="sharded" was asked for: under DDP each process its piece, so no plugin does.

    Raises:
        Misuse: for a plugin of the user's own, and where the strategy was told to write one file.
    """
    strategy: Any = fabric.strategy
    if isinstance(strategy, ModelParallelStrategy) and not strategy._save_distributed_checkpoint:
        raise Misuse(
            "checkpoint='sharded' with strategy=ModelParallelStrategy(..., save_distributed_checkpoint=False), which writes one"
            " file: leave one of them out"
        )
    if not isinstance(strategy, DDPStrategy) or type(io) is AtomicCheckpointIO:
        return io
    is_plugin = type(io) is not TorchCheckpointIO  # Fabric's own, where there is none
    if is_plugin:
        check_plugin(io, "checkpoint='sharded'")
    strategy.checkpoint_io = AtomicCheckpointIO(trusted, in_run=True, behind=is_plugin)
    return strategy.checkpoint_io


def check_sharded(loop: TrainerFace, plan: Plan) -> None:
    """Refuse what would train nothing, or something else, once the model lies in parts."""
    if plan.fn == "fit" and plan.optimizer is not None and not is_maker(plan.optimizer):
        raise Misuse(
            "fit got optimizer= and strategy=ModelParallelStrategy(...), which puts other parameters in the model's: the"
            " optimizer would train none of them; write optimizer=lambda model: torch.optim.Adam(model.parameters()), which"
            " is called once the model is sharded, or a method configure_optimizers"
        )
    for callback in loop.callbacks:
        for kind, instead in _CALLBACKS.items():
            if is_a(callback, kind):
                raise Misuse(
                    f"{type(callback).__name__} with strategy=ModelParallelStrategy(...): it takes the weights for whole, and"
                    f" each rank has a part of them; leave it out, and {instead}"
                )
