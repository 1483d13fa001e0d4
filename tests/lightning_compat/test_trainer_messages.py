"""Test that errors and warnings have the same class and text as under Trainer."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "soak" / "trainer_messages.py"


@pytest.mark.parametrize("kind", ["log ", "optimizer ", "manual"])
def test_messages_differ_from_trainers_only_where_a_reason_is_listed(kind):
    command = [sys.executable, SCRIPT, "--only", kind]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "0 of these without a reason" in finished.stdout
