"""The tests' quick interpreter does what Python does: whatever is typed, printed, raised and signalled."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import ready

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


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="it is Python itself there")
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
