"""Measure how long `import fabric_template` and `fabric-template --help` take, compared with `import lightning.fabric`.

Each timing starts a new interpreter. The contestants take turns, so that other load affects all of them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONTESTANTS = {
    "import lightning.fabric": [sys.executable, "-c", "import lightning.fabric"],
    "import fabric_template": [sys.executable, "-c", "import fabric_template"],
    # Measure FabricLoop separately, because the package imports each class only when it is first used.
    "its FabricLoop": [sys.executable, "-c", "from fabric_template import FabricLoop"],
    # Call main() directly, because the console script `fabric-template` requires an installation of the package.
    "fabric-template --help": [
        sys.executable,
        "-c",
        "from fabric_template.tools.cli import main; main()",
        "--help",
    ],
}
BASE = "import lightning.fabric"
# The largest allowed number of seconds in addition to the time of `import lightning.fabric`.
GOALS = {"import fabric_template": 0.2, "its FabricLoop": 0.2, "fabric-template --help": 1.0}


def seconds(command: list[str]) -> float | None:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).resolve().parent.parent)
    return time.perf_counter() - start if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds

    # Run each command once before the measurement. This call finds failing commands and fills the file caches.
    runs = {name: command for name, command in CONTESTANTS.items() if seconds(command) is not None}
    for name in CONTESTANTS.keys() - runs.keys():
        print(f"left out: {name} (it fails)")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, command in runs.items():
            times[name].append(seconds(command) or float("nan"))

    print(f"{rounds} rounds, medians\n{'':26}{'wall s':>8}{'over fabric':>13}  goal")
    for name, measured in times.items():
        over = statistics.median(
            mine - base for mine, base in zip(measured, times[BASE], strict=True)
        )
        goal = GOALS.get(name)
        verdict = "" if goal is None else f"<= {goal:g} s: {'met' if over <= goal else 'missed'}"
        print(f"{name:26}{statistics.median(measured):8.2f}{over:+13.2f}  {verdict}")


if __name__ == "__main__":
    main()
