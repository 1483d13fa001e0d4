"""Export: a model leaves in a file that others load, and that file is loaded and compared before it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from ..core.errors import Misuse
from ..core.net import net_of
from ..files.disk import make_folder, replace_file
from ..files.errors import CheckpointError, cause_of, local_path
from ..files.plain import brought_back
from ..files.reading import explain_mismatch, find_weights, read_checkpoint
from .examples import Inputs, first_line, has_forward, inputs_inside, inputs_of
from .formats import FORMATS, Format, check_weights, difference, format_named, quietly, write_weights

ANY = "any number n of samples"


@dataclass(frozen=True)
class Exported:
    """What was written, and what the file answered when it was loaded back."""

    path: Path
    format: str
    of: str  # the class
    source: Path | None  # the checkpoint
    takes: dict[str, str]  # what each argument is, by its name; none of weights alone
    batch: str  # which numbers of samples it answers as the model does
    apart: float  # how far from the model, of its largest output; 0.0: the same bits
    use: str  # a line of Python that loads it

    def lines(self) -> dict[str, str]:
        """What there is to say of it, by the word that it begins with."""
        size = os.stat(self.path).st_size / 1e6
        told = {"exported": f"{self.path} ({self.format}, {size:.2g} MB): {self.of}"}
        if self.source is not None:
            told["weights"] = str(self.source)
        if self.takes:
            told["takes"] = f"{', '.join(f'{name} {kind}' for name, kind in self.takes.items())}; {self.batch}"
        near = (
            f"within {self.apart:.1g} of the model's largest output" if self.apart else "the same bits as the model's"
        )
        told["checked"] = f"loaded back: {near}"
        if self.format == "torchscript":
            told["note"] = "TorchScript is deprecated in torch, and was traced: torch.export is what comes after it"
        return {**told, "use": self.use}

    def __str__(self) -> str:
        return "\n".join(f"{word:12}{line}" for word, line in self.lines().items())


def export(
    model: Any, out: str | Path, format: str | None = None, example: Any = None, *, checkpoint: str | Path | None = None,
    submodule: str | None = None, trusted: bool = False,
) -> Exported:  # fmt: skip
    """Write a model as a file for others, whole or not at all, once it was loaded back and has answered as the model does.

    The module is exported as it is called by others: its forward, in eval mode, without gradients, without the loop. The
    model itself stays as it is, but for the weights of a checkpoint.

    Args:
        model: an nn.Module, a LightningModule, or an object that holds modules.
        out: the file.
        format: "safetensors" (the weights alone), "torch.export", "onnx" or "torchscript"; None: as the file's name ends, in
            .safetensors, .pt2, .onnx or .ts.
        example: a batch as the model gets it from its data, of which the forward takes what it needs; not for the weights.
            With submodule= a batch of the whole model's, or what the part itself takes.
        checkpoint: whose weights it gets first: one of ours, Trainer's or Fabric's, or a state dict. Nothing in it is run.
        submodule: a part of the model, by its name: "net.encoder".
        trusted: also load a checkpoint that could run any program.

    Raises:
        Misuse: for what cannot be exported, before anything is written.
        CheckpointError: for a file that cannot be read, or does not fit.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> done = export(net, "net.pt2", example=torch.rand(4, 2))
        >>> done.apart, torch.export.load("net.pt2").module()(torch.zeros(7, 2)).shape
        (0.0, torch.Size([7, 3]))
    """
    path = local_path(out)
    name, kind = format_named(format, path.suffix)
    if path.is_dir():
        raise Misuse(f"export: out={str(out)!r} is a folder: give the file to write, such as model{kind.suffix}")
    if checkpoint is not None and path.exists() and os.path.exists(checkpoint) and path.samefile(checkpoint):
        raise Misuse(f"export: out={str(out)!r} is the checkpoint itself: give another file to write")
    net = prepared(model)
    if checkpoint is not None:
        load(net, checkpoint, trusted)
    part = part_named(net, submodule)
    of = type(model).__name__ + (f", its {submodule} ({type(part).__name__})" if submodule else "")
    with evaluating(net), quietly():
        if kind.write is None:
            check_weights(part, content := write_weights(part))
            takes, batch, apart = {}, "", 0.0
        else:
            inputs = _inputs(model, net, part, submodule, example)
            content, batch, apart = _program(part, inputs, name, kind, of)
            takes = {name: _said(value, batch == ANY) for name, value in inputs.named(part).items()}
    write(path, content)
    plain = not any(kind in ("list", "tuple", "dict") for kind in takes.values())
    named = ", ".join(f"{word!r}: {word}.numpy()" for word in takes) if plain else "..."
    use = kind.use.format(path=str(path), names=", ".join(takes), named=named)
    source = None if checkpoint is None else Path(checkpoint)
    return Exported(path, name, of, source, takes, batch, apart, use)


def prepared(model: Any) -> nn.Module:
    """The module that has a model's weights; one that makes its layers in a hook has made them."""
    if isinstance(model, type) or (not isinstance(model, nn.Module) and not hasattr(model, "__dict__")):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise Misuse(f"export got {what}: expected a model, export(MyModel(), 'model.pt2', checkpoint='best.ckpt')")
    while hasattr(model, "_orig_mod") or is_wrapped(model):  # by torch.compile, by Fabric
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if callable(make := getattr(model, "configure_model", None)):
        make()
    return net_of(model)


