"""How far threads that write a sharded model's pieces slow the steps beside them: a step's median time, with and without.

    python benchmarks/meanwhile.py --megabytes 100 --ranks 2

The ranks (gloo, FSDP2) train with Adam and ``plugins=AsyncCheckpointIO()``, and begin to save every so many steps. A step
counts as beside a save if rank zero's thread writes as it begins. What training waits for, pieces.py says.
"""

import argparse
import json
import statistics
import time

from pieces import begin, found_by, layers, parallelize, train


class Watch:
    """Begins the saves, and times the steps between; rank zero's times count."""

    def __init__(self, every, folder):
        self.every, self.folder = every, folder
        self.beside, self.without, self.saves, self.busy = [], [], 0, False

    def on_train_batch_start(self, trainer, *_):
        self.busy, self.began = trainer._run.keeper.is_busy(), time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        seconds, keeper = time.perf_counter() - self.began, trainer._run.keeper
        if trainer.global_step > self.every // 2:  # the first ones are to warm up
            (self.beside if self.busy else self.without).append(seconds)
        if trainer.global_step % self.every == 0:
            keeper.write_last(trainer._run)
            self.saves += 1

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            found = {"beside": self.beside, "without": self.without, "saves": self.saves}
            (self.folder / "found.json").write_text(json.dumps(found))


def rank_of(number, port, folder, words):
    """One rank."""
    import torch
    from lightning.fabric.strategies import ModelParallelStrategy
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from fabric_template import FabricLoop, TensorLoader

    begin(number, port)
    net, width = layers(words.megabytes)
    loop = FabricLoop(
        accelerator="cpu", devices=words.ranks, strategy=ModelParallelStrategy(parallelize, words.ranks, 1), logger=False,
        max_steps=words.steps, plugins=AsyncCheckpointIO(), enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(folder), callbacks=Watch(words.every, folder),
    )  # fmt: skip
    samples = torch.randn(words.steps * words.batch_size * words.ranks, width)
    train(loop, net, TensorLoader(samples, batch_size=words.batch_size))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--megabytes", type=float, default=100, help="of weights and moments together"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=8, help="steps between two saves")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a rank's step")
    parser.add_argument("--folder", help="where to; by default a temporary folder")
    words = parser.parse_args()
    found = found_by(rank_of, words.ranks, (words,), words.folder)
    beside, without = statistics.median(found["beside"]), statistics.median(found["without"])
    more = len(found["beside"]) * (beside - without) / found["saves"]
    print(f"{words.megabytes:g} MB on {words.ranks} ranks: a step {1000 * without:.1f} ms ({len(found['without'])} steps),"
          f" beside a save {1000 * beside:.1f} ms ({len(found['beside'])} steps): {beside / without:.2f} of it; each of"
          f" {found['saves']} saves costs the steps {1000 * more:.0f} ms so")  # fmt: skip


if __name__ == "__main__":
    main()
