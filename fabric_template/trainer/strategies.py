"""Strategies: the names and objects that Trainer knows and Fabric does not, as Fabric's."""

from __future__ import annotations

import re
from typing import Any, Literal

from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

from ..core.errors import Misuse

_Start = Literal["popen", "spawn", "fork"]
_STARTS: dict[str, _Start] = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_TRAINERS = ("lightning.pytorch.strategies.", "pytorch_lightning.strategies.")
# by Trainer's own names for them, of which the public ones are arguments only
_ELSEWHERE = {"_accelerator": "accelerator", "_precision_plugin": "precision", "_checkpoint_io": "plugins"}
_TRAINERS_ONLY = {"_ddp_comm_hook": "ddp_comm_hook", "_model_averaging_period": "model_averaging_period"}


def as_fabrics(strategy: Any) -> Any:
    """Fabric's strategy for one of Trainer's; anything else as it is, for Fabric to judge.

    Raises:
        Misuse: for one of Trainer's that cannot be made Fabric's without loss; the line names Fabric's.

    Example:
        >>> type(as_fabrics("ddp_fork_find_unused_parameters_false")).__name__
        'DDPStrategy'
    """
    if isinstance(strategy, str):
        found = re.fullmatch("ddp(|_spawn|_fork|_notebook)_find_unused_parameters_(true|false)", strategy.lower())
        if found is None:
            return strategy
        return DDPStrategy(start_method=_STARTS[found[1]], find_unused_parameters=found[2] == "true")
    if not any(f"{base.__module__}.".startswith(_TRAINERS) for base in type(strategy).__mro__):
        return strategy
    name = type(strategy).__name__
    is_own = not f"{type(strategy).__module__}.".startswith(_TRAINERS)  # what a class of one's own does would be lost
    if is_own or name not in ("DDPStrategy", "SingleDeviceStrategy"):
        raise Misuse(
            f"strategy={name}(...) is made for Trainer: expected one of lightning.fabric.strategies"
            f"{'' if is_own else f', such as its {name}'}, or a name (ddp, ddp_spawn, fsdp, deepspeed, ...)"
        )
    if lost := [word for key, word in _TRAINERS_ONLY.items() if getattr(strategy, key, None) is not None]:
        raise Misuse(f"strategy={name}({lost[0]}=...): Fabric has no such word, leave it out")
    if given := [word for key, word in _ELSEWHERE.items() if getattr(strategy, key, None) is not None]:
        raise Misuse(f"strategy={name}(...) brings what is said here by {given[0]}=: write FabricLoop({given[0]}=...)")
    if name == "SingleDeviceStrategy":
        return SingleDeviceStrategy(strategy.root_device)
    same = ("parallel_devices", "cluster_environment", "process_group_backend")
    words = {name: getattr(strategy, name) for name in same}
    return DDPStrategy(timeout=strategy._timeout, start_method=strategy._start_method, **words, **strategy._ddp_kwargs)
