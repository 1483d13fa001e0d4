"""Find the weights in a checkpoint, and load them into the model of a run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import CheckpointError, OtherModelError

if TYPE_CHECKING:
    from ..training.run import Run

# The keys of a state_dict in checkpoints of Lightning, Fabric and PyTorch's tutorials.
_WEIGHTS_KEYS = ("state_dict", "model", "model_state_dict")
# The attributes in which DistributedDataParallel and torch.compile keep the original module.
_WRAPPERS = ("module", "_orig_mod")


def load_weights(run: Run, checkpoint: dict[str, Any]) -> None:
    """Load the weights of a checkpoint into the model.

    Raises:
        OtherModelError: The weights do not match the model.
    """
    path = run.plan.start.path
    target = run.module if run.is_lightning_module else run.network
    weights = rename_weights(find_weights(checkpoint, path), target)
    is_strict = getattr(run.model, "strict_loading", True)
    try:
        target.load_state_dict(weights, strict=is_strict)
    except RuntimeError as error:
        # Shorten load_state_dict's error, because every different parameter adds a line to it.
        differences = shorten(" ".join(str(error).split()), 400, placeholder=" ...")
        raise OtherModelError(
            f"{differences} The weights in '{path}' do not match the model."
            " Create the model with the same arguments as the saved model."
        ) from error


def find_weights(checkpoint: dict[str, Any], path: Any) -> Mapping[str, Any]:
    """Return the state_dict in a checkpoint. The checkpoint itself may be a state_dict."""
    weights: Any = None
    for key in _WEIGHTS_KEYS:
        if weights is None and key in checkpoint:
            value = checkpoint[key]
            value = value.state_dict() if isinstance(value, nn.Module) else value
            weights = value if isinstance(value, Mapping) else None
    if weights is None and all(map(is_weight, checkpoint, checkpoint.values())):
        weights = checkpoint
    if weights is None:
        keys = sorted(map(str, checkpoint))[:5]
        raise CheckpointError(
            f"{path}: got the keys {keys}, expected a checkpoint with state_dict."
        )
    for name in weights:
        if not isinstance(name, str):
            raise CheckpointError(
                f"{path}: got the key {name!r} in a state_dict, expected the name of a parameter."
            )
    return weights


def is_weight(name: Any, value: Any) -> bool:
    """Return whether an item may be of a state_dict. Only an extra state may be of any type."""
    return isinstance(value, Tensor) or str(name).endswith("_extra_state")


def rename_weights(weights: Mapping[str, Any], target: nn.Module) -> Mapping[str, Any]:
    """Give saved weights the names that they have in the model.

    DistributedDataParallel, DataParallel and torch.compile insert a part into the names, such as
    ``module.weight``. Names without these parts must be unique. Otherwise nothing is renamed.
    """
    own = list(target.state_dict())
    if weights.keys() == set(own):
        return weights
    own_names = {plain_name(name): name for name in own}
    if len(own_names) < len(own) or len(set(map(plain_name, weights))) < len(weights):
        return weights
    renamed = OrderedDict((own_names.get(plain_name(k), k), value) for k, value in weights.items())
    # The versions of modules, by which load_state_dict converts old weights.
    versions = getattr(weights, "_metadata", None) or {}
    versions = {plain_name(name): version for name, version in versions.items()}
    paths = [path for path, _ in target.named_modules() if plain_name(path) in versions]
    vars(renamed)["_metadata"] = {path: versions[plain_name(path)] for path in paths}
    return renamed


def plain_name(name: str) -> str:
    """Remove the parts of a name that wrappers have inserted.

    Example:
        >>> plain_name("module._orig_mod.net.0.weight")
        'net.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
