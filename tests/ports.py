"""Ports for ranks to meet at, which the system gives to nobody else meanwhile: none of those that it chooses by itself."""

import itertools
import os
import socket
from pathlib import Path

_COUNT = itertools.count()


def _range():
    """Below the ephemeral ports, of which a connection or a server that asks for any port may get each at any time."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32768
    return range(10_000, first) if first > 12_000 else range(10_000, 32_768)


def free_port():
    """One that nobody listens at; each process begins elsewhere, and none gets one twice in a row."""
    ports = _range()
    while True:
        port = ports[(os.getpid() * 1009 + next(_COUNT)) % len(ports)]
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
            return port
