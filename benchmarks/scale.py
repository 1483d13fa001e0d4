"""Measure the work of rank zero that grows with the number of ranks: gathering, writing and reading a checkpoint.

    python benchmarks/scale.py --ranks 1 4 16 64

Two processes train for three steps with workers. The part of one of them is then repeated in the checkpoint for each rank,
with other random states. Nothing else in a checkpoint depends on the number of ranks.
"""

import argparse
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from lightning.fabric.utilities.seed import seed_everything

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from fabric_template.rng_state import capture_rng_state

ROUNDS = 7


def step(net, batch):
    return net(batch[0]).square().mean()


def make_checkpoint(folder):
    """Return a checkpoint of two processes with two workers each, in the middle of an epoch."""
    seed_everything(1, verbose=False)
    net = torch.nn.Linear(8, 3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    loop = FabricLoop(
        accelerator="cpu", strategy="ddp_fork", devices=2, max_steps=3, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, logger=False,
    )  # fmt: skip
    loop.fit(net, loader, optimizer=torch.optim.Adam(net.parameters()), training_step=step)
    return read_checkpoint(Path(folder, "checkpoints/run/version_0/last.ckpt"))


def with_other_numbers(part, seed):
    """Return a rank's part with other random states."""
    seed_everything(seed, verbose=False)
    return {**part, "rng": capture_rng_state()}


def milliseconds(work):
    """Return the median duration of some rounds."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, path, rows = make_checkpoint(folder), Path(folder, "grown.ckpt"), []
        part = checkpoint["fabric_template"]["ranks"][0]
        for ranks in arguments.ranks:
            parts = [with_other_numbers(part, rank) for rank in range(ranks)]
            checkpoint["fabric_template"]["ranks"] = parts
            gathered = [pickle.dumps(one) for one in parts]
            unpacked = milliseconds(
                lambda gathered=gathered: [pickle.loads(one) for one in gathered]
            )
            io = AtomicCheckpointIO()
            written = milliseconds(lambda io=io: io.save_checkpoint(checkpoint, path))
            read = milliseconds(lambda: read_checkpoint(path))
            size = sum(map(len, gathered))
            rows.append((ranks, size / 1024, unpacked, path.stat().st_size / 1024, written, read))
    print(
        "| ranks | gathered, KB | unpacked, ms | file, KB | written, ms | read and checked, ms |\n|---|---|---|---|---|---|"
    )
    for ranks, size, unpacked, whole, written, read in rows:
        print(
            f"| {ranks} | {size:,.0f} | {unpacked:.1f} | {whole:,.0f} | {written:.1f} | {read:.1f} |"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
