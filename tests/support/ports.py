"""Find free ports for process groups."""

import itertools
import os
import socket
from pathlib import Path

_COUNT = itertools.count()


def _range():
    """Return ports below the ephemeral range, from which the system picks ports for any connection."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32768
    return range(10_000, first) if first > 12_000 else range(10_000, 32_768)


def free_port():
    """Return a free port. To avoid conflicts, each process starts its search at a different port."""
    ports = _range()
    while True:
        port = ports[(os.getpid() * 1009 + next(_COUNT)) % len(ports)]
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
            return port
