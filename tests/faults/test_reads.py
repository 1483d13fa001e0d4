"""Each twelfth look at the disk fails, alone or with a later one: nothing is lost, no good file renamed, no run begun anew."""

import json
import subprocess
import sys
from pathlib import Path

from interpreter import ready

SCRIPT = Path(__file__).with_name("reads.py")


def test_no_error_of_a_look_costs_a_file():
    sweeps = [
        subprocess.Popen(
            ready([sys.executable, str(SCRIPT), "--every", "12", "--files", files]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for files in ("killed", "damaged")
    ]
    for sweep in sweeps:
        out, errors = sweep.communicate()
        assert sweep.returncode == 0, out[-3000:] + errors[-3000:]
        figures = json.loads(out.splitlines()[-1])
        assert figures["losses"] == []
        assert figures["looks"] > 200
        assert figures["faults"] > 15
