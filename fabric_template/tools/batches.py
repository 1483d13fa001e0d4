"""Batches: why two trainings see other ones: another order, a shift, other samples together, other sizes, other values."""

from __future__ import annotations

import re
from collections import Counter

from .pairing import Pair
from .recording import Pass, Recording

SHUFFLED = "the same samples in others: they are shuffled by other random numbers"
OTHERS = "other samples, or the same with other transforms or noise"
DRAWN = (SHUFFLED, OTHERS)  # what other random numbers are a reason of


def batch(pair: Pair, at: int) -> tuple[str, str, str]:
    """What is other, why, and what to write."""
    begin = sum(len(step.passes) for step in pair.yours.steps[:at])
    mine, other = ([one for one in recording.passes() if one.inputs] for recording in (pair.yours, pair.ours))
    where = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if i >= begin and _differ(a, b)), begin)
    where = min(where, len(mine) - 1, len(other) - 1)
    return (
        _of_sizes(pair, mine, other, where)
        or _of_epochs(pair, mine, other, where)
        or _of_order(pair, mine, other, where)
        or _of_samples(pair, mine, other, where)
    )


def _differ(a: Pass, b: Pass) -> bool:
    return not (set(a.inputs) <= set(b.inputs) or set(b.inputs) <= set(a.inputs))


def _of_sizes(pair: Pair, mine: list[Pass], other: list[Pass], where: int) -> tuple[str, str, str] | None:
    a, b = mine[where].size, other[where].size
    if a == b:
        return None
    what = f"a batch of {a} in yours, of {b} here"
    if where and min(a, b) < mine[where - 1].size == other[where - 1].size == max(a, b):
        who = "ours" if a < b else "yours"
        return (
            what,
            f"the last batch of the epoch, a smaller one, is left out in {who} only",
            (f"drop_last={'False' if a < b else 'True'}"),
        )
    return what, "the loader is made with another batch_size", f"batch_size={a}"


def _of_epochs(pair: Pair, mine: list[Pass], other: list[Pass], where: int) -> tuple[str, str, str] | None:
    """What an epoch begins with."""
    what = "another batch"
    epochs = [bool(recording.called("set_epoch", len(pair) - 1)) for recording in (pair.yours, pair.ours)]
    if where and epochs[0] != epochs[1]:
        return (
            what,
            f"sampler.set_epoch is called in {'yours' if epochs[0] else 'ours'} only",
            ("sampler.set_epoch(epoch) at the beginning of each epoch"),
        )
    again = [bool(where) and passes[where].inputs == passes[0].inputs for passes in (mine, other)]
    if again[0] == again[1]:
        return None
    who = "yours" if again[0] else "ours"
    at = min(where, len(pair) - 1)
    if all(any(event.startswith("loader") for event in step.events) for step in pair.step(at)):
        return (
            what,
            f"{who} repeats the first epoch's order: its generator or sampler begins anew",
            ("one generator for all epochs, and sampler.set_epoch(epoch) for a sampler that has it"),
        )
    return (
        what,
        f"in {who} an epoch begins anew here: it takes fewer batches of the loader",
        "the same number of batches",
    )


def _of_order(pair: Pair, mine: list[Pass], other: list[Pass], where: int) -> tuple[str, str, str] | None:
    a, b = [one.inputs for one in mine], [one.inputs for one in other]
    what = "another batch"
    for by, who in ((1, "ours"), (-1, "yours")):
        first, then = (a, b) if by > 0 else (b, a)
        rest = min(len(first) - where - 1, len(then) - where)
        if rest > 1 and first[where + 1 : where + 1 + rest] == then[where : where + rest]:
            return (
                what,
                f"{who} is one batch ahead: it leaves one out that the other trains on",
                ("next(iter(loader)) takes a batch: look at one from a loader of its own"),
            )
    if set(a[where:]) & set(b[where:]) and Counter(a[: len(b)]) == Counter(b[: len(a)]):
        return (
            what,
            "the same batches in another order",
            "the same sampler, and the same seed before the loader is begun",
        )
    return None


def _of_samples(pair: Pair, mine: list[Pass], other: list[Pass], where: int) -> tuple[str, str, str]:
    what = "another batch"
    if _shares_samples(mine[where:], other[where:]):
        kinds = [_shuffles(recording) for recording in (pair.yours, pair.ours)]
        if kinds == [True, False]:
            return what, "the same samples in others: yours shuffles, ours does not", "shuffle=True"
        if kinds == [False, True]:
            return what, "the same samples in others: ours shuffles, yours does not", "shuffle=False"
        return what, SHUFFLED, ("generator=torch.Generator().manual_seed(0) for the training's DataLoader, in both")
    a, b = mine[where].sketch, other[where].sketch
    if a is not None and b is not None and a.is_near(b):
        return (
            what,
            "by rounding: another dtype, or computed in another order",
            "the same dtype and the same transforms",
        )
    if a is not None and b is not None and a.ratio(b) is not None:
        return what, f"{a.ratio(b):.4g} times that of yours: scaled otherwise", "the same transforms in both"
    return what, OTHERS, ("the same dataset, transforms and seed; numbers drawn in a step are drawn in the same order")


def _shares_samples(mine: list[Pass], other: list[Pass]) -> bool:
    """Whether most samples of an input are in both, beyond this batch; what is the same in all samples says nothing."""
    for place in range(max((len(one.rows) for one in mine), default=0)):
        a, b = (
            Counter(row for one in passes if place < len(one.rows) for row in one.rows[place])
            for passes in (mine, other)
        )
        most = min(a.total(), b.total())
        batch_size = max((len(one.rows[place]) for one in mine if place < len(one.rows)), default=0)
        if most > batch_size < len(a) and (a & b).total() >= 0.4 * most:
            return True
    return False


def _shuffles(recording: Recording) -> bool:
    """Whether the loader of training shuffles, as far as its sampler's name tells."""
    begun = recording.called("loader", 0)
    return bool(begun) and re.search("Random|Shuffle", begun[-1]) is not None
