"""Compare the settings that `tune` chooses with settings chosen by hand, on three demos.

    python benchmarks/tuned.py                  # on the CPU, about ten minutes
    python benchmarks/tuned.py --problem digits --rounds 3 --seconds 0.5
    python benchmarks/tuned.py --toy            # a quick check of the script

First, `tune` chooses settings for the unchanged demo. Then all settings and tune's choice take turns, each in a new
process, and their samples per second are measured. The table shows the median and the range of the ratios within a
round. If tune's choice equals one of the settings, both share a row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

# Import the package from this clone, even if it is also installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fabric_template import FabricLoop
from fabric_template.demos.digits import DigitsClassifier, DigitsData
from fabric_template.demos.mnist import MNISTNet
from fabric_template.demos.tabular import TabularData, TabularNet
from fabric_template.tools.tune import label, measure, run_in_process, tune

LARGE = {"digits": 512, "mnist": 400, "tabular": 512}
ONE, FAST = {"threads": 1}, {"threads": 1, "tensor_loader": True, "fused": True}
BY_HAND: list[dict[str, Any]] = [
    {}, ONE, {**ONE, "num_workers": 2}, {**ONE, "tensor_loader": True}, FAST, {**FAST, "precision": "bf16-mixed"},
    {**FAST, "compile": True},
]  # fmt: skip


def by_hand(problem: str) -> list[dict[str, Any]]:
    """Return combinations of settings that an engineer would try, with small and large batches."""
    large = {"batch_size": LARGE[problem]}
    return [*BY_HAND, {**ONE, **large}, {**FAST, **large}]


def mnist_shaped(images: int) -> DataLoader:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (images,), generator=random)
    pixels = torch.rand(images, 784, generator=random)
    return DataLoader(TensorDataset(pixels, labels), batch_size=100, shuffle=True)


def parts(problem: str, toy: bool) -> tuple[Any, dict[str, Any]]:
    """Return a model and the other arguments of fit."""
    torch.manual_seed(0)
    if problem == "digits":
        return DigitsClassifier(), {"datamodule": DigitsData()}
    if problem == "mnist":
        return MNISTNet(), {"train_dataloaders": mnist_shaped(2000 if toy else 60_000)}
    return TabularNet(), {"datamodule": TabularData()}


def rates(
    job: tuple[Any, dict[str, Any]], choices: list[dict[str, Any]], seconds: float, rounds: int
) -> list[list[float]]:
    """Return the samples per second of each combination of settings in each round."""
    found: list[list[float]] = []
    for _ in range(rounds):
        answers = [run_in_process(partial(measure, *job, seconds, choice)) for choice in choices]
        if failed := [failure for _, failure in answers if failure]:
            print("left out a round:", "; ".join(failed))
            continue
        found.append([rate for rate, _ in answers])
    return found


def run(problem: str, toy: bool, seconds: float, rounds: int) -> None:
    model, given = parts(problem, toy)
    loop = FabricLoop(accelerator="cpu", name=problem)
    rows = [{}, FAST] if toy else by_hand(problem)
    tuned = tune(loop, model, **given, seconds=seconds, only=["tensor_loader"] if toy else None)
    choices = rows if tuned.choice in rows else [*rows, tuned.choice]
    place = choices.index(tuned.choice)
    job = loop, {"model": model, "train_dataloaders": next(iter(given.values()))}
    found = rates(job, choices, seconds, rounds)
    print(f"\n{problem}\n{'':48}{'samples/s':>12}{'/ as it is':>12}")
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    for number, choice in enumerate(choices):
        of_base = statistics.median(each[number] / each[0] for each in found)
        name = f"{label(choice)} (tune)" if number == place else label(choice)
        print(f"{name:48}{medians[number]:12,.0f}{of_base:12.2f}")
    best = medians.index(max(medians[: len(rows)]))
    ratios = [each[place] / each[best] for each in found]
    print(
        f"tune / the best by hand ({label(choices[best])}): {statistics.median(ratios):.2f}"
        f" ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=["digits", "mnist", "tabular"], action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--toy", action="store_true", help="check the script with one problem and few settings"
    )
    asked = parser.parse_args()
    print(
        f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads as it is; {asked.rounds} rounds, medians"
    )
    for problem in asked.problem or (["mnist"] if asked.toy else ["digits", "mnist", "tabular"]):
        run(problem, asked.toy, asked.seconds, asked.rounds)


if __name__ == "__main__":
    main()
