"""Let every read of a resumed run fail once. No checkpoint may be lost, and no intact file may be renamed or replaced.

    python soak/reads.py --every 1

For n = 1, 2, ... the n-th open, read, stat or listing of a resumed run fails with EIO or EMFILE, or reports the end of the
file. torch.load fails in the same ways. The run must end without an error, or with a one-line error. A second run without
failures must then end with the same files as an uninterrupted run. Both runs resume a killed run, whose
last.ckpt is either intact or damaged.
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

import search_path  # noqa: F401
from kills import end, fork, warm_up
from layer import Fault, Layer, buffered
from victim import BEST, difference, end_of, torch, train, without_names

OPTIONS = {"max_epochs": 2}
KINDS = ("EIO", "EMFILE", "end")


class Reads(Layer):
    """Counts a run's reads of files in `root`, and lets the n-th read fail."""

    operations = ("open", "stat", "fstat", "listdir", "scandir")

    def __init__(self, root, n=0, kind=None):
        super().__init__(root)
        self.n, self.kind, self.recorded, self._is_busy = n, kind, [], False

    def __enter__(self):
        self._load, torch.load = torch.load, self._load_torch
        return super().__enter__()

    def __exit__(self, *exception):
        torch.load = self._load
        super().__exit__(*exception)

    def before(self, operation, path, size):
        self.recorded.append((operation, os.path.relpath(path, self.root)))
        if self.count != self.n:
            return None
        # Truncate only checkpoints. In a CSV file, nothing but the file's size would reveal that bytes are missing.
        if self.kind == "end" and operation == "read" and path.endswith(".ckpt"):
            return 0
        code = errno.EMFILE if self.kind == "EMFILE" else errno.EIO
        raise OSError(code, os.strerror(code))

    def path_of(self, file=None):
        # Ignore operations that path_of() itself causes, because they are not part of the run.
        if self._is_busy or file is None:
            return None
        self._is_busy = True
        try:
            return super().path_of(file)
        finally:
            self._is_busy = False

    def _load_torch(self, file, *args, **kwargs):
        self.count += 1
        self.before("load", self.root, 0)
        return self._load(file, *args, **kwargs)

    def _open(self, file, mode="r", buffering=-1, *args, **kwargs):
        path = None if set(mode) & set("wax+") or isinstance(file, int) else self.path_of(file)
        if path is None:
            return self._open_files[0](file, mode, buffering, *args, **kwargs)
        raw = ReadingFile(os.open(file, os.O_RDONLY), "rb")
        raw.layer, raw.path = self, path
        return buffered(raw, mode, buffering, self.buffer_size, *args, **kwargs)


class ReadingFile(io.FileIO):
    """A file whose reads can fail."""

    def readinto(self, buffer):
        self.layer.count += 1
        less = self.layer.before("read", self.path, len(buffer))
        return super().readinto(buffer) if less is None else less

    def readall(self):
        chunk, parts = bytearray(1 << 20), []
        while count := self.readinto(chunk):
            parts.append(bytes(chunk[:count]))
        return b"".join(parts)


def contents(root):
    """Return every file's bytes, except for lock files, which contain a process id."""
    paths = [path for path in Path(root).rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def prepare(folder, at=110, **options):
    """Write the files of a run that was killed in its second epoch, and a copy in which last.ckpt is damaged."""
    (code,) = end([fork(_train_until, folder / "run", at, options)])
    if code != -signal.SIGKILL or len(list((folder / "run").rglob("*.ckpt"))) < 2:
        files = list(contents(folder / "run"))
        raise RuntimeError(f"the run to be killed ended with {code}, and left {files}")
    (folder / "run").rename(folder / "killed")
    shutil.copytree(folder / "killed", folder / "damaged")
    (last,) = (folder / "damaged").rglob("last.ckpt")
    last.write_bytes(last.read_bytes()[:-500])
    return folder / "killed", folder / "damaged"


def _train_until(root, at, options):
    with Fault(root, at, "SIGKILL"):
        train(root, **options)


def check(folder, files, whole, n, kind):
    """Resume a run with a failing read, and then without one. Describe the problem, or return None."""
    root, message = folder / "run", None
    shutil.copytree(files, root)
    before = contents(root)
    try:
        with Reads(root, n, kind):
            try:
                train(root, **OPTIONS)
            except (ValueError, OSError) as error:
                message = str(error)
                if "\n" in message:
                    return f"more than a line: {message}"
        after = contents(root)
        if wrong := [name for name in after if name.endswith(".before")]:
            return f"started again: {wrong}; {message}"
        if versions := [name for name in after if "version_1" in name]:
            return f"started a new version: {versions}; {message}"
        if message is not None and after == before:
            return None
        train(root, **OPTIONS)
        problem = difference(without_names(whole, BEST), end_of(root, BEST))
        return f"{problem}; {message}" if problem else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def sweep(every, names):
    """Let every n-th read fail, each in a separate run. Return the results."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    start = time.monotonic()
    figures = {"looks": 0, "faults": 0, "losses": []}
    try:
        warm_up(folder / "warm")
        for files in prepare(folder, **OPTIONS):
            if files.name not in names:
                continue
            shutil.copytree(files, folder / "run")
            with Reads(folder / "run") as layer:
                train(folder / "run", **OPTIONS)
            whole = end_of(folder / "run")
            shutil.rmtree(folder / "run")
            figures["looks"] += layer.count
            for n in range(1, layer.count + 1, every):
                kind = KINDS[n // every % len(KINDS)]
                figures["faults"] += 1
                if problem := check(folder, files, whole, n, kind):
                    fault = f"{n} {kind}: {' '.join(layer.recorded[n - 1])}"
                    loss = {"files": files.name, "fault": fault, "problem": problem}
                    figures["losses"].append(loss)
                    print(loss, file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**figures, "seconds": time.monotonic() - start}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=3, help="let every N-th read fail (3)")
    parser.add_argument(
        "--files", nargs="+", default=("killed", "damaged"), help="the runs to resume (both)"
    )
    options = parser.parse_args()
    figures = sweep(options.every, options.files)
    print(json.dumps(figures))
    sys.exit(bool(figures["losses"]))


if __name__ == "__main__":
    main()
