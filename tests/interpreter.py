"""Commands of Python without the seconds in which each would import torch and Lightning: forked from one that has them.

`ready([sys.executable, "-c", code])` is a command that does the same: for subprocess, for a kernel, for a launcher. What it
starts is small, and asks a server, which is started once by whoever asks first, to fork; the fork has the asker's streams,
folder, variables and arguments, runs the code as `__main__` and ends as Python ends. Signals are passed on, and whoever
kills the asker has killed the fork. Nothing of the package or of the tests is imported before.

Not for what is about imports, a terminal or groups of processes. Who kills one and looks at what it leaves kills it by its
own number: the asker that is killed is gone a moment before.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

OPTIONS = ("-u", "-B")  # torchrun types one, multiprocessing's spawn the other
SIZE = 8  # bytes of a number on the wire
FORWARDED = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
IMPORTED = ("lightning.fabric", "matplotlib")  # before anything is forked
_server = []  # its folder and its process, once it has been asked for


def has_means():
    """Whether this system can end a fork with who has asked for it; some have the call, and forbid it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def ready(command):
    """The same command, by a fork of a Python that has imported torch and Lightning (where the system has such means)."""
    if command[1][0] == "-" and command[1] not in ("-c", "-m", *OPTIONS) or not has_means():
        return command
    assert command[0] == sys.executable, command
    return [sys.executable, "-I", "-S", __file__, "ask", _folder(), *map(str, command[1:])]


def ready_python():
    """The file that is such a Python, for who starts `sys.executable` by itself; where there can be none, Python's own."""
    path = os.path.join(_folder(), "python") if has_means() else sys.executable
    return path if os.access(path, os.X_OK) else sys.executable  # folders for temporary files may be mounted without


def _folder():
    """Where the server is to be asked; it is started if there is none, or if it has been killed."""
    import shlex
    import subprocess
    import tempfile

    if _server and _server[1].poll() is not None:
        end()
    if not _server:
        folder = tempfile.mkdtemp(prefix="python-")
        with open(os.path.join(folder, "python"), "w") as file:
            words = [sys.executable, "-I", "-S", __file__, "ask", folder]
            file.write(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            os.chmod(file.name, 0o700)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MPL"))}
        clean |= dict.fromkeys(POOLS, "1")  # a process with threads does not fork well
        words = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": folder, "env": clean}
        command = [sys.executable, __file__, "serve", folder, *IMPORTED]
        _server.extend([folder, subprocess.Popen(command, start_new_session=True, **words)])
        if (said := _server[1].stdout.readline()) != b"ready\n":
            end()
            raise RuntimeError(f"the Python to be forked has not started, and said {said!r}: see what it wrote above")
    return _server[0]


def end():
    """End the server, which would otherwise end with this process."""
    import shutil

    if _server:
        folder, server = _server
        _server.clear()
        try:
            server.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            # A process that a test has left running keeps the server's standard input open.
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)  # which it does itself, but where it was killed


def ask(folder, *words):
    """In the place of a Python: hand on what there is, pass on what comes, end as the fork has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it is known whom to pass them on to
    inherited = [number for number in range(256) if _is_open(number)]
    with socket.socket(socket.AF_UNIX) as line:
        said = json.dumps([inherited, words, os.getcwd(), dict(os.environ)]).encode()
        os.chdir(folder)
        line.connect("socket")  # a whole path may be too long for one
        socket.send_fds(line, [len(said).to_bytes(SIZE, "big")], inherited)
        line.sendall(said)
        pid = _number(line)
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: _pass_on(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = os.waitstatus_to_exitcode(_number(line))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _pass_on(pid, number):
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False


def _number(line):
    found = b""
    while len(found) < SIZE:
        more = line.recv(SIZE - len(found))
        if not more:
            os._exit(125)  # the server is gone
        found += more
    return int.from_bytes(found, "big")


def serve(folder, *imported):
    """Fork for each that asks, until the input ends; returns only in the forks, with what is to be run."""
    import gc
    import select
    import shutil
    from importlib import import_module

    for name in imported:
        import_module(name)
    gc.collect()
    gc.freeze()  # or each fork's first collection would copy all of it
    assert len(os.listdir("/proc/self/task")) == 1, "it has threads"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")  # in its folder
        listener.listen(64)
        os.write(1, b"ready\n")
        while listener in select.select([listener, 0], [], [])[0]:
            line = listener.accept()[0]
            shepherd = os.fork()
            if shepherd == 0:
                listener.close()
                said = _shepherd(line)
                if said is None:
                    os._exit(0)
                return said
            line.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    shutil.rmtree(folder)
    os._exit(0)


def _shepherd(line):
    """One per fork: it says how that ended, and ends it when nobody is there any more to hear it."""
    import fcntl
    import select

    size, streams, *_ = socket.recv_fds(line, SIZE, 64)
    said = b""
    while len(said) < int.from_bytes(size, "big"):
        more = line.recv(1 << 16)
        if not more:  # the asker is gone
            return None
        said += more
    child = os.fork()
    if child == 0:
        line.close()
        wanted, *rest = json.loads(said)
        aside = [fcntl.fcntl(stream, fcntl.F_DUPFD, 256) for stream in streams]
        os.closerange(3, 256)
        for number, stream in zip(wanted, aside, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        return rest
    os.closerange(0, 3)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):  # the asker may be gone by now
        line.sendall(child.to_bytes(SIZE, "big"))
    if line in select.select([line, ended := os.pidfd_open(child)], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):
        line.sendall(status.to_bytes(SIZE, "big"))
    return None


def become(base, words, folder, variables):
    """Run `-c code`, `-m module` or `script.py`, and what follows, as a Python would that had begun there."""
    import runpy
    import types

    matplotlib, numpy, torch = map(sys.modules.get, ("matplotlib", "numpy", "torch"))
    if matplotlib is not None and "MPLBACKEND" in variables:  # read as it was imported
        matplotlib.rcParams["backend"] = variables["MPLBACKEND"]
    if numpy is not None:
        numpy.random.seed()  # others than in the last fork; Python's are so by themselves
    if torch is not None:
        torch.default_generator.seed()
    os.chdir(folder)
    os.environ.clear()
    sys.executable = variables.get("READY_PYTHON", sys.executable)
    os.environ.update(variables)
    sys.orig_argv = [sys.executable, *words]
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    while words[0] in OPTIONS:
        if words.pop(0) == "-u":
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *base]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if words[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        assert not words[0].startswith("-"), words
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        sys.argv = list(words)
        main.__file__ = os.path.abspath(words[0])
        with open(words[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(*sys.argv[2:])
    base = sys.path[1:]  # without this file's folder
    wanted = serve(*sys.argv[2:])
    try:
        become(base, *wanted)
    except SystemExit:
        raise
    except BaseException as error:
        deep = error.__traceback__
        while deep is not None and deep.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            deep = deep.tb_next
        sys.excepthook(type(error), error.with_traceback(deep), deep)
        sys.excepthook = lambda *error: None  # all is said; the ending is Python's
        raise
