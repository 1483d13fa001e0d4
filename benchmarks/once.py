"""What a run pays beside its steps: once, with each epoch, with each validation, with each checkpoint. A tiny net, CSV, bar.

    python benchmarks/once.py               # a minute
    python benchmarks/once.py --toy         # to see that it runs

How it is measured:

- A fit of one epoch of one step; of eleven such epochs; the same with a validation of one batch, and without checkpoints. What
  is said is the difference: of eleven epochs and one, by ten; of that with something and without it.
- "once" is a whole fit of one step, the step in it, from `fit` to its end: set-up, folders, locks, hparams.yaml, config.yaml,
  one row, one checkpoint, the way out. The loop is made before; what that takes has a row, and the part of it that is
  Lightning Fabric's own (it looks through all packages that are installed).
- "by hand" is that one step in a plain script: its optimizer, a pass over the loader, the two values read. The goal is for
  what a fit costs beyond its steps: once less that.
- Contestants and parts take turns. CPU time is the median of the rounds; time by the clock, with what is waited for the disk,
  is their least, since a shared machine adds to it and takes nothing away.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # works in a clone, installed or not

import torch
from overhead import Problem, lightning_module, out_of_the_way, quieten

GOAL = 10.0  # milliseconds of a fit beside its steps
PROBLEM = Problem("tiny", (64, 32, 10), 32, "adam")
Time = tuple[float, float]  # CPU's and the clock's, in milliseconds


def module(validates: bool) -> Any:
    made = lightning_module(PROBLEM, log=True)
    if validates:
        kind: Any = type(made)

        class Validates(kind):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                x, y = batch
                self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))

        made = Validates()
    return made


def ours(epochs: int, saves: bool) -> Any:
    from fabric_template import FabricLoop

    words = {"num_sanity_val_steps": 0, "enable_checkpointing": saves}
    return FabricLoop(accelerator="cpu", devices=1, max_epochs=epochs, **words)


def mini(epochs: int, saves: bool) -> Any:
    from fabric_template import MiniLoop

    return MiniLoop(accelerator="cpu", devices=1, max_epochs=epochs)


def trainer(epochs: int, saves: bool) -> Any:
    from lightning import Trainer
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    words = {
        "num_sanity_val_steps": 0,
        "enable_checkpointing": saves,
        "logger": CSVLogger("."),
        "log_every_n_steps": 1,
    }
    return Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[TQDMProgressBar()], **words
    )


def fabric() -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def by_hand() -> Time:
    """The step of a fit of one step, which is an optimizer's first."""
    with out_of_the_way():
        net, loader = module(False), PROBLEM.loader(1)

        def fit() -> None:
            optimizer = net.configure_optimizers()
            for x, y in loader:
                logits = net.net(x)
                loss = torch.nn.functional.cross_entropy(logits, y)
                accuracy = (logits.argmax(1) == y).float().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item(), accuracy.item()

        return timed(fit)


def timed(call: Callable[[], Any]) -> Time:
    gc.collect()  # nobody pays for the garbage of the contestant before
    cpu, clock = time.process_time(), time.perf_counter()
    call()
    return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - clock)


def fitted(
    make: Callable[[int, bool], Any], epochs: int, validates: bool = False, saves: bool = True
) -> Time:
    with out_of_the_way():
        loop, net = make(epochs, saves), module(validates)
        val = PROBLEM.loader(1) if validates else None
        return timed(lambda: loop.fit(net, PROBLEM.loader(1), val))


def less(more: Time, without: Time, by: int = 1) -> Time:
    return (more[0] - without[0]) / by, (more[1] - without[1]) / by


def parts(make: Callable[[int, bool], Any], epochs: int) -> dict[str, Time]:
    """What one round finds."""
    by = epochs - 1
    with out_of_the_way():
        made = timed(lambda: make(1, True))
    once = fitted(make, 1)
    epoch = less(fitted(make, epochs), once, by)
    with_val = less(fitted(make, epochs, validates=True), fitted(make, 1, validates=True), by)
    found = {"the loop is made": made, "once: a fit of one step": once, "an epoch of one step": epoch,
             "a validation of one batch": less(with_val, epoch)}  # fmt: skip
    if make is not mini:  # which always saves
        without = less(fitted(make, epochs, saves=False), fitted(make, 1, saves=False), by)
        found["a checkpoint"] = less(epoch, without)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--toy", action="store_true", help="one round of two epochs")
    arguments = parser.parse_args()
    rounds, epochs = (1, 2) if arguments.toy else (arguments.rounds, 11)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quieten()
    contestants = {"FabricLoop": ours, "MiniLoop": mini, "Trainer": trainer}
    found: dict[tuple[str, str], list[Time]] = {}
    for number in range(rounds + (not arguments.toy)):
        with out_of_the_way():
            rows = {("Fabric", "the loop is made"): timed(fabric)}
        rows["by hand", "that step"] = by_hand()
        for name, make in contestants.items():
            rows |= {(name, part): value for part, value in parts(make, epochs).items()}
        if number or arguments.toy:  # the first one loads what is loaded with the first use
            for key, value in rows.items():
                found.setdefault(key, []).append(value)
    print(
        f"torch {torch.__version__}, {platform.system()}, {os.cpu_count()} cores, CPU, 1 thread; {rounds} rounds"
    )
    print(f"{'':40}{'CPU, ms':>10}{'by the clock, ms':>18}")
    for (name, part), times in found.items():
        cpu, clock = statistics.median(one for one, _ in times), min(two for _, two in times)
        print(f"{f'{name}: {part}':40}{cpu:10.2f}{clock:18.2f}")
    pairs = zip(
        found["FabricLoop", "once: a fit of one step"], found["by hand", "that step"], strict=True
    )
    value = statistics.median(once - step for (once, _), (step, _) in pairs)
    verdict = "met" if value <= GOAL else "missed"
    print(
        f"\ngoal: FabricLoop once, beyond its step <= {GOAL:.0f} ms of CPU time: {value:.1f}  {verdict}"
    )


if __name__ == "__main__":
    main()
