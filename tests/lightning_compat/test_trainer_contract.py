"""Test that modules and callbacks read the same values in each hook as under Trainer."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "soak" / "trainer_contract.py"


def test_attributes_differ_from_trainers_only_where_a_reason_is_listed():
    command = [sys.executable, SCRIPT, "--module", "WithSteps"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "0 attributes without a reason" in finished.stdout
