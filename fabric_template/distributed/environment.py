"""Join the processes that torchrun, SLURM, ``fabric run`` or Fabric itself has started."""

from __future__ import annotations

import atexit
import os
import socket
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import DDPStrategy, ParallelStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch.distributed import TCPStore

from ..errors import ConfigurationError
from ..training.hooks import is_instance_of
from .model_parallel import has_mesh

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from ..training.run_state import RunState

# How long torch itself waits until all processes have come.
_SECONDS_TO_JOIN = 1800.0


def is_joined() -> bool:
    """Return whether this process is one of a group already."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def join_processes(fabric: Fabric) -> None:
    """Join the group of the run's processes, unless an earlier call has done it."""
    strategy = fabric.strategy
    if not isinstance(strategy, ParallelStrategy):
        return
    is_child = is_instance_of(strategy.launcher, "_MultiProcessingLauncher") and is_joined()
    is_from_cli = os.environ.get("LT_CLI_USED") == "1"
    has_started = bool(getattr(strategy.launcher, "procs", ())) or has_mesh(strategy)
    if not (is_child or is_from_cli or has_started):
        if not is_joined():
            atexit.register(_leave_group)
        # The store has to stay open until all processes have joined.
        store = open_store_of_attempt() if not is_joined() else None
        fabric.launch()
        del store


def seed_processes(fabric: Fabric) -> None:
    """Seed all processes alike, as Trainer does. Fabric's other strategies do it themselves."""
    if isinstance(fabric.strategy, DDPStrategy):
        reset_seed()


def gather_objects(run: RunState, item: Any) -> list[Any]:
    """Return an object of every process, in the order of their ranks."""
    if run.fabric.world_size == 1:
        return [item]
    gathered: list[Any] = [None] * run.fabric.world_size
    torch.distributed.all_gather_object(gathered, item)
    return gathered


def _leave_group() -> None:
    if is_joined():
        torch.distributed.destroy_process_group()


def is_started_externally(fabric: Fabric) -> bool:
    """Return whether somebody else starts the processes, so that they meet only when they join."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    return bool(getattr(environment, "creates_processes_externally", False))


def end_processes(fabric: Fabric) -> None:
    """Kill the scripts that this process has started, because they would wait for it."""
    for process in getattr(fabric.strategy.launcher, "procs", ()):
        process.kill()


def started_by_launcher() -> tuple[str, int, int] | None:
    """Return who has started this process, with how many others on each machine, and on how many machines."""
    env = os.environ
    if env.get("LT_CLI_USED") == "1":
        return None
    if "TORCHELASTIC_RUN_ID" in env:
        world_size, devices = int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return "torchrun", devices, int(env.get("GROUP_WORLD_SIZE", world_size // devices))
    is_interactive = env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if env.get("SLURM_NTASKS", "1") != "1" and not is_interactive:
        nodes = int(env.get("SLURM_NNODES", 1))
        return (
            "SLURM",
            int(env.get("SLURM_NTASKS_PER_NODE", int(env["SLURM_NTASKS"]) // nodes)),
            nodes,
        )
    return None


def launched_devices(devices: Any, num_nodes: int) -> tuple[Any, int]:
    """Return the devices and machines of ``devices="auto"``, which Fabric takes as one on the CPU."""
    started = started_by_launcher()
    if devices != "auto" or started is None:
        return devices, num_nodes
    return started[1], started[2] if num_nodes == 1 else num_nodes


def check_launched(fabric: Fabric, is_fit: bool) -> None:
    """Refuse other numbers of processes than were started, which would wait for each other.

    Raises:
        ConfigurationError: devices or num_nodes are not those of the launcher.
    """
    started, strategy = started_by_launcher(), fabric.strategy
    if started is None or started[1] * started[2] == 1:
        return
    launcher, devices, nodes = started
    environment = getattr(strategy, "cluster_environment", None)
    is_theirs = is_instance_of(environment, "TorchElasticEnvironment", "SLURMEnvironment")
    if not (is_theirs or is_fit):
        # One process may evaluate by itself.
        return
    text = f"{launcher} has started {devices} processes on each of {nodes} machines"
    if is_theirs and is_instance_of(strategy.launcher, "_MultiProcessingLauncher"):
        raise ConfigurationError(
            f"strategy: got one that starts processes itself, but {text}. Use strategy='ddp', or leave it out."
        )
    given = getattr(strategy, "num_processes", 1), getattr(strategy, "num_nodes", 1)
    if given != (devices, nodes):
        raise ConfigurationError(
            f"devices, num_nodes: got {given[0]} and {given[1]}, but {text}. Leave both out, or write"
            f" devices={devices}, num_nodes={nodes}."
        )


def open_store_of_attempt() -> TCPStore | None:
    """Let the processes that torchrun has started again find each other through a new store.

    torchrun's own store outlives its workers: torch finds the addresses of dead processes in it and waits
    for them. So the first process opens a store for this attempt. Every process takes a number in torchrun's
    store that none had before, and the first one answers each number with the address, until all have come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(host, port, is_master=False)
    number = shared.add("fabric_template/number", 1)
    store, last_answered = None, 0
    deadline = time.monotonic() + _SECONDS_TO_JOIN
    if os.environ["RANK"] == "0":
        host = address_towards(host)
        store = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        port, joined = store.port, f"fabric_template/joined/{number}"
        while shared.add(joined, 0) < int(os.environ["WORLD_SIZE"]) - 1:
            newest = shared.add("fabric_template/number", 0)
            for other in range(last_answered + 1, newest + 1):
                shared.set(f"fabric_template/answer/{other}", f"{host} {port} {joined}")
            last_answered = newest
            _wait(deadline)
    else:
        # A blocking call would hear no signal.
        answer = f"fabric_template/answer/{number}"
        while not shared.check([answer]):
            _wait(deadline)
        host, port_text, joined = shared.get(answer).decode().split()
        port = int(port_text)
        shared.add(joined, 1)
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return store


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"Not all processes have started within {_SECONDS_TO_JOIN:.0f} s.")
    time.sleep(0.01)


def address_towards(host: str) -> str:
    """Return the name by which another machine reaches this one. No packet is sent.

    Example:
        >>> address_towards("127.0.0.1")
        '127.0.0.1'
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as connection:
            connection.connect(address)
            own = str(connection.getsockname()[0])
    except OSError:
        return host
    return host if ip_address(own.partition("%")[0]).is_loopback else own
