"""A layer between Python and the disk: it counts what a run does to the files under a folder, and can make it go wrong.

It takes the place of ``os.open, os.write, os.fsync, os.replace, os.mkdir, ...`` and of ``open`` for writing, in the whole
process, so that no writer can forget to go through it. What concerns other folders passes by untouched.
"""

import builtins
import contextlib
import errno
import io
import os
import signal

OPERATIONS = (
    "open", "write", "pwrite", "fsync", "ftruncate", "replace", "rename", "unlink", "remove", "mkdir", "rmdir",
)  # fmt: skip
KINDS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EACCES": errno.EACCES,
    "short": None,  # half of a write is written and reported; the rest of the operations end as ENOSPC does
    "SIGKILL": None,
}


class Layer:
    """While inside, `before(operation, path, size)` is called ahead of each operation under `root`, `after` behind it.

    `before` may raise, kill the process, or return how many bytes of a write are to be written (of a read: to be read).
    """

    operations = OPERATIONS

    def __init__(self, root):
        self.root = os.path.realpath(root)
        self.folders = {}  # file descriptor -> path
        self.count = 0

    def before(self, operation, path, size):
        """Nothing goes wrong here; see `Fault`."""

    def after(self, operation, path, fd):
        """Nothing is noted here; see `PowerCut`."""

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in self.operations}
        self._opens = builtins.open, io.open
        for name in self.operations:
            setattr(os, name, self._wrap(name))
        builtins.open = io.open = self._open
        return self

    def __exit__(self, *exception):
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open, io.open = self._opens

    def _wrap(self, name):
        real = self._real[name]

        def call(*args, **words):
            path = self._path_of(args[0])
            if path is None:
                return real(*args, **words)
            self.count += 1
            size = len(args[1]) if name in ("write", "pwrite") else 0
            less = self.before(name, path, size)
            if less is not None:
                args = (args[0], memoryview(args[1])[:less], *args[2:])
            result = real(*args, **words)
            if name == "open":
                self.folders[result] = path
            target = args[1] if name in ("replace", "rename") else path
            self.after(name, os.path.realpath(target), result if name == "open" else args[0])
            return result

        return call

    def _path_of(self, file):
        """The path of a file or descriptor under the root; None for all others."""
        if isinstance(file, int):
            path = self.folders.get(file)
            # a number may have been closed and used again by somebody else
            with contextlib.suppress(OSError):
                return path if path is not None and os.readlink(f"/proc/self/fd/{file}").startswith(self.root) else None
            return None
        path = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(file))), os.path.basename(file))
        return path if path.startswith(self.root) else None

    def _open(self, file, mode="r", buffering=-1, *args, **words):
        """As open(), but what is written goes through os.write above."""
        if words.get("opener") is not None:  # which calls os.open itself
            return self._opens[0](file, mode, buffering, *args, **words)
        if isinstance(file, int) or not set(mode) & set("wax+") or self._path_of(file) is None:
            if not isinstance(file, int) and self._path_of(file) is not None:  # a read counts as an open
                self.count += 1
                self.before("open", self._path_of(file), 0)
            return self._opens[0](file, mode, buffering, *args, **words)
        flags = os.O_RDWR if "+" in mode else os.O_WRONLY
        flags |= {"w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}.get(
            next((letter for letter in mode if letter in "wax"), ""), 0
        )
        raw = _Raw(os.open(file, flags, 0o666), "rb+" if "+" in mode else "wb")
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *args, **words)


class _Raw(io.FileIO):
    """A file whose writes go through os.write, where the layer sees them."""

    def write(self, data):
        return os.write(self.fileno(), data)


class Fault(Layer):
    """The n-th operation fails, by an error, by half a write, or by SIGKILL right there; all others are as ever.

    With `lasting`, all operations of that kind fail from there on: a disk that is full stays full.
    """

    def __init__(self, root, n, kind, lasting=False):
        super().__init__(root)
        self.n, self.kind, self.lasting = n, kind, lasting
        self.hit = None  # (operation, path) that failed

    def before(self, operation, path, size):
        if self.count != self.n and not (self.lasting and self.count > self.n and operation != "open"):
            return None
        self.hit = self.hit or (operation, path)
        if self.kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "short" and operation == "write":
            return (size + 1) // 2
        code = KINDS[self.kind] or errno.ENOSPC
        raise OSError(code, os.strerror(code), path)
