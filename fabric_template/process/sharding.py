"""Sharding: what a model or a checkpoint in parts cannot have, refused by its name before anything is launched."""

from __future__ import annotations

from ..core.errors import Misuse
from ..core.optimizers import is_maker
from ..core.overrides import is_a
from ..trainer.attributes import TrainerFace
from .build import Plan

_CALLBACKS = {  # which read or change whole weights while each rank has its part of them
    "WeightAveraging": "average the weights of checkpoints afterwards",
    "StochasticWeightAveraging": "average the weights of checkpoints afterwards",
    "ModelPruning": "prune the model that a checkpoint gives, on one device",
}


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
