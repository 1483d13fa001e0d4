"""Observing: the hooks by which PyTorch tells what a training loop does, any loop; taken off when it is over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from .recording import Pass, Recording, Step
from .sketches import Sketch, digest, random_states, rows, sketch, tensors_in

_SETTINGS = (bool, int, float, str, type(None), tuple)


class Observer:
    """Note what happens in the block, up to so many steps of an optimizer; then rest.

    Args:
        recording: what is noted.
        enough: called when there are as many steps as were asked for, by a script that need not go on.
    """

    def __init__(self, recording: Recording, enough: Callable[[], None] | None = None) -> None:
        self.recording, self.enough = recording, enough
        self._stack = ExitStack()
        self._parameters: list[Tensor] = []  # kept, so that no other takes the place of one
        self._numbers: dict[int, int] = {}
        self._roots: dict[int, nn.Module] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._begin(is_first=True)

    def _begin(self, is_first: bool = False) -> None:
        """Begin another step."""
        self._root: nn.Module | None = None  # the outermost module whose forward is on
        self._again = 0  # ... in itself
        self._goes_back = self._is_quiet = False
        self._passes: list[Pass] = []
        self._next = Pass()
        self._events: list[str] = []
        self._raw: dict[int, Sketch] = {}
        if is_first:
            # of each optimizer, after its step: whether its gradients were empty when the next were added; None: not yet
            self._found_empty: dict[int, bool | None] = {}
        self._step: Step | None = None

    @property
    def rests(self) -> bool:
        """Whether there is nothing more to note."""
        return len(self.recording.steps) >= self.recording.limit

    def __enter__(self) -> Observer:
        self._stack.enter_context(
            warnings.catch_warnings()
        )  # of torch.compile, that there are hooks: they allow for it
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        hooks = (
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        )
        for hook in hooks:
            self._stack.callback(hook.remove)
        self._replace(torch.autograd, "backward", self._backward)  # Tensor.backward ends there, too
        self._replace(DataLoader, "__iter__", self._tells(_loader))
        self._replace(DistributedSampler, "set_epoch", self._tells(lambda sampler, epoch: f"set_epoch {epoch}"))
        for owner in (Optimizer, nn.Module):
            self._replace(owner, "zero_grad", self._tells(lambda *args, **kwargs: "zero_grad"))
        for kind in (LRScheduler, *_below(LRScheduler)):
            if "step" in vars(kind):
                self._replace(kind, "step", self._tells(_scheduler))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        self._name()
        self._roots, self._optimizers, self._parameters, self._numbers = {}, {}, [], {}

    def _replace(self, owner: Any, name: str, wrap: Callable) -> None:
        original = vars(owner)[name]
        self._stack.callback(setattr, owner, name, original)
        setattr(owner, name, wraps(original)(wrap(original)))

    def _tells(self, text: Callable[..., str]) -> Callable:
        def wrap(original: Callable) -> Callable:
            def told(*args: Any, **kwargs: Any) -> Any:
                if self._is_quiet or self.rests:  # inside another one
                    return original(*args, **kwargs)
                if event := text(*args, **kwargs):
                    self._events.append(event)
                self._is_quiet = True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._is_quiet = False

            return told

        return wrap

    # ---- forward and backward

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # what was compiled is seen from outside
            return
        if self._root is not None:
            self._again += module is self._root
            return
        if self.rests or self._goes_back or not torch.is_grad_enabled() or _is_shell(module):
            return
        self._root, self._again = module, 0
        self._roots.setdefault(id(module), module)
        self._random = random_states()

    def _forward_ends(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._root:
            return
        if self._again:
            self._again -= 1
            return
        self._root = None
        kwargs = rest[0] if len(rest) > 1 else {}
        data = [one for one in tensors_in([args, kwargs]) if not one.requires_grad]
        if not data:
            return  # what another module has made of the data
        asleep = tuple(name for name, one in module.named_modules() if not one.training)
        self._next = Pass(
            inputs=(*self._next.inputs, *map(digest, data)), sketch=sketch(data[0]), rows=(*self._next.rows, *map(rows, data)),
            size=data[0].shape[0] if data[0].dim() else 0, random=self._random, asleep=asleep,
            modules=sum(1 for _ in module.modules()), draws=random_states() != self._random,
        )  # fmt: skip

    def _backward(self, original: Callable) -> Callable:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.rests:
                self._stack.close()  # in no hook, so that they can be taken off: from here on nothing costs anything
            if self._goes_back or self.rests:
                return original(tensors, *args, **kwargs)
            for key, found in self._found_empty.items():
                if found is None:
                    self._found_empty[key] = not any(_is_filled(one) for one in _all(self._optimizers[key]))
            self._goes_back = True
            try:
                result = original(tensors, *args, **kwargs)
            finally:
                self._goes_back = False
            losses = [*tensors_in(tensors)]
            self._next.loss = sketch(losses[0]) if losses else None
            self._passes.append(self._next)
            self._next = Pass()
            known = [one for optimizer in self._optimizers.values() for one in _all(optimizer)]
            known += [one for root in self._roots.values() for one in root.parameters()]
            self._raw = {}
            for one in known:
                if (grad := one.grad) is not None:
                    self._raw[id(one)] = sketch(grad, bits=False)
            return result

        return backward

    # ---- the optimizer's step

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.rests:
            return
        key = id(optimizer)
        if key not in self._optimizers:
            self._optimizers[key] = optimizer
        for one in _all(optimizer):
            self._number(one)
        if not self.recording.steps:
            self._meet_all()
        step = Step([*self._optimizers].index(key), type(optimizer).__name__, self._passes)
        step.before = {self._number(one): digest(one) for one in _all(optimizer)}
        self._step = step
        step.is_closed = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if not step.is_closed:
            self._note_gradients(optimizer, step)

    def _note_gradients(self, optimizer: Optimizer, step: Step) -> None:
        given = [one for one in _all(optimizer) if one.grad is not None]
        step.gradients = {self._number(one): sketch(grad) for one in given if (grad := one.grad) is not None}
        step.raw = {self._number(one): self._raw[id(one)] for one in given if id(one) in self._raw}
        step.trained = tuple(self._number(one) for one in given if one.requires_grad)
        step.held = tuple(self._number(one) for one in _all(optimizer))
        parameters = enumerate(self._parameters)
        step.frozen = tuple(n for n, one in parameters if isinstance(one, nn.Parameter) and not one.requires_grad)
        for group in optimizer.param_groups:
            words = {word: value for word, value in group.items() if isinstance(value, _SETTINGS) and word != "params"}
            words |= {word: float(value) for word, value in group.items() if word == "lr"}  # or a tensor
            step.settings |= {self._number(one): words for one in group["params"]}

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step
        if step is None or self.rests:
            return
        if not step.settings:  # it has called a closure: what it made last
            self._note_gradients(optimizer, step)
        step.passes, step.events = self._passes, self._events
        step.is_cleared = self._found_empty.get(id(optimizer)) is not False
        step.weights = {self._number(one): sketch(one) for one in _all(optimizer)}
        for root in self._roots.values():
            step.buffers |= {self._number(one): sketch(one) for one in root.buffers()}
        self.recording.steps.append(step)
        self._begin()
        self._found_empty[id(optimizer)] = None
        if self.rests and self.enough is not None:
            self.enough()

    # ---- which tensor is which

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._parameters)
            self._parameters.append(tensor)
        return self._numbers[id(tensor)]

    def _meet_all(self) -> None:
        """Note the weights with which training begins, those that are frozen, too."""
        for root in self._roots.values():
            for one in (*root.parameters(), *root.buffers()):
                self._number(one)
        self.recording.initial = {
            number: sketch(one) for number, one in enumerate(self._parameters) if isinstance(one, nn.Parameter)
        }

    def _name(self) -> None:
        """Name tensors as the largest module does that was called; those of no module have a number."""
        names, taken = self.recording.names, set[str]()
        for root in sorted(self._roots.values(), key=lambda one: -sum(1 for _ in one.parameters())):
            for name, one in (*root.named_parameters(), *root.named_buffers()):
                if (number := self._numbers.get(id(one))) is not None and number not in names:
                    names[number] = f"{type(root).__name__}.{name}" if name in taken else name
                    while names[number] in taken:
                        names[number] = f"another {names[number]}"
                    taken.add(names[number])
        for number, one in enumerate(self._parameters):
            self.recording.shapes[number] = tuple(one.shape)


def _is_shell(module: nn.Module) -> bool:
    """Whether a module has no parameters, or only wraps the one that has them, as Fabric, DDP and a LightningModule do."""
    if next(module.parameters(recurse=False), None) is not None or type(module).__name__ == "OptimizedModule":
        return False
    inner = [one for one in module.children() if next(one.parameters(), None) is not None]
    others = {type(one).__module__ for one in module.children() if one not in inner}
    if len(inner) != 1 or isinstance(inner[0], nn.ModuleList | nn.ModuleDict):
        return not inner
    return all(name.startswith(("torch.nn.modules.loss", "torchmetrics")) for name in others)


def _is_filled(tensor: Tensor) -> bool:
    grad = tensor.grad
    return grad is not None and bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _below(kind: type) -> Iterator[type]:
    one: type
    for one in type.__subclasses__(kind):
        yield one
        yield from _below(one)


def _loader(loader: DataLoader) -> str:
    return f"loader {type(loader.sampler).__name__} batch_size={loader.batch_size} drop_last={loader.drop_last}"


def _scheduler(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> str:
    return f"scheduler {type(scheduler).__name__}" if getattr(scheduler, "last_epoch", -1) >= 0 else ""
