"""Compare a GPT's tokens per second in a hand-written loop, FabricLoop and Trainer.

    python benchmarks/transformer.py               # 124 million parameters on a GPU, 10 million on the CPU
    python benchmarks/transformer.py --toy         # a quick check of the script

All contestants use bf16-mixed, fused AdamW, torch.compile for the model with its loss, and random tokens on the device. They take
turns. The first steps of each turn are not measured, because they compile the model. "As it comes" means with a progress bar, a
CSV file and a history of the loss. "Bare" means without any of these.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from overhead import run_silently, silence_loggers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

BARE, BARE_EAGER = "bare loop, compiled", "bare loop"
OURS, OURS_EAGER = "ours, compiled, as it comes", "ours, as it comes"
TRAINER = "Trainer, its module compiled"


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    vocabulary: int
    length: int
    batch: int


SIZES = {
    "124M": Size(12, 12, 768, 50304, 1024, 32),
    "10M": Size(6, 6, 320, 8192, 256, 8),
    "toy": Size(2, 2, 32, 64, 16, 4),
}


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A model like GPT-2 whose forward returns the loss. The embedding and the head share their weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.layers(x)))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


class Watch:
    """Measure the time between the starts of two steps, each after the GPU has finished its work."""

    def __init__(self, device: str, first: int, last: int) -> None:
        self.device, self.first, self.last, self.seconds = device, first, last, 0.0

    def start_step(self, number: int) -> None:
        if number in (self.first, self.last):
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds


@dataclass
class Task:
    size: Size
    device: str
    steps: int
    warm: int

    def model(self) -> Gpt:
        torch.manual_seed(0)
        return Gpt(self.size)

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        rows = (self.warm + self.steps + 1) * self.size.batch
        shape = rows, self.size.length + 1
        tokens = torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def optimizer_of(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def options(self) -> dict[str, Any]:
        """Return options for FabricLoop and Trainer, without checkpoints, because the bare loop saves none."""
        where = {"accelerator": self.device, "devices": 1, "precision": "bf16-mixed"}
        return {**where, "max_epochs": 1, "enable_checkpointing": False}


def bare(task: Task, watch: Watch, compiles: bool) -> None:
    net = task.model().to(task.device)
    optimizer, (tokens, targets) = task.optimizer_of(net), task.data()
    forward = torch.compile(net) if compiles else net
    for number, cut in enumerate(range(0, len(tokens), task.size.batch)):
        watch.start_step(number)
        with torch.autocast(task.device, torch.bfloat16):
            rows = slice(cut, cut + task.size.batch)
            loss = forward(tokens[rows], targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ours(task: Task, watch: Watch, compiles: bool) -> None:
    from fabric_template import FabricLoop, TensorLoader

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            watch.start_step(batch_idx)

        def training_step(self, batch: Any) -> Tensor:
            return self.net(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer_of(self.net)

    loop = FabricLoop(compile=compiles, **task.options())
    loop.fit(Module(), TensorLoader(*task.data(), batch_size=task.size.batch))


def trainer(task: Task, watch: Watch, compiles: bool) -> None:
    import lightning

    from fabric_template import TensorLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()
            self.forward_net = torch.compile(self.net) if compiles else self.net

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            watch.start_step(batch_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.forward_net(*batch)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer_of(self.net)

    loop = lightning.Trainer(logger=False, **task.options())
    loop.fit(Module(), TensorLoader(*task.data(), batch_size=task.size.batch))


CONTESTANTS: dict[str, tuple[Callable[[Task, Watch, bool], None], bool]] = {
    BARE_EAGER: (bare, False),
    OURS_EAGER: (ours, False),
    BARE: (bare, True),
    OURS: (ours, True),
    TRAINER: (trainer, True),
}


def measure(task: Task, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of each contestant in each round."""
    measured: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            run, compiles = CONTESTANTS[name]
            watch = Watch(task.device, task.warm, task.warm + task.steps)
            with run_silently():
                torch._dynamo.reset()
                run(task, watch, compiles)
            measured[name].append(task.steps * task.size.batch * task.size.length / watch.seconds)
            if task.device == "cuda":
                torch.cuda.empty_cache()
    return measured


def show(measured: dict[str, list[float]]) -> None:
    print(f"{'':32}{'tokens/s':>12}{'of the bare one':>30}")
    pairs = {BARE: BARE, OURS: BARE, TRAINER: BARE, BARE_EAGER: BARE_EAGER, OURS_EAGER: BARE_EAGER}
    for name, rates in measured.items():
        parts = [mine / theirs for mine, theirs in zip(rates, measured[pairs[name]], strict=True)]
        spread = f"{statistics.median(parts):.3f} ({min(parts):.3f} to {max(parts):.3f})"
        print(f"{name:32}{statistics.median(rates):12,.0f}{spread:>30}")
        if name == OURS:
            verdict = "met" if statistics.median(parts) >= 0.99 else "missed"
            print(
                f"goal: at least 0.99 of the bare compiled loop: {statistics.median(parts):.3f}  {verdict}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--size", choices=SIZES, help="124M on a GPU, 10M on the CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--toy", action="store_true", help="check the script with a tiny model and no compilation"
    )
    arguments = parser.parse_args()
    # Import the package from this clone, even if it is also installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    warnings.simplefilter("ignore")
    silence_loggers()
    is_on_gpu = arguments.device == "cuda"
    default = "124M" if is_on_gpu else "10M"
    name = "toy" if arguments.toy else arguments.size or default
    task = Task(SIZES[name], arguments.device, arguments.steps, warm=5)
    number = sum(p.numel() for p in task.model().parameters())
    where = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if is_on_gpu else where
    batch = f"batches of {task.size.batch} x {task.size.length} tokens"
    print(
        f"torch {torch.__version__}, {where}; {number / 1e6:.0f} million parameters, {batch}; {arguments.steps} steps"
    )
    names = [BARE_EAGER, OURS_EAGER] if arguments.toy else list(CONTESTANTS)
    show(measure(task, names, arguments.rounds))


if __name__ == "__main__":
    main()
