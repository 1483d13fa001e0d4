"""Add hyperparameters to a checkpoint, without values that cannot be pickled."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError
from ..lightning_compat.private import hyperparameters_name

if TYPE_CHECKING:
    from ..training.run import Run


class _NoFile:
    """A file that drops what is written."""

    def write(self, content: Any) -> int:
        return len(content)


class _TrialPickler(pickle.Pickler):
    """Pickles a value without the content of its tensors, which can always be pickled."""

    def persistent_id(self, value: Any) -> str | None:
        is_tensor = isinstance(value, torch.Tensor | torch.UntypedStorage)
        return "tensor" if is_tensor else None


def is_picklable(value: Any) -> bool:
    try:
        _TrialPickler(_NoFile(), protocol=2).dump(value)
    except Exception:
        # An object may raise any error when it is pickled.
        return False
    return True


def picklable_part(value: Any, name: str, dropped: list[str]) -> Any:
    """Return a value without the items of dicts that cannot be pickled.

    Args:
        name: The name of the value, such as "model/activation".
        dropped: A list, to which the names of dropped items are added.
    """
    if not isinstance(value, dict) or is_picklable(value):
        return value
    kept = {}
    for key, item in value.items():
        place = f"{name}/{key}" if name else str(key)
        item = picklable_part(item, place, dropped)
        if is_picklable(key) and is_picklable(item):
            kept[key] = item
        else:
            dropped.append(place)
    return kept


def add_hyperparameters(run: Run, checkpoint: dict[str, Any], part: Any) -> None:
    """Add the arguments that ``save_hyperparameters()`` has stored, under Lightning's keys."""
    hparams = getattr(part, "hparams", None)
    if not hparams or not hasattr(part, "save_hyperparameters"):
        return
    if (name := hyperparameters_name(part)) is not None:
        checkpoint[part.CHECKPOINT_HYPER_PARAMS_NAME] = name
    if type(hparams).__module__.startswith("omegaconf."):
        checkpoint[part.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    else:
        dropped: list[str] = []
        hparams = picklable_part(dict(hparams), "", dropped)
        if dropped:
            run.warn_once(
                f"hparams: {', '.join(map(repr, dropped))} cannot be pickled. Checkpoints are saved"
                " without these hyperparameters. load_from_checkpoint needs them as arguments."
            )
    checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = hparams


def check_saved_state(run: Run) -> None:
    """Warn or raise an error before training, if checkpoints could not be saved.

    Raises:
        CheckpointError: An optimizer or a scheduler has a state that cannot be pickled.
    """
    if run.checkpoints.folder is None and not run.hooks.callbacks_of("Checkpoint"):
        return
    for part in (run.model, run.datamodule):
        add_hyperparameters(run, {}, part)
    states = {
        "optimizers": [optimizer.param_groups for optimizer in run.optimization.optimizers],
        "lr_schedulers": [
            config.scheduler.state_dict() for config in run.optimization.lr_schedulers
        ],
    }
    if (place := find_unpicklable(states)) is not None:
        raise CheckpointError(
            f"{place}: got a value that cannot be pickled, expected one that a checkpoint can contain."
            " Define a function or a class at module level, or leave the value out of state_dict()."
        )


def find_unpicklable(value: Any, name: str = "") -> str | None:
    """Return the name of the first item of nested containers that cannot be pickled, or None."""
    if is_picklable(value):
        return None
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        found = find_unpicklable(item, f"{name}/{key}" if name else str(key))
        if found is not None:
            return found
    return name
