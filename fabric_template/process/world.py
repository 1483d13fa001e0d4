"""World: how many ranks there are, and who has started them."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric import Fabric

from ..core.errors import Misuse


def come_by_themselves(fabric: Fabric) -> bool:
    """Whether somebody else starts the ranks (torchrun, fabric run, SLURM), so that they meet only when they are launched."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    return bool(getattr(environment, "creates_processes_externally", False))


def launched() -> tuple[str, int, int] | None:
    """Who has started this process beside others, how many of them on each machine, and on how many machines."""
    env = os.environ
    if env.get("LT_CLI_USED") == "1":  # fabric run tells Fabric itself
        return None
    if "TORCHELASTIC_RUN_ID" in env:
        world, each = int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return "torchrun", each, int(env.get("GROUP_WORLD_SIZE", world // each))
    if env.get("SLURM_NTASKS", "1") != "1" and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        nodes = int(env.get("SLURM_NNODES", 1))
        return "SLURM", int(env.get("SLURM_NTASKS_PER_NODE", int(env["SLURM_NTASKS"]) // nodes)), nodes
    return None


def as_launched(devices: Any, num_nodes: int) -> tuple[Any, int]:
    """What ``devices="auto"`` means where somebody else has started the ranks: as many as there are, on all machines.

    Fabric takes one on the CPU, and each rank would train by itself.
    """
    if devices != "auto" or (found := launched()) is None:
        return devices, num_nodes
    return found[1], found[2] if num_nodes == 1 else num_nodes


def check_launched(fabric: Fabric, writes: bool = False) -> None:
    """Refuse other numbers of processes than were started, before anybody waits for those that never come.

    One device beside other ranks may be one's own evaluation on rank zero; fits there would all write the same files.
    """
    if (found := launched()) is None:
        return
    who, each, nodes = found
    strategy = fabric.strategy
    now = getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)
    kind = type(getattr(strategy, "cluster_environment", None)).__name__
    is_theirs = kind in ("TorchElasticEnvironment", "SLURMEnvironment")
    is_forked = getattr(strategy, "launcher", None) is not None and not hasattr(strategy.launcher, "procs")
    if each * nodes == 1 or not (is_theirs or writes):
        return
    started = f"{who} has started {each} process{'es' * (each > 1)} on each of {nodes} machine{'s' * (nodes > 1)}"
    if is_theirs and is_forked:
        raise Misuse(f"{started}, and this strategy would start others itself: write strategy='ddp', or leave it out")
    if now != (each, nodes):
        raise Misuse(
            f"devices={now[0]}, num_nodes={now[1]}, but {started}: leave both out, then the loop takes these numbers; or write"
            f" devices={each}, num_nodes={nodes}"
        )


def meet_anew() -> Any:
    """Where torchrun keeps its store over restarts, the ranks of this attempt meet in one of their own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from .attempt import own_store

    return own_store()
