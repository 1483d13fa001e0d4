"""Formats: the bytes of a file that a model leaves in, and what such a file answers when it is loaded.

Nothing of it is on the disk: what cannot be loaded back is never written.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves  # torch has no public name for it

from ..core.errors import Misuse
from ..core.trained import is_lightning
from .examples import Inputs


@dataclass(frozen=True)
class Format:
    """One format: what writes it, what reads it back, and how near that must come to the model."""

    suffix: str
    use: str  # a line of Python that loads it
    packages: tuple[str, ...] = ()
    write: Callable[[nn.Module, Inputs], bytes] | None = None  # None: the weights alone
    read: Callable[[bytes], Callable[..., Any]] | None = None
    tolerance: float = 0.0  # of the largest output; 0: the same bits


def format_named(name: str | None, suffix: str) -> tuple[str, Format]:
    """The format by its name, or by how a file's name ends.

    Example:
        >>> format_named(None, ".pt2")[0]
        'torch.export'
    """
    if name is None:
        name = next((one for one, known in FORMATS.items() if known.suffix == suffix), None)
        if name is None:
            known = ", ".join(f"{one} ({known.suffix})" for one, known in FORMATS.items())
            raise Misuse(
                f"export: {suffix or 'a name without an ending'!r} says no format: expected format= one of {known}"
            )
    if name not in FORMATS:
        raise Misuse(f"export: format={name!r} is unknown: expected one of {', '.join(FORMATS)}")
    if suffix != FORMATS[name].suffix and suffix in (known.suffix for known in FORMATS.values()):
        raise Misuse(f"export: format={name!r} in a file that ends in {suffix}: expected {FORMATS[name].suffix}")
    missing = [package for package in FORMATS[name].packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Misuse(f"export: format={name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return name, FORMATS[name]


# ---- the weights alone


def write_weights(module: nn.Module) -> bytes:
    """The state dict as safetensors. Each tensor stands by itself: of those that share memory there are copies."""
    from safetensors.torch import save

    state = module.state_dict()
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise Misuse(
            f"export: {odd[0]!r} of the state_dict is no tensor, and safetensors holds nothing else: torch.save does"
        )
    return save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})


def check_weights(module: nn.Module, content: bytes) -> None:
    """Load them back, and compare every bit."""
    from safetensors.torch import load

    state, found = module.state_dict(), load(content)
    wrong = [name for name in {**state, **found} if name not in found or not _same_bits(state[name].cpu(), found[name])]
    if wrong:
        raise Misuse(f"export: loaded back, {wrong[0]!r} is not what it was; nothing was written")


# ---- programs


def _write_program(module: nn.Module, inputs: Inputs) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs.args, inputs.kwargs, **_any_batch(module, inputs)), file)
    return file.getvalue()


def _read_program(content: bytes) -> Callable[..., Any]:
    return torch.export.load(io.BytesIO(content)).module()


def _write_script(module: nn.Module, inputs: Inputs) -> bytes:
    file = io.BytesIO()
    if is_lightning(module):  # knows which of its attributes cannot be looked at
        script: Any = module.to_torchscript(  # type: ignore[operator]
            method="trace", example_inputs=inputs.args, strict=False, check_trace=False
        )
    else:
        words: dict[str, Any] = {"example_kwarg_inputs": inputs.kwargs} if inputs.kwargs else {}
        args = inputs.args if not inputs.kwargs else None
        script = torch.jit.trace(module, args, strict=False, check_trace=False, **words)
    torch.jit.save(script, file)
    return file.getvalue()


def _read_script(content: bytes) -> Callable[..., Any]:
    return torch.jit.load(io.BytesIO(content))


def _write_onnx(module: nn.Module, inputs: Inputs) -> bytes:
    words = {"dynamo": True, "verbose": False, **_any_batch(module, inputs)}
    program = torch.onnx.export(module, inputs.args, kwargs=inputs.kwargs, **words)
    assert program is not None
    return program.model_proto.SerializeToString()


def _read_onnx(content: bytes) -> Callable[..., Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def call(*args: Any, **kwargs: Any) -> list[Tensor]:
        given = [value.cpu().numpy() for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        return [torch.as_tensor(array) for array in session.run(None, dict(zip(names, given, strict=True)))]

    return call


def _any_batch(module: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The word that leaves the number of samples open, where that is the first dimension of every argument."""
    if inputs.samples is None:
        return {}
    named = inputs.named(module)
    free = {0: Dim.AUTO}
    return {
        "dynamic_shapes": {
            name: free if isinstance(value, Tensor) else tuple(free for _ in value) if isinstance(value, tuple) else
            {key: free for key in value} for name, value in named.items()
        }
    }  # fmt: skip


FORMATS = {
    "safetensors": Format(".safetensors", "model.load_state_dict(safetensors.torch.load_file({path!r}))", ("safetensors",)),
    "torch.export": Format(
        ".pt2", "torch.export.load({path!r}).module()({names})", (), _write_program, _read_program
    ),
    "onnx": Format(
        ".onnx", "onnxruntime.InferenceSession({path!r}).run(None, {{{named}}})", ("onnx", "onnxscript", "onnxruntime"),
        _write_onnx, _read_onnx, tolerance=1e-4,
    ),
    "torchscript": Format(".ts", "torch.jit.load({path!r})({names})", (), _write_script, _read_script),
}  # fmt: skip


@contextmanager
def quietly() -> Iterator[None]:
    """What torch says of itself while it exports, deprecations and what it has not found, is not said to the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- what comes out of both


def difference(expected: Any, found: Any) -> float:
    """How far two answers are from each other: 0 for the same bits, else of the largest number; inf for another form.

    Example:
        >>> difference({"a": torch.tensor([1.0, 2.0])}, [torch.tensor([1.0, 2.0])])
        0.0
        >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])), difference(torch.ones(2), torch.ones(3))
        (0.25, inf)
        >>> difference(torch.ones(1).expand(1, 1), torch.ones(1, 1)), difference(torch.ones(0, 4), torch.ones(0, 4))
        (0.0, 0.0)
    """
    ours, theirs = ([leaf for leaf in tree_leaves(one) if leaf is not None] for one in (expected, found))
    if len(ours) != len(theirs):
        return float("inf")
    return max((_apart(one, other) for one, other in zip(ours, theirs, strict=True)), default=0.0)


def _apart(one: Any, other: Any) -> float:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if isinstance(one, Tensor) == isinstance(other, Tensor) and one == other else float("inf")
    one, other = one.detach().cpu(), other.detach().cpu()
    if _same_bits(one, other):
        return 0.0
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point() or not one.is_floating_point():
        return float("inf")
    one, other = one.double(), other.double()
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs()).max().item()
    return apart / max(one.abs().nan_to_num(0, 0, 0).max().item(), 1e-30) if apart == apart else float("inf")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bytes_of = (tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in (one, other))
    return not one.numel() or torch.equal(*(tensor.view(torch.uint8) for tensor in bytes_of))
