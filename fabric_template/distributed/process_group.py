"""Detect processes that a launcher or the user has started, and use all of them by default."""

from __future__ import annotations

import math
import os
import zlib
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import Strategy

from ..errors import ConfigurationError
from ..lightning_compat.overrides import is_instance_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

# The environment variables that torchrun, Open MPI and MPICH (or Intel MPI) set for each process.
# The first variable that is set is used.
_VARIABLES = {
    "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "local_size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}
# The number of processes per machine, and the number of machines, in the process group.
_own_group = (1, 1)
# True if a strategy such as "ddp_spawn" has started this process.
_is_spawned = False


def is_joined() -> bool:
    """Return whether this process has joined a process group."""
    return torch.distributed.is_initialized()


def is_spawning(fabric: Fabric) -> bool:
    """Return whether the strategy starts new processes for each fit, as "ddp_spawn" does."""
    return is_instance_of(fabric.strategy.launcher, "_MultiProcessingLauncher")


def remember_group(strategy: Any, is_spawned: bool = False) -> None:
    """Store the size of the process group for later loops in this process."""
    global _own_group, _is_spawned
    _own_group = strategy.num_processes, getattr(strategy, "num_nodes", 1)
    _is_spawned = is_spawned


def launched_processes() -> tuple[int, int] | None:
    """Return (processes per machine, number of machines), or None for a single process."""
    if os.environ.get("LT_CLI_USED") == "1":
        return None
    total, local_size = _read_sizes()
    if is_joined() and total == math.prod(_own_group):
        local_size = _own_group[0]
    if total == 1:
        return None
    if total % local_size:
        raise ConfigurationError(
            f"LOCAL_WORLD_SIZE: got {local_size} for a group of {total} processes, expected the"
            f" same number of processes on each machine. Set it to a divisor of {total}."
        )
    return local_size, total // local_size


def _read_sizes() -> tuple[int, int]:
    """Return the total number of launched processes, and the number on this machine."""
    if is_joined():
        total = torch.distributed.get_world_size()
    elif SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        total = int(os.environ.get("SLURM_NTASKS", 1))
        return total, total // int(os.environ.get("SLURM_NNODES", 1))
    else:
        # Lightning's launcher sets WORLD_SIZE, so ignore WORLD_SIZE if RANK is not set.
        pairs = zip(_VARIABLES["world_size"], _VARIABLES["rank"], strict=True)
        sizes = [size for size, rank in pairs if size in os.environ and rank in os.environ]
        total = int(os.environ[sizes[0]]) if sizes else 1
    return total, read_variable("local_size", total)


def read_variable(name: str, default: int) -> int:
    values = [os.environ[variable] for variable in _VARIABLES[name] if variable in os.environ]
    return int(values[0]) if values else default


def join_by_default(arguments: dict[str, Any]) -> dict[str, Any]:
    """Adapt Fabric's arguments, so that devices="auto" uses all launched processes."""
    started = launched_processes()
    if arguments["devices"] != "auto" or started is None:
        return arguments
    num_nodes = started[1] if arguments["num_nodes"] == 1 else arguments["num_nodes"]
    plugins = arguments["plugins"]
    if needs_environment(arguments["strategy"], plugins):
        plugins = [*plugins, GroupEnvironment(*started)]
    return {**arguments, "devices": started[0], "num_nodes": num_nodes, "plugins": plugins}


def needs_environment(strategy: Any, plugins: list[Any]) -> bool:
    """Return whether the loop must provide a ClusterEnvironment for the launched processes."""
    if isinstance(strategy, Strategy) and getattr(strategy, "cluster_environment", None):
        return False
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return False
    if is_joined():
        # Ignore SLURM's variables, which may describe other processes, such as Ray's driver.
        return not TorchElasticEnvironment.detect()
    kinds = (TorchElasticEnvironment, SLURMEnvironment, MPIEnvironment)
    return not any(kind.detect() for kind in kinds)


def check_launched(fabric: Fabric) -> None:
    """Raise an error if devices and num_nodes do not match the launched processes."""
    strategy, started = fabric.strategy, launched_processes()
    given = getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)
    would_spawn = is_spawning(fabric) and not _is_spawned
    if started is not None and (given != started or would_spawn):
        raise ConfigurationError(
            f"devices, num_nodes: got {given[0]} and {given[1]}, but {started[0]} processes were"
            f" started on each of {started[1]} machines. Leave out devices and num_nodes. Write"
            " strategy='ddp', or leave out strategy."
        )


class GroupEnvironment(TorchElasticEnvironment):
    """A ClusterEnvironment for processes that a launcher or the user has already started.

    Args:
        local_size: The number of processes on each machine.
        num_nodes: The number of machines.
    """

    def __init__(self, local_size: int, num_nodes: int) -> None:
        super().__init__()
        self._local_size, self._num_nodes = local_size, num_nodes
        if not is_joined() and ("MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ):
            choose_address(local_size, num_nodes)

    def world_size(self) -> int:
        return self._local_size * self._num_nodes

    def global_rank(self) -> int:
        return torch.distributed.get_rank() if is_joined() else read_variable("rank", 0)

    def local_rank(self) -> int:
        return read_variable("local_rank", self.global_rank() % self._local_size)

    def node_rank(self) -> int:
        return self.global_rank() // self._local_size


def choose_address(local_size: int, num_nodes: int) -> None:
    """Set the same MASTER_ADDR and MASTER_PORT in all processes of an MPI job on one machine."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    job = next((os.environ[name] for name in names if name in os.environ), None)
    if job is None or num_nodes > 1:
        raise ConfigurationError(
            f"MASTER_ADDR, MASTER_PORT: got no address for a group of {local_size * num_nodes}"
            " processes, expected the address of the first process. Set both variables, or start"
            " the script with torchrun."
        )
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(20000 + zlib.crc32(job.encode()) % 20000)
