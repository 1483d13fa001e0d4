"""Profiling: where a training step goes: its parts, what they need, and what to do about the large ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.errors import Misuse
from ..loop import FabricLoop
from .advising import advise
from .aside import Training, train_aside
from .profiled import Advice, Profile
from .stopwatch import Stopwatch

__all__ = ["Advice", "Profile", "profile"]
WARM_UP = 5
SECONDS = 3.0  # that an attempt may take, about
FEWEST, MOST = 5, 30  # steps of an attempt


def profile(
    loop: FabricLoop, model: Any, train_dataloaders: Any = None, datamodule: Any = None, *, steps: int = 50,
    optimizer: Any = None, training_step: Callable | None = None, scheduler: Any = None, tries: bool = True,
    trace: str | os.PathLike | None = None,
) -> Profile:  # fmt: skip
    """Train a few steps on a copy, with a stopwatch, and say where they go. Everything is as it was afterwards.

    That is: the model and its gradients, optimizers, schedulers, callbacks, random numbers and the generators of loaders.
    No logs and no checkpoints are left. Callbacks run as in a fit, on a copy; loggers other than the CSV logger do not.
    What is compiled as "cuda-graph" runs without: a graph is replayed as a whole.

    Args:
        loop: its words are those of the training: precision, accumulation, callbacks, what is logged and saved.
        model: as for `fit`.
        train_dataloaders: as for `fit`; or a datamodule.
        datamodule: as for `fit`.
        steps: how many batches are timed, behind five that warm up; passes follow each other where one is shorter.
        optimizer: as for `fit`.
        training_step: as for `fit`.
        scheduler: as for `fit`.
        tries: whether advice is tried out, where that is cheap: a few steps each.
        trace: a folder for a trace of three steps more, for chrome://tracing, Perfetto or TensorBoard.

    Returns:
        A `Profile`, to print; its `rows`, its `advice`, its `plot()`.

    Example:
        >>> from fabric_template import FabricLoop, TensorLoader
        >>> net = torch.nn.Linear(2, 1)
        >>> found = profile(
        ...     FabricLoop(accelerator="cpu"), net, TensorLoader(torch.ones(8, 2), batch_size=4), steps=10,
        ...     optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=lambda net, batch: net(batch[0]).mean(),
        ... )
        >>> [row.part for row in found.rows]
        ['data', 'forward', 'backward', 'optimizer', 'logging', 'rest']
    """
    _check(loop, steps, trace)
    given = Training(model, train_dataloaders, datamodule, optimizer, scheduler, training_step)
    on_gpu = loop.fabric.device.type == "cuda"
    look = _Look()
    watch = Stopwatch(WARM_UP, steps, on_gpu, None if trace is None else os.fspath(trace))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(loop.fabric.device)
    more = 1 + on_gpu
    train_aside(loop, given, watch, WARM_UP + steps * more + 5, change=look.at_loader, more_callbacks=[look])
    if not watch.steps:
        raise Misuse(
            "profile: training ended before a step was timed: expected a loader with batches, and no early stop"
        )
    found = Profile(
        watch.steps, watch.whole, str(loop.fabric.device), look.samples, WARM_UP,
        dict(sorted(((_short(name), s / len(watch.steps)) for name, s in watch.hooks.items()), key=lambda one: -one[1])),
        _memory(loop.fabric.device), None if trace is None else os.fspath(trace),
    )  # fmt: skip

    def attempt(steps: int = 0, **words: Any) -> list[float]:
        few = max(min(MOST, int(SECONDS / found.seconds)), FEWEST)
        tried = Stopwatch(max(WARM_UP, steps), few, on_gpu)
        train_aside(loop, given, tried, steps + WARM_UP + 2 * few, **words)
        return tried.whole

    return replace(found, advice=advise(found, look.loader, attempt if tries else None))


class _Look:
    """What the batches come from, and how many samples they have."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.samples: int | None = None

    def at_loader(self, loader: Any) -> Any:
        """The first of several is the one that is told of."""
        self.loader = loader if self.loader is None else self.loader
        return loader

    def on_train_start(self, loop: Any) -> None:
        """The loader is known."""
        size = getattr(self.loader, "batch_size", None) or getattr(
            getattr(self.loader, "batch_sampler", None), "batch_size", None
        )
        self.samples = size if isinstance(size, int) else None


def _check(loop: FabricLoop, steps: Any, trace: Any) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise Misuse(f"profile(steps={steps!r}): expected how many steps are timed, 1 or more")
    if loop.fabric.world_size > 1:
        raise Misuse(f"profile looks at one process, and this loop has {loop.fabric.world_size}: write devices=1")
    if trace is not None:
        try:
            Path(trace).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Misuse(
                f"profile(trace={str(trace)!r}): {error.strerror}: expected a folder that can be written"
            ) from error


def _short(action: str) -> str:
    """A hook's name without its kind, and without the words that a callback's state is known by.

    Example:
        >>> _short("[Callback]EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}.on_train_batch_end")
        'EarlyStopping.on_train_batch_end'
    """
    name = action.partition("]")[2]
    return name.partition("{")[0] + "." + name.rpartition(".")[2] if "{" in name else name


def _memory(device: torch.device) -> dict[str, int]:
    """Bytes: of the process since it began, and of the allocator on a GPU since the profile did."""
    found = {}
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["process"] = peak if sys.platform == "darwin" else peak * 1024
    if device.type == "cuda":
        found["GPU"] = torch.cuda.max_memory_allocated(device)
    return found
