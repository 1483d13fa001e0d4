"""Start Python commands quickly, by forking a process that has imported torch and Lightning.

`fork_command([sys.executable, "-c", code])` returns a command with the same effect. The new command starts a
small client, which asks a server to fork. The forked process gets the client's streams, working directory, environment
and arguments, runs the code as `__main__`, and exits as Python does. The client forwards signals. If the client is
killed, the server kills the forked process. The server imports neither the package nor the tests.

Tests of imports and process groups cannot use `fork_command`. A test that kills a command and then reads its
files must kill the forked process by its own process id, because the client may exit earlier.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

# Commands may contain these options of Python: torchrun passes -u, and multiprocessing passes -B.
OPTIONS = ("-u", "-B")
# An integer that is sent through the socket has this number of bytes.
SIZE = 8
FORWARDED = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# The server imports these modules before it forks, so that the forked processes need not import them.
IMPORTED = ("lightning.fabric", "matplotlib", "pandas")
# This environment variable contains the folder of the running server.
SHARED = "FORKING_PYTHON_FOLDER"
SECONDS_TO_START = 300
# If this process has started a server, the list contains the server's folder and process.
_server = []


@functools.cache
def can_fork_server():
    """Return whether the server can run here. It needs pidfd_open(), and a torch that starts no threads."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        return bool(_folder())
    except (AttributeError, OSError, RuntimeError):
        return False


def fork_command(command):
    """Return an equivalent command that forks the server, or ``command`` if that is not possible."""
    if command[1][0] == "-" and command[1] not in ("-c", "-m", *OPTIONS) or not can_fork_server():
        return command
    assert command[0] == sys.executable, command
    return [sys.executable, "-I", "-S", __file__, "ask", _folder(), *map(str, command[1:])]


def forking_python():
    """Return an executable file that forks the server, to use instead of `sys.executable`."""
    path = os.path.join(_folder(), "python") if can_fork_server() else sys.executable
    # Temporary folders may be mounted with noexec, so that the file is not executable.
    return path if os.access(path, os.X_OK) else sys.executable


