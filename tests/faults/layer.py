"""Count the file operations of a process in a folder, and make some of them fail.

`open`, `os.open`, `os.write`, `os.fsync`, `os.replace` and similar functions are replaced during a
`with` block. Writes by C and C++ code are not counted here. soak/syscalls.py counts system calls.
"""

import builtins
import contextlib
import errno
import io
import os
import signal

OPERATIONS = ("open", "write", "fsync", "truncate", "replace", "rename", "unlink", "remove", "mkdir", "rmdir")
KINDS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EACCES": errno.EACCES,
    # With "short", a write writes only half of its bytes, and other operations fail with ENOSPC.
    "short": None,
    "SIGKILL": None,
}


class Layer:
    """Calls `before(operation, path, size)` and `after(operation, path, fd)` around each operation under `root`.

    `before` may raise an error, kill the process, or return the number of bytes that a write should write.
    """

    operations = OPERATIONS
    # A buffered file reads or writes this number of bytes at a time.
    buffer_size = 8192

    def __init__(self, root):
        self.root = os.path.realpath(root)
        # Map each file descriptor to the path of its file.
        self.paths = {}
        self.count = 0

    def before(self, operation, path, size):
        """Subclasses override this method."""

    def after(self, operation, path, fd):
        """Subclasses override this method."""

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in self.operations}
        self._open_files = builtins.open, io.open
        for name in self.operations:
            setattr(os, name, self._wrap(name))
        builtins.open = io.open = self._open
        return self

    def __exit__(self, *exception):
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open, io.open = self._open_files

    def _wrap(self, name):
        real = self._real[name]

        def call(*args, **kwargs):
            path = self.path_of(args[0] if args else None)
            if path is None:
                return real(*args, **kwargs)
            self.count += 1
            less = self.before(name, path, len(args[1]) if name == "write" else 0)
            if less is not None:
                args = (args[0], memoryview(args[1])[:less])
            result = real(*args, **kwargs)
            if name == "open":
                self.paths[result] = path
            target = args[1] if name in ("replace", "rename") else path
            self.after(name, os.path.realpath(target), result if name == "open" else args[0])
            return result

        return call

    def path_of(self, file):
        """Return the path of a file or descriptor, or None if the file is not below the root."""
        if isinstance(file, int):
            # Check the descriptor's current path, because it may have been closed and then reused for another file.
            with contextlib.suppress(OSError):
                return self.paths.get(file) if os.readlink(f"/proc/self/fd/{file}").startswith(self.root) else None
            return None
        if file is None:
            return None
        path = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(file))), os.path.basename(file))
        return path if path.startswith(self.root) else None

    def _open(self, file, mode="r", buffering=-1, *args, **kwargs):
        """Open a file whose writes go through os.write."""
        path = None if isinstance(file, int) else self.path_of(file)
        writes = set(mode) & set("wax+")
        if path is None or kwargs.get("opener") is not None or not writes:
            if path is not None and not writes:
                self.count += 1
                self.before("open", path, 0)
            return self._open_files[0](file, mode, buffering, *args, **kwargs)
        flags = os.O_RDWR if "+" in mode else os.O_WRONLY
        kinds = {"w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL, "r": 0}
        flags |= next(kinds[letter] for letter in mode if letter in kinds)
        raw = WritingFile(os.open(file, flags, 0o666), "rb+" if "+" in mode else "wb")
        if "a" in mode:
            raw.seek(0, os.SEEK_END)
        return buffered(raw, mode, buffering, self.buffer_size, *args, **kwargs)


class WritingFile(io.FileIO):
    """A file whose writes go through os.write, so that the layer counts them."""

    def write(self, data):
        return os.write(self.fileno(), data)


def buffered(raw, mode, buffering, size, *args, **kwargs):
    """Return the file object that open() would create around a raw file."""
    if buffering == 0:
        return raw
    kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
    binary = kind(raw, size)
    return binary if "b" in mode else io.TextIOWrapper(binary, *args, **kwargs)


class Fault(Layer):
    """Makes the n-th operation fail with an error, write only half of its bytes, or kill the process."""

    def __init__(self, root, n, kind):
        super().__init__(root)
        self.n, self.kind = n, kind

    def before(self, operation, path, size):
        if self.count != self.n:
            return None
        if self.kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "short" and operation == "write":
            return (size + 1) // 2
        code = KINDS[self.kind] or errno.ENOSPC
        raise OSError(code, os.strerror(code), path)
