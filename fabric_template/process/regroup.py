"""Regroup: a checkpoint from the middle of an epoch, for another number of processes than it was saved by.

The order in which ranks share the samples of an epoch depends on its seed alone, and what all of them have trained is its
beginning: so only the position is other. Ranks of one tensor-parallel group have one share: it is shares that are counted.
Where there is one share its order comes from random numbers; then it is drawn again, and is in the checkpoints of the rest
of this epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from ..core.inputs import length_of
from ..core.ranks import share_of
from ..core.run import Run
from ..data.loaders import loaders_in
from ..data.tensors import TensorLoader, global_seed
from ..exact.indices import replaced
from ..exact.put_back import rng_state_of_another
from ..exact.randomness import isolated_rng
from ..files.errors import CheckpointError

_ADDED = ("mean", "sum")  # what of the running sums of two ranks is added, to be those of one


class Rest(DistributedSampler):
    """This rank's part of an order that is known."""

    def __init__(self, order: Tensor, ranks: int, rank: int) -> None:
        super().__init__(range(len(order)), ranks, rank, shuffle=False)  # type: ignore[arg-type]
        self.order = order.tolist()

    def __iter__(self) -> Iterator[int]:
        return (self.order[place] for place in super().__iter__())


def regroup(run: Run, ours: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Our part of the checkpoint for the processes that there are, the run's counters too; and the order, where it is needed.

    Raises:
        CheckpointError: what is left of the epoch cannot be told for this kind of loader.
    """
    processes, shares = run.fabric.world_size, share_of(run.fabric)[0]
    were_processes = len(ours["ranks"])
    were = ours.get("shares", were_processes)
    given, loader = loaders_in(run.data.train.source)[0], run.data.train.loaders[0]
    if not _is_known(run, given, loader, ours):
        raise CheckpointError(
            f"resume: '{run.origin.resume_path}' is of a run with {_counted(were_processes)}, this one has {processes}, and it"
            f" is from the middle of an epoch, after {ours['batch_idx']} batches, where each process goes on with its own"
            f" samples of {type(given).__name__}: give {were_processes} (devices={were_processes}), or resume= with a"
            " checkpoint from an epoch's end, or load= to start a new run from the weights; a DataLoader or TensorLoader that"
            " the loop shares goes on in any number"
        )
    is_own = isinstance(getattr(given, "sampler", None), DistributedSampler)
    order = ours.get("order", {}).get("samples")
    if order is None and (were > 1 or is_own) != (shares > 1 or is_own):
        order = _order(run, ours, given, loader, by_seed=were > 1)
    samples = _samples(given)
    if order is not None and not torch.equal(order.sort().values, torch.arange(samples)):
        raise CheckpointError(f"resume: the order of samples in '{run.origin.resume_path}' is of other data")
    if (were_processes, were) != (processes, shares):
        ours = _scaled(run, ours, loader.batch_size, were, shares)
    if order is not None:
        ours["order"] = {"epoch": ours["epoch"], "samples": order}
    return ours, order


def _is_known(run: Run, given: Any, loader: Any, ours: Mapping[str, Any]) -> bool:
    """Whether the epoch's order is that of a permutation, of which a part is done that one can count."""
    data = ours.get("fingerprint", {}).get("data", ())
    state = ours["ranks"][0]["train"]
    if run.data.train.combined is not None or len(data) != 1 or not data[0].get("batch_size") or state is None:
        return False
    if not state["sources"][0] or isinstance(loader, TensorLoader):
        return bool(state["sources"][0])
    sampler = getattr(given, "sampler", None)
    draws_once = not isinstance(sampler, RandomSampler) or not (
        sampler.replacement or sampler.num_samples != length_of(given.dataset)
    )
    kinds = (RandomSampler, SequentialSampler, DistributedSampler)
    is_plain = type(getattr(loader, "batch_sampler", None)) is BatchSampler and type(sampler) in kinds
    return is_plain and draws_once and not hasattr(loader, "state_dict")


def _order(run: Run, ours: Mapping[str, Any], given: Any, loader: Any, by_seed: bool) -> Tensor:
    """All samples of the epoch, in the order in which the run that goes on trained them."""
    is_tensors, samples = isinstance(given, TensorLoader), _samples(given)
    state = ours["ranks"][0]["train"]
    shuffled = given.shuffle if is_tensors else by_seed or isinstance(given.sampler, RandomSampler)
    if not shuffled or run.config.overfit_batches:
        return torch.arange(samples)
    if by_seed:
        seed = (state["seeds"] or [global_seed()])[0]
        sampler: Any = DistributedSampler(range(samples), 1, 0, seed=seed)  # type: ignore[arg-type]
        sampler.set_epoch(ours["epoch"])
        return torch.tensor(list(sampler))
    place = state["sources"][0]
    with isolated_rng():
        # TensorLoader draws its order as a pass begins, DataLoader as its first batch is fetched
        run.data.train.sources.each[0].put_back(place["began"] if is_tensors else place["first"] or place["began"])
        if is_tensors:
            return torch.randperm(samples, generator=given.generator)
        if place["first"] is None and place["is_born"]:  # its workers' seed is drawn first
            torch.empty((), dtype=torch.int64).random_(generator=given.generator)
        return torch.tensor(list(given.sampler))


def _counted(processes: int) -> str:
    return f"{processes} process{'es' * (processes > 1)}"


def _samples(given: Any) -> int:
    return len(given.tensors[0] if isinstance(given, TensorLoader) else given.dataset)


def _scaled(run: Run, ours: dict[str, Any], size: int, were: int, now: int) -> dict[str, Any]:
    """Where so many shares stand in the epoch; the position counts in samples."""
    processes, were_processes = run.fabric.world_size, len(ours["ranks"])
    at, was = run.at, ours["fingerprint"]["data"][0]["batch_size"]
    window = ours.get("window") or at.window
    done = ours["batch_idx"] * was * were
    batches = done // (size * now)
    again = done - size * now * (batches := batches - batches % window)
    if ours["is_last_batch"]:
        batches, again = int(at.num_batches), 0
    at.regroup(batches)
    of_shares = ours["ranks"][:: were_processes // were]  # a tensor-parallel group is ranks side by side
    parts = [_part(of_shares, share, now, batches) for share in range(now)]
    ranks = [parts[rank * now // processes] for rank in range(processes)]
    if run.fabric.is_global_zero:
        said = (
            f"{again} of them come again, as {done} are not a whole number of steps here"
            if again
            else "each comes once"
        )
        run.said.warn(
            f"resume: the epoch goes on with {_counted(processes)} where {were_processes} began it, behind batch {batches}, and"
            f" with the samples that were left, {said}. Weights, optimizers, schedulers and rows are those of the checkpoint."
            " Not to the bit from here on: sums over the ranks, random numbers of ranks that were not there, torchmetrics of"
            " this epoch"
        )
    counters = {
        "total_batches": at.total_batches,
        "stepped_before": at.stepped_before,
        "steps_in_epoch": at.steps_in_epoch,
    }
    return {**ours, "ranks": ranks, "batch_idx": batches, **counters}


def _part(ranks: list[dict[str, Any]], rank: int, now: int, batches: int) -> dict[str, Any]:
    """What one of the processes goes on with."""
    first, is_new = ranks[0], rank >= len(ranks)
    part = {**(first if is_new else ranks[rank])}
    (place,) = part["train"]["sources"]
    place = {**place, "taken": batches, "ahead": None}
    if is_new:
        part["rng"] = rng_state_of_another(first["rng"], rank)
        places = ("began", "first", "born")
        place |= {name: {**place[name], **rng_state_of_another(place[name], rank)} for name in places if place[name]}
        place["workers"] = []
        if part["val"] is not None:
            part["val"] = {**part["val"], "sources": [None] * len(part["val"]["sources"])}
    part["train"] = {**part["train"], "sources": [place], "taken": batches, "fetched": batches, "ahead": None}
    others = [ranks[other] for other in range(rank + now, len(ranks), now)]
    factor = 0 if is_new else 1
    sums, weights = part["returned"]["sums"], part["returned"]["weights"]
    part["returned"] = {
        **part["returned"],
        "sums": {
            name: factor * sum((one["returned"]["sums"].get(name, 0) for one in others), sums[name]) for name in sums
        },
        "weights": {
            name: factor * sum((one["returned"]["weights"].get(name, 0) for one in others), weights[name])
            for name in weights
        },
    }
    entries = [_entry(entry, [one["metrics"]["train"] for one in others], factor) for entry in part["metrics"]["train"]]
    part["metrics"] = {**part["metrics"], "train": entries, **({"objects": {}} if is_new else {})}
    return part


def _entry(entry: dict[str, Any], others: list[list[dict[str, Any]]], factor: int) -> dict[str, Any]:
    """A running value of one rank and those of others, as one; a rank that was not there has none of it."""
    total, weight, how = entry["total"], entry["weight"], entry["meta"]["reduce"]
    if total is None:
        return entry
    same = [one for part in others for one in part if one["meta"] == entry["meta"] and one["total"] is not None]
    if how in _ADDED:
        total, weight = total * factor, weight * factor
        for one in same:
            total, weight = total + one["total"], weight + one["weight"]
    else:
        combine = {"max": torch.maximum, "min": torch.minimum}.get(how, lambda one, other: one)
        for one in same:
            total = combine(total, one["total"])
    return {**entry, "total": total, "weight": weight}


def in_order(run: Run, order: Tensor) -> AbstractContextManager[None]:
    """Within, a pass over the training loader that begins takes its samples in this order."""
    loader, rest = run.data.train.loaders[0], Rest(order, *share_of(run.fabric))
    if isinstance(loader, TensorLoader):
        return replaced(loader, share=rest)
    batches = loader.batch_sampler
    return replaced(loader, sampler=rest, batch_sampler=BatchSampler(rest, batches.batch_size, batches.drop_last))
