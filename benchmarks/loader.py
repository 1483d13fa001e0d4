"""Compare the cost of a batch from memory with TensorLoader, DataLoader and hand-written slicing.

    python benchmarks/loader.py             # a minute or two
    python benchmarks/loader.py --toy       # a quick check of the script

How it is measured:

- The data are shuffled images of bytes in MNIST's shape, with labels, in batches of 100. No model uses the batches. "With a
  transform" converts the images to normalized floats: a DataLoader converts each sample, and the others convert each batch.
- One pass over all samples is timed, after a pass that is not timed. The contestants take turns. The table shows the median
  and the range of the ratios within a round.
- Worker processes start before the timing (persistent_workers=True).
- Before the timing, the script checks that each contestant yields each sample once, with the same numbers.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Import the package from this clone, even if it is also installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabric_template import TensorLoader

BATCH = 100
OURS, HAND = "TensorLoader", "by hand: x[order[i:j]]"


def normalized(x: Tensor) -> Tensor:
    return (x.float() / 255 - 0.1307) / 0.3081


class Transformed(Dataset):
    """A dataset that transforms each sample separately, as in tutorials."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return normalized(self.x[index]), self.y[index]


class ByHand:
    """Index the tensors with slices of a random permutation."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x))
        for start in range(0, len(order), BATCH):
            cut = order[start : start + BATCH]
            yield self.x[cut], self.y[cut]


class Whole:
    """Transform whole batches of a loader instead of single samples."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.loader:
            yield normalized(x), y


def contestants(x: Tensor, y: Tensor, transform: bool, workers: list[int]) -> dict[str, Any]:
    whole: Callable[[Any], Any] = Whole if transform else lambda loader: loader
    found = {
        HAND: whole(ByHand(x, y)),
        OURS: whole(TensorLoader(x, y, batch_size=BATCH, shuffle=True)),
    }
    data = Transformed(x, y) if transform else TensorDataset(x, y)
    for number in workers:
        options = {"num_workers": number, "persistent_workers": number > 0}
        found[f"DataLoader, {number} workers"] = DataLoader(data, BATCH, shuffle=True, **options)
    return found


def check(loader: Any, x: Tensor, y: Tensor, transform: bool) -> None:
    """Assert that a loader yields each sample once. Compare sums, which do not depend on the order."""
    batches = list(loader)
    expected = normalized(x) if transform else x
    assert sum(len(part) for part, _ in batches) == len(x)
    assert sorted(torch.cat([part for _, part in batches]).tolist()) == sorted(y.tolist())
    sums = torch.cat([part.double().flatten(1).sum(1) for part, _ in batches]).sort().values
    assert torch.equal(sums, expected.double().flatten(1).sum(1).sort().values)


def seconds(loader: Any) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def measure(loaders: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            found[name].append(seconds(loader))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--toy", action="store_true", help="500 samples, one round, no workers")
    given = parser.parse_args()
    samples, rounds, workers = given.samples, given.rounds, given.workers
    if given.toy:
        samples, rounds, workers = 500, 1, [0]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    y = torch.randint(10, (samples,))
    print(f"torch {torch.__version__}, {platform.system()}, {os.cpu_count()} cores, CPU, 1 thread")
    images = f"{samples:,} images of 28 x 28 bytes, batches of {BATCH}, shuffled"
    print(f"{images}; {rounds} rounds, medians")
    for transform in (False, True):
        loaders = contestants(x, y, transform, workers)
        for loader in loaders.values():
            check(loader, x, y, transform)
        found = measure(loaders, rounds)
        title = "with a transform" if transform else "as they are"
        print(f"\n{title:24}{'samples/s':>12}{'TensorLoader is faster':>26}")
        for name, times in found.items():
            ratios = sorted(theirs / ours for theirs, ours in zip(times, found[OURS], strict=True))
            middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{name:24}{samples / statistics.median(times):12,.0f}{middle:>26}")


if __name__ == "__main__":
    main()
