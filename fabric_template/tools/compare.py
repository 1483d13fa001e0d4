"""Record two trainings, and explain the first optimizer step in which they differ."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import hypot, isclose
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

CHILD_PROCESS = """
import os, runpy, sys
sys.path.append({root!r})
from {module} import record_training
recording, steps, *sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
with record_training(recording, int(steps), stop=True):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
Record = dict[str, Any]  # The recorded values of one optimizer step or one parameter.
Finding = tuple[str, Any, Any, str, str]  # A difference: quantity, both values, reason, fix.


@dataclass
class Comparison:
    """The first difference between two trainings. Without a difference, ``step`` is None."""

    steps: int
    step: int | None = None
    quantity: str = ""
    values: tuple[Any, ...] = ()
    reason: str = ""
    fix: str = ""

    @property
    def is_equal(self) -> bool:
        return self.step is None

    def __str__(self) -> str:
        if self.is_equal:
            return f"equal    no difference in {self.steps} steps"
        a, b = (f"{value:.4g}" if isinstance(value, float) else value for value in self.values)
        difference = f"{self.quantity}: {a} in the first, {b} in the second"
        return f"step {self.step:<4}{difference}\nreason   {self.reason}\nfix      {self.fix}"


def compare(first: Any, second: Any, steps: int = 50) -> Comparison:
    """Find the first optimizer step in which two trainings differ.

    Give each training as a script with its arguments (``"train.py --lr 0.1"``), as a function
    without arguments, or as a file written by `record_training`. A script runs in its own process.

    Args:
        first: The correct training.
        second: The training to compare with it.
        steps: The number of optimizer steps to compare. Scripts and functions end after them.

    Raises:
        ValueError: If a file is missing, a script fails or a training takes no optimizer step.
    """
    recordings = record_steps(first, steps), record_steps(second, steps)
    lengths = tuple(len(recorded) for recorded in recordings)
    for step, (a, b) in enumerate(zip(*recordings, strict=False)):
        finding = (
            check_optimizer(a, b, step)
            or check_weights(a, b, step)
            or check_batch(a, b)
            or check_loss(a, b)
            or check_gradients(a, b)
        )
        if finding is not None:
            quantity, *values, reason, fix = finding
            return Comparison(min(lengths), step, quantity, tuple(values), reason, fix)
    if lengths[0] != lengths[1]:
        reason, fix = "one training ends earlier", "the same number of epochs and batches in both"
        return Comparison(min(lengths), min(lengths), "number of steps", lengths, reason, fix)
    return Comparison(min(lengths))


def compare_command(first: str, second: str, *, steps: int = 50) -> int:
    comparison = compare(first, second, steps)
    print(comparison)
    return int(not comparison.is_equal)


def find_changed(first: Record, second: Record, quantity: str) -> list[tuple[Record, Record]]:
    """Pair each parameter with the other training's. Return the pairs that differ in ``quantity``."""

    def shape_and_weights(parameter: Record) -> tuple[list[int], str]:
        return parameter["shape"], parameter["weights"]["digest"]

    # Sort the parameters, because two optimizers may have them in a different order.
    ordered = [sorted(record["parameters"], key=shape_and_weights) for record in (first, second)]
    changed = [(a, b) for a, b in zip(*ordered, strict=False) if a[quantity] != b[quantity]]
    return sorted(changed, key=lambda pair: first["parameters"].index(pair[0]))


def join_names(pairs: list[tuple[Record, Record]]) -> str:
    return ", ".join(a["name"] for a, _ in pairs[:3])


