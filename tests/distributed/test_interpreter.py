"""The tests' quick interpreter does what Python does: whatever is typed, printed, raised and signalled."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
from interpreter import end, has_means, ready, ready_python

FAILS = """
import sys
from datetime import date

class Local:
    pass

assert sys.modules["__main__"].Local is Local and Local.__module__ == "__main__"
assert not [name for name in sys.modules if name.split(".")[0] in ("fabric_template", "pytest", "runs")]
print(__name__, __file__, __spec__, sys.argv, sys.path[0], sys.path[1])
raise ValueError("mine")
"""
TYPED = {
    "script": ["script.py", "--word", "a b"],
    "module": ["-m", "script", "x"],
    "no module": ["-m", "nothing_of_that_name"],
    "code": ["-c", "import sys; print(sys.argv, repr(sys.path[0])); print('said', file=sys.stderr)", "-x"],
    "a code": ["-c", "raise SystemExit(3)"],
    "words": ["-c", "import sys; sys.exit('why not')"],
    "interrupt": ["-c", "raise KeyboardInterrupt"],
    "killed": ["-c", "import os; print('lost'); os.kill(os.getpid(), 9)"],
    "input": ["-c", "print(input()[::-1]); import atexit; atexit.register(print, 'the end')"],
    "folder": ["-c", "import os; print(os.getcwd(), sorted(os.environ.items()))"],
    "random": ["-c", "import torch; torch.manual_seed(1); print(torch.rand(2), torch.get_num_threads())"],
}


here_only = pytest.mark.skipif(not has_means(), reason="it is Python itself there")


@here_only
@pytest.mark.parametrize("what", TYPED)
def test_does_what_python_does(what):
    Path("script.py").write_text(FAILS)
    command = [sys.executable, *TYPED[what]]
    environment = {**os.environ, "PYTHONPATH": "/nowhere", "OMP_NUM_THREADS": "1"}
    words = {"capture_output": True, "text": True, "input": "abc\n", "env": environment}
    expected, found = (subprocess.run(typed, **words) for typed in (command, ready(command)))
    if what == "module":  # how runpy's lines are numbered is its own affair
        expected, found = (done.stderr.splitlines()[-3:] for done in (expected, found))
        assert found == expected
    else:
        assert (found.returncode, found.stdout, found.stderr) == (
            expected.returncode, expected.stdout, expected.stderr,
        )  # fmt: skip


def test_each_draws_random_numbers_of_its_own():
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    drawn = [subprocess.check_output(ready([sys.executable, "-c", code]), text=True).split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 6


WAITS = """
import os, signal, sys, time
def ended(number, frame):
    os.write(1, b"had 15")
    sys.exit(7)
signal.signal(signal.SIGTERM, ended)
os.write(1, b"there\\n")
while True:
    time.sleep(1)
"""


def test_signals_arrive_and_whoever_is_killed_takes_it_along():
    with subprocess.Popen(ready([sys.executable, "-c", WAITS]), stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[0] == "had 15"
        assert process.returncode == 7
    with subprocess.Popen(ready([sys.executable, "-c", WAITS]), stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""  # nobody holds the other end any more


SAYS = [sys.executable, "-c", "import sys; print(*sorted({'runpy', 'site'} & sys.modules.keys()))"]


@pytest.fixture
def own_server(monkeypatch):
    """None has been asked for; whichever is asked for then goes with the test. It imports nothing, which takes seconds."""
    monkeypatch.setattr(interpreter, "IMPORTED", ())
    monkeypatch.setattr(interpreter, "_server", [])
    yield
    end()


@here_only
def test_a_folder_for_temporary_files_whose_name_is_long(tmp_path, monkeypatch, own_server):
    """A socket's name has 108 bytes at most; nothing is left there in the end."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert subprocess.check_output(ready(SAYS), text=True) == "runpy site\n"
    assert subprocess.check_output([ready_python(), *SAYS[1:]], text=True) == "runpy site\n"
    end()
    assert list(folder.glob("python-*")) == []


@here_only
def test_a_server_that_was_killed_has_a_successor(tmp_path, monkeypatch, own_server):
    """Only who was about to ask it is lost; its folder goes, too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lost = ready(SAYS)
    folder, server = interpreter._server
    server.kill()
    server.wait()
    assert subprocess.run(lost, capture_output=True).returncode == 1
    assert subprocess.check_output(ready(SAYS), text=True) == "runpy site\n"
    assert not Path(folder).exists()


@here_only
def test_an_asker_that_is_gone_before_it_knows_whom_it_has(monkeypatch, own_server):
    """What was forked for it ends."""
    import json
    import socket

    monkeypatch.chdir(Path(ready(SAYS)[5]))
    reads, writes = os.pipe()
    said = json.dumps([[1], ["-c", "while True: pass"], os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("socket")
        socket.send_fds(line, [len(said).to_bytes(8, "big")], [writes])
        line.sendall(said)
        line.shutdown(socket.SHUT_RD)  # who sends finds nobody
        os.close(writes)
    assert os.read(reads, 1) == b""  # nobody holds the other end any more
    os.close(reads)


def test_where_there_are_no_means_it_is_python(monkeypatch):
    """Systems that lack the call, and those that forbid it."""

    def forbidden(pid, flags=0):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden, raising=False)
    assert (ready(SAYS), ready_python()) == (SAYS, sys.executable)
    monkeypatch.delattr(os, "pidfd_open")
    assert (ready(SAYS), ready_python()) == (SAYS, sys.executable)


@here_only
def test_where_no_file_may_be_run_it_is_python():
    os.chmod(file := ready_python(), 0o600)
    try:
        assert ready_python() == sys.executable
    finally:
        os.chmod(file, 0o700)
