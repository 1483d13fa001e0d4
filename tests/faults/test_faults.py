"""Test a few kills and disk faults. soak/run.py runs thousands of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import fork_command

FOLDER = Path(__file__).parent


def run(script, *options):
    """Run a script, check that no saved state was lost, and return the results."""
    command = fork_command([sys.executable, str(FOLDER / f"{script}.py"), *map(str, options)])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["losses"] == []
    return figures


@pytest.mark.parametrize(("ranks", "kills"), [(1, 4), (2, 1)])
def test_a_run_killed_at_random_times_resumes_exactly(ranks, kills):
    assert run("kills", "--ranks", ranks, "--kills", kills, "--seed", 0)["kills"] >= kills


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pathlib does not call the replaced functions in Python 3.10")
def test_a_run_resumes_no_matter_which_disk_operation_fails():
    figures = run("sweep", "--every", 83)
    assert figures["operations"] > 150