def check_optimizer(first: Record, second: Record, step: int) -> Finding | None:
    """Compare the class of the optimizer and the settings of its parameter groups."""
    a, b = first["optimizer"], second["optimizer"]
    if a != b:
        reason = "the optimizers have different classes, or step in a different order"
        return "optimizer", a, b, reason, f"{a} in both"
    pairs = find_changed(first, second, "settings")
    if not pairs:
        return None
    a, b = (parameter["settings"] for parameter in pairs[0])
    name = next(name for name in a if a[name] != b[name])
    pairs = [(p, q) for p, q in pairs if p["settings"][name] != q["settings"][name]]
    if step > 0:
        reason = "the schedulers have different values, or step at different times"
        fix = 'the same scheduler, and "interval": "step" if it changes the rate after each step'
    elif len(pairs) < len(first["parameters"]):
        reason, fix = f"different groups: {join_names(pairs)}", "the same groups in both"
    else:
        reason, fix = "the optimizers are created with different values", f"{name}={a[name]}"
    return "learning rate" if name == "lr" else name, a[name], b[name], reason, fix


def check_weights(first: Record, second: Record, step: int) -> Finding | None:
    """Compare the weights before the step."""
    a, b = (sorted(p["shape"] for p in record["parameters"]) for record in (first, second))
    if a != b:
        reason = "the models or the parameters of the optimizers differ"
        return "shapes of parameters", a, b, reason, "the same model and parameters in both"
    pairs = find_changed(first, second, "weights")
    if not pairs:
        return None
    a, b = (parameter["weights"]["norm"] for parameter in pairs[0])
    names = join_names(pairs)
    if step == 0:
        reason = f"{names}: one training initialized, loaded or trained these weights differently"
        fix = "torch.manual_seed(0) before the model is created, and the same checkpoint, in both"
        return "norm of initial weights", a, b, reason, fix
    reason = f"{names}: only one training clamps, averages or loads them, or its optimizer's state"
    return "norm of weights", a, b, reason, "the same changes of weights and optimizer in both"


def check_batch(first: Record, second: Record) -> Finding | None:
    counts = len(first["losses"]), len(second["losses"])
    if counts[0] != counts[1]:
        reason = "the step accumulates gradients of a different number of batches"
        return "backward passes", *counts, reason, f"accumulate_grad_batches={counts[0]}"
    for a, b in zip(first["batch sizes"], second["batch sizes"], strict=True):
        # A batch size of 0 means that no module with parameters has received the batch.
        if a != b and min(a, b) > 0:
            reason = "the loaders have different batch sizes, or one drops the last batch"
            return "batch size", a, b, reason, "the same batch_size= and drop_last= in both"
    # Ignore samples that only one training adds, because its model may also receive the targets.
    only_first = set(first["samples"]) - set(second["samples"])
    only_second = set(second["samples"]) - set(first["samples"])
    if only_first and only_second:
        reason = "the loaders have other samples, transforms or another order"
        fix = "the same dataset, shuffle=, generator= and seed, and sampler.set_epoch(epoch)"
        return "digest of a sample", min(only_first), min(only_second), reason, fix
    return None


def check_loss(first: Record, second: Record) -> Finding | None:
    # Compare as strings, because NaN != NaN.
    losses = zip(first["losses"], second["losses"], strict=True)
    changed = [(a, b) for a, b in losses if str(a) != str(b)]
    if not changed:
        return None
    a, b = changed[0]
    passes = len(first["losses"])
    modes = first["eval modules"], second["eval modules"]
    states = first["random state"], second["random state"]
    if len(modes[0]) != len(modes[1]):
        which = "first" if len(modes[0]) > len(modes[1]) else "second"
        names = ", ".join(sorted({*max(modes, key=len)}))
        reason = f"more modules are in eval mode in the {which}: {names}"
        fix = "model.train() before training and after each validation"
    elif all(states) and states[0] != states[1]:
        reason = "the random state of torch differs before the forward pass, which draws numbers"
        fix = "the same seed before both, and the same number of random draws"
    elif passes > 1 and isclose(a, b * passes, rel_tol=1e-3):
        reason = f"{passes} times smaller: fit divides by accumulate_grad_batches, like the step"
        fix = "return the loss of the batch undivided"
    else:
        reason = "other targets, outputs, loss functions, precision or dropout"
        fix = "the same model, the same loss of the same outputs, and the same precision="
    return "loss", a, b, reason, fix


