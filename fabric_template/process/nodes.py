"""Nodes: whether the machines of a run see the folder that rank zero writes."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from ..core.ranks import gather
from ..core.run import Run
from ..files.disk import fs


def tell_unshared(run: Run) -> None:
    """Say once which machines do not see the run's folder: rank zero writes a token there, the others look for it.

    A run needs no shared folder, only rank zero writes; a resume does, as all ranks read the checkpoint.
    """
    fabric, token = run.fabric, ""
    folders = [run.home.folder, *(getattr(logger, "log_dir", None) for logger in run.home.loggers)]
    folder = next((Path(folder) for folder in folders if folder and os.path.isdir(folder)), None)
    if fabric.is_global_zero and folder is not None:
        path = folder / f".nodes.{os.getpid()}.{secrets.token_hex(4)}.tmp"  # `clear_stale` knows such names
        with suppress(OSError):
            fs.close(fs.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
            token = str(path)
    if not (token := fabric.broadcast(token)):
        return
    found = gather(fabric, (fabric.node_rank, socket.gethostname(), os.path.exists(token)))
    if not fabric.is_global_zero:
        return
    with suppress(OSError):
        fs.unlink(token)
    if blind := [f"machine {node} ({host})" for node, host, sees in dict.fromkeys(found) if not sees]:
        run.said.warn(
            f"{', '.join(blind)} cannot see '{folder}', which rank zero writes: all of the run lies on rank zero's machine"
            " alone, and resume= will not find it from the others; write default_root_dir= with a folder that all machines"
            " share"
        )
