"""Test that errors and warnings have the same class and text as with Trainer."""

import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import fork_command

SCRIPT = Path(__file__).parents[2] / "soak" / "trainer_messages.py"


@pytest.mark.parametrize("kind", ["optimizer ", "manual", pytest.param("", marks=pytest.mark.soak)])
def test_each_message_that_differs_from_trainer_has_a_documented_reason(kind):
    command = [sys.executable, str(SCRIPT), "--only", kind]
    finished = subprocess.run(fork_command(command), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "0 of these without a reason" in finished.stdout
