"""States: what optimizers hold, loaded as it was saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


@contextmanager
def states_as_saved(optimizers: Iterable[Any]) -> Iterator[None]:
    """Whatever state these optimizers load inside keeps the dtypes in which it was saved, and they their defaults.

    ``Optimizer.load_state_dict`` casts all of it to its parameter's: float32 averages of bfloat16 weights are rounded. It
    also adds a word to the defaults, which groups that are added later would have, and in an uninterrupted run have not.
    """
    loaded: list[tuple[Any, Mapping[str, Any]]] = []
    found = (
        part for optimizer in optimizers for part in (optimizer, *vars(optimizer).values())
    )  # with those that it wraps
    hooked = [part for part in found if isinstance(part, Optimizer) and "defaults" in vars(part)]
    hooks = [
        optimizer.register_load_state_dict_pre_hook(lambda *now: loaded.append(now))  # as other hooks have left it
        for optimizer in hooked
    ]
    defaults = [dict(optimizer.defaults) for optimizer in hooked]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for optimizer, before in zip(hooked, defaults, strict=True):
            optimizer.defaults = before
    for optimizer, saved in loaded:
        for theirs, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            for number, parameter in zip(theirs["params"], group["params"], strict=True):
                if number in saved["state"]:
                    optimizer.state[parameter] = _as_saved(optimizer.state[parameter], saved["state"][number])


def _as_saved(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, dict):
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(map(_as_saved, loaded, saved))
    return loaded
