"""Agreement: how many ranks there are, who has started them, and that all of them go on from one checkpoint."""

from __future__ import annotations

import os
import socket
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from ..core.errors import Misuse
from ..core.ranks import gather
from ..files.opening import CheckpointError
from ..files.reading import load_header


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


def from_rank_zero(fabric: Fabric, find: Callable[[], Any]) -> Any:
    """What rank zero finds, on all ranks; an error there is one on all, and nobody waits."""
    found = error = None
    if fabric.is_global_zero:
        try:
            found = find()
        except CheckpointError as caught:
            error = caught
    found, error = fabric.broadcast((found, error))
    if error is not None:
        raise error
    return found


def agree_on_file(fabric: Fabric, find: Callable[[], Any]) -> None:
    """Let each rank find its checkpoint, and compare what they have found: without a shared disk one name may be two files."""
    error = None
    try:
        found = _describe(find())
    except Exception as caught:
        found, error = str(caught).rstrip("."), caught
    all_found = gather(fabric, (found, socket.gethostname()))
    if len({found for found, _ in all_found}) > 1:
        first: dict[str, str] = {}
        for rank, (found, host) in enumerate(all_found):
            first.setdefault(found, f"rank {rank} (on {host}): {found}")
        raise CheckpointError(
            f"the ranks have not found the same checkpoint: {'; '.join(first.values())}: write default_root_dir= (or the path)"
            " with a folder that all of them share, or copy the file of one to the others"
        ) from error
    if error is not None:
        raise error


def _describe(path: str | Path | None) -> str:
    """A file by its size, its step and its checksum, for a torch file that of the checksums in its directory."""
    if path is None or not os.path.isfile(path):
        return "none" if path is None else f"'{path}'"  # a CheckpointIO plugin may read what is no file
    crc, step = 0, "unknown"
    with open(path, "rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                crc = zlib.crc32(repr([(part.filename, part.CRC) for part in archive.infolist()]).encode())
        else:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    with suppress(CheckpointError):
        step = load_header(path).get("global_step", step)
    return f"'{path}' of {os.path.getsize(path):,} bytes, step {step}, checksum {crc:08x}"
