"""Find settings that speed up training on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch.utilities.data import extract_batch_size

from .step_benchmark import PARTS, Choice, time_steps

# A setting is better only if its slowest trial is more than MIN_GAIN times as fast as the fastest
# trial without it.
MIN_GAIN, ROUNDS = 1.03, 3
TIME_LIMIT = 120.0  # A trial is killed after this number of seconds.

# Maps each setting to the values to try and to the code that the user must write.
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "threads": ((1, 2, 4, 8), "torch.set_num_threads({0}), or OMP_NUM_THREADS={0}"),
    "tensor_loader": ((True,), "TensorLoader(x, y, ...) instead of the DataLoader"),
    "num_workers": (
        (0, 1, 2, 4, 8),
        "DataLoader(..., num_workers={0}, persistent_workers={1})",
    ),
    "fused": ((True,), "fused=True for the optimizer, as in torch.optim.Adam(..., fused=True)"),
    "precision": (("bf16-mixed",), "FabricLoop(precision={0!r})"),
    "compile": ((True,), "FabricLoop(compile={0})"),
    "batch_size": ((64, 128, 256, 512, 1024), "batch_size={0}, and tune the learning rate again"),
}


class Tuned(NamedTuple):
    """The settings that make training faster, and their combined speed-up."""

    choice: Choice
    gain: float

    def __str__(self) -> str:
        writes = [
            f"write       {SETTINGS[name][1].format(self.choice[name], bool(self.choice[name]))}"
            for name in self.choice
        ]
        return "\n".join([f"result      {self.gain:.2f}x: {label(self.choice)}", *writes])


def label(choice: Choice) -> str:
    """Return settings as a string, such as "threads 1, fused True"."""
    return ", ".join(f"{name} {value}" for name, value in choice.items()) or "current settings"


def tune(
    loop: Any,
    model: Any,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    only: Iterable[str] | None = None,
    seconds: float = 2.0,
    **fit_arguments: Any,
) -> Tuned:
    """Try settings in separate processes, and return those that make training faster.

    Args:
        loop: The loop with the training options. tune does not change this loop.
        model: The `model` argument of `fit`.
        train_dataloaders: One loader, such as a DataLoader.
        datamodule: A datamodule to use instead of the loader.
        only: The settings to try, such as ["threads", "batch_size"].
        seconds: The duration of each trial.
        **fit_arguments: Other arguments of fit, such as optimizer and training_step.

    Raises:
        ValueError: A setting is unknown, or training fails with the current settings.
    """
    names = tuple(SETTINGS) if only is None else tuple(only)
    check_arguments(names, seconds)
    data = train_dataloaders if datamodule is None else datamodule
    parts = {"model": model, "train_dataloaders": data, **fit_arguments}

    def trial(choice: Choice) -> float:
        rate, failure = run_in_process(partial(measure, loop, parts, seconds, choice))
        speed = "failed" if failure else f"{rate:,.0f} samples/s"
        print(f"{speed:>22}  {label(choice)}  {failure}".rstrip(), flush=True)
        return rate or 0.0

    if not trial({}):
        text = "tune: training fails with the current settings. Call fit to see the error."
        raise ValueError(text)
    return Tuned(*choose_settings(trial, names))


def check_arguments(names: tuple[str, ...], seconds: float) -> None:
    if not set(names) <= set(SETTINGS):
        raise ValueError(f"only: got {', '.join(names)}, expected some of {', '.join(SETTINGS)}.")
    longest = TIME_LIMIT / 2
    if not isinstance(seconds, int | float) or not 0 < seconds <= longest:
        expected = f"a number above 0 and at most {longest:g}. Write seconds=2.0"
        raise ValueError(f"tune(seconds): got {seconds!r}, expected {expected}.")


def measure(loop: Any, parts: dict[str, Any], seconds: float, choice: Choice) -> float:
    timer = time_steps(loop, parts, choice, seconds=seconds)
    return extract_batch_size(timer.first_batch) / timer.get_median(*PARTS)


def choose_settings(trial: Callable[[Choice], float], names: Iterable[str]) -> tuple[Choice, float]:
    """Return the settings that make training faster, and their combined speed-up."""
    choice: Choice = {}
    for name in names:
        for value in SETTINGS[name][0]:
            if name == "threads" and value == torch.get_num_threads():
                continue
            new = {**choice, name: value}
            if compare(trial, choice, new):
                choice = new
    gain = compare(trial, {}, choice) if choice else 0.0
    return (choice, gain) if gain else ({}, 1.0)


def compare(trial: Callable[[Choice], float], before: Choice, after: Choice) -> float:
    """Return the speed-up from a new setting, or 0.0 if it may be noise."""
    slow: list[float] = []
    fast: list[float] = []
    for _ in range(ROUNDS):
        fast.append(trial(after))
        slow.append(trial(before) if fast[-1] else 0.0)
        if min(fast) <= max(slow) * MIN_GAIN or not min(slow):
            return 0.0
    return median(fast) / median(slow)


def run_in_process(function: Callable[[], Any]) -> Any:
    """Run a function in a child process, and return (result, "") or (None, error message)."""
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send_result, args=(function, sender, torch.get_num_threads()))
    child.start()
    sender.close()
    try:
        # recv() raises EOFError if the child ends without a result.
        with suppress(EOFError):
            if receiver.poll(TIME_LIMIT):
                return receiver.recv()
    finally:
        # A normal exit also ends the DataLoader workers, so give the child a second to exit before
        # killing it.
        child.join(1)
        child.kill()
        child.join()
    return None, f"no result within {TIME_LIMIT:g} seconds, exit code {child.exitcode}"


def send_result(function: Callable[[], Any], sender: Any, threads: int) -> None:
    """Call a function, hide its output, and send its result or error to the parent process."""
    if hasattr(signal, "SIGCHLD"):
        # Reset SIGCHLD, because torch's handler would end this process if a DataLoader worker
        # fails.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ignore Ctrl-C, because the parent process ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        # Run in a new thread, because OpenMP may hang in the main thread of a forked process.
        executor = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        future = executor.submit(function)
        error = future.exception()
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    sender.send((None, reason) if error else (future.result(), ""))


def tune_command(
    loop: Any, model: Any, data: Any, *, only: list[str] | None, seconds: float, out: str
) -> int:
    tuned = tune(loop, model, data, only=only, seconds=seconds)
    config = {**loop.recipe, **tuned.choice}
    for part in ("data", "model"):
        arguments = (config.get(part) or {}).get("init_args", {})
        arguments.update({name: tuned.choice[name] for name in tuned.choice if name in arguments})
    config = {name: config[name] for name in config if name in loop.recipe}
    Path(out).write_text(yaml.safe_dump(config), encoding="utf-8")
    print(f"{tuned}\nconfig      {out}, for fit --config")
    return 0
