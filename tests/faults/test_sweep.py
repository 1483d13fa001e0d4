"""Every operation on the disk fails once: the old state is readable, and the run is finished as if nothing had been.

In the suite each n fails by SIGKILL and by one of the errors in turn, and of the writes inside a checkpoint file only some do;
`make soak` takes all of them, in every way.
"""

import json
import subprocess
import sys
from pathlib import Path


def test_nothing_is_lost():
    script = Path(__file__).with_name("sweep.py")
    done = subprocess.run([sys.executable, str(script), "--short", "--every", "60"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert figures["losses"] == []
    assert figures["faults"]["SIGKILL"] > 100
    assert min(figures["faults"].values()) > 25
