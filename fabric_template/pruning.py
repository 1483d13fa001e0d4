"""Pruning: parameters that ``torch.nn.utils.prune`` has masked during a run, masked again on resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .hooks import is_a

if TYPE_CHECKING:
    from .run import Run


def pruning_of(run: Run) -> dict[str, Any]:
    """What is masked, by name; and the first weights, to which Lightning's ModelPruning goes back (it has no state_dict)."""
    masked = {
        f"{name}.{key[:-5]}": {"orig": parameter.detach(), "mask": module._buffers[f"{key[:-5]}_mask"]}
        for name, module in run.net.named_modules()
        for key, parameter in module._parameters.items()
        if key.endswith("_orig") and f"{key[:-5]}_mask" in module._buffers
    }
    return {"masked": masked, "first": [layer.state_dict() for layer in _first_layers(run)]}


def prune_again(run: Run, state: Mapping[str, Any]) -> None:
    """Mask what was masked, the parameters being those that the optimizers train."""
    from torch.nn.utils import prune

    modules, masked = dict(run.net.named_modules()), {}
    for path, part in state.get("masked", {}).items():
        owner, _, name = path.rpartition(".")
        if owner in modules and isinstance(parameter := getattr(modules[owner], name, None), nn.Parameter):
            with torch.no_grad():
                parameter.copy_(part["orig"])
            prune.custom_from_mask(modules[owner], name, part["mask"].to(parameter.device))
            masked[part["orig"].data_ptr()] = parameter
    for layer, first in zip(_first_layers(run), state.get("first", ()), strict=False):
        layer.load_state_dict(first)
        for name, value in first.items():
            if value.data_ptr() in masked:  # it went back to the first weights themselves, and trains them since
                getattr(layer, name).data = masked[value.data_ptr()].data


def unpruned(weights: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model that is not masked (yet) in a file of one that was.

    Example:
        >>> masked = {"weight_orig": torch.ones(2), "weight_mask": torch.tensor([0.0, 1.0])}
        >>> unpruned(masked, {"weight": torch.zeros(2)})
        {'weight': tensor([0., 1.])}
    """
    plain = dict(weights)
    for name in expected.keys() - weights.keys():
        if (orig := weights.get(f"{name}_orig")) is not None and (mask := weights.get(f"{name}_mask")) is not None:
            del plain[f"{name}_orig"], plain[f"{name}_mask"]
            plain[name] = orig * mask.to(orig.dtype)
    return plain


def _first_layers(run: Run) -> list[nn.Module]:
    callbacks = [callback for callback in run.callbacks if is_a(callback, "ModelPruning")]
    layers = [layer for callback in callbacks for layer in (getattr(callback, "_original_layers", None) or {}).values()]
    return [layer["data"] for layer in layers]