def check_gradients(first: Record, second: Record) -> Finding | None:
    frozen = find_changed(first, second, "is trained")
    if frozen:
        trained = [sum(p["is trained"] for p in step["parameters"]) for step in (first, second)]
        which = "first" if trained[0] < trained[1] else "second"
        reason = f"frozen or unused in the {which}: {join_names(frozen)}"
        fix = "requires_grad_() and the optimizer for the same parameters in both"
        return "trained parameters", trained[0], trained[1], reason, fix
    pairs = find_changed(first, second, "gradient")
    if not pairs:
        return None
    norms = [hypot(*(p["gradient"]["norm"] for p in run["parameters"])) for run in (first, second)]
    is_close = all(
        isclose(a["gradient"]["norm"], b["gradient"]["norm"], rel_tol=1e-3) for a, b in pairs
    )
    if first["has old gradients"] != second["has old gradients"]:
        which = "first" if first["has old gradients"] else "second"
        reason = f"zero_grad() is missing in the {which}: it adds up the gradients of all steps"
        fix = "optimizer.zero_grad() before each backward"
    elif is_close:
        reason = "rounding: sums (such as the norm for clipping) are added in a different order"
        fix = "nothing if the last bits may differ, else the same order of parameters"
    else:
        which = "first" if norms[0] < norms[1] else "second"
        reason = f"only the {which} clips, scales or detaches gradients, or its limit is stricter"
        fix = f"gradient_clip_val={norms[0]:.4g}" if which == "first" else "no clipping"
    return "gradient norm", norms[0], norms[1], reason, fix


class EnoughSteps(BaseException):
    """Ends a training after the last recorded step."""


