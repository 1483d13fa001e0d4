"""Compare the speed of AtomicCheckpointIO with that of torch.save and fsync in the same folder.

    python benchmarks/checkpoint.py --megabytes 100 --pairs 12

The two methods take turns. AtomicCheckpointIO writes a temporary file, syncs it, renames it and syncs the folder. The plain
method overwrites the old file and syncs it. Peak memory is the memory that the weights and one save add to the process, divided
by the size of the weights.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO

# The goals: saving reaches at least 0.7 times the speed of
# torch.save, and needs at most 1.1 times the memory of the weights.
SPEED, MEMORY = 0.7, 1.1


def ours(state, path):
    AtomicCheckpointIO().save_checkpoint(state, path)


def plain(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def seconds(save, state, path):
    start = time.perf_counter()
    save(state, path)
    return time.perf_counter() - start


def peak():
    """Return the peak memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=100, help="the size of the weights (100)")
    parser.add_argument(
        "--pairs", type=int, default=12, help="the number of saves in each way (12)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Save once before the measurement, because the first save also imports modules.
        ours({"w": torch.zeros(1)}, Path(folder, "warm.ckpt"))
        before, size = peak(), arguments.megabytes * 10**6
        layers = [torch.randn(size // 40) for _ in range(10)]
        state = {"state_dict": {f"layer{i}": layer for i, layer in enumerate(layers)}}
        times = {ours: [], plain: []}
        ours(state, Path(folder, "ours.ckpt"))
        # Read the peak memory now, because the plain saves below could raise it.
        memory = (peak() - before) / size
        for number in range(arguments.pairs):
            for save in (ours, plain) if number % 2 else (plain, ours):
                times[save].append(seconds(save, state, Path(folder, f"{save.__name__}.ckpt")))
    ratios = [b / a for a, b in zip(times[ours], times[plain], strict=True)]
    speed = statistics.median(ratios)
    print(
        f"torch {torch.__version__}, {arguments.megabytes} MB of weights, {arguments.pairs} pairs, medians"
    )
    for save, spent in times.items():
        middle, best = size / 1e6 / statistics.median(spent), size / 1e6 / min(spent)
        print(f"{save.__name__:6}{middle:8.0f} MB/s, {best:.0f} at best")
    verdict = "met" if speed >= SPEED else "missed"
    print(f"ours has {speed:.2f} of the plain speed (goal {SPEED}): {verdict}")
    verdict = "met" if memory <= MEMORY else "missed"
    print(f"peak memory {memory:.2f} x the weights (goal {MEMORY}): {verdict}")


if __name__ == "__main__":
    main()
