"""Count the CPU instructions of a training step in each loop. The counts do not depend on other load.

    python benchmarks/instructions.py           # ten minutes, needs the program valgrind
    python benchmarks/instructions.py --once    # three minutes: a fit of one step and an epoch of one step, as in once.py

The script starts itself under ``valgrind --tool=cachegrind``. Each contestant of overhead.py trains for an epoch of 100
steps and for one of 200. Each epoch runs in a forked process, because valgrind writes its counts when a process ends.
A step's count is one hundredth of the difference between the two epochs. Progress bars are drawn only once, because
further updates depend on a clock. The counts do not include the cost of memory and caches. To measure that cost, run overhead.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import once
import overhead
import torch
from overhead import MINI_ALL, OURS, OURS_ALL, PLAIN, PLAIN_METRICS, Problem

STEPS = 100, 200
EPOCHS = 0, 1, 11
CONTESTANTS = [PLAIN, PLAIN_METRICS, OURS, OURS_ALL, MINI_ALL, "Fabric, its tutorial"]
# Map each problem's name to (layer sizes, batch size).
PROBLEMS = {"tiny": ((64, 32, 10), 32), "tutorial": ((784, 100, 10), 100)}


def counted(problem: Problem, folder: Path) -> None:
    """Count the instructions of each contestant in epochs of 100 and of 200 steps."""
    for name in CONTESTANTS:
        train = overhead.CONTESTANTS[name][1]
        # Train once before forking, so that the counted runs include no imports and no compilation.
        run(train, problem, 20)
        for steps in STEPS:
            count_in_fork(folder, name, steps, run, train, problem, steps)


def counted_once(folder: Path) -> None:
    """Count the instructions of complete fits of zero, one and eleven epochs, with one step per epoch."""
    contestants = {"FabricLoop": once.ours, "MiniLoop": once.mini, "Trainer": once.trainer}
    for name, make in contestants.items():
        # Call fit once before forking, so that the counted fits include no imports.
        fit(make, 2)
        for epochs in EPOCHS:
            count_in_fork(folder, name, epochs, fit, make, epochs)


def count_in_fork(folder: Path, name: str, number: int, work: Callable, *args: Any) -> None:
    """Run a function in a forked process, and add the name of valgrind's output file to a list."""
    child = os.fork()
    if not child:
        work(*args)
        os._exit(0)
    os.waitpid(child, 0)
    with (folder / "names").open("a") as names:
        print(child, number, name, file=names)


def fit(make: Callable, epochs: int) -> None:
    with overhead.run_silently():
        loop, net, loader = make(max(epochs, 1), True), once.module(False), once.PROBLEM.loader(1)
        if epochs:
            loop.fit(net, loader)


def draw_once() -> None:
    """Draw each bar only once, because programs run fifty times slower under valgrind."""
    import tqdm

    from fabric_template.loggers import console

    class Still(tqdm.tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "mininterval": 1e9})

    tqdm.tqdm = Still
    for place in console.SECONDS_BETWEEN_DRAWS:
        console.SECONDS_BETWEEN_DRAWS[place] = float("inf")


def run(train: Callable, problem: Problem, steps: int) -> None:
    with overhead.run_silently():
        train(problem, steps)


def counts_in(folder: Path) -> dict[str, dict[int, int]]:
    """Return valgrind's counts, keyed by contestant and by number of steps or epochs."""
    counts: dict[str, dict[int, int]] = {}
    for line in (folder / "names").read_text().splitlines():
        child, number, name = line.split(" ", 2)
        summary = (folder / child).read_text().rsplit("summary:", 1)[1]
        counts.setdefault(name, {})[int(number)] = int(summary.split()[0])
    return counts


def table_once(folder: Path) -> str:
    """Return a table of the instructions for a fit of one step, and for each additional epoch."""
    none, one, more = EPOCHS
    lines = [f"{'':26}{'once: a fit of one step':>26}{'an epoch of one step':>24}"]
    for name, count in counts_in(folder).items():
        lines.append(
            f"{name:26}{count[one] - count[none]:26,}{(count[more] - count[one]) / (more - one):24,.0f}"
        )
    return "\n".join(lines)


def table(folder: Path) -> str:
    """Return a table of the instructions for a step, with their ratios to the plain loop, without and with metrics."""
    counts = counts_in(folder)
    fewer, more = STEPS
    each = {name: (count[more] - count[fewer]) / (more - fewer) for name, count in counts.items()}
    lines = [f"{'':26}{'instructions':>14}{'/ plain':>9}{'/ same metrics':>16}"]
    for name, count in each.items():
        lines.append(
            f"{name:26}{count:14,.0f}{count / each[PLAIN]:9.3f}{count / each[PLAIN_METRICS]:16.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=[*PROBLEMS], default="tiny")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="adam")
    parser.add_argument(
        "--once", action="store_true", help="count complete fits of the tiny model with adam"
    )
    # The help does not show --into, because only this script passes it, to itself under valgrind.
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    problem = Problem(arguments.problem, *PROBLEMS[arguments.problem], arguments.optimizer)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if arguments.into is not None:
        overhead.silence_loggers()
        torch.set_num_threads(1)
        draw_once()
        counted_once(arguments.into) if arguments.once else counted(problem, arguments.into)
        return
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit(
            "valgrind is not on the PATH. Install the package valgrind of your system."
        )
    with tempfile.TemporaryDirectory() as folder:
        counting = [valgrind, "--quiet", "--tool=cachegrind", "--cache-sim=no"]
        counting.append(f"--cachegrind-out-file={folder}/%p")
        # Repeat this script's own options in the process that valgrind runs.
        own = [sys.executable, __file__, *sys.argv[1:], "--into", folder]
        subprocess.run([*counting, *own], check=True, stderr=subprocess.DEVNULL)
        if arguments.once:
            problem = once.PROBLEM
        about = f"{problem.name}: {problem.sizes}, batch {problem.batch_size}, {problem.optimizer}"
        print(f"torch {torch.__version__}, CPU, 1 thread; {about}")
        print(table_once(Path(folder)) if arguments.once else table(Path(folder)))


if __name__ == "__main__":
    main()
