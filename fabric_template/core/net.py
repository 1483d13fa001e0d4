"""Net: the nn.Module that holds an owner's parameters; where it is, and in which modes its parts are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from .errors import MisuseOfType


def net_of(owner: Any) -> nn.Module:
    """The nn.Module that holds an owner's parameters: itself, or all modules and parameters among its attributes.

    Example:
        >>> class Plain:
        ...     def __init__(self): self.net = nn.Linear(2, 1)
        >>> list(net_of(Plain()).state_dict())
        ['net.weight', 'net.bias']
    """
    if isinstance(owner, nn.Module):
        return owner
    net = nn.Module()
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if isinstance(value, nn.Module):
            net.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            net.register_parameter(name, value)
        elif isinstance(value, list | tuple) and value and all(isinstance(part, nn.Module) for part in value):
            net.add_module(name, nn.ModuleList(value))
        elif isinstance(value, dict) and value and all(isinstance(part, nn.Module) for part in value.values()):
            net.add_module(name, nn.ModuleDict(value))
    if not list(net.children()) and not list(net.parameters()):
        raise MisuseOfType(
            f"{type(owner).__name__} holds no torch.nn.Module: expected an nn.Module, or an object with modules among its "
            "attributes; write self.net = ... in its __init__"
        )
    return net


def device_of(net: nn.Module) -> torch.device:
    """Where a net is, by its first parameter or buffer; one that has none yet is on the CPU.

    Example:
        >>> device_of(nn.Linear(1, 1))
        device(type='cpu')
    """
    first = next(chain(net.parameters(), net.buffers()), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def with_a_note(net: nn.Module) -> Iterator[nn.Module]:
    """The net, and those of its parts that keep their own note of device and dtype: LightningModules and metrics."""
    return (part for part in net.modules() if part is net or type(part).to is not nn.Module.to)


class Modes:
    """Remembers which modules were in training mode, to put each back as it was.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Dropout()); _ = net[1].eval()
        >>> modes = Modes(net); _ = net.eval(); modes.of(net[0])
        True
        >>> modes.restore(); [part.training for part in net]
        [True, False]
    """

    def __init__(self, net: nn.Module) -> None:
        # by id: the hash of a torchmetrics metric changes with what it has measured
        self._modes = {id(module): (module, module.training) for module in net.modules()}

    def of(self, module: nn.Module) -> bool:
        """The mode that this module was in; of one that was not there, the one that it is in."""
        _, training = self._modes.get(id(module), (module, module.training))
        return training

    def restore(self) -> None:
        """Put every module back into the mode that it was in."""
        for module, training in self._modes.values():
            module.training = training
