"""Knobs: what can be tried, in which order, which of it changes the numbers, and how each is said to fit or in a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .throughput import Facts

MOST_BATCH = 4096


@dataclass(frozen=True)
class Knob:
    """One thing that can be otherwise."""

    name: str
    shown: str  # in the table
    numbers: str  # how it changes the numbers; "" if it does not
    values: Callable[[Facts, Mapping[str, Any]], Iterable[Any]]  # to try, from what the parts are like
    line: Callable[[Any], str]  # in a script
    word: str = ""  # of fit, in a file
    arguments: tuple[str, ...] = ()  # of the data's class, or the model's, that say it
    doubles: bool = False  # each value is twice the one before: it ends where it does not pay, or does not fit

    def label(self, value: Any) -> str:
        """The value as the table has it."""
        return self.shown if value is True else f"{self.shown} {value}"


def _workers(facts: Facts, chosen: Mapping[str, Any]) -> Iterable[int]:
    if facts.workers is None:
        return ()
    numbers, number = [0], 1
    while number < facts.cores:
        numbers.append(number)
        number *= 2
    return [one for one in [*numbers, facts.cores] if one != facts.workers]


def _threads(facts: Facts, chosen: Mapping[str, Any]) -> Iterable[int]:
    numbers, number = [], 1
    while number < facts.cores:
        numbers.append(number)
        number *= 2
    return [one for one in [*numbers, facts.cores] if one != facts.threads] if facts.device == "cpu" else ()


def _batch_sizes(facts: Facts, chosen: Mapping[str, Any]) -> Iterable[int]:
    size, most = facts.batch_size, min(MOST_BATCH, chosen.get("max_batch_size", MOST_BATCH))
    if facts.samples is not None:
        most = min(most, facts.samples // 2)  # the windows are as many epochs as it takes; one step is no epoch
    sizes = []
    while size is not None and 2 * size <= most:
        size *= 2
        sizes.append(size)
    return sizes


def _matmul(facts: Facts, chosen: Mapping[str, Any]) -> Iterable[str]:
    faster = "high" if facts.device == "cuda" else "medium"  # a CPU has nothing between
    return [faster] if facts.matmul_precision == "highest" and facts.precision == "32-true" else ()


SAID_LR = "the steps are fewer and larger: the learning rate is to be found again (--lr)"
KNOBS = (
    # first: on a busy machine more threads than one are what makes all other measurements waver
    Knob(
        "threads", "threads", "", _threads,
        lambda v: f"torch.set_num_threads({v}), or OMP_NUM_THREADS={v} before the command: sums may end in another last bit",
    ),
    Knob(
        "workers", "workers", "", _workers,
        lambda v: f"DataLoader(..., num_workers={v}{', persistent_workers=True' * bool(v)})",
        arguments=("num_workers", "workers"),
    ),
    Knob(
        "pin_memory", "pinned memory", "",
        lambda f, c: [True] if f.device == "cuda" and f.workers is not None and not f.pin_memory else (),
        lambda v: "DataLoader(..., pin_memory=True)", arguments=("pin_memory",),
    ),
    Knob(
        "prefetch", "prefetch", "",
        lambda f, c: [True] if f.device == "cuda" and not f.is_prefetched else (),
        lambda v: "FabricLoop(prefetch=True)", word="prefetch",
    ),
    Knob(
        "tensors", "TensorLoader", "",
        lambda f, c: [True] if f.has_tensors else (),
        lambda v: "TensorLoader(x, y, batch_size=...) in the place of DataLoader(TensorDataset(x, y), ...): the same samples;"
        " where they are shuffled, in another order",
    ),
    Knob(
        "matmul_precision", "matmul precision", "products of matrices are rounded more coarsely", _matmul,
        lambda v: f'torch.set_float32_matmul_precision("{v}")',
    ),
    Knob(
        "precision", "precision", "layers compute in bfloat16, of which three digits are right",
        lambda f, c: ["bf16-mixed"] if f.precision == "32-true" else (),
        lambda v: f'FabricLoop(precision="{v}")', word="precision",
    ),
    Knob(
        "channels_last", "channels_last", "convolutions add in another order: other last digits",
        lambda f, c: [True] if f.has_convolutions else (),
        lambda v: "model = model.to(memory_format=torch.channels_last)", arguments=("channels_last",),
    ),
    Knob(
        "fused", "fused optimizer", "the optimizer rounds in other places: other last digits",
        lambda f, c: [True] if f.is_fused is False else (),
        lambda v: "fused=True where the optimizer is made, torch.optim.Adam(..., fused=True)", arguments=("fused",),
    ),
    Knob(
        "compile", "compile", "operations are put together: other last digits",
        lambda f, c: [] if f.is_compiled else [True],
        lambda v: "FabricLoop(compile=True)", word="compile",
    ),
    Knob(
        "batch_size", "batch size", SAID_LR, _batch_sizes,
        lambda v: f"DataLoader(..., batch_size={v})", arguments=("batch_size",), doubles=True,
    ),
)  # fmt: skip
BY_NAME = {knob.name: knob for knob in KNOBS}


def label(choice: Mapping[str, Any]) -> str:
    """What is chosen, in a line.

    Example:
        >>> label({"workers": 2, "tensors": True}), label({})
        ('workers 2, TensorLoader', 'as it is')
    """
    return ", ".join(BY_NAME[name].label(value) for name, value in choice.items()) or "as it is"
