"""Every operation on the disk fails once, in each way; the old state stays readable and the run is finished as if nothing was.

    python tests/faults/sweep.py --every 40

For n = 1, 2, ... the n-th open, write, fsync, rename, mkdir, ... of a run fails with ENOSPC, EIO or EACCES, is half a write, or
is where SIGKILL hits, until a run passes unharmed. After it, `resume="auto"` must end with the same bytes.
`--every`: of the many writes inside one checkpoint file, take the first, the last and every so many; all else is always taken.
"""

import argparse
import itertools
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

from fabric_template.reading import read_checkpoint


class Trace(Layer):
    """Notes each operation: (name, path)."""

    def __init__(self, root):
        super().__init__(root)
        self.operations = []

    def before(self, operation, path, size):
        self.operations.append((operation, path))


def chosen(operations, every):
    """The numbers of the operations that shall fail: all, but of a row of writes to one checkpoint only some."""
    numbers, number = [], 0
    for (operation, path), row in itertools.groupby(operations):
        length = len(list(row))
        thinned = operation == "write" and ".ckpt" in path
        numbers += [
            number + i
            for i in range(1, length + 1)
            if not thinned or i in (1, length) or (i + number // 100) % every == 0
        ]
        number += length
    return numbers


def harmed(root, n, kind, words):
    """The run with its n-th operation failing; a complaint in one line is as good an end as any."""
    try:
        with Fault(root, n, kind):
            train(root, **words)
    except ValueError as error:  # a CheckpointError, a LogsError
        if "\n" in str(error):
            raise


def check(home, whole, n, kind, words):
    """Harm one run and finish it; returns what went wrong, in words, or None.

    SIGKILL needs a process of its own, which is forked; all else happens in this one, which is three times as quick.
    """
    root = home / "run"
    try:
        if kind == "SIGKILL":
            (code,) = end([fork(harmed, root, n, kind, words)])
            if code != -signal.SIGKILL:
                return f"the harmed run ended with {code}"
        else:
            harmed(root, n, kind, words)
        for path in root.rglob("last.ckpt"):
            read_checkpoint(path)  # the old state, or the new one
        train(root, **words)
        without = () if kind == "SIGKILL" else BEST  # one that the disk refused was said to be missing, and is
        return difference(without_names(whole, without), end_of(root, without))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def sweep(every, kinds, words, rotate=False):
    """Sweep over all operations; with `rotate`, each n fails by SIGKILL and by one of the errors, in turn."""
    home = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    began = time.monotonic()
    try:
        warm_up(home / "warm")
        with Trace(home / "whole") as trace:
            train(home / "whole", **words)
        whole = end_of(home / "whole")
        numbers = chosen(trace.operations, every)
        figures = {"operations": len(trace.operations), "faults": dict.fromkeys(kinds, 0), "losses": []}
        errors = itertools.cycle(kind for kind in kinds if kind != "SIGKILL")
        for n in numbers:
            for kind in [next(errors), "SIGKILL"] if rotate else kinds:
                figures["faults"][kind] += 1
                if problem := check(home, whole, n, kind, words):
                    operation, path = trace.operations[n - 1]
                    where = f"{operation} {os.path.relpath(path, trace.root)}"
                    figures["losses"].append({"n": n, "kind": kind, "operation": where, "problem": problem})
                    print(figures["losses"][-1], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {**figures, "seconds": time.monotonic() - began}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="see above")
    parser.add_argument(
        "--short", action="store_true", help="2 epochs of 4 batches; each n by SIGKILL and one of the errors"
    )
    words = parser.parse_args()
    run = {"max_epochs": 2, "limit_train_batches": 4, "save_every_n_steps": 1} if words.short else {}
    figures = sweep(words.every, list(KINDS), run, rotate=words.short)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
