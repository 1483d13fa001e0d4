"""Find the settings that make a training faster on this machine, or a learning rate."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .lr_finder import LearningRateRamp, save_curve

# A setting is kept if its slowest of ROUNDS trials beats the fastest one without it by MIN_GAIN.
MIN_GAIN, ROUNDS = 1.03, 3
# The speed is the median of WINDOWS. A trial that takes TIME_LIMIT seconds counts as hung.
WINDOWS, TIME_LIMIT = 5, 120.0
IN_EFFECT = "this value is in effect already"
# The values to try and the line to write, in the order of the trials.
SETTINGS: dict[str, tuple[tuple, str]] = {
    "threads": (
        (1, 2, 4, 8),
        "torch.set_num_threads({0}), or OMP_NUM_THREADS={0}; last digits may differ",
    ),
    "tensor_loader": ((True,), "TensorLoader(x, y, ...) in place of the DataLoader"),
    "num_workers": (
        (0, 1, 2, 4, 8),
        "DataLoader(..., num_workers={0}, persistent_workers=bool({0}))",
    ),
    "fused": ((True,), "fused=True for the optimizer, as in torch.optim.Adam(..., fused=True)"),
    "precision": (("bf16-mixed",), "FabricLoop(precision={0!r})"),
    "compile": ((True,), "FabricLoop(compile={0})"),
    "batch_size": ((64, 128, 256, 512, 1024), "batch_size={0}; then find the learning rate again"),
}
SAME_NUMBERS = ("threads", "num_workers")
# A trial takes these options from the loop, since they change the cost of a step.
KEPT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "compile")
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Tuned(NamedTuple):
    """The faster settings, as options for FabricLoop and lines to write, and their gain.

    Trials are tuples: the settings, samples per second, and the reason of a failure.
    """

    choice: dict[str, Any]
    options: dict[str, Any]
    lines: list[str]
    gain: float
    trials: list[tuple[str, float, str]]

    def __str__(self) -> str:
        result = f"result      {self.gain:.2f}x: {label(self.choice)}"
        writes = [f"write       {line}" for line in self.lines]
        return "\n".join([*(row(*trial) for trial in self.trials), result, *writes])


def row(name: str, rate: float, failure: str) -> str:
    """Return the line of a trial in the table."""
    speed = "failed" if failure else f"{rate:,.0f} samples/s"
    return f"{speed:>22}  {name}  {failure}".rstrip()


def label(choice: dict[str, Any]) -> str:
    """Name the settings of a choice, such as "threads 1, fused True"."""
    return ", ".join(f"{name} {value}" for name, value in choice.items()) or "as it is"


def tune(
    loop: Any,
    model: Any,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    only: Iterable[str] | None = None,
    seconds: float = 2.0,
    same_numbers: bool = False,
    verbose: bool = False,
    **fit_arguments: Any,
) -> Tuned:
    """Find the settings that make a training faster, each tried in a process of its own.

    Args:
        loop: the loop that would train. Nothing here is trained or written.
        model: as for fit.
        train_dataloaders: as for fit.
        datamodule: as for fit.
        only: the settings to try, such as ["threads", "batch_size"].
        seconds: the length of a trial.
        same_numbers: leave out the settings that change the numbers.
        verbose: print each trial when it ends.
        **fit_arguments: optimizer, training_step and the like, as for fit.

    Raises:
        ValueError: for an unknown setting, or if the training fails as it is.
    """
    known = SAME_NUMBERS if same_numbers else tuple(SETTINGS)
    names = known if only is None else tuple(only)
    if not set(names) <= set(known):
        raise ValueError(f"only: got {', '.join(names)}, expected some of {', '.join(known)}.")
    data = train_dataloaders if datamodule is None else datamodule
    parts = {"model": model, "train_dataloaders": data, **fit_arguments}
    return Tuner(partial(measure, loop, parts, seconds), verbose).run(names)


class Tuner:
    """Measures a training with several settings."""

    def __init__(self, measure: Callable[[dict[str, Any]], float], verbose: bool = False) -> None:
        self.measure, self.verbose = measure, verbose
        self.trials: list[tuple[str, float, str]] = []

    def run(self, names: Iterable[str]) -> Tuned:
        """Try one setting after another, keep what is faster, and measure the gain at the end."""
        import torch

        choice: dict[str, Any] = {}
        if not self.trial(choice):
            reason = self.trials[0][2]
            raise ValueError(f"tune: got a training that fails ({reason}). Try fit first.")
        for name in names:
            for value in SETTINGS[name][0]:
                if name == "threads" and value == torch.get_num_threads():
                    continue
                new = {**choice, name: value}
                if self.compare(choice, new):
                    choice = new
        gain = self.compare({}, choice) if choice else 0.0
        if not gain:
            choice, gain = {}, 1.0
        lines = []
        for name, value in choice.items():
            numbers = "same" if name in SAME_NUMBERS else "other"
            lines.append(f"{SETTINGS[name][1].format(value)} ({numbers} numbers)")
        options = {name: choice[name] for name in choice if name in ("precision", "compile")}
        return Tuned(choice, options, lines, gain, self.trials)

    def compare(self, before: dict[str, Any], after: dict[str, Any]) -> float:
        """Measure two choices in turn; return the gain, or 0.0 if it is not above the noise."""
        slow: list[float] = []
        fast: list[float] = []
        for _ in range(ROUNDS):
            fast.append(self.trial(after))
            slow.append(self.trial(before) if fast[-1] else 0.0)
            if min(fast) <= max(slow) * MIN_GAIN or not min(slow):
                return 0.0
        return median(fast) / median(slow)

    def trial(self, choice: dict[str, Any]) -> float:
        """Return samples per second of a training in a process of its own, 0.0 if it fails."""
        rate, failure = run_in_process(partial(self.measure, choice))
        self.trials.append((label(choice), rate or 0.0, failure))
        if self.verbose:
            print(row(*self.trials[-1]), flush=True)
        return rate or 0.0


def run_in_process(function: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function in a child process; return its result, or None and the reason."""
    import torch

    method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(function, sender, torch.get_num_threads()))
    child.start()
    sender.close()
    try:
        if receiver.poll(TIME_LIMIT):
            return receiver.recv()
        return None, f"no result after {TIME_LIMIT:g} seconds"
    except EOFError:
        child.join()
        return None, f"its process ended with exit code {child.exitcode}"
    finally:
        # A child that exits by itself ends the workers of its DataLoader, too.
        child.join(1)
        child.kill()
        child.join()