def load(net: nn.Module, checkpoint: str | Path, trusted: bool = False) -> None:
    """Put the weights of a checkpoint into a module, all of them or none."""
    expected = net.state_dict()
    weights = find_weights(brought_back(read_checkpoint(checkpoint, trusted=trusted)), expected)
    if told := explain_mismatch(expected, weights):
        raise CheckpointError(f"'{checkpoint}' is of another model: {told}; build the model with the same arguments")
    net.load_state_dict(weights)


def part_named(net: nn.Module, name: str | None) -> nn.Module:
    """A part of a module by its name; without a name all of it."""
    if not name:
        return net
    try:
        return net.get_submodule(name)
    except AttributeError:
        known = [one for one, _ in net.named_modules() if one]
        shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        raise Misuse(f"export: submodule={name!r} is no part of the model: it has {shown or 'none'}") from None


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Eval mode within, and then each part in the mode that it had."""
    before = {part: part.training for part in net.modules()}
    try:
        net.eval()
        yield
    finally:
        for part, was_training in before.items():
            part.training = was_training


def write(path: Path, content: bytes) -> None:
    """The file, whole or not at all."""
    try:
        make_folder(path.absolute().parent)
        replace_file(path, content)
    except OSError as error:
        raise Misuse(f"export: '{path}' cannot be written: {cause_of(error)}; give another file") from error


def _inputs(model: Any, net: nn.Module, part: nn.Module, submodule: str | None, example: Any) -> Inputs:
    """What the part is called with."""
    if example is None:
        raise Misuse(
            "export needs an example input to follow what the model does: give a batch, example= in Python; on the command line"
            " its shape, --input 1,64 (whole numbers: --input 1,64:int64), or a run's folder, --run logs/name/version_0, whose"
            " data have one"
        )
    if not has_forward(part):
        inside = ", ".join(name for name, child in part.named_children() if has_forward(child))
        raise Misuse(
            f"export: {type(model if part is net else part).__name__} has no forward: export a part of it, submodule= one of"
            f" {inside or 'those that have one'}"
        )
    tensor = next(part.parameters(), next(part.buffers(), None))
    if isinstance(example, Inputs):
        return Inputs(_moved(example.args, tensor), _moved(example.kwargs, tensor))
    batch = _moved(example, tensor)
    if submodule is None:
        return inputs_of(part, batch)
    try:
        return inputs_inside(model, net, part, batch)
    except Misuse:  # then it is what the part itself takes
        direct = inputs_of(part, batch)
        with suppress(Exception):
            direct.call(part)
            return direct
        raise


def _moved(values: Any, beside: Tensor | None) -> Any:
    """The same on the device of the model."""
    return values if beside is None else move_data_to_device(values, beside.device)


def _program(part: nn.Module, inputs: Inputs, name: str, kind: Format, of: str) -> tuple[bytes, str, float]:
    """The bytes of a format, loaded back and asked the same as the model; what batches it takes, and how far it is off."""
    assert kind.write is not None and kind.read is not None  # noqa: PT018
    try:
        expected = inputs.call(part)
    except Exception as error:
        raise Misuse(
            f"export: {of} cannot be called with the example ({first_line(error)}): give what its forward takes, example= in"
            " Python, --input 1,64 on the command line"
        ) from error
    try:
        with torch.random.fork_rng():
            content = kind.write(part, inputs)
        loaded = kind.read(content)
        answer = inputs.call(loaded)
    except Exception as error:  # what these cannot follow they refuse in a hundred ways
        others = ", ".join(one for one in FORMATS if one != name)
        raise Misuse(
            f"export: {name} cannot take {of} ({first_line(error)}); nothing was written. Another format may ({others}), or"
            " a part of it, as submodule='its.name'"
        ) from error
    apart = difference(expected, answer)
    if apart > kind.tolerance:
        how = "in its form" if apart == float("inf") else f"by {apart:.1g} of the largest output"
        raise Misuse(f"export: loaded back, it answers otherwise than the model, {how}; nothing was written")
    return content, _batches(part, loaded, inputs, kind.tolerance), apart


def _batches(part: nn.Module, loaded: Any, inputs: Inputs, tolerance: float) -> str:
    """Which numbers of samples the file takes: tried with another one."""
    have = inputs.samples
    if have is None:
        return "of these sizes"
    other = inputs.with_samples(have - 1 if have > 2 else have + 1)
    try:
        is_free = difference(other.call(part), other.call(loaded)) <= max(tolerance, 1e-5)
    except Exception:  # it says so in its own way
        is_free = False
    return ANY if is_free else f"{have} sample{'s' * (have > 1)}, no other number"


def _said(value: Any, any_batch: bool) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = ["n" if any_batch and not place else str(size) for place, size in enumerate(value.shape)]
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(sizes)})"