def record_steps(training: Any, steps: int) -> list[Record]:
    """Run a function or a script, or read a recording, and return the recorded steps."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder, "recording.json")
        if callable(training):
            with record_training(recording, steps, stop=True):
                training()
        elif Path(training).is_file() and not str(training).endswith(".py"):
            recording = Path(training)
        else:
            run_script(str(training), recording, steps)
        recorded: list[Record] = json.loads(recording.read_text(encoding="utf-8"))[:steps]
    if not recorded:
        expected = "expected a training in one process with an optimizer of torch.optim"
        raise ValueError(f"compare: got {training!r}, which takes no optimizer step, {expected}.")
    return recorded


def run_script(script: str, recording: Path, steps: int) -> None:
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    code = CHILD_PROCESS.format(root=root, module=__name__)
    command = [sys.executable, "-c", code, str(recording), str(steps), *shlex.split(script)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        error = done.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"compare: got {script!r}, which fails ({error}). Run it alone first.")


@contextmanager
def record_training(path: str | Path, steps: int = 50, stop: bool = False) -> Iterator[None]:
    """Record the training inside this context to a JSON file for `compare`.

    Args:
        path: The file to write.
        steps: The number of optimizer steps to record.
        stop: Leave the context after the last recorded step. By default the training continues.
    """
    recorder = Recorder(steps, stop)
    try:
        with recorder.hooks:
            yield
    except EnoughSteps:
        pass
    finally:
        Path(path).write_text(json.dumps(recorder.steps, default=float), encoding="utf-8")


class Recorder:
    """Record each optimizer step as a dict of plain values, with PyTorch's global hooks."""

    def __init__(self, limit: int, stop: bool) -> None:
        self.limit, self.stop = limit, stop
        self.steps: list[Record] = []
        self.modules: dict[int, torch.nn.Module] = {}
        self.optimizers: list[Any] = []
        self.parameters: list[torch.Tensor] = []
        self.start_step()
        run_backward = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.before_backward(tensors)
            run_backward(tensors, *args, **kwargs)

        self.hooks = ExitStack()
        self.hooks.callback(register_module_forward_pre_hook(self.before_forward).remove)
        self.hooks.callback(register_optimizer_step_pre_hook(self.before_step).remove)
        self.hooks.callback(register_optimizer_step_post_hook(self.after_step).remove)
        # Replace backward(), because PyTorch has no global hook for it.
        self.hooks.enter_context(mock.patch.object(torch.autograd, "backward", backward))

    def start_step(self) -> None:
        self.step: Record = {"losses": [], "batch sizes": [], "samples": [], "random state": ""}
        self.inputs: dict[int, list[str]] = {}
        self.batch_size = 0
        self.random_state = digest_random_state()

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Record the random state and the input data of modules with parameters."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if id(module) not in self.modules:
            self.modules |= {id(child): child for child in module.modules()}
        data = [tensor for tensor in find_tensors(args) if not tensor.requires_grad]
        if data and next(module.parameters(recurse=False), None) is not None:
            rows = [list(torch.atleast_1d(tensor)) for tensor in data]
            # Keep the inputs of the last forward pass only. Earlier ones may have no backward pass.
            self.inputs[id(module)] = [digest(row) for tensor in rows for row in tensor]
            self.batch_size = len(rows[0])
            self.random_state = digest_random_state()

    def before_backward(self, loss: Any) -> None:
        """Record the loss, and the forward pass that computed the loss."""
        step = self.step
        if not step["losses"]:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            step["has old gradients"] = any(bool(gradient.any()) for gradient in gradients)
        if self.random_state != digest_random_state():
            step["random state"] += self.random_state
        leaves = [module for module in self.modules.values() if not list(module.children())]
        step["eval modules"] = [type(leaf).__name__ for leaf in leaves if not leaf.training]
        step["losses"].append(sum(float(tensor.detach().sum()) for tensor in find_tensors(loss)))
        step["samples"] += [sample for samples in self.inputs.values() for sample in samples]
        step["batch sizes"].append(self.batch_size)
        self.inputs, self.batch_size = {}, 0

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights = [fingerprint(p) for p in self.parameters]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer step. Remove the hooks after the last step to record."""
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        number = self.optimizers.index(optimizer) + 1
        self.step["optimizer"] = f"{type(optimizer).__name__} (number {number})"
        self.step["parameters"] = self.describe_parameters(optimizer)
        self.steps.append(self.step)
        self.start_step()
        if len(self.steps) == self.limit:
            self.hooks.close()
            if self.stop:
                raise EnoughSteps

    def describe_parameters(self, optimizer: Any) -> list[Record]:
        named = [pair for module in self.modules.values() for pair in module.named_parameters()]
        # The module that was called first contains the other modules. Use its parameter names.
        names = {id(parameter): name for name, parameter in reversed(named)}
        described: list[Record] = []
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for group, p, weights in zip(groups, self.parameters, self.weights, strict=True):
            parameter = {
                "name": names.get(id(p), f"parameter {len(described)}"),
                "shape": list(p.shape),
                "settings": {name: group[name] for name in optimizer.defaults},
                "weights": weights,
                "is trained": p.requires_grad and p.grad is not None,
                "gradient": fingerprint(torch.zeros(1) if p.grad is None else p.grad),
            }
            described.append(parameter)
        return described


def find_tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    apply_to_collection(value, torch.Tensor, tensors.append)
    return tensors


def digest(tensor: torch.Tensor) -> str:
    bits = tensor.detach().to_dense().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=8).hexdigest()


def fingerprint(tensor: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor by its norm and a digest of its bits."""
    norm = tensor.detach().double().nan_to_num().norm()
    return {"norm": float(norm), "digest": digest(tensor)}


def digest_random_state() -> str:
    """Return a digest of the generators that modules such as Dropout use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return digest(torch.cat(states))
