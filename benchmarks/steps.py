"""What the usual step costs in each loop, in time, on a machine that does other things, too.

    python benchmarks/steps.py                # three minutes
    python benchmarks/steps.py --rounds 5     # a glance

How it is measured: the contestants of overhead.py take turns, and the dataset, which only hands out what was made beforehand,
notes when it is asked. Of the steps of an epoch the fast ones count (the first tenth, quarter and half), and of those the
median of all rounds: what interrupts a process hits some steps, and not the fast ones. So do a row every 50 steps and a bar
that is drawn: those are left out here, as is what an epoch costs; overhead.py has it all, and wants a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # works in a clone, installed or not

import overhead
import torch
from instructions import CONTESTANTS
from overhead import PLAIN, PLAIN_METRICS, Batches, Problem

PARTS = 10, 4, 2  # the first tenth, quarter and half of the steps, by their length
WARM = 30  # steps that do not count


class Noting(Batches):
    """The same batches; notes when each is asked for."""

    asked: list[int] = []  # noqa: RUF012 - one list for all loaders of this process

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(time.perf_counter_ns())
        return super().__getitem__(index)


def microseconds(name: str, problem: Problem, steps: int) -> list[float]:
    """The length of a step at the end of each of PARTS, in one epoch."""
    Noting.asked.clear()
    gc.collect()
    with overhead.out_of_the_way():
        overhead.CONTESTANTS[name][1](problem, steps)
    asked = Noting.asked[WARM:]
    lengths = sorted(after - before for before, after in zip(asked[:-1], asked[1:], strict=True))
    return [lengths[len(lengths) // part] / 1000 for part in PARTS]


def table(measured: dict[str, list[list[float]]]) -> str:
    """Medians of the rounds, and the tenth's ratios, which are taken within a round."""
    lines = [
        f"{'us a step':26}{'tenth':>8}{'quarter':>9}{'half':>7}{'/ plain':>10}{'/ same metrics':>16}"
    ]
    for name, rounds in measured.items():
        tenth, quarter, half = (statistics.median(column) for column in zip(*rounds, strict=True))
        plain, same = (
            statistics.median(
                own[0] / other[0] for own, other in zip(rounds, measured[base], strict=True)
            )
            for base in (PLAIN, PLAIN_METRICS)
        )
        lines.append(f"{name:26}{tenth:8.1f}{quarter:9.1f}{half:7.1f}{plain:10.3f}{same:16.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=250, help="of an epoch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    overhead.quieten()
    kept, overhead.Batches = overhead.Batches, Noting  # type: ignore[misc]
    problem = Problem("tiny", (64, 32, 10), 32, "adam")
    measured: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    for turn in range(arguments.rounds + 1):
        for name in CONTESTANTS:
            found = microseconds(name, problem, arguments.steps)
            if turn:  # the first one imports and compiles
                measured[name].append(found)
    overhead.Batches = kept  # type: ignore[misc]
    print(
        f"torch {torch.__version__}, CPU, 1 thread; tiny; {arguments.rounds} rounds of {arguments.steps} steps, medians"
    )
    print(table(measured))


if __name__ == "__main__":
    main()
