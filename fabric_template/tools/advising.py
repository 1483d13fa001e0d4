"""Advising: what to do about a part of a step that is large; what is cheap to try is tried, a few steps each."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from ..data.tensors import TensorLoader
from .profiled import Advice, Profile, _ms
from .rebuilt import has_tensors, rebuilt

MUCH = 0.2  # of a step, from which on a part is worth a word,
SOME = 0.1  # for those that should cost nothing
CLEARLY = 1.1  # times faster, from which on something is said to help
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

LESS = "do less for each sample (smaller files, decoded before), or do it once: TensorLoader(x, y, batch_size=64)"

# (change of the loader, callbacks beside those that are there) -> seconds of each step
Attempt = Callable[..., list[float]] | None


def advise(profile: Profile, loader: Any, attempt: Attempt) -> list[Advice]:
    """What to do, the part with the largest share first.

    Args:
        profile: the figures.
        loader: what the batches come from.
        attempt: trains a few steps with something changed; None: nothing is tried.
    """
    shares = sorted(((profile.share(*parts), rule) for parts, rule in RULES), key=lambda pair: -pair[0])
    return [one for share, rule in shares if share >= SOME for one in rule(profile, share, loader, attempt)]


def _data(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    if share < MUCH:
        return
    what = f"{share:.0%} of a step waits for data"
    if has_tensors(loader):
        shuffled = ", shuffle=True" * (type(loader.sampler) is not SequentialSampler)
        yield _tried(profile, attempt, f"{what}: it lies in memory, and TensorLoader cuts whole batches of it", (
            f"TensorLoader(x, y, batch_size={loader.batch_size}{shuffled})"
        ), change=partial(rebuilt, choice={"tensors": True}))  # fmt: skip
        return
    if not isinstance(loader, DataLoader):
        yield Advice(f"{what}, from a {type(loader).__name__}", (
            "make its batches in a DataLoader with num_workers, or of tensors in memory: TensorLoader(x, y, batch_size=64)"
        ))  # fmt: skip
        return
    workers = _workers_for(profile, loader.num_workers)
    how = "workers" if not loader.num_workers else f"workers in the place of {loader.num_workers}"
    write = f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
    if workers <= loader.num_workers:
        yield Advice(f"{what}, with {loader.num_workers} workers on {_cores()} processors", (
            LESS
        ))  # fmt: skip
    elif type(loader) is not DataLoader:
        kind = f"this {type(loader).__name__} is not torch's own"
        yield Advice(f"{what}: {workers} {how} could fetch it meanwhile; not tried, as {kind}", write)
    else:
        change = partial(rebuilt, choice={"workers": workers})
        what = f"{what}: {workers} {how} fetch it meanwhile"
        yield _tried(profile, attempt, what, write, LESS, fmean, change=change, steps=4 * workers)


def _device(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    what, write = f"{share:.0%} of a step brings batches to the device", "DataLoader(..., pin_memory=True)"
    if isinstance(loader, TensorLoader) and profile.device != "cpu":
        yield Advice(f"{what}: the tensors can lie there", "TensorLoader(..., device='cuda')")
    elif profile.device != "cpu" and type(loader) is DataLoader and not loader.pin_memory:
        yield _tried(
            profile, attempt, f"{what}: pinned memory", write, change=partial(rebuilt, choice={"pin_memory": True})
        )


def _step(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    if share < 0.5:
        return
    what = f"{share:.0%} of a step is the model's own work, forward and backward"
    if profile.device != "cpu":
        yield Advice(what, "precision='bf16-mixed', compile=True, or a larger batch; one at a time, and look again")
    elif (threads := torch.get_num_threads()) > 1:
        try:
            torch.set_num_threads(1)
            yield _tried(profile, attempt, f"{what}, on {threads} threads: one thread", "torch.set_num_threads(1)")
        finally:
            torch.set_num_threads(threads)
    else:
        yield Advice(what, "compile=True, a smaller model, or a GPU")


def _optimizer(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    if share < MUCH:
        return
    fuse, what = Fuse(), f"{share:.0%} of a step is the optimizer's"
    fewer = "a larger batch, and so fewer steps; fewer parameters that train (requires_grad_(False))"
    tried = _tried(profile, attempt, f"{what}: fused=True computes it in one pass", "", fewer, more_callbacks=[fuse])
    if attempt is not None and not fuse.names:  # none of torch's, or fused already
        yield Advice(what, fewer)
    else:
        name = fuse.names[0] if fuse.names else "Adam"
        yield replace(tried, write=tried.write or f"torch.optim.{name}(..., fused=True)")


def _hooks(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    if profile.hooks:
        name, seconds = max(profile.hooks.items(), key=lambda item: item[1])
        yield Advice(
            f"{share:.0%} of a step is for callbacks and hooks: {name} takes {_ms(1e3 * seconds)} of each step",
            "what it does every so many steps only, or at an epoch's end (on_train_epoch_end)",
        )


def _logging(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    yield Advice(
        f"{share:.0%} of a step logs", "a larger log_every_n_steps; self.log(..., on_step=False, on_epoch=True)"
    )


def _checkpoint(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    yield Advice(f"{share:.0%} of the time saves checkpoints within an epoch", "a larger save_every_n_steps")


def _rest(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    if share >= MUCH:
        yield Advice(
            f"{share:.0%} of a step, {_ms(1e3 * profile.mean('rest'))}, is the loop itself: this step is very small",
            "a larger batch; barebones=True shows what is left without log, bar and files",
        )


RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Advice]]], ...] = (
    (("data",), _data),
    (("device",), _device),
    (("forward", "backward"), _step),
    (("optimizer",), _optimizer),
    (("hooks",), _hooks),
    (("logging",), _logging),
    (("checkpoint",), _checkpoint),
    (("rest",), _rest),
)


def _tried(
    profile: Profile, attempt: Attempt, what: str, write: str, otherwise: str = "leave it as it is",
    average: Callable[[list[float]], float] = median, **words: Any,
) -> Advice:  # fmt: skip
    """The advice with what came of it, also where that is nothing."""
    if attempt is None:
        return Advice(what, write)
    try:
        seconds = average(attempt(**words))
    except Exception as error:
        reason = [f"{type(error).__name__}:", *str(error).strip().splitlines()[-1:]]
        return Advice(f"{what}; not measured, it failed with {' '.join(reason)}", write)
    before = average(profile.whole)
    faster, took = before / seconds, f"{_ms(1e3 * before)} a step, {_ms(1e3 * seconds)} with it"
    if faster < CLEARLY:
        return Advice(f"{what}; measured, that does not help here: {took}", otherwise, faster)
    return Advice(f"{what}; measured {faster:.1f}x: {took}", write, faster)


class Fuse:
    """Lets torch's optimizers compute in one pass, where they can: a callback of the loop in which that is tried."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_train_start(self, loop: Any) -> None:
        """The optimizers are made, and none has stepped."""
        for optimizer in loop.optimizers:
            if isinstance(optimizer, FUSED) and not any(group.get("fused") for group in optimizer.param_groups):
                self.names.append(next(kind.__name__ for kind in type(optimizer).__mro__ if kind in FUSED))
                for group in optimizer.param_groups:
                    group |= {"fused": True, "foreach": False}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers_for(profile: Profile, now: int) -> int:
    """As many as hide the waiting behind the rest of a step, if there are processors for them."""
    waiting, rest = profile.mean("data"), profile.seconds - profile.mean("data")
    needed = max(now, 1) * math.ceil(1 + waiting / max(rest, 1e-6))
    return min(max(needed, 2), max(_cores(), 2))
