"""Every look at the disk fails while a run goes on from its files, alone and in pairs: nothing is lost, no good file renamed.

    python tests/faults/reads.py --every 1

For n = 1, 2, ... the n-th open, read, stat, fstat or listing of a resumed run fails with EIO, EMFILE, no memory, or says that
the file has ended; so does torch.load. The run must end well, or with one line of ours; a second one, undisturbed, ends with
the same files as a run that never was. The files it goes on from: those of a killed run; the same with a damaged last.ckpt.
"""

import argparse
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from kills import end, fork, warm_up
from layer import Fault, Layer
from victim import difference, end_of, torch, train  # torch by the victim: it says first how many threads there are

SHORT = {"max_epochs": 2}
KINDS = ("EIO", "EMFILE", "memory", "end")
NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
)


class Reads(Layer):
    """Counts, notes, and lets fail what a run looks at under `root`: `faults` says which, {number: kind}."""

    operations = ("open", "stat", "fstat", "listdir", "scandir")

    def __init__(self, root, faults=()):
        super().__init__(root)
        self.faults, self.noted, self._is_ours = dict(faults), [], False

    def __enter__(self):
        super().__enter__()
        self._load = torch.load
        torch.load = self._fails_to_load
        return self

    def __exit__(self, *exception):
        torch.load = self._load
        super().__exit__(*exception)

    def before(self, operation, path, size):
        self.noted.append((operation, os.path.relpath(path, self.root)))
        kind = self.faults.get(self.count)
        if kind is None:
            return None
        if kind == "end" and operation == "read":
            return 0
        if kind == "memory":
            raise (
                RuntimeError(NO_MEMORY)
                if operation == "load"
                else MemoryError
                if operation == "read"
                else _error("ENOMEM")
            )
        raise _error("EIO" if kind == "end" else kind)

    def _path_of(self, file=None):
        if self._is_ours or file is None:  # what this layer itself looks at
            return None
        self._is_ours = True
        try:
            return super()._path_of(file)
        finally:
            self._is_ours = False

    def _fails_to_load(self, file, *args, **words):
        self.count += 1
        self.before("load", self.root, 0)
        return self._load(file, *args, **words)

    def _open(self, file, mode="r", buffering=-1, *args, **words):
        """As open(); what is read goes through `before`. Writing is none of this layer's business."""
        path = None if set(mode) & set("wax+") else self._path_of(file)
        if path is None or isinstance(file, int):
            return self._opens[0](file, mode, buffering, *args, **words)
        raw = _Raw(os.open(file, os.O_RDONLY), "rb")
        raw.layer, raw.path = self, path
        if buffering == 0:
            return raw
        return io.BufferedReader(raw) if "b" in mode else io.TextIOWrapper(io.BufferedReader(raw), *args, **words)


class _Raw(io.FileIO):
    """A file whose reads can fail."""

    def readinto(self, buffer):
        self.layer.count += 1
        less = self.layer.before("read", self.path, len(buffer))
        return super().readinto(buffer) if less is None else less

    def readall(self):
        data = bytearray(1 << 20)
        parts = []
        while count := self.readinto(data):
            parts.append(bytes(data[:count]))
        return b"".join(parts)


def _error(name):
    code = getattr(errno, name)
    return OSError(code, os.strerror(code))


def contents(root):
    """Every file's bytes, but for the lock's, which names a process."""
    return {
        str(p.relative_to(root)): p.read_bytes() for p in Path(root).rglob("*") if p.is_file() and p.name != ".lock"
    }


def ending(root):
    """What the run left, but for what was set aside."""
    for path in Path(root).rglob("*.damaged*"):
        path.unlink()
    return end_of(root)


def begin(home, at=120, **words):
    """Two sets of files, of a run in `home`/run: killed in its second epoch; the same with a damaged last.ckpt."""
    root = home / "run"
    (code,) = end([fork(_train_until, root, at, words)])
    if code != -signal.SIGKILL or len(list(root.rglob("*.ckpt"))) < 2:
        raise RuntimeError(f"the run that was to be killed ended with {code}, and left {contents(root).keys()}")
    root.rename(home / "killed")
    shutil.copytree(home / "killed", home / "damaged")
    damage(home / "damaged")
    return home / "killed", home / "damaged"


def _train_until(root, at, words):
    with Fault(root, at, "SIGKILL"):
        train(root, **words)


def damage(root):
    """The newest file cut off, as a disk that lost its end leaves it; that of the best epoch is still good."""
    (path,) = Path(root).rglob("last.ckpt")
    path.write_bytes(path.read_bytes()[:-500])


def check(home, begun, whole, faults):
    """Let these looks of a resumed run fail, then finish it; returns what went wrong, in words, or None."""
    root = home / "run"
    shutil.copytree(begun, root)
    before, told = contents(begun), None
    damaged = {data for name, data in before.items() if name.endswith("last.ckpt") and "damaged" in begun.name}
    try:
        with Reads(root, faults):
            try:
                train(root, **SHORT)
            except ValueError as error:  # a CheckpointError, a LogsError
                told = str(error)
                if "\n" in told:
                    return f"more than a line: {told}"
        after = contents(root)
        if wrong := [name for name, data in after.items() if ".damaged" in name and data not in damaged]:
            return f"renamed, and good: {wrong}; {told}"
        if wrong := [name for name in after if ".before" in name]:
            return f"begun anew: {wrong}; {told}"
        if told is not None and after == before:
            return None  # nothing was touched: what comes of that is known
        train(root, **SHORT)
        problem = difference(whole, ending(root))
        return f"{problem}; {told}" if problem else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def plans(noted, every):
    """Which looks fail, and how: every so many alone, and each third of them with a later one.

    Of several reads of one file in a row, the first and the last count; with `every` 1, all do, alone and in pairs.
    """
    numbers = list(range(1, len(noted) + 1))
    if every > 1:
        before, after = [None, *noted], [*noted[1:], None]
        numbers = [n for n in numbers if not before[n - 1] == noted[n - 1] == after[n - 1]]
    for number, n in enumerate(numbers[::every]):
        yield {n: KINDS[number % 4]}
        if every > 1 and number % 3:
            continue
        if (later := n + 1 + 7 * number % 23) <= len(noted):
            yield {n: KINDS[number % 4], later: KINDS[(number + 1 + number // 4) % 4]}


def sweep(every, names):
    """All plans on these files; returns the figures."""
    home = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    began = time.monotonic()
    figures = {"looks": 0, "faults": 0, "losses": []}
    try:
        warm_up(home / "warm")
        for begun in begin(home, at=90, **SHORT):
            if begun.name not in names:
                continue
            shutil.copytree(begun, home / "run")
            with Reads(home / "run") as layer:
                train(home / "run", **SHORT)
            whole = ending(home / "run")
            shutil.rmtree(home / "run")
            figures["looks"] += layer.count
            for faults in plans(layer.noted, every):
                figures["faults"] += len(faults)
                if problem := check(home, begun, whole, faults):
                    where = {f"{n} {kind}": " ".join(layer.noted[n - 1]) for n, kind in faults.items()}
                    figures["losses"].append({"files": begun.name, "faults": where, "problem": problem})
                    print(figures["losses"][-1], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {**figures, "seconds": time.monotonic() - began}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--every", type=int, default=3, help="which looks fail: each third of the different ones, all (1)"
    )
    parser.add_argument("--files", nargs="+", default=("killed", "damaged"), help="what a run goes on from; both")
    words = parser.parse_args()
    figures = sweep(words.every, words.files)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
