"""Compare two trainings and explain the first optimizer step in which they differ."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, isclose
from typing import Any

from .training_recorder import load_steps

Record = dict[str, Any]
Finding = tuple[str, Any, Any, str, str]  # the quantity, both values, the reason and the fix


@dataclass
class Comparison:
    """The first difference of two trainings, at ``step`` (from 0; None if they are equal)."""

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
    without arguments, or as a file written by `training_recorder.record_training`. A script runs in its own process.

    Args:
        first: The training that is right.
        second: The training to compare with it.
        steps: The number of optimizer steps to compare. Scripts and functions end after them.

    Raises:
        ValueError: If a file is missing, a script fails or a training takes no optimizer step.
    """
    recordings = load_steps(first, steps), load_steps(second, steps)
    lengths = tuple(len(recorded) for recorded in recordings)
    for step, (a, b) in enumerate(zip(*recordings, strict=False)):
        finding = (
            check_optimizer(a, b)
            or check_settings(a, b, step)
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
    """Return the pairs of parameters that differ in a quantity."""

    def shape_and_weights(parameter: Record) -> tuple[list[int], str]:
        return parameter["shape"], parameter["weights"]["digest"]

    # Two optimizers may have the same parameters in a different order.
    ordered = [sorted(record["parameters"], key=shape_and_weights) for record in (first, second)]
    changed = [(a, b) for a, b in zip(*ordered, strict=False) if a[quantity] != b[quantity]]
    return sorted(changed, key=lambda pair: first["parameters"].index(pair[0]))


def join_names(pairs: list[tuple[Record, Record]]) -> str:
    return ", ".join(a["name"] for a, _ in pairs[:3])


def check_optimizer(first: Record, second: Record) -> Finding | None:
    a, b = first["optimizer"], second["optimizer"]
    reason = "the optimizers have different classes, or step in a different order"
    return None if a == b else ("optimizer", a, b, reason, f"{a} in both")


def check_settings(first: Record, second: Record, step: int) -> Finding | None:
    pairs = find_changed(first, second, "settings")
    if not pairs:
        return None
    a, b = (parameter["settings"] for parameter in pairs[0])
    name = next(name for name in a if a[name] != b[name])
    changed = [(p, q) for p, q in pairs if p["settings"][name] != q["settings"][name]]
    quantity = "learning rate" if name == "lr" else name
    if step > 0:
        reason = "the schedulers have different values, or step at different times"
        fix = 'the same scheduler, and "interval": "step" if it changes the rate after each step'
    elif len(changed) < len(first["parameters"]):
        reason, fix = f"different groups: {join_names(changed)}", "the same groups in both"
    else:
        reason, fix = "the optimizers are created with different values", f"{name}={a[name]}"
    return quantity, a[name], b[name], reason, fix


def check_weights(first: Record, second: Record, step: int) -> Finding | None:
    """Compare the weights before the step."""
    counts = len(first["parameters"]), len(second["parameters"])
    shapes = find_changed(first, second, "shape")
    if shapes:
        a, b = (parameter["shape"] for parameter in shapes[0])
        return "shape", a, b, f"the models differ in {join_names(shapes)}", "the same model"
    if counts[0] != counts[1]:
        reason, fix = "the optimizers have different parameters", "the same parameters in both"
        return "number of parameters", *counts, reason, fix
    pairs = find_changed(first, second, "weights")
    if not pairs:
        return None
    a, b = (parameter["weights"]["norm"] for parameter in pairs[0])
    names = join_names(pairs)
    if step == 0:
        reason = f"{names}: one training initialized, loaded or trained these weights differently"
        fix = "torch.manual_seed(0) before the model is created, and the same checkpoint, in both"
        return "norm of initial weights", a, b, reason, fix
    reason = f"{names}: clamped, averaged or loaded in one only, or another state of the optimizer"
    return "norm of weights", a, b, reason, "the same changes of weights and optimizer in both"


def check_batch(first: Record, second: Record) -> Finding | None:
    counts = len(first["passes"]), len(second["passes"])
    if counts[0] != counts[1]:
        reason = "the step accumulates gradients of a different number of batches"
        return "backward passes", *counts, reason, f"accumulate_grad_batches={counts[0]}"
    for a, b in zip(first["passes"], second["passes"], strict=True):
        sizes = a["batch size"], b["batch size"]
        if sizes[0] != sizes[1] and min(sizes) > 0:
            reason = "the loaders have different batch sizes, or one drops the last batch"
            return "batch size", *sizes, reason, "the same batch_size= and drop_last= in both"
        # A module that also receives the targets has more samples.
        only_first = set(a["samples"]) - set(b["samples"])
        only_second = set(b["samples"]) - set(a["samples"])
        if only_first and only_second:
            reason = "the loaders have other samples, transforms or another order"
            fix = "the same dataset, shuffle=, generator= and seed, and sampler.set_epoch(epoch)"
            return "digest of a sample", min(only_first), min(only_second), reason, fix
    return None


def check_loss(first: Record, second: Record) -> Finding | None:
    for a, b in zip(first["passes"], second["passes"], strict=True):
        # Compare as strings, because NaN != NaN.
        if str(a["loss"]) != str(b["loss"]):
            return "loss", a["loss"], b["loss"], *explain_loss(a, b, len(first["passes"]))
    return None


def explain_loss(a: Record, b: Record, passes: int) -> tuple[str, str]:
    modes = a["eval modules"], b["eval modules"]
    if len(modes[0]) != len(modes[1]):
        which = "first" if len(modes[0]) > len(modes[1]) else "second"
        names = ", ".join(sorted({*max(modes, key=len)}))
        reason = f"more modules are in eval mode in the {which}: {names}"
        return reason, "model.train() before training and after each validation"
    states = a["random state"], b["random state"]
    libraries = [name for name in states[0] if states[0][name] != states[1].get(name)]
    if a["is random"] and b["is random"] and libraries:
        reason = f"the random state of {' and '.join(libraries)} differs before the forward pass"
        return reason, "the same seed before both, and the same number of random draws"
    if passes > 1 and isclose(a["loss"], b["loss"] * passes, rel_tol=1e-3):
        reason = f"{passes} times smaller: fit divides by accumulate_grad_batches, like the step"
        return reason, "return the loss of the batch undivided"
    reason = "other targets, outputs, loss functions, precision or dropout"
    return reason, "the same model, the same loss of the same outputs, and the same precision="


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
