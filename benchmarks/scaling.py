"""Measure which costs grow with the number of metrics, steps, epochs, rows, checkpoints, versions or skipped batches.

    python benchmarks/scaling.py                   # about ten minutes
    python benchmarks/scaling.py --only metrics rows
    python benchmarks/scaling.py --toy             # a quick check of the script

How it is measured:

- metrics: each step logs 0, 1, 4, 16 or 64 values by step and by epoch to CSV files. A hand-written loop does only the required
  tensor arithmetic (a clone, and a sum scaled by the batch size). The cost is the smallest CPU time of a long fit minus that of
  a short fit. "Of one more" is the cost of each metric added since the row above. The first metric's cost includes
  writing steps.csv.
- steps: one fit of each loop in a new process, with epochs of 1,000 steps. Memory is the process's resident set size, and
  handles are its open files.
- epochs: 5,000 epochs of two steps with a validation, a row and a save. A cost is the median over a fifth of the epochs.
- rows: a CSV file with many rows is opened and continued, as in a resumed run. The cost of a row is the median over blocks of 100 rows.
- checkpoints: each epoch has one step and keeps its checkpoint (save_top_k=-1). Then the finished run is resumed. The table
  shows CPU times.
- versions: a run's folder is copied many times. Then each loop starts a new run and resumes a run, and the runs are listed.
  The table shows CPU times.
- resume: the batch number in a checkpoint is changed from 7 to 1,000,000. The time is measured from the call to fit
  until the first batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

# Import the package from this clone, even if it is also installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from overhead import NoTerminal, run_silently, silence_loggers
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from fabric_template import CSVLogger, FabricLoop, MiniLoop, TensorLoader
from fabric_template.tools.runs import list_runs

SILENT = {"enable_progress_bar": False, "enable_model_summary": False}
BATCH = 32
# A run saves a checkpoint after 7 batches. To resume later in the epoch, each 7 in the checkpoint's counters is replaced.
DONE = 7


class Net(nn.Module):
    """A tiny network that logs a metric for each name."""

    log: Any

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.layer, self.names, self.values = nn.Linear(4, 1), names, make_values(len(names))

    def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        for name, value in zip(self.names, self.values, strict=True):
            self.log(name, value, on_epoch=True)
        return mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Repeated:
    """A loader that yields one batch again and again, so that loading data costs no time."""

    def __init__(self, number: int) -> None:
        self.number, self.batch = number, make_batch()

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        batch = self.batch
        return (batch for _ in range(self.number))


def make_values(number: int) -> list[Tensor]:
    return [torch.tensor(float(index)) for index in range(number)]


def make_batch() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(BATCH, 4), torch.randn(BATCH, 1)


# Section "metrics": the cost of a step that logs 0 to 64 values


def by_hand(number: int, steps: int) -> None:
    net, batches, values = Net(), Repeated(steps), make_values(number)
    optimizer = net.configure_optimizers()
    last: list[Any] = [None] * number
    sums: list[Any] = [torch.zeros(()) for _ in values]
    net.train()
    for x, y in batches:
        for index, value in enumerate(values):
            last[index] = value.clone()
            sums[index] = torch.add(sums[index], value, alpha=BATCH)
        loss = mse_loss(net.layer(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ours(number: int, steps: int) -> None:
    names = tuple(f"metric_{index}" for index in range(number))
    loop = FabricLoop(accelerator="cpu", devices=1, max_epochs=1, **SILENT)
    loop.fit(Net(names), Repeated(steps))


def cpu_seconds(train: Callable[[int, int], None], number: int, steps: int) -> float:
    start = time.process_time()
    train(number, steps)
    return time.process_time() - start


def metrics(size: float) -> Iterator[str]:
    steps, rounds, numbers = max(int(500 * size), 4), max(int(9 * size), 1), (0, 1, 4, 16, 64)
    found: dict[tuple[str, int, int], float] = {}
    with run_silently():
        ours(1, 10)
        for _ in range(rounds):
            for number, length in product(numbers, (steps, 3 * steps)):
                for name, train in (("by hand", by_hand), ("ours", ours)):
                    key = name, number, length
                    found[key] = min(cpu_seconds(train, number, length), found.get(key, 1e9))
    each = {}
    for name, number in product(("by hand", "ours"), numbers):
        more = found[name, number, 3 * steps] - found[name, number, steps]
        each[name, number] = 1e6 * more / (2 * steps)
    # Subtract the time of the hand-written loop, which does only the required tensor arithmetic.
    beyond = {number: each["ours", number] - each["by hand", number] for number in numbers}
    yield f"{'logged metrics':24}{'by hand, us a step':>20}{'ours':>10}{'beyond, us a metric':>22}{'of one more':>14}"
    for before, number in zip((0, *numbers), numbers, strict=False):
        row = f"{number:<24}{each['by hand', number]:20.1f}{each['ours', number]:10.1f}"
        if number:
            row += f"{(beyond[number] - beyond[0]) / number:22.2f}"
            row += f"{(beyond[number] - beyond[before]) / (number - before):14.2f}"
        yield row


# Section "steps": whether memory, open files and the time per step grow during a long fit


def resident() -> float:
    """Return this process's resident memory in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def new_loop(kind: str, **options: Any) -> Any:
    """Return a FabricLoop or MiniLoop that prints nothing and monitors "metric" for best.ckpt."""
    options = {"monitor": "metric", "mode": "min", "accelerator": "cpu", "devices": 1, **options}
    return MiniLoop(**options) if kind == "MiniLoop" else FabricLoop(**{**SILENT, **options})


