"""SIGKILL at random instants: no run ends other than it would have undisturbed. `make soak` does this a thousand times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import ready

SCRIPT = Path(__file__).with_name("kills.py")


@pytest.mark.parametrize(("ranks", "kills"), [(1, 20), (2, 4)])
def test_nothing_is_lost(ranks, kills):
    done = subprocess.run(
        ready([sys.executable, str(SCRIPT), "--ranks", str(ranks), "--kills", str(kills), "--seed", "0"]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert figures["kills"] >= kills
    assert figures["losses"] == []
