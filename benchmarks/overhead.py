"""Compare the cost of a training step in each loop, in one table from one run.

    python benchmarks/overhead.py            # a few minutes
    python benchmarks/overhead.py --quick    # a quick look

How it is measured:

- The contestants take turns (A B C ... A B C ...). The table shows the median of the ratios within a round, so that other
  load affects a few rounds, but does not favor any contestant.
- A step costs (time of an epoch of 3S steps - time of an epoch of S steps) / 2S. The costs of a fit and of an epoch cancel
  out: set-up, a row of the CSV file, a checkpoint and teardown. The column "once" shows these costs.
- All contestants have the same data, model, loss, optimizer and loader, and one thread. The batches are created before the
  timing, because their creation would hide the differences. Fabric and Accelerate need a DataLoader, so all get one.
- Bars are drawn to a terminal that discards them.
- Before the timing, the script checks that each contestant ends with the same weights as the plain loop.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import importlib.util
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

PLAIN, PLAIN_METRICS = "plain", "plain, same metrics"
OURS, OURS_ALL, MINI_ALL = "ours, barebones", "ours, everything on", "MiniLoop, everything on"
TRAINER, TRAINER_ALL = "Trainer, barebones", "Trainer, everything on"
# The hand-written loop with metrics logs every 50 steps, as Trainer does by default.
LOG_EVERY = 50


@dataclass(frozen=True)
class Problem:
    name: str
    sizes: tuple[int, ...]
    batch_size: int
    optimizer: str
    device: str = "cpu"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for width_in, width_out in zip(self.sizes[:-1], self.sizes[1:], strict=True):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def model_there(self) -> nn.Module:
        return self.model().to(self.device)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=1e-3)
        return torch.optim.SGD(model.parameters(), lr=1e-2)

    def loader(self, steps: int) -> DataLoader:
        return DataLoader(Batches(self, steps), batch_size=None, collate_fn=as_it_is)


class Batches(Dataset):
    """A dataset that returns the same sixteen batches again and again."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.steps = steps
        self.batches = []
        generator = torch.Generator().manual_seed(1)
        for _ in range(16):
            x = torch.randn(problem.batch_size, problem.sizes[0], generator=generator)
            y = torch.randint(problem.sizes[-1], (problem.batch_size,), generator=generator)
            self.batches.append((x.to(problem.device), y.to(problem.device)))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batches[index % 16]


def as_it_is(batch):
    return batch


# The contestants: functions that train for one epoch of `steps` steps and return the trained network.


def plain(problem: Problem, steps: int) -> nn.Module:
    model, loader = problem.model_there(), problem.loader(steps)
    optimizer = problem.optimizer_of(model)
    model.train()
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def plain_metrics(problem: Problem, steps: int) -> nn.Module:
    """Train by hand with a progress bar, CSV files, a checkpoint, and metrics that are summed on the device."""
    from tqdm import tqdm

    model, loader = problem.model_there(), problem.loader(steps)
    optimizer = problem.optimizer_of(model)
    loss_sum, acc_sum, count = *torch.zeros(2, device=problem.device), 0
    with (
        open("steps.csv", "w", newline="") as steps_file,
        open("metrics.csv", "w", newline="") as epochs_file,
    ):
        step_rows, epoch_rows = csv.writer(steps_file), csv.writer(epochs_file)
        step_rows.writerow(["step", "train_loss", "train_acc"])
        epoch_rows.writerow(["epoch", "step", "train_loss", "train_acc"])
        model.train()
        with tqdm(total=len(loader)) as bar:
            for step, (x, y) in enumerate(loader, start=1):
                logits = model(x)
                loss = functional.cross_entropy(logits, y)
                acc = (logits.argmax(1) == y).float().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach() * len(x)
                acc_sum += acc * len(x)
                count += len(x)
                if step % LOG_EVERY == 0:
                    step_rows.writerow([step, loss.item(), acc.item()])
                    bar.set_postfix(train_loss=loss.item(), train_acc=acc.item(), refresh=False)
                bar.update()
        epoch_rows.writerow([0, steps, (loss_sum / count).item(), (acc_sum / count).item()])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.ckpt")
    return model


