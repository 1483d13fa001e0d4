"""One operation on the disk in 17 fails once, in each way: the old state is readable, the run ends as if nothing was."""

import json
import subprocess
import sys
from pathlib import Path

from interpreter import ready

SCRIPT = Path(__file__).with_name("sweep.py")
PARTS = (["ENOSPC", "EIO", "EACCES"], ["short", "SIGKILL"])  # about the same time each, side by side
EVERY = 17  # operations: all of them fail in the soak


def test_nothing_is_lost():
    sweeps = [
        subprocess.Popen(
            ready([sys.executable, str(SCRIPT), "--every", str(EVERY), "--kinds", *kinds]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kinds in PARTS
    ]
    for kinds, sweep in zip(PARTS, sweeps, strict=True):
        out, errors = sweep.communicate()
        assert sweep.returncode == 0, out[-3000:] + errors[-3000:]
        figures = json.loads(out)
        assert figures["losses"] == []
        assert figures["operations"] > 150
        assert figures["faults"] == dict.fromkeys(kinds, figures["operations"] // EVERY)
