"""What a training step costs in each loop, counted in instructions: the same on a busy machine as on a quiet one.

    python benchmarks/instructions.py           # ten minutes; needs valgrind, of the system's packages
    python benchmarks/instructions.py --once    # three: a whole fit of one step, and an epoch of one step, as in once.py

How it is counted: this script starts itself again under ``valgrind --tool=cachegrind``. Each contestant of overhead.py trains
an epoch of 100 steps and one of 200, each in a fork, as what a process has counted is written when it ends. A step is the
hundredth part of the difference. What a clock decides is left out: no bar is drawn after the first time. A count says
nothing of memory and caches; overhead.py measures time.
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

import once
import overhead
import torch
from overhead import MINI_ALL, OURS, OURS_ALL, PLAIN, PLAIN_METRICS, Problem

STEPS = 100, 200
EPOCHS = 0, 1, 11
CONTESTANTS = [PLAIN, PLAIN_METRICS, OURS, OURS_ALL, MINI_ALL, "Fabric, its tutorial"]
PROBLEMS = {"tiny": ((64, 32, 10), 32), "tutorial": ((784, 100, 10), 100)}  # sizes, batch size


def counted(problem: Problem, folder: Path) -> None:
    """Train each contestant in forks, and name the files that they leave; runs under valgrind."""
    torch.set_num_threads(1)
    draw_once()
    for name in CONTESTANTS:
        train = overhead.CONTESTANTS[name][1]
        run(train, problem, 20)  # what is imported and compiled at first
        for steps in STEPS:
            child = os.fork()
            if not child:
                run(train, problem, steps)
                os._exit(0)
            os.waitpid(child, 0)
            with (folder / "names").open("a") as names:
                print(child, steps, name, file=names)


def counted_once(folder: Path) -> None:
    """The same of whole fits: nothing but what a fit is made of, one epoch of one step, eleven."""
    torch.set_num_threads(1)
    draw_once()
    for name, make in {
        "FabricLoop": once.ours,
        "MiniLoop": once.mini,
        "Trainer": once.trainer,
    }.items():
        fit(make, 2)  # what is imported at first
        for epochs in EPOCHS:
            child = os.fork()
            if not child:
                fit(make, epochs)
                os._exit(0)
            os.waitpid(child, 0)
            with (folder / "names").open("a") as names:
                print(child, epochs, name, file=names)


def fit(make: Callable, epochs: int) -> None:
    with overhead.out_of_the_way():
        loop, net, loader = make(max(epochs, 1), True), once.module(False), once.PROBLEM.loader(1)
        if epochs:
            loop.fit(net, loader)


def draw_once() -> None:
    """No bar looks at the clock: time passes fifty times as slowly here."""
    import tqdm

    from fabric_template.loggers import console

    class Still(tqdm.tqdm):
        def __init__(self, *args, **words):
            super().__init__(*args, mininterval=1e9, **words)

    tqdm.tqdm = Still
    for screen in (console.Screen, *console.Screen.__subclasses__()):
        screen.seconds_between_draws = float("inf")


def run(train: Callable, problem: Problem, steps: int) -> None:
    with overhead.out_of_the_way():
        train(problem, steps)


def counts_in(folder: Path) -> dict[str, dict[int, int]]:
    """What was counted, by contestant and by how many steps or epochs."""
    counts: dict[str, dict[int, int]] = {}
    for line in (folder / "names").read_text().splitlines():
        child, number, name = line.split(" ", 2)
        summary = (folder / child).read_text().rsplit("summary:", 1)[1]
        counts.setdefault(name, {})[int(number)] = int(summary.split()[0])
    return counts


def table_once(folder: Path) -> str:
    """The instructions of a fit of one step, and of an epoch more."""
    none, one, more = EPOCHS
    lines = [f"{'':26}{'once: a fit of one step':>26}{'an epoch of one step':>24}"]
    for name, count in counts_in(folder).items():
        lines.append(
            f"{name:26}{count[one] - count[none]:26,}{(count[more] - count[one]) / (more - one):24,.0f}"
        )
    return "\n".join(lines)


def table(folder: Path) -> str:
    """The instructions of a step, beside those of the plain loops."""
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
    parser.add_argument("--once", action="store_true", help="of the tiny net with adam")
    parser.add_argument(
        "--into", type=Path, help=argparse.SUPPRESS
    )  # what it starts itself again with
    arguments = parser.parse_args()
    problem = Problem(arguments.problem, *PROBLEMS[arguments.problem], arguments.optimizer)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if arguments.into is not None:
        overhead.quieten()
        counted_once(arguments.into) if arguments.once else counted(problem, arguments.into)
        return
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit(
            "valgrind is not installed: expected it on the PATH, as the package valgrind of your system brings it"
        )
    with tempfile.TemporaryDirectory() as folder:
        counting = [
            valgrind,
            "--quiet",
            "--tool=cachegrind",
            "--cache-sim=no",
            f"--cachegrind-out-file={folder}/%p",
        ]
        words = [
            "--problem",
            problem.name,
            "--optimizer",
            problem.optimizer,
            *["--once"] * arguments.once,
            "--into",
            folder,
        ]
        subprocess.run(
            [*counting, sys.executable, __file__, *words], check=True, stderr=subprocess.DEVNULL
        )
        if arguments.once:
            problem = once.PROBLEM
        about = f"{problem.name}: {problem.sizes}, batch {problem.batch_size}, {problem.optimizer}"
        print(f"torch {torch.__version__}, CPU, 1 thread; {about}")
        print(table_once(Path(folder)) if arguments.once else table(Path(folder)))


if __name__ == "__main__":
    main()
