"""Define exceptions for users, and warnings that are shown once."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

# Advice for names that other libraries use for options of FabricLoop.
_INSTEAD = {
    "epochs": "Use max_epochs.",
    "gpus": "Use accelerator='gpu', devices=2.",
    "amp": "Use precision='bf16-mixed' or '16-mixed'.",
    "lr": "Pass it to the optimizer: torch.optim.Adam(model.parameters(), lr=1e-3).",
    "batch_size": "Pass it to the loader: DataLoader(dataset, batch_size=32).",
    "optimizer": "Pass it to fit: fit(model, loader, optimizer=...).",
    "resume_from_checkpoint": "Use the argument resume of fit: fit(model, loader, resume='last').",
    "sync_batchnorm": "Call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fit.",
}


class ConfigurationError(MisconfigurationException, ValueError):
    """Raised for a wrong value, an unsupported model or a contradiction between options.

    Code that catches Lightning's MisconfigurationException also catches ConfigurationError.
    """


class ConfigurationTypeError(MisconfigurationException, TypeError):
    """Raised for an argument of a wrong type."""


class MissingDataError(ConfigurationTypeError, ConfigurationError):
    """Raised for a call without data."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, read or used. The message explains what to do."""


class DamagedCheckpointError(CheckpointError):
    """Raised for a checkpoint file that is incomplete, or was changed after it was written."""


class OtherModelError(CheckpointError, RuntimeError):
    """Raised if the weights in a checkpoint do not match the model."""


class WeightsOnlyError(CheckpointError, KeyError):
    """Raised if ``resume=`` or ``ckpt_path=`` gets a checkpoint without optimizer states."""

    def __str__(self) -> str:
        # Without this method, KeyError shows the repr of its message.
        return str(self.args[0])


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """Raised if a checkpoint file does not exist."""


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Return the message for an option that FabricLoop does not have."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    advice = f"Did you mean {near[0]}?" if near else "help(FabricLoop) lists the options."
    return f"FabricLoop: got the unknown option {name}. {_INSTEAD.get(name, advice)}"


def describe(value: Any) -> str:
    """Return a value's repr for an error message, or its class name if the repr is long.

    Example:
        >>> describe("cpu"), describe(dict)
        ("'cpu'", 'the class dict')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, name = repr(value), type(value).__name__
    is_short = len(text) <= 60 and "\n" not in text and not text.startswith("<")
    article = "an" if re.match("[aeiouAEIOU]|nd|[FHLMNRSX][A-Z]", name) else "a"
    return text if is_short else f"{article} {name}"


def check_object(argument: str, value: Any) -> None:
    """Raise an error if the value is a class instead of an object."""
    if isinstance(value, type):
        raise ConfigurationTypeError(
            f"{argument}: got {describe(value)}, expected an object. Write {value.__name__}(...)."
        )


class WarnOnce:
    """Show each warning once in a run, on the main process only."""

    def __init__(self, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self._shown: set[str] = set()

    def __call__(self, message: str, category: type[Warning] = UserWarning) -> None:
        if self.is_enabled and message not in self._shown:
            self._shown.add(message)
            warnings.warn(message, category, stacklevel=3)