def start_server():
    """Start the server. Processes that pytest-xdist starts later use the same server."""
    import shlex
    import tempfile

    folder = tempfile.mkdtemp(prefix="python-")
    with open(os.path.join(folder, "python"), "w") as file:
        arguments = [sys.executable, "-I", "-S", __file__, "ask", folder]
        file.write(f'#!/bin/sh\nexec {shlex.join(arguments)} "$@"\n')
        os.chmod(file.name, 0o700)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MPL"))}
    # The server must not have threads, because it forks. pyarrow,
    # which pandas imports if possible, would start a thread.
    clean |= {**dict.fromkeys(POOLS, "1"), "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    command = [sys.executable, __file__, "serve", folder, *IMPORTED]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "cwd": folder, "env": clean}
    _server.extend([folder, subprocess.Popen(command, start_new_session=True, **options)])
    os.environ[SHARED] = folder


def _folder():
    """Return the folder of the server's socket. Start the server if it is not running."""
    if _server and _server[1].poll() is not None:
        end()
    if not _server and SHARED not in os.environ:
        start_server()
    folder = _server[0] if _server else os.environ[SHARED]
    deadline = time.monotonic() + SECONDS_TO_START
    while not os.path.exists(os.path.join(folder, "ready")):
        has_failed = os.path.exists(os.path.join(folder, "failed"))
        if time.monotonic() > deadline or has_failed or (_server and _server[1].poll() is not None):
            end()
            raise RuntimeError("the server has not started. Its error is above.")
        time.sleep(0.01)
    return folder


def end():
    """End the server, which would otherwise end with this process."""
    import shutil

    if _server:
        folder, server = _server
        _server.clear()
        os.environ.pop(SHARED, None)
        try:
            server.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            # A process that a test has left running keeps the server's standard input open.
            server.kill()
            server.wait()
        # A killed server does not remove its folder.
        shutil.rmtree(folder, ignore_errors=True)


def ask(folder, *arguments):
    """Send streams, folder and arguments to the server, forward signals, and exit like the forked process."""
    # Block these signals until the forked process to which they are forwarded exists.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    inherited = [number for number in range(256) if _is_open(number)]
    cores = list(os.sched_getaffinity(0))
    with socket.socket(socket.AF_UNIX) as line:
        message = json.dumps([inherited, arguments, os.getcwd(), dict(os.environ), cores]).encode()
        os.chdir(folder)
        # Use a relative path, because a full path may be too long for a socket.
        line.connect("socket")
        socket.send_fds(line, [len(message).to_bytes(SIZE, "big")], inherited)
        line.sendall(message)
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
    with contextlib.suppress(ProcessLookupError):
        # The forked process may have just ended, so that no process has this pid.
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
            # An empty read means that the server has ended.
            os._exit(125)
        found += more
    return int.from_bytes(found, "big")


def serve(folder, *imported):
    """Fork for each request until standard input is closed. In a forked process, return the request."""
    import gc
    import select
    import shutil
    from importlib import import_module

    try:
        for name in imported:
            import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1, "the server has threads"
    except BaseException:
        # Without the file `failed`, other processes would wait for the file `ready`.
        open("failed", "w").close()
        raise
    gc.collect()
    # Without gc.freeze(), the first garbage collection in a forked process would copy all memory pages.
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        # The path of the socket is relative to the server's folder.
        listener.bind("socket")
        listener.listen(64)
        open("ready", "w").close()
        while listener in select.select([listener, 0], [], [])[0]:
            line = listener.accept()[0]
            watcher = os.fork()
            if watcher == 0:
                listener.close()
                message = _watch_fork(line)
                if message is None:
                    os._exit(0)
                return message
            line.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    shutil.rmtree(folder)
    os._exit(0)


def _watch_fork(line):
    """Fork a process, and send its exit status to the client. If the client ends, kill the process."""
    import fcntl
    import select

    size, streams, *_ = socket.recv_fds(line, SIZE, 64)
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        more = line.recv(1 << 16)
        if not more:
            # An empty read means that the client has ended.
            return None
        message += more
    child = os.fork()
    if child == 0:
        line.close()
        wanted, *rest = json.loads(message)
        aside = [fcntl.fcntl(stream, fcntl.F_DUPFD, 256) for stream in streams]
        os.closerange(3, 256)
        for number, stream in zip(wanted, aside, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        return rest
    os.closerange(0, 3)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        # The client may have ended, so that sending raises an error.
        line.sendall(child.to_bytes(SIZE, "big"))
    if line in select.select([line, ended := os.pidfd_open(child)], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):
        line.sendall(status.to_bytes(SIZE, "big"))
    return None


def become(base, arguments, folder, variables, cores):
    """Run `-c code`, `-m module` or `script.py` with its arguments, like a new Python process."""
    import multiprocessing
    import runpy
    import types
    from multiprocessing import resource_tracker

    matplotlib, numpy, torch = map(sys.modules.get, ("matplotlib", "numpy", "torch"))
    if matplotlib is not None and "MPLBACKEND" in variables:
        # Set the backend, because matplotlib reads MPLBACKEND only when it is imported.
        matplotlib.rcParams["backend"] = variables["MPLBACKEND"]
    if numpy is not None:
        # Reseed NumPy's generator, because Python reseeds only its own generator after a fork.
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(variables)
    if "FORKING_PYTHON" in variables:
        sys.executable = variables["FORKING_PYTHON"]
        # Start the resource tracker before the executable is replaced,
        # because the tracker must not run in a forked process.
        resource_tracker.ensure_running()
        multiprocessing.set_executable(sys.executable)
    sys.orig_argv = [sys.executable, *arguments]
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    while arguments[0] in OPTIONS:
        if arguments.pop(0) == "-u":
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *base]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if arguments[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])
        return
    if arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    else:
        assert not arguments[0].startswith("-"), arguments
        sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))
        sys.argv = list(arguments)
        main.__file__ = os.path.abspath(arguments[0])
        with open(arguments[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(*sys.argv[2:])
    # Leave out the folder of this file, which Python has added to sys.path.
    base = sys.path[1:]
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
        # The error is already printed. It is raised again only to set the exit code.
        sys.excepthook = lambda *error: None
        raise
