"""Compare the duration of an ordinary step in each loop, even on a machine with other load.

    python benchmarks/steps.py                # three minutes
    python benchmarks/steps.py --rounds 5     # a quick look

The contestants of overhead.py take turns, and the dataset records when each batch is requested. Only the fastest tenth, quarter
and half of an epoch's steps are used, because other load makes some steps slower, but none faster. The table shows the medians
of all rounds. The results therefore exclude the end of an epoch, and the steps that write a row or draw the bar. overhead.py
includes these costs, but needs a machine without other load.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

# Import the package from this clone, even if it is also installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import overhead
import torch
from instructions import CONTESTANTS
from overhead import PLAIN, PLAIN_METRICS, Batches, Problem

# Show the fastest tenth, quarter and half of the steps, because other load makes some steps slower but none faster.
PARTS = 10, 4, 2
# Leave out the first 30 steps of a run as a warm-up.
WARM = 30


class RecordingBatches(Batches):
    """Batches that record when each one is requested."""

    asked: list[int] = []  # noqa: RUF012

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(time.perf_counter_ns())
        return super().__getitem__(index)


def microseconds(name: str, problem: Problem, steps: int) -> list[float]:
    """Return the longest duration within the fastest tenth, quarter and half of an epoch's steps, in microseconds."""
    RecordingBatches.asked.clear()
    gc.collect()
    with overhead.run_silently():
        overhead.CONTESTANTS[name][1](problem, steps)
    asked = RecordingBatches.asked[WARM:]
    lengths = sorted(after - before for before, after in zip(asked[:-1], asked[1:], strict=True))
    return [lengths[len(lengths) // part] / 1000 for part in PARTS]


def table(measured: dict[str, list[list[float]]]) -> str:
    """Return a table of median durations, and of median ratios of the fastest tenths."""
    lines = [
        f"{'us a step':26}{'tenth':>8}{'quarter':>9}{'half':>7}{'/ plain':>10}{'/ same metrics':>16}"
    ]
    for name, rounds in measured.items():
        tenth, quarter, half = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = []
        for base in (PLAIN, PLAIN_METRICS):
            pairs = zip(rounds, measured[base], strict=True)
            ratios.append(statistics.median(own[0] / other[0] for own, other in pairs))
        plain, same = ratios
        lines.append(f"{name:26}{tenth:8.1f}{quarter:9.1f}{half:7.1f}{plain:10.3f}{same:16.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=250, help="the number of steps in an epoch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    overhead.silence_loggers()
    kept, overhead.Batches = overhead.Batches, RecordingBatches  # type: ignore[misc]
    problem = Problem("tiny", (64, 32, 10), 32, "adam")
    measured: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    for turn in range(arguments.rounds + 1):
        for name in CONTESTANTS:
            found = microseconds(name, problem, arguments.steps)
            # Leave out the first round, which also imports modules and compiles code.
            if turn:
                measured[name].append(found)
    overhead.Batches = kept  # type: ignore[misc]
    rounds = f"{arguments.rounds} rounds of {arguments.steps} steps, medians"
    print(f"torch {torch.__version__}, CPU, 1 thread; tiny; {rounds}")
    print(table(measured))


if __name__ == "__main__":
    main()
