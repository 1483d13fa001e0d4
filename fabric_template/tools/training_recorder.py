"""Record data, loss, gradients and weights of each optimizer step by PyTorch's global hooks."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
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


class EnoughSteps(BaseException):
    """End a training after the last step to record."""


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


def load_steps(training: Any, steps: int) -> list[dict[str, Any]]:
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
        recorded = json.loads(recording.read_text(encoding="utf-8"))[:steps]
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


class Recorder:
    """Record optimizer steps as dicts of plain values until `hooks` is closed."""

    def __init__(self, limit: int, stop: bool) -> None:
        self.limit, self.stop = limit, stop
        self.steps: list[dict[str, Any]] = []
        self.passes: list[dict[str, Any]] = []
        self.modules: dict[int, torch.nn.Module] = {}
        self.inputs: dict[int, list[str]] = {}
        self.batch_size = 0
        self.random_state: dict[str, str] = {}
        self.optimizers: list[Any] = []
        self.parameters: list[torch.Tensor] = []
        self.has_old_gradients = False
        run_backward = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.before_backward(tensors)
            run_backward(tensors, *args, **kwargs)

        self.hooks = ExitStack()
        self.hooks.callback(register_module_forward_pre_hook(self.before_forward).remove)
        self.hooks.callback(register_optimizer_step_pre_hook(self.before_step).remove)
        self.hooks.callback(register_optimizer_step_post_hook(self.after_step).remove)
        # PyTorch has no global hook for backward().
        self.hooks.enter_context(mock.patch.object(torch.autograd, "backward", backward))

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Record the random state and the input data of modules with parameters."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if id(module) not in self.modules:
            self.modules |= {id(child): child for child in module.modules()}
        data = [tensor for tensor in find_tensors(args) if not tensor.requires_grad]
        if data and next(module.parameters(recurse=False), None) is not None:
            rows = [list(torch.atleast_1d(tensor)) for tensor in data]
            # Keep the last call only, because an earlier one may have had no backward.
            self.inputs[id(module)] = [digest(row) for tensor in rows for row in tensor]
            self.batch_size = len(rows[0])
            self.random_state = get_random_state()

    def before_backward(self, loss: Any) -> None:
        """Record the loss and the forward pass that computed it."""
        if not self.passes:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.has_old_gradients = any(bool(gradient.any()) for gradient in gradients)
        leaves = [module for module in self.modules.values() if not list(module.children())]
        forward_pass = {
            "samples": [sample for samples in self.inputs.values() for sample in samples],
            "batch size": self.batch_size,
            "random state": self.random_state,
            "is random": self.random_state != get_random_state(),
            "eval modules": [type(leaf).__name__ for leaf in leaves if not leaf.training],
            "loss": sum(float(tensor.detach().sum()) for tensor in find_tensors(loss)),
        }
        self.passes.append(forward_pass)
        self.inputs, self.batch_size = {}, 0

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights = [fingerprint(p) for p in self.parameters]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer step. Remove the hooks after the last step to record."""
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        number = self.optimizers.index(optimizer) + 1
        step = {
            "optimizer": f"{type(optimizer).__name__} (number {number})",
            "passes": self.passes,
            "has old gradients": self.has_old_gradients,
            "parameters": self.describe_parameters(optimizer),
        }
        self.steps.append(step)
        self.passes = []
        if len(self.steps) == self.limit:
            self.hooks.close()
            if self.stop:
                raise EnoughSteps

    def describe_parameters(self, optimizer: Any) -> list[dict[str, Any]]:
        named = [pair for module in self.modules.values() for pair in module.named_parameters()]
        # The first called module is the outermost one, which has the full names.
        names = {id(parameter): name for name, parameter in reversed(named)}
        described: list[dict[str, Any]] = []
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
    """Return the tensors in nested lists, tuples and dicts."""
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


def get_random_state() -> dict[str, str]:
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy.random.get_state()}
    states["torch"] = torch.get_rng_state().numpy()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy()
    return {name: hashlib.md5(pickle.dumps(state)).hexdigest() for name, state in states.items()}