def _send_result(function: Callable[[], Any], sender: Any, threads: int) -> None:
    import torch

    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
        # OpenMP's threads do not survive a fork. A new thread starts its own.
        executor = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        future = executor.submit(function)
        error = future.exception()
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    sender.send((None, reason) if error else (future.result(), ""))


def trial_options(loop: Any) -> dict[str, Any]:
    """Return the options of a loop for trials: one device, no output, no validation."""
    device = loop.fabric.device
    options = {name: getattr(loop.config, name) for name in KEPT} | dict.fromkeys(OFF, False)
    options |= {"accelerator": device.type, "devices": [device.index] if device.index else 1}
    options |= {"max_epochs": -1, "max_steps": 10**9, "limit_val_batches": 0}
    return options | {"precision": loop.fabric.strategy.precision.precision}


def measure(loop: Any, parts: dict[str, Any], seconds: float, choice: dict[str, Any]) -> float:
    """Train with the chosen settings, and return samples per second."""
    import torch

    torch.set_num_threads(choice.get("threads", torch.get_num_threads()))
    owner = parts["model"] if parts["train_dataloaders"] is None else parts["train_dataloaders"]
    if hasattr(owner, "train_dataloader"):
        make_loader = owner.train_dataloader
        owner.train_dataloader = lambda: change_loader(make_loader(), choice)
    else:
        parts = {**parts, "train_dataloaders": change_loader(owner, choice)}
    stopwatch = Stopwatch(seconds / WINDOWS, "fused" in choice)
    options = trial_options(loop)
    for name in {"precision", "compile"} & {*choice}:
        if choice[name] == options[name]:
            raise ValueError(IN_EFFECT)
        options[name] = choice[name]
    type(loop)(callbacks=[stopwatch], **options).fit(**parts)
    return median(stopwatch.rates[1:])


