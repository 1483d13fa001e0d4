"""Record two training runs, and explain the first optimizer step at which they differ."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from math import hypot, isclose
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .step_benchmark import EnoughSteps

CHILD_PROCESS = """
import os, runpy, sys
sys.path.append({root!r})
from {module} import record_training
recording, steps, *sys.argv = sys.argv[1:]
is_module = sys.argv[0] == "-m"
if is_module:
    del sys.argv[0]
sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(sys.argv[0]))
with record_training(recording, int(steps), stop=True):
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
"""
Record = dict[str, Any]  # The recorded values of one optimizer step.
# Optimizer options that are not compared, because they do not affect the updated weights.
OPTIONS_OF_THE_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
REORDERED = (
    "the batch contains the same samples in a different order",
    "the same order in both",
)
AFTER_THE_LAST_STEP = " after the last step"

# Maps each quantity to the likely reason why it differs between two runs, and to a fix.
EXPLANATIONS = {
    "optimizer": (
        "the optimizers have different classes, or run in a different order",
        "the same optimizers in both, called in the same order",
    ),
    "shape of a parameter": (
        "the models or the parameters of the optimizers differ",
        "the same model and parameters in both",
    ),
    "dtype of a parameter": (
        "the models have different precisions for {names}",
        "the same net.double(), net.half() or precision= in both",
    ),
    "norm of an initial weight": (
        "the runs initialized, loaded or trained {names} differently",
        "torch.manual_seed(0) before the model is created, and the same checkpoint, in both",
    ),
    "norm of a weight": (
        "only one run clamps, averages or loads {names}, or loads an optimizer state",
        "the same changes to weights and optimizer in both",
    ),
    "backward passes": (
        "the runs accumulate gradients over different numbers of batches",
        "the same accumulate_grad_batches= in both",
    ),
    "batch size": (
        "the loaders have different batch sizes, or one drops the last batch",
        "the same batch_size= and drop_last= in both",
    ),
    "digest of a sample": (
        "the loaders use different samples or transforms, or a different order",
        "the same dataset, shuffle=, generator= and seed, and sampler.set_epoch(epoch)",
    ),
    "is trained": (
        "only one run freezes {names}, or leaves them unused",
        "requires_grad_() and the optimizer for the same parameters in both",
    ),
    "dtype of a buffer": (
        "the models have different precisions for {names}",
        "the same net.double(), net.half() or precision= in both",
    ),
    "norm of a buffer": (
        "{names}: a different momentum=, or additional forward passes in train mode",
        "call net.eval() before validation, and the same momentum= in both",
    ),
    "norm of a weight after the last step": (
        "only one run changes {names} after the last step, or the optimizer state before that step",
        "the same code before and after the last optimizer.step() in both",
    ),
    "norm of a buffer after the last step": (
        "only one run changes {names} after the last step, such as by a forward pass in train mode",
        "call net.eval() before validation and testing",
    ),
}


@dataclass
class Comparison:
    """The first difference between two training runs. ``step`` is None if they do not differ."""

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
        if a == b:
            # If two numbers look equal with four digits, show all digits.
            a, b = self.values
        difference = f"{self.quantity}: {a} in the first, {b} in the second"
        return f"step {self.step:<4}{difference}\nreason   {self.reason}\nfix      {self.fix}"


def compare(first: Any, second: Any, steps: int = 50) -> Comparison:
    """Find the first optimizer step at which two training runs differ.

    After the last compared step, also compare the final weights and buffers.

    Each run is a script with its arguments (``"train.py --lr 0.1"``), a module of a package
    (``"-m package.train --lr 0.1"``), a function without arguments, or a file written by
    `record_training`. `compare` runs each script in a new process, and each function in the current
    process.

    Args:
        first: The correct run.
        second: The run to compare with the first.
        steps: The number of optimizer steps to compare. Scripts and functions then stop early.

    Raises:
        ValueError: If a file is missing, a script fails or a run takes no optimizer step.
    """
    return find_first_difference(record_steps(first, steps), record_steps(second, steps))


def find_first_difference(*recordings: list[Record]) -> Comparison:
    lengths = tuple(len(recorded) for recorded in recordings)
    for step, (a, b) in enumerate(zip(*recordings, strict=False)):
        for quantity in a["quantities"]:
            pairs = find_differences(quantity, a, b)
            if pairs:
                # Show a tensor's norm, but not the tensor's hash.
                values = [x[0] if x and "norm" in quantity else x for x in pairs[0]]
                reason, fix = explain(quantity, a, b, step)
                return Comparison(min(lengths), step, quantity, tuple(values), reason, fix)
    if lengths[0] != lengths[1]:
        reason, fix = "one run ends earlier", "the same number of epochs and batches in both"
        return Comparison(min(lengths), min(lengths), "number of steps", lengths, reason, fix)
    return Comparison(min(lengths))


def compare_command(first: str, second: str, *, steps: int = 50) -> int:
    recordings = [record_steps(script, steps, is_shown=True) for script in (first, second)]
    comparison = find_first_difference(*recordings)
    print(comparison)
    return int(not comparison.is_equal)


def find_differences(quantity: str, first: Record, second: Record) -> list[tuple[Any, Any]]:
    if quantity.endswith(AFTER_THE_LAST_STEP) and quantity not in second["quantities"]:
        # Final weights are comparable only if both runs end at the same step.
        return []
    a, b = (record["quantities"].get(quantity, []) for record in (first, second))
    if quantity in (*first.get("tensors", []), *second.get("tensors", [])):
        # One run may store an option such as lr as a float32 tensor, and the other as a Python
        # float, so round both to float32.
        a, b = (torch.tensor(values, dtype=torch.float32).tolist() for values in (a, b))
    if quantity == "digest of a sample" and ({*a} <= {*b} or {*b} <= {*a}):
        # Ignore additional inputs, such as targets that only one of the two models receives.
        return []
    if quantity == "batch size" and 0 in (*a, *b):
        # The batch size is recorded as 0 if no module with parameters received the batch.
        return []
    # Compare the values as strings, because NaN is not equal to itself.
    return [(x, y) for x, y in zip_longest(a, b) if str(x) != str(y)]


def explain(quantity: str, first: Record, second: Record, step: int) -> tuple[str, str]:
    """Return the likely reason for the first difference between two runs, and a fix."""
    if quantity == "loss":
        return explain_loss(first, second)
    if quantity == "norm of a gradient":
        return explain_gradients(first, second)
    if quantity.startswith("number of buffers"):
        return explain_number_of_buffers(quantity, first, second)
    a, b = (record["quantities"][quantity] for record in (first, second))
    names_of_values = first["names"].get(quantity, first["names"]["parameters"])
    changed = {name: x for name, x, y in zip(names_of_values, a, b, strict=False) if x != y}
    names = ", ".join([*changed][:3])
    if quantity not in EXPLANATIONS:
        quantity = quantity.removesuffix(AFTER_THE_LAST_STEP)
    if quantity in EXPLANATIONS:
        reason, fix = EXPLANATIONS[quantity]
        return reason.format(names=names), fix
    if step > 0:
        fix = 'the same scheduler, and "interval": "step" if it changes the rate after each step'
        return "the schedulers have different values, or step at different times", fix
    value = next(iter(changed.values()))
    return f"the optimizers have different values for {names}", f"{quantity}={value}"


def explain_loss(first: Record, second: Record) -> tuple[str, str]:
    modes = first.get("eval modules", []), second.get("eval modules", [])
    if len(modes[0]) != len(modes[1]):
        which = "first" if len(modes[0]) > len(modes[1]) else "second"
        names = ", ".join(sorted({*max(modes, key=len)}))
        fix = "model.train() before training and after each validation"
        return f"the {which} has more modules in eval mode: {names}", fix
    if is_reordered(first, second):
        return REORDERED
    losses, others = first["quantities"]["loss"], second["quantities"]["loss"]
    passes = len(losses)
    if passes > 1 and isclose(losses[0], others[0] * passes, rel_tol=1e-3):
        reason = f"the second loss is {passes} times smaller, because it is divided twice"
        return f"{reason} (accumulate_grad_batches divides it, too)", "return the undivided loss"
    reason = "different targets, outputs, loss functions, precision or random numbers (dropout)"
    return reason, "the same model, loss function, outputs, seed= and precision= in both"


def is_reordered(first: Record, second: Record) -> bool:
    """Return whether two batches contain the same samples in a different order."""
    a, b = (record["quantities"]["digest of a sample"] for record in (first, second))
    return bool(a != b and sorted(a) == sorted(b))


def explain_gradients(first: Record, second: Record) -> tuple[str, str]:
    if first.get("has old gradients") != second.get("has old gradients"):
        which = "first" if first.get("has old gradients") else "second"
        reason = f"the {which} does not call zero_grad(), so gradients of all steps add up"
        return reason, "optimizer.zero_grad() before each backward"
    a, b = (
        [norm for norm, _ in record["quantities"]["norm of a gradient"]]
        for record in (first, second)
    )
    # The gradient of a bias before BatchNorm is zero except for rounding, so ignore tiny gradients.
    smallest = 1e-5 * hypot(*a)
    if all(isclose(x, y, rel_tol=1e-3, abs_tol=smallest) for x, y in zip(a, b, strict=True)):
        if is_reordered(first, second):
            return REORDERED
        reason = "rounding: sums (such as the norm for clipping) are computed in a different order"
        fix = "none needed if the last bits may differ. Otherwise, the same order of parameters"
        return reason, fix
    which = "first" if hypot(*a) < hypot(*b) else "second"
    fix = f"gradient_clip_val={hypot(*a):.4g}" if which == "first" else "no clipping"
    return f"only the {which} clips, scales or detaches gradients, or it clips more", fix


def explain_number_of_buffers(quantity: str, first: Record, second: Record) -> tuple[str, str]:
    a, b = (record["names"][quantity] for record in (first, second))
    which, more, fewer = ("first", a, b) if len(a) > len(b) else ("second", b, a)
    names = ", ".join([name for name in more if name not in fewer][:3])
    fix = "the same layers, options (track_running_stats=) and train() or eval() in both"
    return f"only the {which} changes {names}", fix


def record_steps(training: Any, steps: int, is_shown: bool = False) -> list[Record]:
    """Run a function or script and record its optimizer steps, or read a file of recorded steps."""
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"compare(steps): got {steps!r}, expected an int >= 1. Write steps=50.")
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder, "recording.json")
        if callable(training):
            with record_training(recording, steps, stop=True):
                training()
        elif os.path.isfile(training) and not str(training).endswith(".py"):
            recording = Path(training)
        else:
            run_script(str(training), recording, steps, is_shown)
        recorded = read_recording(recording)[:steps]
    if not recorded:
        expected = "expected training in one process with an optimizer from torch.optim"
        raise ValueError(f"compare: got {training!r}, which takes no optimizer step, {expected}.")
    return recorded


def read_recording(path: Path) -> list[Record]:
    try:
        recorded: list[Record] = json.loads(path.read_text(encoding="utf-8"))
        is_recording = all("quantities" in record for record in recorded)
    except (OSError, TypeError, ValueError):
        is_recording = False
    if not is_recording:
        expected = "expected a script with the suffix .py, or a file written by record_training"
        raise ValueError(f"compare: got the file {str(path)!r}, {expected}.")
    return recorded


def run_script(script: str, recording: Path, steps: int, is_shown: bool) -> None:
    """Run a script in its own process, and record its optimizer steps in a JSON file."""
    try:
        arguments = [script] if os.path.isfile(script) else shlex.split(script)
    except ValueError as problem:
        expected = "expected a script and its arguments, with matching quotation marks"
        raise ValueError(f"compare: got {script!r}, {expected} ({problem}).") from problem
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    code = CHILD_PROCESS.format(root=root, module=__name__)
    command = [sys.executable, "-c", code, str(recording), str(steps), *arguments]
    started, line = time.monotonic(), ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while True:
            if is_shown:
                line = f"running {script}: {time.monotonic() - started:.0f} s"
                print(f"\r{line}", end="", file=sys.stderr, flush=True)
            with suppress(subprocess.TimeoutExpired):
                _, errors = process.communicate(timeout=1)
                break
    print(f"\r{' ' * len(line)}\r" if line else "", end="", file=sys.stderr, flush=True)
    # A script that calls os._exit(0) returns 0 without writing the recording, so check that the
    # file exists.
    if process.returncode != 0 or not recording.exists():
        error = errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        text = f"compare: got {script!r}, which fails ({error}). Run the script alone, and fix"
        raise ValueError(f"{text} this error first.")


@contextmanager
def record_training(path: str | Path, steps: int = 50, stop: bool = False) -> Iterator[None]:
    """Record the training steps of a `with` block in a JSON file for `compare`.

    Args:
        path: The file to write.
        steps: The number of optimizer steps to record.
        stop: Whether to leave the `with` block after the last recorded step, before the next one.
            By default, training continues.
    """
    recorder = Recorder(steps, stop)
    try:
        with recorder.hooks:
            yield
    except EnoughSteps:
        pass
    finally:
        recorder.record_end()
        Path(path).write_text(json.dumps(recorder.steps, default=float), encoding="utf-8")


class Recorder:
    """Use PyTorch's global hooks to record each optimizer step as a JSON-serializable dict."""

    def __init__(self, limit: int, stop: bool) -> None:
        self.limit, self.stop = limit, stop
        self.steps: list[Record] = []
        self.has_ended = False
        # Maps each module to its name in the first module that contains it.
        self.names: dict[torch.nn.Module, str] = {}
        # Maps each module to fingerprints of its buffers before the first forward pass.
        self.initial_buffers: dict[torch.nn.Module, dict[str, list[Any]]] = {}
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
        self.hooks.enter_context(mock.patch.object(torch.autograd, "backward", backward))

    def start_step(self) -> None:
        self.data: dict[str, list[Any]] = {"batch size": [], "digest of a sample": [], "loss": []}
        self.step: Record = {}
        self.start_forward()

    def start_forward(self) -> None:
        self.inputs: dict[torch.nn.Module, list[str]] = {}
        self.batch_size = 0

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Record the inputs of modules that have parameters of their own, such as Linear."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if len(self.steps) == self.limit and module.training:
            self.stop_recording()
            return
        if module not in self.names:
            for name, child in module.named_modules():
                self.names.setdefault(child, name)
        # In a compiled module, this hook does not run for submodules, so visit all submodules here.
        called = module.modules() if hasattr(module, "_orig_mod") else [module]
        for owner in called:
            if owner not in self.initial_buffers:
                buffers = find_float_buffers(owner).items()
                self.initial_buffers[owner] = {name: fingerprint(x) for name, x in buffers}
        data = [tensor for tensor in find_tensors(args) if not tensor.requires_grad]
        if data and next(module.parameters(recurse=False), None) is not None:
            rows = [list(torch.atleast_1d(tensor)) for tensor in data]
            # If a module runs several times before a backward pass, keep only the inputs of its
            # last call.
            self.inputs[module] = [digest(row) for tensor in rows for row in tensor]
            self.batch_size = len(rows[0])

    def before_backward(self, loss: Any) -> None:
        """Record a loss, and the input batches of the forward pass that computed this loss."""
        if not self.step:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.step["has old gradients"] = any(bool(gradient.any()) for gradient in gradients)
        leaves = [module for module in self.names if not list(module.children())]
        self.step["eval modules"] = [type(leaf).__name__ for leaf in leaves if not leaf.training]
        for samples in self.inputs.values():
            self.data["digest of a sample"] += samples
        self.data["batch size"].append(self.batch_size)
        self.data["loss"].append(sum(float(x.detach().sum()) for x in find_tensors(loss)))
        self.start_forward()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(self.steps) == self.limit:
            self.stop_recording()
            return
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights = [fingerprint(p) for p in self.parameters]
        self.buffers, self.names_of_buffers = self.describe_buffers()

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self.steps.append(self.describe_step(optimizer))
        self.start_step()

    def stop_recording(self) -> None:
        """Record the final weights, remove the hooks and, if ``stop`` is True, end training."""
        self.record_end()
        self.hooks.close()
        if self.stop:
            raise EnoughSteps

    def record_end(self) -> None:
        """Add the final weights and buffers to the record of the last step."""
        if self.has_ended or not self.steps:
            return
        self.has_ended = True
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = {id(p): p for group in groups for p in group["params"]}.values()
        entries = [(p, fingerprint(p)) for p in parameters]
        entries.sort(key=lambda entry: (tuple(entry[0].shape), entry[1]))
        names = self.name_parameters([parameter for parameter, _ in entries])
        quantities = {
            "dtype of a parameter": [str(parameter.dtype) for parameter, _ in entries],
            "norm of a weight": [weight for _, weight in entries],
        }
        buffers, names_of_buffers = self.describe_buffers()
        names_of_values = dict.fromkeys(quantities, names) | names_of_buffers
        for name, values in (quantities | buffers).items():
            self.steps[-1]["quantities"][name + AFTER_THE_LAST_STEP] = values
            self.steps[-1]["names"][name + AFTER_THE_LAST_STEP] = names_of_values[name]

    def name_parameters(self, parameters: list[torch.Tensor]) -> list[str]:
        named = [pair for module in self.names for pair in module.named_parameters()]
        # If a parameter has names in several modules, use its name in the first module, which is
        # usually the whole model.
        names = {id(parameter): name for name, parameter in reversed(named)}
        return [names.get(id(parameter), "a parameter") for parameter in parameters]

    def describe_buffers(self) -> tuple[Record, dict[str, list[str]]]:
        """Return the number, dtypes and norms of buffers changed since the first forward pass.

        Also return the names of these buffers, keyed by quantity.
        """
        entries = []
        for module, initial in self.initial_buffers.items():
            for name, buffer in find_float_buffers(module).items():
                now, before = fingerprint(buffer), initial.get(name, [])
                # Skip constant buffers, because the model of the other run may not store its
                # constants in buffers.
                if now != before:
                    full_name = f"{self.names[module]}.{name}".lstrip(".")
                    entries.append((list(buffer.shape), before, now, str(buffer.dtype), full_name))
        # Sort the buffers, because the order of the modules may differ between the runs.
        entries.sort(key=lambda entry: entry[:2])
        quantities = {
            "number of buffers": [len(entries)],
            "dtype of a buffer": [dtype for *_, dtype, _ in entries],
            "norm of a buffer": [now for *_, now, _, _ in entries],
        }
        return quantities, dict.fromkeys(quantities, [name for *_, name in entries])

    def describe_step(self, optimizer: Any) -> Record:
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        entries = list(zip(self.parameters, self.weights, groups, strict=True))
        # Sort the parameters, because the runs' optimizers may list them in different orders.
        entries.sort(key=lambda entry: (tuple(entry[0].shape), entry[1]))
        parameters = [parameter for parameter, *_ in entries]
        number = self.optimizers.index(optimizer) + 1
        options = [name for name in optimizer.defaults if name not in OPTIONS_OF_THE_IMPLEMENTATION]
        tensors = [name for name in options if find_tensors([group[name] for group in groups])]
        # List each value before the values that depend on it, because compare() reports only the
        # first difference.
        quantities = {
            "optimizer": [f"{type(optimizer).__name__} (number {number})"],
            "shape of a parameter": [list(p.shape) for p in parameters],
            "dtype of a parameter": [str(p.dtype) for p in parameters],
            **{name: [copy_value(group[name]) for *_, group in entries] for name in options},
            f"norm of {'a' if self.steps else 'an initial'} weight": [w for _, w, _ in entries],
            "backward passes": [len(self.data["loss"])],
            **self.data,
            "is trained": [p.requires_grad and p.grad is not None for p in parameters],
            "norm of a gradient": [
                fingerprint(torch.zeros(1) if p.grad is None else p.grad) for p in parameters
            ],
            **self.buffers,
        }
        names = {"parameters": self.name_parameters(parameters)} | self.names_of_buffers
        return {**self.step, "tensors": tensors, "names": names, "quantities": quantities}


def find_float_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Skip uninitialized buffers, which have no values yet. LazyBatchNorm1d initializes its buffers
    # in the first forward pass.
    buffers = [pair for pair in module.named_buffers(recurse=False) if not is_lazy(pair[1])]
    return {name: buffer for name, buffer in buffers if buffer.is_floating_point()}


def copy_value(value: Any) -> Any:
    """Copy the value of an optimizer option, because schedulers can change tensors in place."""
    return apply_to_collection(value, torch.Tensor, torch.Tensor.tolist)


def find_tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    apply_to_collection(value, torch.Tensor, tensors.append)
    return tensors


def digest(tensor: torch.Tensor) -> str:
    bits = tensor.detach().to_dense().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=8).hexdigest()


def fingerprint(tensor: torch.Tensor) -> list[Any]:
    """Return the norm of a tensor and a hash of the tensor's bits."""
    return [float(tensor.detach().double().nan_to_num().norm()), digest(tensor)]
