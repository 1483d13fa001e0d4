"""Put back: what the parts of a run held beside their state_dict, as a checkpoint has it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..core.run import Run
from .held import Held, part_of, sizes
from .randomness import LIBRARIES, PLAIN, generator_state, set_generator_state


def put_back_groups(run: Run, groups: Sequence[Any]) -> None:
    """Let optimizers train the parameters that they trained, before their state is loaded."""
    parameters = dict(run.trained.net.named_parameters())
    for optimizer, saved in zip(run.optimizing.optimizers, groups, strict=False):
        if not saved or [len(names) for names in saved] == sizes(optimizer):
            continue
        if not {name for names in saved for name in names} <= parameters.keys():
            continue  # of another model: what loads the optimizer's state says so
        del optimizer.param_groups[len(saved) :]
        for group in optimizer.param_groups:
            group["params"] = []
        for index, names in enumerate(saved):
            own = [parameters[name] for name in names]
            if index < len(optimizer.param_groups):
                optimizer.param_groups[index]["params"] = own
            else:
                optimizer.add_param_group({"params": own})


def put_back(run: Run, held: Held, state: Mapping[str, Any]) -> None:
    """Put everything but the groups back, after all hooks that set it up again."""
    net, device = run.trained.net, run.fabric.device
    modules, parameters = dict(net.named_modules()), dict(net.named_parameters())
    for name, own in state["settings"].items():
        for key, value in own.items():
            if name in modules and type(vars(modules[name]).get(key, ...)) in PLAIN:
                setattr(modules[name], key, value)
            elif name in parameters and key == "requires_grad":
                parameters[name].requires_grad_(value)
    with torch.no_grad():
        for name, value in state["buffers"].items():
            owner, _, key = name.rpartition(".")
            if owner in modules:
                _put(modules[owner], key, value.to(device, copy=True))
        tensors = held.tensors()
        for path, value in state["tensors"].items():
            if path in tensors and part_of(tensors[path]).shape == value.shape:
                part_of(tensors[path]).copy_(value)
    for name, gradient in state["gradients"].items():
        if name in parameters and part_of(parameters[name]).shape == gradient.shape:
            whole = part_of(parameters[name]) is parameters[name]
            parameters[name].grad = gradient.to(device, copy=True) if whole else torch.zeros_like(parameters[name])
            if not whole:
                part_of(parameters[name].grad).copy_(gradient)
    generators = held.generators()
    for path, part in state["generators"].items():
        if path in generators:
            set_generator_state(generators[path], part)
    if missing := sorted(state["generators"].keys() - generators.keys()):
        run.said.warn(
            f"resume: the checkpoint has the state of random generators that are not there now ({', '.join(missing)}): what"
            " they draw is not what they would have drawn; make them in __init__ or setup"
        )


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Fill a buffer, or put another one in its place."""
    now = getattr(module, name, None)
    if isinstance(now, Tensor) and now.shape == value.shape and now.dtype == value.dtype and not now.is_inference():
        now.copy_(value)
    elif name in module._buffers:
        setattr(module, name, value)


def rng_state_of_another(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The `rng_state` of a process that has none yet: its own, and always the same, made of another's and a number.

    Example:
        >>> from fabric_template.exact.randomness import rng_state
        >>> state = rng_state(); states = [rng_state_of_another(state, number)["torch"] for number in (1, 1, 2)]
        >>> torch.equal(states[0], states[1]), torch.equal(states[0], states[2])
        (True, False)
    """
    torchs = torch.Generator()
    set_generator_state(torchs, state["torch"])
    seed = int(torch.randint(2**31, (), generator=torchs)) + number
    anew = torchs.manual_seed(seed), random.Random(seed), numpy.random.RandomState(seed)
    other: dict[str, Any] = dict(zip(LIBRARIES, map(generator_state, anew), strict=True))
    if "cuda" in state and torch.cuda.is_available():
        other["cuda"] = [torch.Generator("cuda").manual_seed(seed).get_state()] * len(state["cuda"])
    return other
