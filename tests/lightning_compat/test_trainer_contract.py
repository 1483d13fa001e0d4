"""Test that modules and callbacks read the same values in each hook as with Trainer."""

import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import fork_command

SCRIPT = Path(__file__).parents[2] / "soak" / "trainer_contract.py"


@pytest.mark.parametrize(
    "options", [["--module", "WithSteps"], pytest.param([], marks=pytest.mark.soak)], ids=["one module", "all modules"]
)
def test_each_loop_attribute_that_differs_from_trainer_has_a_documented_reason(options):
    command = [sys.executable, str(SCRIPT), *options]
    finished = subprocess.run(fork_command(command), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "0 attributes without a reason" in finished.stdout
