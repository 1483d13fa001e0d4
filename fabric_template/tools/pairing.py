"""Pairing: two recordings side by side; which parameter of one is which of the other, and where each part is other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .recording import Pass, Recording, Step

# how a step is computed, not what it is
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "max_lr", "min_lr", "max_momentum",
                  "base_momentum"}  # fmt: skip


@dataclass
class Pair:
    """Your recording and ours."""

    yours: Recording
    ours: Recording
    same: dict[int, int] = field(init=False)  # the number of a tensor in yours, and in ours

    def __post_init__(self) -> None:
        self.same = match(self.yours, self.ours)

    def __len__(self) -> int:
        return min(len(self.yours.steps), len(self.ours.steps))

    def step(self, at: int) -> tuple[Step, Step]:
        """The same step of both."""
        return self.yours.steps[at], self.ours.steps[at]

    def passes(self, at: int) -> list[tuple[Pass, Pass]]:
        """The backward passes of a step, of both."""
        mine, other = self.step(at)
        return list(zip(mine.passes, other.passes, strict=False))

    def tensors(self, word: str, at: int) -> Iterator[tuple[str, Any, Any]]:
        """Name and what is known of each tensor in both, of a part of a step."""
        a, b = (getattr(step, word) for step in self.step(at))
        for number, value in a.items():
            if (other := b.get(self.same.get(number, -1))) is not None:
                yield self.yours.names.get(number, f"parameter {number}"), value, other

    def other(self, word: str, at: int) -> list[tuple[str, Any, Any]]:
        """Those that are not the same to the bit."""
        return [(name, a, b) for name, a, b in self.tensors(word, at) if a != b]

    def initial(self) -> list[tuple[str, Any, Any]]:
        """Name and sketch of each weight with which training begins."""
        return [
            (self.yours.names.get(number, f"parameter {number}"), value, self.ours.initial[self.same[number]])
            for number, value in self.yours.initial.items()
            if self.same.get(number, -1) in self.ours.initial
        ]


def match(yours: Recording, ours: Recording) -> dict[int, int]:
    """Tensors by name; by the end of their names where a module stands around the net; otherwise by order and shape."""
    by_name = {name: number for number, name in ours.names.items()}
    same = {number: by_name[name] for number, name in yours.names.items() if name in by_name}
    if len(same) < min(len(yours.names), len(ours.names)):
        ends = {
            number: [other for name, other in by_name.items() if name.endswith(f".{mine}") or mine.endswith(f".{name}")]
            for number, mine in yours.names.items()
        }
        found = {number: others[0] for number, others in ends.items() if len(others) == 1}
        if len(found) > len(same) and len(set(found.values())) == len(found):
            same = found
    if all(yours.shapes[a] == ours.shapes[b] for a, b in same.items()) and len(same) > len(yours.initial) // 2:
        return same
    return {
        number: number
        for number in yours.shapes
        if yours.shapes[number] == ours.shapes.get(number) and (number in yours.initial) == (number in ours.initial)
    }


# ---- is a part other?


def _weights_before(pair: Pair, at: int) -> bool:
    if at == 0:
        return any(a != b for _, a, b in pair.initial())
    return bool(pair.other("before", at))


def _batches(pair: Pair, at: int) -> bool:
    for a, b in pair.passes(at):
        mine, other = set(a.inputs), set(b.inputs)
        if mine and other and not (mine <= other or other <= mine):
            return True
    return False


def _modes(pair: Pair, at: int) -> bool:
    return any(a.inputs and b.inputs and sleepers(a, b) != (0, 0) for a, b in pair.passes(at))


def sleepers(a: Pass, b: Pass) -> tuple[int, int]:
    """How many modules are in eval mode in yours only, and in ours only."""
    if a.modules == b.modules:
        return len(set(a.asleep) - set(b.asleep)), len(set(b.asleep) - set(a.asleep))
    share = [len(one.asleep) / max(1, one.modules) for one in (a, b)]  # a module stands around the net
    if share in ([0, 1], [1, 0]):
        return len(a.asleep), len(b.asleep)
    return 0, 0


def _trained(pair: Pair, at: int) -> bool:
    mine, other = pair.step(at)
    return {pair.same.get(number, -1 - number) for number in mine.trained} != set(other.trained)


def _losses(pair: Pair, at: int) -> bool:
    return any(a.loss is not None and b.loss is not None and a.loss != b.loss for a, b in pair.passes(at))


def is_closed(pair: Pair, at: int) -> bool:
    """Whether the passes of a step are evaluations of a closure, each of which comes of the one before."""
    return all(step.is_closed for step in pair.step(at))


def begins_alike(pair: Pair, at: int) -> bool:
    """Whether the first of several passes has the same loss."""
    losses = [step.passes[0].loss for step in pair.step(at) if step.passes]
    return len(losses) == 2 and losses[0] == losses[1]


def _random(pair: Pair, at: int) -> bool:
    return bool(random_parts(pair, at))


def random_parts(pair: Pair, at: int) -> list[str]:
    """The libraries whose random numbers are other before a forward of this step."""
    found = dict.fromkeys(
        name
        for a, b in pair.passes(at)
        for name in a.random.keys() & b.random.keys()
        if a.random[name] != b.random[name]
    )
    return sorted(found, key=["torch", "cuda", "numpy", "python"].index)


def other_settings(pair: Pair, at: int) -> dict[str, list[tuple[str, Any, Any]]]:
    """By word, the parameters for which it is other."""
    found: dict[str, list[tuple[str, Any, Any]]] = {}
    trained = {pair.yours.names.get(number, f"parameter {number}") for number in pair.step(at)[0].trained}
    for name, a, b in pair.tensors("settings", at):
        for word in a.keys() & b.keys() - IMPLEMENTATION if name in trained else ():
            if a[word] != b[word]:
                found.setdefault(word, []).append((name, a[word], b[word]))
    return dict(sorted(found.items(), key=lambda item: ({"lr": 0, "weight_decay": 1}.get(item[0], 2), item[0])))


def _optimizers(pair: Pair, at: int) -> bool:
    mine, other = pair.step(at)
    return (mine.optimizer, mine.kind) != (other.optimizer, other.kind)


PARTS: dict[str, Callable[[Pair, int], bool]] = {  # in the order in which one comes of the other
    "net": lambda pair, at: at == 0 and 2 * len(pair.initial()) < min(len(pair.yours.initial), len(pair.ours.initial)),
    "initial weights": lambda pair, at: at == 0 and _weights_before(pair, at),
    "weights between steps": lambda pair, at: at > 0 and _weights_before(pair, at),
    "optimizer": _optimizers,
    "accumulation": lambda pair, at: not is_closed(pair, at) and len({len(step.passes) for step in pair.step(at)}) > 1,
    "random numbers": _random,
    "batch": _batches,
    "modes": _modes,
    "trained parameters": _trained,
    "loss": _losses,
    "clearing": lambda pair, at: pair.step(at)[0].is_cleared != pair.step(at)[1].is_cleared,
    "gradients": lambda pair, at: bool(pair.other("raw", at)),
    "clipped gradients": lambda pair, at: bool(pair.other("gradients", at)),
    "settings": lambda pair, at: bool(other_settings(pair, at)),
    "weights": lambda pair, at: bool(pair.other("weights", at)),
    "buffers": lambda pair, at: bool(pair.other("buffers", at)),
}
# other states, of which something must come before they count
STATES = {
    "random numbers": {"batch", "loss"},
    "modes": {"loss", "gradients", "clipped gradients", "buffers"},
    "clearing": {"gradients", "clipped gradients"},
}
