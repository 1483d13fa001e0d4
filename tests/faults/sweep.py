"""Make each disk operation of a run fail once in every way, and check that no saved state is lost.

    python tests/faults/sweep.py --kinds ENOSPC short SIGKILL

For n = 1, 2, ..., the n-th open, write, fsync, rename, mkdir, ... of a run fails. After each fault,
last.ckpt must be readable, and resume="auto" must end with the same files as an undisturbed run.
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

from kills import end, fork, warm_up
from layer import KINDS, Fault, Layer
from victim import BEST, difference, end_of, train, without_names

from fabric_template.checkpoint.checkpoint_io import read_checkpoint


class Trace(Layer):
    """Records each operation as (name, path)."""

    def __init__(self, root):
        super().__init__(root)
        self.recorded = []

    def before(self, operation, path, size):
        self.recorded.append((operation, path))


def train_with_fault(root, n, kind):
    """Train while the n-th operation fails. The run may end with a one-line error."""
    try:
        with Fault(root, n, kind):
            train(root)
    except (ValueError, OSError) as error:
        if "\n" in str(error):
            raise


def check(workspace, whole, n, kind):
    """Make one operation of a run fail, then finish the run. Return the problem, or None."""
    root = workspace / "run"
    try:
        if kind == "SIGKILL":
            (code,) = end([fork(train_with_fault, root, n, kind)])
            if code != -signal.SIGKILL:
                return f"the run with the fault ended with {code}"
        else:
            train_with_fault(root, n, kind)
        for path in root.rglob("last.ckpt"):
            read_checkpoint(path)
        train(root)
        # best.ckpt may be missing, because a run only warns if it cannot write this file.
        without = () if kind == "SIGKILL" else BEST
        return difference(without_names(whole, without), end_of(root, without))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def sweep(kinds, buffer, every=1):
    """Return the results of a sweep over every ``every``-th operation."""
    workspace = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    start = time.monotonic()
    Layer.buffer_size = buffer
    try:
        warm_up(workspace / "warm")
        with Trace(workspace / "whole") as trace:
            train(workspace / "whole")
        whole = end_of(workspace / "whole")
        figures = {"operations": len(trace.recorded), "faults": dict.fromkeys(kinds, 0), "losses": []}
        for n, (operation, path) in enumerate(trace.recorded, 1):
            for kind in kinds if n % every == 0 else ():
                figures["faults"][kind] += 1
                if problem := check(workspace, whole, n, kind):
                    where = f"{operation} {os.path.relpath(path, trace.root)}"
                    figures["losses"].append({"n": n, "kind": kind, "operation": where, "problem": problem})
                    print(figures["losses"][-1], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return {**figures, "seconds": time.monotonic() - start}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="ways to fail (all)")
    parser.add_argument("--buffer", type=int, default=8192, help="number of bytes that are written at a time (8192)")
    parser.add_argument("--every", type=int, default=1, help="make only every n-th operation fail (1)")
    options = parser.parse_args()
    figures = sweep(options.kinds, options.buffer, options.every)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