def as_tensor_loader(loader: Any) -> Any:
    """Return a TensorLoader in place of a DataLoader of tensors in memory."""
    from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset, default_collate

    from ..data.tensor_loader import TensorLoader

    is_usual = type(loader.sampler) in (RandomSampler, SequentialSampler)
    is_usual = is_usual and loader.collate_fn is default_collate
    if type(loader.dataset) is not TensorDataset or not is_usual:
        raise ValueError("the samples are not a TensorDataset with the usual batches")
    arguments = {name: getattr(loader, name) for name in ("batch_size", "drop_last", "generator")}
    shuffle = type(loader.sampler) is RandomSampler
    return TensorLoader(*loader.dataset.tensors, shuffle=shuffle, **arguments)


def change_loader(loader: Any, choice: dict[str, Any]) -> Any:
    """Return a loader of the same samples with the chosen settings."""
    from torch.utils.data import DataLoader

    from ..data.tensor_loader import TensorLoader

    if "tensor_loader" in choice:
        loader = as_tensor_loader(loader)
    changes = {name: choice[name] for name in choice if name in ("num_workers", "batch_size")}
    if not changes:
        return loader
    names = ["batch_size", "drop_last", "generator"]
    if isinstance(loader, TensorLoader):
        names += ["shuffle"]
    else:
        names += ["num_workers", "sampler", "collate_fn", "pin_memory", "worker_init_fn"]
    arguments = {name: getattr(loader, name) for name in names}
    if loader.batch_size is None:
        raise ValueError("the loader has its own batches")
    largest = len(loader.tensors[0] if "shuffle" in names else loader.sampler) // 2
    if "batch_size" in changes and not loader.batch_size < changes["batch_size"] <= largest:
        raise ValueError(f"it is not between {loader.batch_size} and half of the samples")
    if not {*changes} <= {*names}:
        raise ValueError("a TensorLoader has no workers")
    if changes.get("num_workers") == arguments.get("num_workers", -1):
        raise ValueError(IN_EFFECT)
    arguments |= changes
    if isinstance(loader, TensorLoader):
        return TensorLoader(*loader.tensors, **arguments)
    has_workers = arguments["num_workers"] > 0
    return DataLoader(loader.dataset, persistent_workers=has_workers, **arguments)


class Stopwatch:
    """Callback that measures samples per second in windows of time, and then stops the run."""

    def __init__(self, window: float, is_fused: bool) -> None:
        self.window, self.is_fused = window, is_fused
        self.start, self.samples = time.perf_counter(), 0
        self.rates: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fuse the optimizers if it is chosen, and stop schedulers: some need a validation."""
        for config in trainer.lr_scheduler_configs:
            config.frequency = 10**9
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group in groups if self.is_fused else []:
            group["foreach"], group["fused"] = False, True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
        """End the measurement when its time is over. The first one is a warm-up."""
        from lightning.pytorch.utilities.data import extract_batch_size

        self.samples += extract_batch_size(batch[0])
        elapsed = time.perf_counter() - self.start
        if elapsed > self.window:
            self.rates.append(self.samples / elapsed)
            self.start, self.samples = time.perf_counter(), 0
        if len(self.rates) > WINDOWS:
            trainer.should_stop = True


def tune_command(
    loop: Any,
    model: Any,
    data: Any,
    *,
    lr: bool,
    only: list[str] | None,
    same_numbers: bool,
    seconds: float,
    out: str,
) -> int:
    """Find the settings that make a training faster on this machine, or a learning rate."""
    import yaml

    if lr:
        ramp = LearningRateRamp()
        options = trial_options(loop) | {"max_steps": ramp.steps}
        type(loop)(callbacks=[ramp], **options).fit(model, data)
        rate = save_curve(ramp.rates, ramp.losses, Path(out))
        print(f"suggested   {rate and f'{rate:.2g}'}\ncurve       {Path(out).with_suffix('.png')}")
        return 0
    tuned = tune(
        loop, model, data, only=only, seconds=seconds, same_numbers=same_numbers, verbose=True
    )
    config = {**loop.recipe, **tuned.options}
    for name, value in tuned.choice.items():
        for part in ("data", "model"):
            arguments = (config.get(part) or {}).get("init_args", {})
            if name in arguments:
                arguments[name] = value
    Path(out).write_text(yaml.safe_dump(config), encoding="utf-8")
    table = str(tuned).splitlines()
    print("\n".join([*table[len(tuned.trials) :], f"config      {out}, for fit --config"]))
    return 0
