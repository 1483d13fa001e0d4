"""Rates: why two sequences of learning rates part: made with another one, no scheduler, stepped at another place."""

from __future__ import annotations

from itertools import groupby

from .pairing import Pair
from .recording import Recording


def learning_rate(pair: Pair, at: int) -> tuple[str, str] | None:
    """Why, and what to write; None: it is the groups that are other."""
    mine, other = _rates(pair.yours, at), _rates(pair.ours, at)
    if at == 0 and mine[0] == other[0]:
        return None  # that of another group
    a, b = ([(rate, len([*run])) for rate, run in groupby(rates)] for rates in (mine, other))
    if len(a) == len(b) == 1:
        return "the optimizer is made with another one", f"lr={mine[0]:.4g}"
    if (shift := _shift(mine, other)) != 0:
        when = "earlier" if shift > 0 else "later"
        steps = f"{abs(shift)} step{'s' * (abs(shift) > 1)}"
        return f"the sequence of yours, {steps} {when}: the scheduler is stepped at another place", (
            "scheduler.step() once after each optimizer.step(), and none before the first"
        )
    if len(b) == 1:
        return "a scheduler steps in yours only", _with_scheduler(pair.yours, a)
    if len(a) == 1:
        return "a scheduler steps in ours only", "leave the scheduler out"
    most = min(len(a), len(b))
    if [rate for rate, _ in a[: most - 1]] == [rate for rate, _ in b[: most - 1]] and most > 1:
        every = [f"{run[0][1]} step{'s' * (run[0][1] > 1)}" for run in (a, b)]
        return f"the same learning rates, changed every {every[0]} in yours, every {every[1]} here", _with_scheduler(
            pair.yours, a
        )
    if len({round(two / one, 9) for one, two in zip(mine, other, strict=False) if one}) == 1:
        return "the same schedule from another start", f"lr={mine[0]:.4g}"
    return "another schedule", "the same scheduler with the same number of steps"


def _with_scheduler(yours: Recording, runs: list[tuple[float, int]]) -> str:
    begun = [at for at, step in enumerate(yours.steps) if any(event.startswith("loader") for event in step.events)]
    epoch = begun[1] - begun[0] if len(begun) > 1 else 0
    interval = "epoch" if epoch > 1 and runs[0][1] % epoch == 0 else "step"
    return f'optimizer={{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "{interval}"}}}}'


def _rates(recording: Recording, at: int) -> list[float]:
    """Those of the first parameter of the optimizer that steps there."""
    steps = [step for step in recording.steps if step.optimizer == recording.steps[at].optimizer]
    return [float(next(iter(step.settings.values())).get("lr", 0.0)) for step in steps if step.settings]


def _shift(mine: list[float], other: list[float]) -> int:
    """By how many steps ours is ahead; 0: it is not the same sequence."""
    for by in (1, -1, 2, -2):
        a, b = (mine[by:], other) if by > 0 else (mine, other[-by:])
        most = min(len(a), len(b))
        if most > 2 and a[:most] == b[:most] and len(set(a[:most])) > 1:
            return by
    return 0
