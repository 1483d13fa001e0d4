"""Attempt: where the ranks of one attempt meet, when torchrun starts them again and again.

torchrun's store outlives its workers. torch's own meeting finds in it where those listened that are gone, and waits for
them; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` would help, but only the launcher reads it. So the first rank opens a store for
this attempt, and tells its address to those that ask now: it may be on another machine than torchrun's.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore

PATIENCE = timedelta(minutes=30)  # torch's own, until all ranks have come
POLL = 0.01  # seconds


def own_store() -> TCPStore | None:
    """Let the environment name a store of this attempt; the first rank has to keep the one returned until all have met.

    Each rank takes a number that none ever had; the first rank answers every number with where it is, until all have met it.
    Numbers of ranks that are gone are answered, too, which nobody reads.
    """
    address, rank, ranks = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=PATIENCE)
    number = shared.add("fabric_template/arrived", 1)
    until = time.monotonic() + PATIENCE.total_seconds()
    store = None
    if rank == 0:
        address = own_address(address)
        store = TCPStore(address, 0, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=PATIENCE)
        port, answered = str(store.port), 0
        while shared.add(f"fabric_template/met/{number}", 0) < ranks - 1:
            arrived = shared.add("fabric_template/arrived", 0)
            for other in range(answered + 1, arrived + 1):
                shared.set(f"fabric_template/answer/{other}", f"{address} {port} {number}")
            answered = arrived
            _wait(until)
    else:
        while not shared.check([answer := f"fabric_template/answer/{number}"]):  # a blocking call would hear no signal
            _wait(until)
        address, port, first = shared.get(answer).decode().split()
        shared.add(f"fabric_template/met/{first}", 1)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


def own_address(other: str) -> str:
    """What this machine is called on the way to another one; nothing is sent there.

    Example:
        >>> own_address("127.0.0.1")  # itself
        '127.0.0.1'
    """
    try:
        family, kind, *_, where = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(where)
            own = str(way.getsockname()[0])
    except OSError:  # no such way: torch says so, by the name that it was given
        return other
    return other if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own


def _wait(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"not all ranks have come within {PATIENCE}: this is rank {os.environ['RANK']}")
    time.sleep(POLL)
