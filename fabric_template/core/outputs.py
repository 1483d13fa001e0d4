"""Outputs: what a step returned: the loss in it, which is minimized, and the scalars, by the names of the history."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import Misuse, MisuseOfType
from .run import Run


def loss_in(output: Any, run: Run) -> Tensor | None:
    """The loss in what a step returned when that is no tensor; None to skip the batch."""
    if output is None:
        _check_skip(run)
        run.said.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        return None
    loss = output
    if isinstance(output, tuple):
        if len(output) == 2 and not run.trained.is_lightning:
            loss = output[0]
    elif isinstance(output, Mapping):
        loss = output.get("loss")
        if loss is None:
            raise Misuse(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present;"
                f" found the keys {sorted(map(str, output))}: write return {{'loss': loss, ...}}"
            )
    if not isinstance(loss, Tensor):
        raise MisuseOfType(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step will be"
            f" skipped); it returned a {type(loss).__name__}: write return loss"
        )
    return loss


def _check_skip(run: Run) -> None:
    """Only a LightningModule may leave a batch out, and only where no other rank waits for its gradients."""
    if not run.trained.is_lightning:
        raise Misuse("training_step returned None: expected the loss, a tensor; write return loss at its end")
    if run.fabric.world_size > 1:
        raise RuntimeError(
            "Skipping the `training_step` by returning None in distributed training is not supported. It is"
            " recommended that you rewrite your training logic to avoid having to skip the step in the first place."
        )


def refuse_without_gradient(batch_idx: int) -> None:
    """Say what a loss lacks that comes of no parameter."""
    raise Misuse(
        f"training_step returned a loss without gradient at batch {batch_idx}: expected a tensor computed"
        " from the model's parameters; is it detached, computed under torch.no_grad, or is everything frozen?"
    )


def name_outputs(output: Any, prefix: str) -> dict[str, Tensor]:
    """The scalars that a step returned, under the names that they get in the history.

    A tensor is ``<prefix>_loss``, a dict gives ``<prefix>_<key>``, a pair is ``<prefix>_loss, <prefix>_acc``.

    Example:
        >>> name_outputs((torch.tensor(0.5), torch.tensor(1.0)), "val")
        {'val_loss': tensor(0.5000), 'val_acc': tensor(1.)}
    """
    if isinstance(output, tuple):  # first what is quickly known: it is asked for each batch
        named: Mapping[Any, Any] = {"loss": output[0], "acc": output[1]} if len(output) == 2 else {}
    elif isinstance(output, Tensor | numbers.Number):
        named = {"loss": output}
    else:
        named = output if isinstance(output, Mapping) else {}
    found, beginning = {}, f"{prefix}_"
    for key, value in named.items():
        name = key if str(key).startswith(beginning) else f"{beginning}{key}"
        if isinstance(value, Tensor):
            if value.numel() == 1:
                value = value.detach() if value.requires_grad else value
                found[name] = value.reshape(()) if value.dim() else value
        elif isinstance(value, numbers.Number) and not isinstance(value, bool):
            found[name] = torch.tensor(float(value))  # type: ignore[arg-type]
    return found
