"""Inputs: what is plausibly given in the place of a model, a loader, a step, an optimizer or a file; what to write instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .errors import Misuse, MisuseOfType
from .passes import INFINITE


def check_object(argument: str, value: Any) -> None:
    """Refuse a class where an object of it is meant.

    Example:
        >>> check_object("model", nn.Linear)
        Traceback (most recent call last):
        ...
        fabric_template.core.errors.MisuseOfType: model=Linear: this is a class, expected an object of it: write Linear(...)
    """
    if isinstance(value, type):
        name = value.__name__
        raise MisuseOfType(f"{argument}={name}: this is a class, expected an object of it: write {name}(...)")


def check_path(argument: str, value: Any, words: tuple[str, ...]) -> None:
    """Refuse what names no file, such as True or a state dict."""
    known = f"expected a path, {' or '.join(map(repr, words))}"
    if value is not None and not isinstance(value, str | os.PathLike):
        hint = "; weights that are in memory go in by model.load_state_dict(...)" if argument == "load" else ""
        raise MisuseOfType(f"{argument} got a {type(value).__name__}: {known}{hint}")
    if value == "auto" and "auto" not in words:
        raise Misuse(f"{argument}='auto': {known}; 'auto' is a word of resume=")


def why_no_loader(loader: Any) -> str | None:
    """What is wrong with this as an iterable of batches, and what to write; None for nothing.

    Example:
        >>> why_no_loader("data/train")
        'gives single characters; write DataLoader(your_dataset, batch_size=32)'
        >>> why_no_loader([1, 2]) is None
        True
    """
    if isinstance(loader, str | bytes):
        return "gives single characters; write DataLoader(your_dataset, batch_size=32)"
    if isinstance(loader, type) or not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
        return "cannot be iterated over"
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        return "gives single samples; write DataLoader(dataset, batch_size=32)"
    if hasattr(loader, "iloc"):
        return "gives the names of its columns; write TensorLoader(torch.tensor(frame.to_numpy()), batch_size=32)"
    if isinstance(loader, Tensor) or hasattr(loader, "__array_interface__"):
        return "gives single rows; write TensorLoader(x, y, batch_size=32)"
    parts = list(loader.values()) if isinstance(loader, Mapping) else list(loader) if type(loader) is tuple else []
    if parts and all(isinstance(part, Tensor) or hasattr(part, "__array_interface__") for part in parts):
        return f"holds whole tensors; write TensorLoader({', '.join('xyzw'[: len(parts)])}, batch_size=32)"
    if type(loader) in (list, tuple):
        kinds = {type(item) for item in loader}
        if kinds == {type(None)}:
            return "holds no batches"
        if len(kinds) > 1 and not all(issubclass(kind, int | float | str) for kind in kinds):
            return "holds neither loaders nor batches of one kind"
    return None


def check_names(names: Iterable[str]) -> None:
    """Refuse a loader to validate under the name that training's own metrics have."""
    if "train" in names:
        raise Misuse(
            f"the loaders to validate are named {', '.join(map(repr, names))}: train_loss is what training measures; write"
            " {'train_again': loader}"
        )


def check_signature(step: Callable, name: str, takes_net: bool = False, takes_idx: bool = True) -> None:
    """Refuse a step that cannot be called with a batch, or with a batch and its index."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # of a builtin: it is called as it is
        return
    given = (None,) * (1 + takes_net + takes_idx)
    named = {"dataloader_idx": 0} if "dataloader_idx" in signature.parameters else {}
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        first = "model, " if takes_net else "self, "
        # as a call says it
        why = str(error).replace("missing a required argument", "missing 1 required positional argument")
        raise MisuseOfType(
            f"{name}{signature} cannot be called with a batch ({why}): expected {name}({first}batch) or"
            f" {name}({first}batch, batch_idx)"
        ) from None


def check_parameters(optimizers: list[Any], net: nn.Module, name: str) -> None:
    """Refuse optimizers that have nothing of the model; plain tensors among their parameters are the user's own matter."""
    own = {id(parameter) for parameter in net.parameters()}
    theirs = [p for optimizer in optimizers for group in optimizer.param_groups for p in group.get("params", ())]
    if any(isinstance(p, nn.Parameter) for p in theirs) and not any(id(p) in own for p in theirs):
        raise Misuse(
            f"the optimizer has {len(theirs)} parameters, none of which is {name}'s: nothing would be trained; write"
            " torch.optim.SGD(model.parameters(), lr=...) with the model that is trained"
        )
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            from .redundancy import check_redundancy

            check_redundancy(optimizer)


def length_of(loader: Any) -> int | float:
    """len(loader), or infinity where it has none."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        return INFINITE
    if is_combined(loader):  # it knows its own length in a pass only
        return max(map(length_of, loader.flattened), default=0)
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return INFINITE


def is_combined(source: Any) -> bool:
    """Whether this is Lightning's CombinedLoader, of either package."""
    return hasattr(source, "flattened") and hasattr(source, "limits")