class Watched(Net):
    """A network that records the memory and the open files when an epoch starts and when training ends."""

    trainer: Any

    def __init__(self, at: list[int]) -> None:
        super().__init__(("metric",))
        self.at, self.start = set(at), time.perf_counter()
        self.seen: list[tuple[int, float, int, float]] = []

    def on_train_epoch_start(self) -> None:
        step = self.trainer.global_step
        if step in self.at:
            handles, now = len(os.listdir("/proc/self/fd")), time.perf_counter() - self.start
            self.seen.append((step, resident(), handles, now))

    on_train_end = on_train_epoch_start


def child(kind: str, each: int, epochs: int) -> list[tuple[int, float, int, float]]:
    torch.set_num_threads(1)
    net = Watched([each * epoch for epoch in (1, epochs // 100, epochs // 10, epochs)])
    x = torch.randn(4 * each, 4)
    data = TensorLoader(x, x.sum(1, keepdim=True), batch_size=4, shuffle=True)
    loop = new_loop(kind, max_epochs=epochs)
    net.log, net.trainer = loop.log, loop
    with run_silently():
        loop.fit(net, data)
    return net.seen


def steps(size: float) -> Iterator[str]:
    for kind in ("FabricLoop", "MiniLoop"):
        if size == 1:
            command = [sys.executable, __file__, "--child", kind, "1000", "1000"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seen = json.loads(done.stdout.splitlines()[-1])
        else:
            seen = child(kind, 2, 100)
        yield f"{f'steps, {kind}':24}{'RSS, MB':>12}{'handles':>10}{'us a step so far':>20}"
        for number, memory, handles, seconds in seen:
            yield f"{number:<24,}{memory:12.1f}{handles:10}{1e6 * seconds / number:20.0f}"
        yield f"{'grown':24}{seen[-1][1] - seen[0][1]:12.1f}{seen[-1][2] - seen[0][2]:10}"


# Section "epochs": whether memory and the time per epoch grow during a fit of 5,000 epochs


class Measurements(list[float]):
    """A list that is left out of checkpoints, because its class is a subclass of list."""


class Timed(Net):
    """A network that records the time and the memory at each validation."""

    def __init__(self) -> None:
        super().__init__(("metric",))
        self.times, self.memory = Measurements(), Measurements()

    def validation_step(self, batch: tuple[Tensor, ...]) -> Tensor:
        self.times.append(time.process_time())
        self.memory.append(resident())
        return mse_loss(self.layer(batch[0]), batch[1])


def epochs(size: float) -> Iterator[str]:
    number = max(int(5000 * size), 20)
    yield f"{f'{number:,} epochs':24}{'first fifth, ms':>16}{'last, ms':>10}{'ratio':>8}{'MB grown':>10}"
    for kind in ("FabricLoop", "MiniLoop"):
        with run_silently():
            net, loop = Timed(), new_loop(kind, max_epochs=number, name=kind)
            net.log = loop.log
            loop.fit(net, Repeated(2), Repeated(1))
        part = number // 5
        costs = [1e3 * (after - now) for now, after in zip(net.times, net.times[1:], strict=False)]
        first, last = statistics.median(costs[:part]), statistics.median(costs[-part:])
        grown = net.memory[-1] - net.memory[part]
        yield f"{kind:24}{first:16.2f}{last:10.2f}{last / first:8.2f}{grown:10.1f}"


# Section "rows": the cost of opening and continuing a CSV file that has many rows


def make_filled_logger(name: str, rows: int) -> CSVLogger:
    """Return a logger for a CSV file that already has ``rows`` rows."""
    logger = CSVLogger("logs", version=rows)
    append = make_append(logger, name)
    append(0)
    path = Path(logger.log_dir, name)
    head, row, _ = path.read_text().split("\n")
    path.write_text("\n".join([head, *[row] * rows, ""]))
    return CSVLogger("logs", version=rows)


def make_append(logger: CSVLogger, name: str) -> Callable[[int], None]:
    values = {"train_loss": 0.12345678912345, "val_loss": 0.23456789123456}
    values |= {"val_acc": 0.98765, "lr": 1e-3}
    if name == "steps.csv":
        return lambda number: logger.log_metrics(values, step=number)
    return lambda number: logger.log_epoch({"epoch": number, "step": 100 * number, **values})


def rows(size: float) -> Iterator[str]:
    few, many, block = 1000, max(int(1_000_000 * size), 2000), 100
    yield f"{'rows':24}{'opened, ms':>12}{'cut back, ms':>14}{'us a row':>10}"
    with run_silently():
        for name in ("metrics.csv", "steps.csv"):
            for number in (few, many):
                logger = make_filled_logger(name, number)
                start = time.perf_counter()
                place = logger.position()
                opened = 1e3 * (time.perf_counter() - start)
                append, each = make_append(logger, name), list[float]()
                for _ in range(11):
                    start = time.perf_counter()
                    for index in range(block):
                        append(index)
                    each.append(1e6 * (time.perf_counter() - start) / block)
                again = CSVLogger("logs", version=number)
                start = time.perf_counter()
                again.rewind(place)
                back = 1e3 * (time.perf_counter() - start)
                assert again.position() == place, "rewind() has changed the existing rows"
                what = f"{name}, {number:,}"
                yield f"{what:24}{opened:12.1f}{back:14.1f}{statistics.median(each):10.1f}"


# Section "checkpoints": the cost of saving and resuming if a run keeps the checkpoint of each epoch


class Stopwatch:
    """A callback that records the CPU time at the start of each epoch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.times.append(time.process_time())


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the CPU time that a call takes, in milliseconds."""
    start = time.process_time()
    with redirect_stdout(NoTerminal()), redirect_stderr(NoTerminal()):
        call()
    return 1e3 * (time.process_time() - start)


class Better(Net):
    """A network whose metric decreases at each step."""

    def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
        self.values[0] = self.values[0] - 1
        return super().training_step(batch)


def saving(epochs: int, **options: Any) -> FabricLoop:
    options = {"monitor": "metric", "mode": "min", "save_top_k": -1, **SILENT, **options}
    return FabricLoop(accelerator="cpu", devices=1, max_epochs=epochs, **options)


def checkpoints(size: float) -> Iterator[str]:
    number = max(int(1000 * size), 22)
    with run_silently():
        watch = Stopwatch()
        saving(number, callbacks=[watch]).fit(Better(("metric",)), Repeated(1))
        saving(1, name="few").fit(Better(("metric",)), Repeated(1))
        pairs = zip(watch.times, watch.times[1:], strict=False)
        times = [1e3 * (then - now) for now, then in pairs]
        part = min(50, len(times) // 2)
        kept = len(list(Path("checkpoints/run/version_0").glob("*.ckpt")))
        first, last = statistics.median(times[1 : part + 1]), statistics.median(times[-part:])
        yield f"{'checkpoints kept':24}{'ms an epoch':>12}"
        yield f"{f'the first {part}':24}{first:12.2f}"
        yield f"{f'the last of {kept}':24}{last:12.2f}"
        yield f"{'resumed, nothing to do':24}{'auto, ms':>12}{'best, ms':>12}"
        for name, epochs in (("few", 1), ("run", number)):
            auto, best = (time_resume(name, epochs, keyword) for keyword in ("auto", "best"))
            among = f"among {kept if name == 'run' else 2}"
            yield f"{among:24}{auto:12.1f}{best:12.1f}"


def time_resume(name: str, epochs: int, keyword: str) -> float:
    """Return the CPU time of resuming a finished run, in milliseconds."""

    def resume() -> None:
        saving(epochs, name=name).fit(Better(("metric",)), Repeated(1), resume=keyword)

    return statistics.median(milliseconds(resume) for _ in range(5))


# Section "versions": the cost of starting, resuming and listing runs in a folder with many versions


def versions(size: float) -> Iterator[str]:
    number = max(int(10_000 * size), 20)
    yield f"{'versions in a folder':32}{'new run, ms':>14}{'auto, ms':>12}{'listed, ms a run':>18}"
    for kind in ("FabricLoop", "MiniLoop"):
        for many in (10, number):
            with run_silently():
                fit_once(kind)
                for folder, index in product(("logs", "checkpoints"), range(1, many)):
                    run = Path(folder, kind)
                    shutil.copytree(run / "version_0", run / f"version_{index}")
                new = [milliseconds(lambda k=kind: fit_once(k)) for _ in range(7)]
                auto = [milliseconds(lambda k=kind: fit_once(k, "auto")) for _ in range(7)]
                listed = milliseconds(lambda k=kind: list_runs(Path("logs", k))) / many
            cells = f"{statistics.median(new):14.1f}{statistics.median(auto):12.1f}{listed:18.2f}"
            yield f"{f'{kind}, {many:,}':32}{cells}"


def fit_once(kind: str, resume: str | None = None) -> None:
    loop, net = new_loop(kind, max_epochs=1, name=kind), Better(("metric",))
    net.log = loop.log
    loop.fit(net, Repeated(1), resume=resume)


# Section "resume": the time to resume after a million batches of an epoch


class Items(Dataset):
    """A dataset that creates and counts its samples only on request."""

    loaded = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        Items.loaded += 1
        return torch.full((4,), float(index)), torch.ones(1)


class FirstBatchReached(Exception):
    """Raised in the first training step, to end the run."""


def replace_done(item: Any, to: int) -> Any:
    """Replace each number DONE in nested values with the number ``to``."""
    if isinstance(item, dict):
        return {key: replace_done(part, to) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(replace_done(part, to) for part in item)
    return to if type(item) is int and item == DONE else item


def resumed(number: int, **loader: Any) -> tuple[float, int]:
    """Return the seconds from the call to fit until the first batch, and the number of items loaded until then."""
    data = DataLoader(Items(number + 100), batch_size=1, **loader)
    options: dict[str, Any] = {"save_every_n_steps": DONE, "logger": False, **SILENT}
    name = "-".join(map(str, loader.values()))
    options |= {"accelerator": "cpu", "devices": 1, "name": name}
    FabricLoop(max_steps=DONE, seed=1, **options).fit(Net(), data)
    path = Path("checkpoints", name, "version_0", "last.ckpt")
    state = torch.load(path, weights_only=True)
    for key in ("loops", "fabric_template", "global_step"):
        state[key] = replace_done(state[key], number)
    torch.save(state, path)
    Items.loaded, then = 0, 0.0

    class Here(Net):
        def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
            nonlocal then
            then = time.perf_counter()
            raise FirstBatchReached

    loop = FabricLoop(max_epochs=1, **options)
    start = time.perf_counter()
    try:
        loop.fit(Here(), data, resume=path)
    except FirstBatchReached:
        assert loop.global_step == number, loop.global_step
    return then - start, Items.loaded


def resume(size: float) -> Iterator[str]:
    number = max(int(1_000_000 * size), 1000)
    yield f"{f'resume at batch {number:,}':34}{'seconds':>10}{'items loaded':>14}"
    with run_silently():
        for name, loader in (
            ("in order", {"shuffle": False}),
            ("shuffled", {"shuffle": True}),
            ("shuffled, 2 workers", {"shuffle": True, "num_workers": 2}),
        ):
            seconds, loaded = resumed(number, **loader)
            loaded = "by workers" if loader.get("num_workers") else str(loaded)
            yield f"{name:34}{seconds:10.2f}{loaded:>14}"


SECTIONS = {"metrics": metrics, "steps": steps, "epochs": epochs, "rows": rows, "checkpoints": checkpoints,
            "versions": versions, "resume": resume}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--toy", action="store_true", help="check the script with small sizes")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    silence_loggers()
    if arguments.child:
        kind, each, number = arguments.child
        print(json.dumps(child(kind, int(each), int(number))))
        return
    torch.set_num_threads(1)
    machine = f"{platform.system()}, {os.cpu_count()} cores, CPU, 1 thread"
    print(f"torch {torch.__version__}, {machine}", flush=True)
    for name in arguments.only:
        # Print the table only after its section has ended, because output within a section is discarded.
        lines = list(SECTIONS[name](0.005 if arguments.toy else 1))
        print("", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
