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
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data.dataloader import default_collate

from ..data.tensors import TensorLoader
from .profiled import Advice, Profile, _ms

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
    if as_tensors(loader) is not None:
        yield _tried(profile, attempt, f"{what}: it lies in memory, and TensorLoader cuts whole batches of it", (
            f"TensorLoader(x, y, batch_size={loader.batch_size}{', shuffle=True' * _is_shuffled(loader)})"
        ), change=as_tensors)  # fmt: skip
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
    elif not _can_be_made_again(loader):
        kind = f"this {type(loader).__name__} is not torch's own"
        yield Advice(f"{what}: {workers} {how} could fetch it meanwhile; not tried, as {kind}", write)
    else:
        change = partial(made_again, num_workers=workers, persistent_workers=True)
        what = f"{what}: {workers} {how} fetch it meanwhile"
        yield _tried(profile, attempt, what, write, LESS, fmean, change=change, steps=4 * workers)


def _device(profile: Profile, share: float, loader: Any, attempt: Attempt) -> Iterator[Advice]:
    what, write = f"{share:.0%} of a step brings batches to the device", "DataLoader(..., pin_memory=True)"
    if isinstance(loader, TensorLoader) and profile.device != "cpu":
        yield Advice(f"{what}: the tensors can lie there", "TensorLoader(..., device='cuda')")
    elif profile.device != "cpu" and isinstance(loader, DataLoader) and not loader.pin_memory:
        yield _tried(profile, attempt, f"{what}: pinned memory", write, change=partial(made_again, pin_memory=True))


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


# ---- loaders made again


def _can_be_made_again(loader: DataLoader) -> bool:
    return type(loader) is DataLoader


def made_again(loader: Any, **words: Any) -> Any:
    """A DataLoader of the same batches in other words; any other loader as it is.

    Example:
        >>> loader = made_again(DataLoader(range(8), batch_size=2), num_workers=2)
        >>> loader.num_workers, loader.batch_size, len(loader)
        (2, None, 4)
    """
    if not isinstance(loader, DataLoader) or not _can_be_made_again(loader):
        return loader
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
             "persistent_workers")  # fmt: skip
    same = {name: getattr(loader, name) for name in names}
    if isinstance(loader.dataset, IterableDataset):
        same |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        same["batch_sampler"] = loader.batch_sampler
    else:
        same |= {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, **{**same, **words})


def as_tensors(loader: Any) -> TensorLoader | None:
    """A TensorLoader of the same batches, for a DataLoader that only collates what lies in tensors; None for any other.

    Example:
        >>> loader = as_tensors(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
        >>> [batch[0].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """
    if not isinstance(loader, DataLoader) or not loader.batch_size or loader.collate_fn is not default_collate:
        return None
    dataset: Any = loader.dataset
    indices = None
    if type(dataset) is Subset:
        dataset, indices = dataset.dataset, list(dataset.indices)
    of_samples = type(loader.sampler) is SequentialSampler or _is_shuffled(loader)
    if type(dataset) is not TensorDataset or not of_samples:
        return None
    tensors = dataset.tensors if indices is None else [tensor[indices] for tensor in dataset.tensors]
    return TensorLoader(
        *tensors, batch_size=loader.batch_size, shuffle=_is_shuffled(loader), drop_last=loader.drop_last
    )


def _is_shuffled(loader: DataLoader) -> bool:
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers_for(profile: Profile, now: int) -> int:
    """As many as hide the waiting behind the rest of a step, if there are processors for them."""
    waiting, rest = profile.mean("data"), profile.seconds - profile.mean("data")
    needed = max(now, 1) * math.ceil(1 + waiting / max(rest, 1e-6))
    return min(max(needed, 2), max(_cores(), 2))