def fitted(kind: Any, problem: Problem, steps: int, log: bool, **options: Any) -> nn.Module:
    """Train a module with Trainer, FabricLoop or MiniLoop."""
    module = lightning_module(problem, log)
    loop = kind(accelerator=problem.device, devices=1, max_epochs=1, **options)
    loop.fit(module, problem.loader(steps))
    return module.net


def ours_bare(problem: Problem, steps: int) -> nn.Module:
    from fabric_template import FabricLoop

    return fitted(FabricLoop, problem, steps, log=False, barebones=True)


def ours_everything(problem: Problem, steps: int) -> nn.Module:
    from fabric_template import FabricLoop

    return fitted(FabricLoop, problem, steps, log=True)


def mini_everything(problem: Problem, steps: int) -> nn.Module:
    from fabric_template import MiniLoop

    return fitted(MiniLoop, problem, steps, log=True)


def plain_fabric(problem: Problem, steps: int) -> nn.Module:
    """Train as in Fabric's tutorial."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=problem.device, devices=1)
    fabric.launch()
    net = problem.model()
    model, optimizer = fabric.setup(net, problem.optimizer_of(net))
    loader = fabric.setup_dataloaders(problem.loader(steps))
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    return net


def trainer_bare(problem: Problem, steps: int) -> nn.Module:
    from lightning import Trainer

    return fitted(Trainer, problem, steps, log=False, barebones=True)


def trainer_everything(problem: Problem, steps: int) -> nn.Module:
    from lightning import Trainer

    # Trainer shows a TQDMProgressBar only if rich is not installed, so always pass one.
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    options = {"logger": CSVLogger("."), "callbacks": [TQDMProgressBar()]}
    return fitted(Trainer, problem, steps, log=True, **options)


def accelerate(problem: Problem, steps: int) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=problem.device == "cpu")
    net = problem.model()
    model, optimizer, loader = accelerator.prepare(
        net, problem.optimizer_of(net), problem.loader(steps)
    )
    model.train()
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return net


def ignite(problem: Problem, steps: int) -> nn.Module:
    from ignite.engine import create_supervised_trainer

    model = problem.model_there()
    trainer = create_supervised_trainer(
        model, problem.optimizer_of(model), functional.cross_entropy, problem.device
    )
    trainer.run(problem.loader(steps), max_epochs=1)
    return model


# Map each contestant's name to (the package that it needs, the function that trains it).
CONTESTANTS: dict[str, tuple[str, Callable[[Problem, int], nn.Module]]] = {
    PLAIN: ("torch", plain),
    PLAIN_METRICS: ("tqdm", plain_metrics),
    OURS: ("fabric_template", ours_bare),
    OURS_ALL: ("fabric_template", ours_everything),
    MINI_ALL: ("fabric_template", mini_everything),
    "Fabric, its tutorial": ("lightning", plain_fabric),
    TRAINER: ("lightning", trainer_bare),
    TRAINER_ALL: ("lightning", trainer_everything),
    "Accelerate": ("accelerate", accelerate),
    "Ignite": ("ignite", ignite),
}
# The goals: (contestant, baseline, largest allowed ratio of their times per step, problem).
GOALS = [
    (OURS_ALL, PLAIN_METRICS, 1.08, "tiny"),
    (OURS_ALL, TRAINER_ALL, 0.21, "tiny"),
    (OURS, PLAIN, 1.03, "tiny"),
    (MINI_ALL, PLAIN_METRICS, 1.05, "tiny"),
    (MINI_ALL, PLAIN_METRICS, 1.02, "tutorial"),
]


def lightning_module(problem: Problem, log: bool):
    """Return a LightningModule. If `log` is True, it logs two metrics to files and to the progress bar."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = problem.model()

        def training_step(self, batch, batch_idx):
            x, y = batch
            return functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return problem.optimizer_of(self.net)

    class LoggingModule(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self.net(x)
            loss = functional.cross_entropy(logits, y)
            self.log("train_loss", loss, on_epoch=True, prog_bar=True)
            acc = (logits.argmax(1) == y).float().mean()
            self.log("train_acc", acc, on_epoch=True, prog_bar=True)
            return loss

    return LoggingModule() if log else Module()


# Functions that measure the contestants and print the results


class NoTerminal(io.TextIOBase):
    """A terminal that discards all output."""

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def run_silently():
    """Run in a temporary folder, and discard the output."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(NoTerminal()), contextlib.redirect_stderr(NoTerminal()):
                yield
        finally:
            os.chdir(here)


def silence_loggers() -> None:
    names = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric")
    for name in (*names, "ignite", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def seconds(train: Callable[[Problem, int], nn.Module], problem: Problem, steps: int) -> float:
    with run_silently():
        # Collect the previous contestant's garbage now, so that collecting it is not part of the measured time.
        gc.collect()
        start = time.perf_counter()
        train(problem, steps)
        if problem.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def find_contestants(problem: Problem) -> list[str]:
    """Return the contestants that are installed, run without an error, and end with the plain loop's weights."""
    names = []
    expected = plain(problem, steps=30).state_dict()
    for name, (package, train) in CONTESTANTS.items():
        if importlib.util.find_spec(package) is None:
            print(f"left out: {name} ({package} is not installed)")
            continue
        try:
            with run_silently():
                weights = train(problem, 30).state_dict()
        except Exception as error:
            # A failing contestant is left out, so that the benchmark continues with the other contestants.
            print(f"left out: {name} ({type(error).__name__}: {error})")
            continue
        if all(torch.equal(weights[key].cpu(), value.cpu()) for key, value in expected.items()):
            names.append(name)
        else:
            print(f"left out: {name} (its final weights differ from those of the plain loop)")
    return names


def measure(
    problem: Problem, names: list[str], steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds per step and the remaining seconds of a fit, for each contestant and round."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        if sys.stderr.isatty():
            text = f"\r{problem.name}: round {number + 1} of {rounds}"
            print(text, end="\r", file=sys.stderr, flush=True)
        for name in names:
            _, train = CONTESTANTS[name]
            short, long = seconds(train, problem, steps), seconds(train, problem, 3 * steps)
            per_step = (long - short) / (2 * steps)
            measured[name].append((per_step, short - steps * per_step))
    return measured


def ratio(measured: dict[str, list[tuple[float, float]]], name: str, base: str) -> float:
    pairs = zip(measured[name], measured[base], strict=True)
    return statistics.median(mine / theirs for (mine, _), (theirs, _) in pairs)


def show(problem: Problem, measured: dict[str, list[tuple[float, float]]]) -> None:
    sizes = "-".join(str(size) for size in problem.sizes)
    print(f"\n{problem.name}: {sizes}, batch {problem.batch_size}, {problem.optimizer}")
    print(f"{'':26}{'ms a step':>10}{'/ plain':>9}{'/ same metrics':>16}{'once, ms':>10}")
    for name, rows in measured.items():
        per_step, once = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        against = f"{ratio(measured, name, PLAIN):9.2f}{ratio(measured, name, PLAIN_METRICS):16.2f}"
        print(f"{name:26}{per_step:10.3f}{against}{once:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=400,
        help="S, the steps of the short epoch; the long one has 3S",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="adam")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="the device of model and batches"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="100 steps and 3 rounds, which are too few for a verdict",
    )
    arguments = parser.parse_args()
    steps, rounds = (100, 3) if arguments.quick else (arguments.steps, arguments.rounds)

    # Use one thread, because operations on such small tensors are slower with more threads.
    torch.set_num_threads(1)
    # Import the package from this clone, even if it is also installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    warnings.simplefilter("ignore")
    silence_loggers()

    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU, 1 thread"
    print(f"torch {torch.__version__}, {where}; S={steps}, {rounds} rounds, medians")
    results = {}
    for problem in (
        Problem("tiny", (64, 32, 10), 32, arguments.optimizer, arguments.device),
        Problem("tutorial", (784, 100, 10), 100, arguments.optimizer, arguments.device),
    ):
        results[problem.name] = measure(problem, find_contestants(problem), steps, rounds)
        show(problem, results[problem.name])

    print("\ngoals")
    for name, base, most, problem_name in GOALS:
        measured = results[problem_name]
        if name in measured and base in measured:
            value = ratio(measured, name, base)
            verdict = f"{value:.2f}  {'met' if value <= most else 'missed'}"
        else:
            verdict = "not measured"
        print(f"  {problem_name}: {name} <= {most} x {base}:  {verdict}")


if __name__ == "__main__":
    main()
