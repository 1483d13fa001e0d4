"""Examples: what a module is called with, found in a batch, or made of shapes; to trace it, and to compare what it answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import Misuse

FEW = 4  # samples are enough to compare
LABELS = ("label", "labels", "target", "targets")  # what a forward takes only to say its loss


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of a module."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Any) -> Any:
        """What the function answers; with the same random numbers each time."""
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return function(*self.args, **self.kwargs)

    def named(self, module: nn.Module) -> dict[str, Any]:
        """The arguments by their names in the module's forward."""
        return dict(inspect.signature(module.forward).bind(*self.args, **self.kwargs).arguments)

    @property
    def samples(self) -> int | None:
        """How many samples all of the arguments have; None where that is not their first dimension."""
        values = [*self.args, *self.kwargs.values()]
        sizes = {value.shape[0] if isinstance(value, Tensor) and value.dim() else None for value in values}
        return sizes.pop() if len(sizes) == 1 else None

    def with_samples(self, count: int) -> Inputs:
        """The same with another number of samples: cut off, or repeated."""
        have = self.samples or 1
        rows = torch.arange(count) % have
        take = partial(_rows, rows=rows)
        return Inputs(tuple(map(take, self.args)), {name: take(value) for name, value in self.kwargs.items()})


def _rows(value: Tensor, rows: Tensor) -> Tensor:
    return value[rows.to(value.device)]


def inputs_of(module: nn.Module, batch: Any) -> Inputs:
    """What a forward takes of a batch: by their names of a dict, else as many as it needs, from the first on.

    Example:
        >>> batch = (torch.zeros(9, 2), torch.zeros(9))
        >>> inputs = inputs_of(nn.Linear(2, 1), batch)
        >>> len(inputs.args), inputs.samples
        (1, 4)
    """
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [one for one in parameters if one.default is one.empty and one.kind in (0, 1)]
    takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if isinstance(batch, Mapping) and all(one.name in batch for one in needed):
        found = {one.name: batch[one.name] for one in parameters if one.name in batch}
        required = {one.name for one in needed}
        inputs = Inputs((), {name: found[name] for name in found if name in required or name not in LABELS})
    elif isinstance(batch, list | tuple) and batch:
        inputs = Inputs(tuple(batch) if takes_all else tuple(batch[: max(len(needed), 1)]))
    else:
        inputs = Inputs((batch,))
    return inputs.with_samples(FEW) if (inputs.samples or 0) > FEW else inputs


def inputs_inside(model: Any, net: nn.Module, part: nn.Module, batch: Any) -> Inputs:
    """What a part of a model is called with when the model is given the batch: in its forward, or in its predict_step."""
    caught: list[Inputs] = []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(Inputs(args, kwargs))

    hook = part.register_forward_pre_hook(catch, with_kwargs=True)
    why = ""
    try:
        for call in _ways(model, net, batch):
            try:
                with torch.no_grad():
                    call()
            except Exception as error:  # a user's code: what it was called with until then is enough
                why = why or f" ({first_line(error)})"
            if caught:
                break
    finally:
        hook.remove()
    if not caught:
        raise Misuse(
            f"export: {type(model).__name__} does not call {type(part).__name__} when it is given a batch{why}: give what the"
            " part itself takes, example= in Python, --input 1,64 on the command line"
        )
    first = caught[0]
    return first.with_samples(FEW) if (first.samples or 0) > FEW else first


def _ways(model: Any, net: nn.Module, batch: Any) -> Any:
    if has_forward(net):
        yield lambda: inputs_of(net, batch).call(net)
    if callable(step := getattr(model, "predict_step", None)):
        more = (0,) if len(inspect.signature(step).parameters) > 1 else ()
        yield lambda: step(batch, *more)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: one that only holds others cannot."""
    return type(module).forward is not nn.Module.forward


def of_shapes(shapes: list[str]) -> Inputs:
    """An argument of random numbers for each shape, ``1,64``; with whole ones, 0 and 1, for ``1,64:int64``.

    Example:
        >>> of_shapes(["2,3", "2:int64"]).args[1].dtype
        torch.int64
    """
    made = []
    for shape in shapes:
        match = re.fullmatch(r"(\d+(?:,\d+)*)(?::(\w+))?", shape.replace(" ", ""))
        kind = getattr(torch, (match and match[2]) or "float32", None)
        if match is None or not isinstance(kind, torch.dtype):
            raise Misuse(
                f"--input {shape}: expected sizes, such as 1,64, and behind a colon a dtype, such as 1,64:int64"
            )
        sizes = [int(size) for size in match[1].split(",")]
        random = torch.Generator().manual_seed(0)
        whole = not (kind.is_floating_point or kind.is_complex)
        values = torch.randint(2, sizes, generator=random) if whole else torch.randn(sizes, generator=random)
        made.append(values.to(kind))
    return Inputs(tuple(made))


def first_line(error: BaseException) -> str:
    """One line for an error of somebody else's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
