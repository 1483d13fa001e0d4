"""Every operation on the disk fails once, in each way; the old state stays readable and the run is finished as if nothing was.

    python tests/faults/sweep.py --kinds ENOSPC short SIGKILL

For n = 1, 2, ... the n-th open, write, fsync, rename, mkdir, ... of a run fails with ENOSPC, EIO or EACCES, is half a write, or
is where SIGKILL hits, until a run passes unharmed. After it, `resume="auto"` must end with the same bytes.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from fabric_template.files import storage
from kills import end, fork, warm_up
from layer import KINDS, Fault, Layer
from victim import BEST, difference, end_of, train, without_names

from fabric_template.checkpoint.checkpoint_io import read_checkpoint


class Trace(Layer):
    """Notes each operation: (name, path)."""

    def __init__(self, root):
        super().__init__(root)
        self.noted = []

    def before(self, operation, path, size):
        self.noted.append((operation, path))


def harmed(root, n, kind):
    """The run with its n-th operation failing; a complaint in one line is as good an end as any."""
    try:
        with Fault(root, n, kind):
            train(root)
    except ValueError as error:  # a CheckpointError, a LogsError
        if "\n" in str(error):
            raise


def check(home, whole, n, kind):
    """Harm one run and finish it; returns what went wrong, in words, or None.

    SIGKILL needs a process of its own, which is forked; all else happens in this one, which is three times as quick.
    """
    root = home / "run"
    try:
        if kind == "SIGKILL":
            (code,) = end([fork(harmed, root, n, kind)])
            if code != -signal.SIGKILL:
                return f"the harmed run ended with {code}"
        else:
            harmed(root, n, kind)
        for path in root.rglob("last.ckpt"):
            read_checkpoint(path)  # the old state, or the new one
        train(root)
        without = () if kind == "SIGKILL" else BEST  # one that the disk refused was said to be missing, and is
        return difference(without_names(whole, without), end_of(root, without))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def sweep(kinds, buffer, every=1):
    """Sweep over all operations (or every so many), in each of these ways, with saves of so many bytes at a time."""
    home = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    began = time.monotonic()
    storage.BUFFER = buffer
    try:
        warm_up(home / "warm")
        with Trace(home / "whole") as trace:
            train(home / "whole")
        whole = end_of(home / "whole")
        figures = {"operations": len(trace.noted), "faults": dict.fromkeys(kinds, 0), "losses": []}
        for n, (operation, path) in enumerate(trace.noted, 1):
            for kind in kinds if n % every == 0 else ():
                figures["faults"][kind] += 1
                if problem := check(home, whole, n, kind):
                    where = f"{operation} {os.path.relpath(path, trace.root)}"
                    figures["losses"].append({"n": n, "kind": kind, "operation": where, "problem": problem})
                    print(figures["losses"][-1], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {**figures, "seconds": time.monotonic() - began}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="in which ways to fail; all")
    parser.add_argument(
        "--buffer",
        type=int,
        default=8192,
        help="bytes that a save writes at a time: a checkpoint of this run comes in a few pieces, with 1 in hundreds (8192)",
    )
    parser.add_argument("--every", type=int, default=1, help="every so many operations fail; all")
    words = parser.parse_args()
    figures = sweep(words.kinds, words.buffer, words.every)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
