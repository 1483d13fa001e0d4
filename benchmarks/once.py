"""Measure what a run costs besides its steps, such as the costs of a fit, an epoch, a validation and a checkpoint.

    python benchmarks/once.py               # a minute
    python benchmarks/once.py --toy         # a quick check of the script

How it is measured:

- A tiny model trains for one epoch and for eleven epochs of one step each, with a CSV file and a bar. An epoch
  costs one tenth of the difference. Both fits are repeated with a validation of one batch, and without checkpoints.
  The cost of a validation or of a checkpoint is the difference between a fit that includes it and a fit without it.
- "once" is a complete fit of one step: set-up, folders, locks, hparams.yaml, config.yaml, one row, one checkpoint, teardown.
  Separate rows show the cost of creating the loop, and Lightning Fabric's share of this cost.
- "by hand" is the same step in a plain script. The goal applies to the difference between "once" and "by hand".
- Contestants and parts take turns. CPU time is the median of the rounds. Wall-clock time is the minimum of the rounds,
  because other load can only increase it.
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

# Import the package from this clone, even if it is also installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from overhead import Problem, lightning_module, run_silently, silence_loggers

# The largest allowed CPU time of a fit besides its steps, in milliseconds.
GOAL = 10.0
PROBLEM = Problem("tiny", (64, 32, 10), 32, "adam")
# A measured time: (CPU time, wall-clock time), both in milliseconds.
Time = tuple[float, float]


def module(validates: bool) -> Any:
    made = lightning_module(PROBLEM, log=True)
    if not validates:
        return made
    kind: Any = type(made)

    class Validates(kind):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))

    return Validates()


def ours(epochs: int, saves: bool) -> Any:
    from fabric_template import FabricLoop

    options = {"num_sanity_val_steps": 0, "enable_checkpointing": saves}
    return FabricLoop(accelerator="cpu", devices=1, max_epochs=epochs, **options)


def mini(epochs: int, saves: bool) -> Any:
    from fabric_template import MiniLoop

    return MiniLoop(accelerator="cpu", devices=1, max_epochs=epochs)


def trainer(epochs: int, saves: bool) -> Any:
    from lightning import Trainer
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    options = {"num_sanity_val_steps": 0, "enable_checkpointing": saves, "log_every_n_steps": 1}
    options |= {"logger": CSVLogger("."), "callbacks": [TQDMProgressBar()]}
    return Trainer(accelerator="cpu", devices=1, max_epochs=epochs, **options)


def fabric() -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def by_hand() -> Time:
    """Run the first step of a plain script, in which the optimizer also creates its state."""
    with run_silently():
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
    # Collect the previous contestant's garbage now, so that collecting it is not part of the measured time.
    gc.collect()
    cpu, clock = time.process_time(), time.perf_counter()
    call()
    return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - clock)


def fitted(
    make: Callable[[int, bool], Any], epochs: int, validates: bool = False, saves: bool = True
) -> Time:
    with run_silently():
        loop, net = make(epochs, saves), module(validates)
        val = PROBLEM.loader(1) if validates else None
        return timed(lambda: loop.fit(net, PROBLEM.loader(1), val))


def subtract(more: Time, without: Time, by: int = 1) -> Time:
    return (more[0] - without[0]) / by, (more[1] - without[1]) / by


def parts(make: Callable[[int, bool], Any], epochs: int) -> dict[str, Time]:
    """Measure each cost once, such as that of an epoch or a checkpoint."""
    by = epochs - 1
    with run_silently():
        made = timed(lambda: make(1, True))
    once = fitted(make, 1)
    epoch = subtract(fitted(make, epochs), once, by)
    with_val = subtract(fitted(make, epochs, validates=True), fitted(make, 1, validates=True), by)
    found = {"the loop is made": made, "once: a fit of one step": once, "an epoch of one step": epoch,
             "a validation of one batch": subtract(with_val, epoch)}  # fmt: skip
    # MiniLoop cannot turn off checkpoints, so the cost of its checkpoints cannot be measured as a difference.
    if make is not mini:
        without = subtract(fitted(make, epochs, saves=False), fitted(make, 1, saves=False), by)
        found["a checkpoint"] = subtract(epoch, without)
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
    silence_loggers()
    contestants = {"FabricLoop": ours, "MiniLoop": mini, "Trainer": trainer}
    found: dict[tuple[str, str], list[Time]] = {}
    for number in range(rounds + (not arguments.toy)):
        with run_silently():
            rows = {("Fabric", "the loop is made"): timed(fabric)}
        rows["by hand", "that step"] = by_hand()
        for name, make in contestants.items():
            rows |= {(name, part): value for part, value in parts(make, epochs).items()}
        # Leave out the first round, which also imports modules. With --toy, there is only one round.
        if number or arguments.toy:
            for key, value in rows.items():
                found.setdefault(key, []).append(value)
    print(
        f"torch {torch.__version__}, {platform.system()}, {os.cpu_count()} cores, CPU, 1 thread; {rounds} rounds"
    )
    print(f"{'':40}{'CPU, ms':>10}{'by the clock, ms':>18}")
    for (name, part), times in found.items():
        cpu, clock = statistics.median(one for one, _ in times), min(two for _, two in times)
        print(f"{f'{name}: {part}':40}{cpu:10.2f}{clock:18.2f}")
    fits, steps = found["FabricLoop", "once: a fit of one step"], found["by hand", "that step"]
    pairs = zip(fits, steps, strict=True)
    value = statistics.median(once - step for (once, _), (step, _) in pairs)
    verdict = "met" if value <= GOAL else "missed"
    print(
        f"\ngoal: FabricLoop once, beyond its step <= {GOAL:.0f} ms of CPU time: {value:.1f}  {verdict}"
    )


if __name__ == "__main__":
    main()
