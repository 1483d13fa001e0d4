"""Find the attributes and buffers of a run's objects that no state_dict() contains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from ..lightning_compat.overrides import is_instance_of, overridden
from ..loggers.result_collection import find_torchmetrics
from ..plain_state import Part, PlainState, address_of

if TYPE_CHECKING:
    from ..training.run import Run

# Lightning sets these attributes itself.
_OF_MODULE = frozenset(vars(LightningModule()))
_OF_DATAMODULE = frozenset(vars(LightningDataModule()))
# StochasticWeightAveraging sets the momentum of BatchNorm, and sets it back at the end of training.
_OF_AVERAGING = _OF_MODULE | {"momentum"}
_LIGHTNINGS_CALLBACKS = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.")


def make_plain_state(run: Run) -> PlainState:
    """Return the plain state of the model, the datamodule and the callbacks."""
    parts = dict([*parts_of_model(run), *parts_of_callbacks(run)])
    if run.datamodule is not None:
        has_no_state = overridden(run.datamodule, "state_dict") is None
        parts["datamodule"] = Part(run.datamodule, _OF_DATAMODULE, has_no_state)

    def find_covered() -> set[int]:
        """Return the addresses of the tensors in the model's state_dict."""
        saved = run.network.state_dict(keep_vars=True).values()
        return {address_of(value) for value in saved if type(value) in (nn.Parameter, Tensor)}

    return PlainState(parts, run.fabric.device, find_covered)


def parts_of_model(run: Run) -> Iterator[tuple[str, Part]]:
    """Yield the attributes of the model and its submodules, and the buffers that are not saved."""
    metrics = tuple(find_torchmetrics(run.network))
    saved = run.network.state_dict(keep_vars=True)
    is_averaging = bool(run.hooks.callbacks_of("StochasticWeightAveraging"))
    if run.model is not run.network:
        yield "model", Part(run.model)
    for name, module in run.network.named_modules():
        # The state of torchmetrics objects is saved with the results.
        if any(name == metric or name.startswith(f"{metric}.") for metric in metrics):
            continue
        path = f"model.{name}" if name else "model"
        if name or run.model is run.network:
            yield path, Part(module, _OF_AVERAGING if is_averaging else _OF_MODULE)
        prefix = f"{name}." if name else ""
        # A scripted module has no plain dict of buffers.
        buffers = [buffer for buffer, _ in module.named_buffers(recurse=False)]
        persistent = [buffer for buffer in buffers if prefix + buffer in saved]
        yield f"{path}.buffers", Part(module, persistent, has_buffers=True)


def parts_of_callbacks(run: Run) -> Iterator[tuple[str, Part]]:
    counts: dict[str, int] = {}
    for callback in run.hooks.callbacks:
        name = type(callback).__qualname__
        counts[name] = counts.get(name, 0) + 1
        is_lightnings = type(callback).__module__.startswith(_LIGHTNINGS_CALLBACKS)
        has_state = overridden(callback, "state_dict") is not None
        has_attributes = not (is_lightnings or has_state or is_instance_of(callback, "ProgressBar"))
        yield f"callbacks.{name}.{counts[name]}", Part(callback, has_attributes=has_attributes)
