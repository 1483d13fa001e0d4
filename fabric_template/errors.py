"""Define the package's exceptions and error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

_INSTEAD = {
    "epochs": "Use max_epochs.",
    "gpus": "Use accelerator='gpu', devices=2.",
    "amp": "Use precision='bf16-mixed' or '16-mixed'.",
    "lr": "Pass lr to the optimizer: torch.optim.Adam(model.parameters(), lr=1e-3).",
    "batch_size": "Pass batch_size to the loader: DataLoader(dataset, batch_size=32).",
    "optimizer": "Pass the optimizer to fit: fit(model, loader, optimizer=...).",
    "resume_from_checkpoint": "Pass the checkpoint to fit: fit(model, loader, resume='last').",
    "use_distributed_sampler": "Leave it out. To distribute the samples yourself, pass a loader"
    " with your own DistributedSampler.",
    "enable_autolog_hparams": "Leave it out. FabricLoop writes hparams.yaml unless you pass"
    " logger=False.",
    "model_registry": "Download the checkpoint, and pass its path to fit:"
    " fit(model, loader, resume=path).",
    "sync_batchnorm": "Call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fit.",
}

NUMPY_BATCH = (
    "got NumPy arrays in the batch, expected tensors. Write TensorLoader(x, y, batch_size=32), or"
    " convert the batch in the step with torch.as_tensor."
)
# Use the text of Trainer's error message, because users search the web for this text.
UNUSED_PARAMETERS = (
    "has parameters that were not used in producing the loss returned by training_step. If this is"
    " intentional, write strategy='ddp_find_unused_parameters_true'."
)
SECOND_BACKWARD = (
    "got a second backward pass through the same graph, expected only one. If the step calls"
    " loss.backward(), remove the call, because the loop calls loss.backward(). If the step keeps"
    " tensors for later batches, such as a hidden state, call detach() on them."
)


class ConfigurationError(MisconfigurationException, ValueError):
    """Raised for an invalid value, an unsupported model, or options that contradict each other.

    Code that catches Lightning's MisconfigurationException also catches ConfigurationError.
    """


class ConfigurationTypeError(MisconfigurationException, TypeError):
    """Raised for an argument of the wrong type."""


class MissingDataError(ConfigurationTypeError, ConfigurationError):
    """Raised if there is no loader for fit, validate, test or predict."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, read or used for this run."""


class DamagedCheckpointError(CheckpointError):
    """Raised if a checkpoint file is incomplete, or has changed since it was saved."""


class OtherModelError(CheckpointError, RuntimeError):
    """Raised if the weights in a checkpoint do not match the model."""


class _CheckpointKeyError(CheckpointError, KeyError):
    def __str__(self) -> str:
        # KeyError.__str__ would return the message in quotes.
        return str(self.args[0])


class MissingKeyError(_CheckpointKeyError):
    """Raised if ``loop.load`` is called with a key that is not in the checkpoint."""


class WeightsOnlyError(_CheckpointKeyError):
    """Raised if the checkpoint for ``resume=`` or ``ckpt_path=`` has no optimizer states."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """Raised if a checkpoint file does not exist."""


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Return the error message for an option that FabricLoop does not have."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    advice = f"Did you mean {near[0]}?" if near else "help(FabricLoop) lists the options."
    return f"FabricLoop: unknown option {name!r}. {_INSTEAD.get(name, advice)}"


def unknown_argument(
    method: str, name: str, value: str, known: Iterable[str], options: Iterable[str]
) -> str:
    """Return the error message for an argument that a method such as fit does not have."""
    if name in options:
        write = f"FabricLoop({name}={value}).{method}(...)"
        return f"{method}: got {name}={value}, which is an option of FabricLoop. Write {write}."
    near = difflib.get_close_matches(name, [*known, *options], n=1, cutoff=0.6)
    advice = f"help(FabricLoop.{method}) lists the arguments."
    if near:
        advice = f"Did you mean {near[0]}{' of FabricLoop' if near[0] in options else ''}?"
    return f"{method}: unknown argument {name!r}. {_INSTEAD.get(name, advice)}"


def explain_error(
    error: BaseException, hook: str | None, model: str, is_automatic: bool
) -> Exception | None:
    """Return an error that adds advice to a common error of torch, or None for all other errors.

    Args:
        hook: The name of the hook or step that raised the error.
        model: The kind of model that the message mentions, such as "LightningModule".
        is_automatic: Whether the loop calls backward() and the optimizer.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and "Expected to have finished reduction" in text:
        return RuntimeError(f"It looks like your {model} {UNUSED_PARAMETERS}")
    if not is_automatic:
        return None
    if isinstance(error, TypeError | AttributeError) and "numpy.ndarray" in text:
        is_in_step = str(hook).endswith("_step")
        return TypeError(f"{hook}: {NUMPY_BATCH}") if is_in_step else None
    if not isinstance(error, RuntimeError) or hook != "backward":
        return None
    if "through the graph a second time" in text:
        return RuntimeError(f"training_step: {SECOND_BACKWARD}")
    if "only for scalar outputs" in text:
        return RuntimeError(
            "training_step: got a loss with several elements, expected the loss as a tensor with"
            " one element. Return the mean, loss.mean()."
        )
    return None


def describe(value: Any) -> str:
    """Return a value's repr for an error message, or "a <class name>" if the repr is too long.

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
    """Raise an error if an argument is a class instead of an object."""
    if isinstance(value, type):
        raise ConfigurationTypeError(
            f"{argument}: got {describe(value)}, expected an instance. Pass {value.__name__}(...)."
        )
