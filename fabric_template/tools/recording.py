"""Recording: what was noted of a training, step by step, in plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .sketches import Sketch


@dataclass
class Pass:
    """One backward, and the forward that led to it."""

    inputs: tuple[str, ...] = ()  # digests of the data that entered the model
    sketch: Sketch | None = None  # of the first of them, and its samples
    rows: tuple[tuple[str, ...], ...] = ()  # the samples of each of them
    size: int = 0
    random: dict[str, str] = field(default_factory=dict)  # before the forward
    asleep: tuple[str, ...] = ()  # modules in eval mode
    modules: int = 0
    draws: bool = False  # whether the forward draws random numbers, as dropout does
    loss: Sketch | None = None


@dataclass
class Step:
    """One step of an optimizer."""

    optimizer: int  # by the order in which they came
    kind: str
    passes: list[Pass] = field(default_factory=list)
    is_closed: bool = False  # whether the optimizer itself calls for the passes, by a closure
    is_cleared: bool = True  # whether the gradients were empty before the first of them
    before: dict[int, str] = field(default_factory=dict)  # weights, by the number of the parameter
    raw: dict[int, Sketch] = field(default_factory=dict)  # gradients as backward left them
    gradients: dict[int, Sketch] = field(default_factory=dict)  # ... as the optimizer got them
    settings: dict[int, dict[str, Any]] = field(default_factory=dict)  # lr, weight_decay, ...
    trained: tuple[int, ...] = ()
    held: tuple[int, ...] = ()  # by the optimizer, with a gradient or without
    frozen: tuple[int, ...] = ()  # by requires_grad, held or not
    weights: dict[int, Sketch] = field(default_factory=dict)  # after the step
    buffers: dict[int, Sketch] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)  # what else was called since the step before


@dataclass
class Recording:
    """What `record` has noted."""

    name: str
    limit: int
    names: dict[int, str] = field(default_factory=dict)  # of parameters and buffers, by their numbers
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    initial: dict[int, Sketch] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def passes(self) -> Iterator[Pass]:
        """Every backward, in order."""
        for step in self.steps:
            yield from step.passes

    def called(self, word: str, until: int) -> list[str]:
        """The events of a kind up to a step."""
        return [event for step in self.steps[: until + 1] for event in step.events if event.startswith(word)]

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.name}: no optimizer step"
        kinds = " and ".join(dict.fromkeys(step.kind for step in self.steps))
        losses = [one.loss.samples[0] for one in self.passes() if one.loss is not None and one.loss.samples]
        counts = {"step": len(self.steps), "parameter": len({*self.steps[0].trained})}
        steps, parameters = (f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items())
        text = f"{self.name}: {steps} of {kinds}, {parameters}"
        return f"{text}, loss {losses[0]:.4g} to {losses[-1]:.4g}" if losses else text
