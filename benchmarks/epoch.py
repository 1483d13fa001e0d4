"""Compare the cost of an epoch in each loop, on two tutorial problems with images like MNIST's and CIFAR-10's.

    python benchmarks/epoch.py                     # on the GPU if there is one, otherwise on the CPU, which takes a long time
    python benchmarks/epoch.py --problem mnist --device cpu --rounds 3
    python benchmarks/epoch.py --toy               # a quick check of the script

How it is measured:

- The contestants take turns. The table shows the median and the range of the ratios within a round.
- An epoch consists of training and validation with CSV rows, progress bars and checkpoints. The column "first" shows the first epoch of a
  fit, which includes set-up, workers, compilation and the choice of kernels.
- The table also shows each contestant's validation accuracy after the same number of epochs.

The tutorials' loops have a Dataset that normalizes each item, a shuffling DataLoader, and ``loss.item()`` in each step.
"Tuned" adds worker processes, pinned memory and a larger batch. All contestants train in float32, where cuDNN uses TF32 by
default.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from overhead import run_silently, silence_loggers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).resolve().parent
TUTORIAL, FABRIC = "the tutorial's loop", "the same on Fabric"
TRAINER, ACCELERATE = "Trainer", "Accelerate"
BY_HAND, GRAPH = "by hand, tensors on the device", "by hand, one CUDA graph a step"
OURS, OURS_TENSORS = "ours, DataLoader", "ours, TensorLoader, fused"
OURS_COMPILED, OURS_REDUCED = "ours, and compile", "ours, compile, reduce-overhead"
TUNED, OURS_FAST = "the tutorial's, tuned", "ours, TensorLoader, bf16, fused"
OURS_FASTEST = "ours, and compile"


class Clock:
    """Record when each epoch starts, after the GPU has finished its work."""

    def __init__(self, device: str) -> None:
        self.device, self.times, self.acc = device, list[float](), 0.0

    def start_epoch(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        """Return the duration of the first epoch, and the median duration of the later ones."""
        each = [later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False)]
        return each[0], statistics.median(each[1:])


@dataclass
class Problem:
    """Images that a model can learn to classify, because each class is a random pattern with noise."""

    name: str
    shape: tuple[int, ...]
    train: int
    val: int
    batch: int
    make: Callable[[], nn.Module]
    lr: float
    device: str
    workers: int = 0
    _data: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def data(self, stage: str) -> tuple[Tensor, Tensor]:
        if not self._data:
            generator = torch.Generator().manual_seed(1)
            patterns = torch.rand(10, *self.shape, generator=generator)
            for name, number in (("train", self.train), ("val", self.val)):
                y = torch.randint(10, (number,), generator=generator)
                x = torch.empty(number, *self.shape, dtype=torch.uint8)
                for rows in torch.arange(number).split(10_000):
                    noise = torch.rand(len(rows), *self.shape, generator=generator)
                    x[rows] = (96 * patterns[y[rows]] + 159 * noise).byte()
                self._data[name] = x, y
        return self._data[stage]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def loader(self, stage: str, tuned: bool = False) -> DataLoader:
        options = {"pin_memory": self.device == "cuda", "persistent_workers": self.workers > 0}
        options = {"num_workers": self.workers, **options} if tuned else {}
        images = Images(*self.data(stage))
        return DataLoader(images, self.batch, shuffle=stage == "train", **options)

    def tensors(self, stage: str, channels_last: bool = False) -> tuple[Tensor, Tensor]:
        """Return a split's data as normalized float tensors on the device."""
        x, y = (part.to(self.device) for part in self.data(stage))
        x = x.float().div_(255).sub_(0.5).div_(0.25)
        return (x.to(memory_format=torch.channels_last) if channels_last else x), y


class Images(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index].float().div_(255).sub_(0.5).div_(0.25), int(self.y[index])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            convolution = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(self.norm(self.first(x)).relu()))
        return (out + self.short(x)).relu()


