"""System calls that fail below Python: a few of what `soak/syscalls.py` does a thousand times."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "soak" / "syscalls.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the library is for Linux")
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_no_failing_system_call_costs_a_file():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--faults", "8", "--seed", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["losses"] == []
    assert figures["faults"] >= 8
    assert min(figures["calls"].values()) > 300


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = subprocess.run([sys.executable, str(SCRIPT), "--faults", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == "skipped: no C compiler (cc, gcc or clang) on a Linux here\n"
