"""A save in pieces beside torch.distributed.checkpoint's own: seconds, and bytes per rank, of a model in parts.

    python benchmarks/pieces.py --megabytes 100 --ranks 2

The ranks (gloo, FSDP2) train one step of Adam, then save in turns: ``last.ckpt`` with its pieces,
`torch.distributed.checkpoint.save` of the same weights and moments into a fresh folder, as a loop of one's own does, and
``last.ckpt`` with pieces that a thread writes, of which what counts is how long training waits for it.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def seconds_of(call):
    """One call on all ranks, from the first that begins to the last that ends."""
    import torch

    torch.distributed.barrier()
    began = time.perf_counter()
    call()
    torch.distributed.barrier()
    return time.perf_counter() - began


def measure(run, folder, times):
    """Seconds of each way in turns, and what lies on the disk."""
    import torch.distributed.checkpoint as dcp
    from fabric_template.files.background import BackgroundKeeper
    from fabric_template.files.shards import clear_unnamed
    from torch.distributed.checkpoint.state_dict import get_state_dict

    ours, theirs, behind = [], [], []
    keeper = BackgroundKeeper(run.keeper.folder, run.config)

    def written():
        while keeper.is_busy():
            time.sleep(0.001)

    def alone(number):
        if run.steps.sharded is None:  # under DDP: one file
            run.config, shards = run.config.changed(checkpoint=None), run.config
            run.keeper.write_last(run)
            run.config = shards
            return
        weights, moments = get_state_dict(run.trained.net, run.optimizing.optimizers)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"alone{number}")

    for number in range(times + 1):  # the first is to warm up
        ours.append(seconds_of(lambda: run.keeper.write_last(run)))
        theirs.append(seconds_of(lambda number=number: alone(number)))
        if run.fabric.is_global_zero:
            shutil.rmtree(folder / f"alone{number}", ignore_errors=True)
        waits = seconds_of(lambda: keeper.write_last(run))
        seconds_of(written)  # in which one would train
        behind.append(waits + seconds_of(keeper.commit))
        if run.fabric.is_global_zero:
            clear_unnamed(keeper.folder)
    run.keeper.write_last(run)
    keeper.finish(run, interrupted=False)
    pieces = sorted(path.stat().st_size for path in folder.rglob("*.distcp"))
    (last,) = folder.rglob("last.ckpt")
    found = {"ours": statistics.median(ours[1:]), "alone": statistics.median(theirs[1:])}
    found["waits"] = statistics.median(behind[1:])
    return found | {"pieces": pieces, "last": last.stat().st_size, "times": times}


def parallelize(model, mesh):
    """Each layer in parts, and the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def layers(megabytes):
    """Eight square layers that take so much with Adam's two moments of each, and their width."""
    import torch

    width = int((megabytes * 1e6 / 4 / 3 / 8) ** 0.5)
    return torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(8))
    ), width


def begin(number, port):
    """Be this rank."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(number)}


def train(loop, net, data):
    """Adam, on whatever."""
    import torch

    loop.fit(
        net, data, training_step=lambda net, batch: net(batch[0]).square().mean(),
        optimizer=lambda net: torch.optim.Adam(net.parameters()),
    )  # fmt: skip


def found_by(rank_of, ranks, given, where):
    """What the ranks have left in found.json of their folder; each is rank_of(number, port, folder, *given)."""
    folder = Path(tempfile.mkdtemp(dir=where))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_of, args=(number, port, folder, *given))
        for number in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(500)
        return json.loads((folder / "found.json").read_text())
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def rank_of(number, port, folder, ranks, megabytes, times):
    """One rank."""
    import torch
    from lightning.fabric.strategies import ModelParallelStrategy

    from fabric_template import FabricLoop, TensorLoader

    begin(number, port)

    class AtEnd:
        def on_train_end(self, trainer, module):
            found = measure(trainer._run, folder, times)
            if trainer.is_global_zero:
                (folder / "found.json").write_text(json.dumps(found))

    net, width = layers(megabytes)
    strategy = ModelParallelStrategy(parallelize, ranks, 1)
    loop = FabricLoop(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder), callbacks=AtEnd(),
    )  # fmt: skip
    train(loop, net, TensorLoader(torch.ones(4 * ranks, width), batch_size=4))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--megabytes", type=float, default=100, help="of weights and moments together"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=7, help="saves of each way; the median counts")
    parser.add_argument("--folder", help="where to; by default a temporary folder")
    words = parser.parse_args()
    given = (words.ranks, words.megabytes, words.times)
    found = found_by(rank_of, words.ranks, given, words.folder)
    other = "torch.distributed.checkpoint alone"
    print(f"{words.megabytes:g} MB on {words.ranks} ranks: ours {found['ours']:.3f} s, {other} {found['alone']:.3f} s:"
          f" {found['alone'] / found['ours']:.2f} of its speed; meanwhile: training waits {found['waits']:.3f} s,"
          f" {found['waits'] / found['ours']:.2f} of ours; pieces of {found['pieces']} bytes, last.ckpt {found['last']:,}"
          " bytes")  # fmt: skip


if __name__ == "__main__":
    main()