class Resnet18(nn.Module):
    """A ResNet-18 with 11.2 million parameters for images of 32 x 32 pixels. The first convolution is 3 x 3, without pooling."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.first = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())
        blocks, before = list[nn.Module](), width
        for number in range(4):
            now = width * 2**number
            blocks += [Block(before, now, 1 if number == 0 else 2), Block(now, now, 1)]
            before = now
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)).mean((2, 3)))


def acc_of(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).float().mean()


# The contestants: functions that train for several epochs and record the start of each epoch in a Clock.


def tutorial(
    problem: Problem,
    epochs: int,
    clock: Clock,
    tuned: bool = False,
    fabric: Any = None,
    prepare: Any = None,
) -> None:
    """Train as tutorials do, in plain PyTorch, with Fabric or with Accelerate."""
    net, train, val = problem.model(), problem.loader("train", tuned), problem.loader("val", tuned)
    optimizer = torch.optim.Adam(net.parameters(), lr=problem.lr)
    backward = Tensor.backward
    moves = fabric is None and prepare is None
    if fabric is not None:
        net, optimizer = fabric.setup(net, optimizer)
        train, val = fabric.setup_dataloaders(train, val)
        backward = fabric.backward
    elif prepare is not None:
        net, optimizer, train, val = prepare.prepare(net, optimizer, train, val)
        backward = prepare.backward
    else:
        net = net.to(problem.device)
    for _ in range(epochs):
        clock.start_epoch()
        net.train()
        running_loss = correct = 0.0
        for x, y in train:
            if moves:
                x, y = x.to(problem.device), y.to(problem.device)
            optimizer.zero_grad()
            logits = net(x)
            loss = cross_entropy(logits, y)
            backward(loss)
            optimizer.step()
            running_loss += loss.item()
            correct += (logits.argmax(1) == y).sum().item()
        net.eval()
        right = 0.0
        with torch.no_grad():
            for x, y in val:
                if moves:
                    x, y = x.to(problem.device), y.to(problem.device)
                right += (net(x).argmax(1) == y).sum().item()
        clock.acc = right / problem.val


def on_fabric(problem: Problem, epochs: int, clock: Clock) -> None:
    from lightning.fabric import Fabric

    tutorial(problem, epochs, clock, fabric=Fabric(accelerator=problem.device, devices=1))


def accelerate(problem: Problem, epochs: int, clock: Clock) -> None:
    from accelerate import Accelerator

    tutorial(problem, epochs, clock, prepare=Accelerator(cpu=problem.device == "cpu"))


def tuned(problem: Problem, epochs: int, clock: Clock) -> None:
    tutorial(problem, epochs, clock, tuned=True)


def by_hand(problem: Problem, epochs: int, clock: Clock) -> None:
    """Train on slices of tensors. Like FabricLoop, sum the metrics on the device, and read them once per epoch."""
    net, batch = problem.model().to(problem.device), problem.batch
    optimizer = torch.optim.Adam(net.parameters(), lr=problem.lr, fused=True)
    (x, y), (x_val, y_val) = problem.tensors("train"), problem.tensors("val")
    for _ in range(epochs):
        clock.start_epoch()
        sums, right = torch.zeros(2, device=problem.device), torch.zeros((), device=problem.device)
        order = torch.randperm(len(x), device=problem.device)
        net.train()
        for rows in order.split(batch):
            target = y[rows]
            logits = net(x[rows])
            loss = cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach(), acc_of(logits, target)]) * len(rows)
        net.eval()
        with torch.no_grad():
            for x_part, y_part in zip(x_val.split(batch), y_val.split(batch), strict=True):
                right += (net(x_part).argmax(1) == y_part).sum()
        _, clock.acc = (sums / len(x)).tolist(), right.item() / problem.val


def by_graph(problem: Problem, epochs: int, clock: Clock) -> None:
    """Train as fast as possible, with one CUDA graph for a step and one for a validation batch."""
    net, batch = problem.model().to(problem.device), problem.batch
    optimizer = torch.optim.Adam(net.parameters(), lr=problem.lr, fused=True, capturable=True)
    (x, y), (x_val, y_val) = problem.tensors("train"), problem.tensors("val")
    rows, sums = torch.zeros(batch, dtype=torch.long, device="cuda"), torch.zeros(3, device="cuda")

    def step() -> None:
        target = y[rows]
        logits = net(x[rows])
        loss = cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * batch
        sums[1] += acc_of(logits, target) * batch

    @torch.no_grad()
    def validate() -> None:
        sums[2] += (net(x_val[rows]).argmax(1) == y_val[rows]).sum()

    before = {name: value.clone() for name, value in net.state_dict().items()}
    graphs = [capture_graph(part) for part in (step, validate)]
    net.load_state_dict(before)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    in_order = torch.arange(len(x_val), device="cuda")
    for _ in range(epochs):
        clock.start_epoch()
        sums.zero_()
        order = torch.randperm(len(x), device="cuda")
        for graph, indices in zip(graphs, (order, in_order), strict=True):
            for some in indices.split(batch):
                rows.copy_(some)
                graph.replay()
        *_, right = sums.tolist()
        clock.acc = right / problem.val


def capture_graph(part: Callable[[], None]) -> Any:
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            part()
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph):
        part()
    return graph


def lightning_module(problem: Problem, clock: Clock) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.model()

        def on_train_epoch_start(self) -> None:
            clock.start_epoch()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.measure(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.measure(batch, "val")

        def measure(self, batch: Any, stage: str) -> Tensor:
            logits = self.net(batch[0])
            loss = cross_entropy(logits, batch[1])
            self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
            acc = acc_of(logits, batch[1])
            self.log(f"{stage}_acc", acc, on_step=False, on_epoch=True, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=problem.lr)

    return Module()


def fitted(problem: Problem, epochs: int, clock: Clock, kind: Any = None, **options: Any) -> None:
    """Train with Trainer or FabricLoop, with a progress bar, a CSV file and a checkpoint per epoch."""
    from fabric_template import FabricLoop

    loop = (kind or FabricLoop)(accelerator=problem.device, devices=1, max_epochs=epochs, **options)
    loop.fit(lightning_module(problem, clock), problem.loader("train"), problem.loader("val"))
    clock.acc = float(loop.callback_metrics["val_acc"])


def trainer(problem: Problem, epochs: int, clock: Clock) -> None:
    from lightning import Trainer
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    options = {"logger": CSVLogger("."), "callbacks": [TQDMProgressBar()]}
    fitted(problem, epochs, clock, Trainer, num_sanity_val_steps=0, **options)


class Returning(nn.Module):
    """A module whose step methods return their metrics, so that torch.compile needs no graph break."""

    def __init__(self, problem: Problem, clock: Clock, channels_last: bool = False) -> None:
        super().__init__()
        self.net, self.clock, self.lr = problem.model(), clock, problem.lr
        if channels_last:
            self.net = self.net.to(memory_format=torch.channels_last)

    def on_train_epoch_start(self) -> None:
        self.clock.start_epoch()

    def training_step(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.net(batch[0])
        return cross_entropy(logits, batch[1]), acc_of(logits, batch[1])

    def validation_step(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr, fused=True)


def tensor_loop(
    channels_last: bool = False, **options: Any
) -> Callable[[Problem, int, Clock], None]:
    """Return a function that trains with FabricLoop and TensorLoader, with a progress bar, a CSV file and checkpoints."""

    def run(problem: Problem, epochs: int, clock: Clock) -> None:
        from fabric_template import FabricLoop, TensorLoader

        train, val = (problem.tensors(stage, channels_last) for stage in ("train", "val"))
        train_loader = TensorLoader(*train, batch_size=problem.batch, shuffle=True)
        val_loader = TensorLoader(*val, batch_size=problem.batch)
        loop = FabricLoop(accelerator=problem.device, devices=1, max_epochs=epochs, **options)
        module = Returning(problem, clock, channels_last)
        history = loop.fit(module, train_loader, val_loader)
        clock.acc = float(history["val_acc"].iloc[-1])

    return run


FAST = {"channels_last": True, "precision": "bf16-mixed", "benchmark": True}
Contestant = tuple[str, Callable[[Problem, int, Clock], None]]
# Map each contestant's name to (the package that it needs, the function that trains it).
MNIST: dict[str, Contestant] = {
    TUTORIAL: ("torch", tutorial),
    FABRIC: ("lightning", on_fabric),
    TRAINER: ("lightning", trainer),
    ACCELERATE: ("accelerate", accelerate),
    BY_HAND: ("torch", by_hand),
    GRAPH: ("torch", by_graph),
    OURS: ("fabric_template", fitted),
    OURS_TENSORS: ("fabric_template", tensor_loop()),
    OURS_COMPILED: ("fabric_template", tensor_loop(compile=True)),
    OURS_REDUCED: ("fabric_template", tensor_loop(compile="reduce-overhead")),
}
CIFAR: dict[str, Contestant] = {
    TUTORIAL: ("torch", tutorial),
    TUNED: ("torch", tuned),
    OURS: ("fabric_template", fitted),
    OURS_FAST: ("fabric_template", tensor_loop(**FAST)),
    OURS_FASTEST: ("fabric_template", tensor_loop(**FAST, compile=True)),
}
# The goals of each problem: (contestants, baseline, largest allowed ratio of their times per epoch).
GOALS = {
    "mnist": [
        ((OURS_TENSORS, OURS_COMPILED, OURS_REDUCED), FABRIC, 1 / 15),
        ((OURS_TENSORS, OURS_COMPILED, OURS_REDUCED), GRAPH, 1.2),
        ((OURS_TENSORS,), BY_HAND, 1 / 0.97),
        ((OURS_TENSORS,), TUTORIAL, 1 / 1.3),
    ],
    "cifar": [((OURS_FAST, OURS_FASTEST), TUNED, 1 / 5)],
}


# Functions that measure the contestants and print the results


def measure(
    problem: Problem, contestants: dict[str, Contestant], epochs: int, rounds: int
) -> dict[str, list]:
    """For each contestant and round, return the seconds of the first and of a later epoch, and the final accuracy."""
    measured: dict[str, list] = {}
    for number in range(rounds):
        for name, (package, run) in contestants.items():
            if (number and name not in measured) or importlib.util.find_spec(package) is None:
                continue
            clock = Clock(problem.device)
            try:
                with run_silently():
                    torch._dynamo.reset()
                    run(problem, epochs + 2, clock)
            except Exception as error:
                # A failing contestant is left out, so that the benchmark continues with the other contestants.
                print(f"left out: {name} ({type(error).__name__}: {error})")
                measured.pop(name, None)
                continue
            found = (*clock.seconds(), clock.acc)
            measured.setdefault(name, []).append(found)
            print(f"  round {number + 1}, {name}: {found}", file=sys.stderr, flush=True)
    return measured


def ratios(measured: dict[str, list], name: str, base: str) -> list[float]:
    pairs = zip(measured[name], measured[base], strict=True)
    return [mine[1] / theirs[1] for mine, theirs in pairs]


def show(problem: Problem, measured: dict[str, list], base: str) -> None:
    sizes = f"{problem.train:,} + {problem.val:,} images, batch {problem.batch}"
    print(f"\n{problem.name}: {sizes}, workers {problem.workers}")
    print(f"{'':36}{'ms an epoch':>12}{'faster than ' + base:>34}{'first, s':>10}{'val_acc':>9}")
    for name, rows in measured.items():
        first, epoch, acc = (statistics.median(column) for column in zip(*rows, strict=True))
        faster = [1 / ratio for ratio in ratios(measured, name, base)]
        spread = f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})"
        print(f"{name:36}{1e3 * epoch:12.1f}{spread:>34}{first:10.2f}{acc:9.3f}")
    for names, against, most in GOALS[problem.name]:
        names = [name for name in names if name in measured]
        if not names or against not in measured:
            print(f"goal, against {against}: not measured")
            continue
        best = min(names, key=lambda name: statistics.median(ratios(measured, name, against)))
        ratio = statistics.median(ratios(measured, best, against))
        verdict = "met" if ratio <= most else "missed"
        print(f"goal: {best}: at most {most:.3f} of {against}: {ratio:.3f}  {verdict}")


def problems(arguments: argparse.Namespace) -> list[tuple[Problem, dict[str, Contestant], str]]:
    device, toy = arguments.device, arguments.toy
    train, val = (400, 100) if toy else (60_000, 10_000)
    mnist = Problem("mnist", (1, 28, 28), train, val, 100, mlp, 1e-3, device)
    train, val, batch = (64, 32, 16) if toy else (50_000, 10_000, 512)
    make = (lambda: Resnet18(4)) if toy else Resnet18
    workers = arguments.workers
    cifar = Problem("cifar", (3, 32, 32), train, val, batch, make, 1e-3, device, workers)
    chosen = [(mnist, MNIST, FABRIC), (cifar, CIFAR, TUNED)]
    chosen = [one for one in chosen if arguments.problem in (one[0].name, "all")]
    left_out = {GRAPH, OURS_REDUCED} if device == "cpu" else set()
    if toy:
        left_out |= {OURS_COMPILED, OURS_FASTEST, OURS_REDUCED}
    left_out |= set(arguments.without)
    found = []
    for problem, contestants, base in chosen:
        kept = {name: one for name, one in contestants.items() if name not in left_out}
        found.append((problem, kept, base))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=["mnist", "cifar", "all"], default="all")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--epochs", type=int, default=3, help="the number of measured epochs per round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--workers", type=int, default=8, help="the number of workers of the tuned DataLoader"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        metavar="CONTESTANT",
        help="the contestants to leave out",
    )
    parser.add_argument("--toy", action="store_true", help="check the script with a few images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Import the package from this clone, even if it is also installed.
    sys.path.insert(0, str(HERE.parent))
    warnings.simplefilter("ignore")
    silence_loggers()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU, 1 thread"
    rounds = f"{arguments.rounds} rounds of {arguments.epochs} epochs, medians"
    print(f"torch {torch.__version__}, {name}; {rounds}")
    for problem, contestants, base in problems(arguments):
        show(problem, measure(problem, contestants, arguments.epochs, arguments.rounds), base)


if __name__ == "__main__":
    main()
