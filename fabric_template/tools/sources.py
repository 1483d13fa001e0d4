"""Sources: a script's training loops as its text tells them; nothing of it is run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.While, ast.AsyncFor)
# they clear, divide, seed and wrap on their own
FRAMEWORKS = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "ignite",
    "fabric_template",
    "composer",
    "catalyst",
)
_OPTIMIZER = re.compile(r"(.*\.)?_?(optim|opt(?![a-z])|optimi[sz]er)\w*", re.IGNORECASE)


def text(node: ast.AST | None) -> str:
    """A name as it is written, such as self.net; nothing for what is no name."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def calls(node: ast.AST, *names: str, nested: bool = True) -> list[ast.Call]:
    """Calls of functions or methods with one of these last names."""
    found = ast.walk(node) if nested else within(node)
    return [one for one in found if isinstance(one, ast.Call) and called(one) in names]


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def receiver(call: ast.Call) -> str:
    """What stands before the dot of a method."""
    return text(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def argument(call: ast.Call, place: int, word: str) -> ast.expr | None:
    """What is given for an argument."""
    given = {one.arg: one.value for one in call.keywords}
    return given.get(word, call.args[place] if place < len(call.args) else None)


def number(node: ast.AST | None) -> float | None:
    """A literal number."""
    is_one = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return float(node.value) if is_one else None  # type: ignore[union-attr]


def within(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when this node runs: not the bodies of functions that are only defined in it."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        if one is node or not isinstance(one, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(one)


@dataclass(frozen=True, order=True)
class Mistake:
    """What is wrong in a line, and what to write; or only slow, or not exact."""

    line: int
    what: str
    write: str
    is_advice: bool = False


@dataclass
class Training:
    """An innermost loop that goes backward and steps an optimizer."""

    loop: ast.For | ast.While | ast.AsyncFor
    backwards: list[ast.Call]
    steps: dict[ast.Call, str]  # with the optimizer that each steps

    @cached_property
    def losses(self) -> set[str]:
        """The names of what goes backward, also scaled or divided."""
        return {loss_of(one) for one in self.backwards} - {""}


@dataclass
class Source:
    """A script, read."""

    path: str
    code: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    made: dict[str, list[ast.Call]] = field(default_factory=dict)  # what is assigned to a name by a call

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = [*zip(target.elts, node.value.elts, strict=False)]
                    for one, value in pairs:
                        if isinstance(value, ast.Call):
                            self.made.setdefault(text(one), []).append(value)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """All that a node stands in, the nearest first."""
        while (up := self.parents.get(node)) is not None:
            yield up
            node = up

    def scope(self, node: ast.AST) -> ast.AST:
        """The function that a node stands in, or the script."""
        return next((up for up in self.above(node) if isinstance(up, FUNCTIONS)), self.tree)

    def made_by(self, pattern: str) -> dict[str, ast.Call]:
        """Names, and the call of a class with such a name that made each."""
        return {
            name: call
            for name, found in self.made.items()
            for call in found
            if name and re.search(pattern, ast.unparse(call.func))
        }

    @cached_property
    def frameworks(self) -> set[str]:
        """Which of the libraries are imported that do much of a loop themselves."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
        return names & {*FRAMEWORKS}

    @cached_property
    def is_led(self) -> bool:
        """Whether a framework may run a loop or clear gradients for the script; Fabric and Accelerate leave that to it."""
        return bool(self.frameworks - {"accelerate", "lightning", "fabric_template"})

    @cached_property
    def optimizers(self) -> dict[str, ast.Call]:
        """Names of torch's optimizers, and how each is made."""
        kinds = "SGD|Adam|AdamW|Adamax|NAdam|RAdam|Adagrad|Adadelta|RMSprop|Rprop|ASGD|SparseAdam|Adafactor"
        return self.made_by(rf"(^|\.)({kinds})$")

    @cached_property
    def schedulers(self) -> dict[str, ast.Call]:
        """Names of torch's schedulers, and how each is made."""
        return self.made_by(r"lr_scheduler\.|^(\w+LR|ReduceLROnPlateau|CosineAnnealingWarmRestarts)$")

    @cached_property
    def nets(self) -> set[str]:
        """Names of what an optimizer trains whole: its parameters() are given to one."""
        found = set()
        for call in self.optimizers.values():
            for one in calls(call, "parameters", "named_parameters"):
                found.add(receiver(one))
        return found - {""}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions and methods by their name; none that there are two of."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(node)
        return {name: ones[0] for name, ones in found.items() if len(ones) == 1}

    def inlined(self, node: ast.AST) -> list[ast.AST]:
        """What runs when a node runs, with the functions of the script that it calls, and those that these call."""
        found: list[ast.AST] = []
        waiting, seen = [node], set[str]()
        while waiting:
            for one in within(waiting.pop()):
                found.append(one)
                name = called(one) if isinstance(one, ast.Call) else ""
                if name in self.functions and name not in seen:
                    seen.add(name)
                    waiting.append(self.functions[name])
        return found

    def step_of(self, call: ast.Call) -> str:
        """The optimizer that a call steps; nothing if it is something else."""
        if called(call) != "step":
            return ""
        owner = receiver(call)
        if "scaler" in owner.lower() and call.args:
            return text(call.args[0])
        is_one = owner in self.optimizers or (_OPTIMIZER.fullmatch(owner) and owner not in self.schedulers)
        return owner if is_one and not call.args else ""

    @cached_property
    def trainings(self) -> list[Training]:
        """Every innermost loop that trains."""
        found: list[Training] = []
        for loop in ast.walk(self.tree):
            if not isinstance(loop, LOOPS):
                continue
            backwards = [one for one in calls(loop, "backward", nested=False) if is_own_backward(one)]
            steps = {one: name for one in calls(loop, "step", nested=False) if (name := self.step_of(one))}
            if backwards and steps:
                found.append(Training(loop, backwards, steps))
        inner = {up for one in found for up in self.above(one.loop)}
        return [one for one in found if one.loop not in inner]

    def epochs_of(self, training: Training) -> ast.For | ast.While | None:
        """The loop around a training loop, in the same function."""
        for up in self.above(training.loop):
            if isinstance(up, ast.For | ast.While):
                return up
            if isinstance(up, FUNCTIONS):
                break
        return None


def loss_of(call: ast.Call) -> str:
    """The loss in loss.backward(), (loss / 4).backward(), scaler.scale(loss).backward(), fabric.backward(loss)."""
    node = call.func.value if isinstance(call.func, ast.Attribute) else None
    if call.args and not isinstance(call.args[0], ast.Constant):
        node = call.args[0]
    if isinstance(node, ast.Call) and called(node) == "scale" and node.args:
        node = node.args[0]
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        node = node.left
    return text(node)


def is_own_backward(call: ast.Call) -> bool:
    """Whether it is a tensor's backward, or that of Fabric, Accelerate or a loop of ours, in a loop of one's own."""
    if re.search(r"(fabric|accelerator|loop)$", receiver(call)) and len(call.args) == 1:
        return True
    first = call.args[0] if call.args else None
    return isinstance(call.func, ast.Attribute) and (
        first is None or isinstance(first, ast.Constant) or "grad" in text(first)
    )


def read_script(path: Path) -> Source:
    """Read a script, or the code of a notebook.

    Raises:
        ValueError: where it is no Python.
    """
    code = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(code)["cells"] if cell["cell_type"] == "code"]
        lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
        code = "\n".join("" if re.match(r"\s*[%!]", line) else line for line in lines)
    return Source(str(path), code, ast.parse(code))
