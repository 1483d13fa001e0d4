"""Compare two trainings and explain the first optimizer step in which they differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import hypot, isclose
from typing import Any

Record = dict[str, Any]
Run = list[Record]
Explanation = tuple[str, str]  # the reason and the fix
Finding = tuple[str, Any, Any, str, str]  # the quantity, both values, the reason and the fix


@dataclass
class Comparison:
    """The first difference of two trainings. ``step`` counts from 0, and is None without one."""

    steps: int
    step: int | None = None
    quantity: str = ""
    values: tuple[Any, ...] = ()
    reason: str = ""
    fix: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether all compared steps are equal."""
        return self.step is None

    def __str__(self) -> str:
        if self.is_equal:
            return f"equal    no difference in {self.steps} steps"
        a, b = (f"{value:.4g}" if isinstance(value, float) else value for value in self.values)
        difference = f"{self.quantity}: {a} in the first, {b} in the second"
        return f"step {self.step:<4}{difference}\nreason   {self.reason}\nfix      {self.fix}"


def compare(first: Any, second: Any, steps: int = 50) -> Comparison:
    """Find the first optimizer step in which two trainings differ.

    A training is a script with its arguments (``"train.py --lr 0.1"``), which runs in its own
    process, a function without arguments, or a file of `record_training`.

    Args:
        first: The training that is right.
        second: The training to compare with it.
        steps: The number of optimizer steps to compare. Scripts and functions end after them.

    Raises:
        ValueError: If a file is missing, a script fails or a training takes no optimizer step.
    """
    from .recorder import load_steps

    recordings = load_steps(first, steps), load_steps(second, steps)
    lengths = tuple(len(recorded) for recorded in recordings)
    shortest = min(lengths)
    for step in range(shortest):
        for check in CHECKS:
            finding = check(*recordings, step)
            if finding is not None:
                quantity, *values, reason, fix = finding
                return Comparison(shortest, step, quantity, tuple(values), reason, fix)
    if lengths[0] != lengths[1]:
        reason, fix = "one training ends earlier", "the same number of epochs and batches in both"
        return Comparison(shortest, shortest, "number of steps", lengths, reason, fix)
    return Comparison(shortest)


def compare_command(first: str, second: str, *, steps: int = 50) -> int:
    """Run two training scripts and explain the first optimizer step in which they differ.

    Args:
        first: The script that is right, with its arguments ("train.py --lr 0.1"), or a recording.
        second: The script to compare with it, or a recording.
        steps: The number of optimizer steps to compare.
    """
    comparison = compare(first, second, steps)
    print(comparison)
    return int(not comparison.is_equal)


def _find_changed(first: Record, second: Record, quantity: str) -> list[tuple[Record, Record]]:
    """Pair parameters by their weights before the step, or by order, and return what differs."""
    others = defaultdict(list)
    for parameter in second["parameters"]:
        others[parameter["weights before"]["digest"]].append(parameter)
    pairs = []
    for parameter in first["parameters"]:
        candidates = others[parameter["weights before"]["digest"]]
        if candidates:
            pairs.append((parameter, candidates.pop(0)))
    if len(pairs) < min(len(first["parameters"]), len(second["parameters"])):
        pairs = list(zip(first["parameters"], second["parameters"], strict=False))
    return [(a, b) for a, b in pairs if a[quantity] != b[quantity]]


def _join_names(parameters: list[Record]) -> str:
    names = [parameter["name"] for parameter in parameters]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_optimizer(first: Run, second: Run, step: int) -> Finding | None:
    a, b = first[step]["optimizer"], second[step]["optimizer"]
    reason = "the optimizers have different classes, or step in a different order"
    return None if a == b else ("optimizer", a, b, reason, f"{a} in both")


def _check_initial_weights(first: Run, second: Run, step: int) -> Finding | None:
    pairs = _find_changed(first[0], second[0], "weights before")
    if not pairs:
        return None
    a, b = (parameter["weights before"]["norm"] for parameter in pairs[0])
    names = _join_names([a for a, _ in pairs])
    reason = f"{names}: another model, other random numbers, or loaded or trained before"
    fix = "torch.manual_seed(0) before the model is created, and the same checkpoint, in both"
    return "norm of initial weights", a, b, reason, fix


def _check_settings(first: Run, second: Run, step: int) -> Finding | None:
    pairs = _find_changed(first[step], second[step], "settings")
    if not pairs:
        return None
    a, b = (parameter["settings"] for parameter in pairs[0])
    name = next(name for name in a if a[name] != b[name])
    reason, fix = "the optimizers or their schedulers differ", f"{name}={a[name]}"
    groups = [{str(p["settings"]) for p in run[step]["parameters"]} for run in (first, second)]
    if len(groups[0]) != len(groups[1]):
        changed = [a for a, b in pairs if a["settings"][name] != b["settings"][name]]
        reason, fix = f"other parameter groups: {_join_names(changed)}", "the same groups in both"
    elif step > 0:
        fix = 'scheduler.step() after the same batches, "interval": "step" or "epoch" for fit'
    return "learning rate" if name == "lr" else name, a[name], b[name], reason, fix


def _check_accumulation(first: Run, second: Run, step: int) -> Finding | None:
    a, b = len(first[step]["passes"]), len(second[step]["passes"])
    reason = "gradients of a different number of batches are added up, or of the rest of an epoch"
    return None if a == b else ("backward passes", a, b, reason, f"accumulate_grad_batches={a}")


def _check_batch(first: Run, second: Run, step: int) -> Finding | None:
    for a, b in zip(first[step]["passes"], second[step]["passes"], strict=False):
        sizes = a["batch size"], b["batch size"]
        if sizes[0] != sizes[1] and min(sizes) > 0:
            reason = "the loaders have other batch sizes, or only one drops the last batch"
            fix = f"batch_size={sizes[0]}, or the same drop_last"
            return "batch size", sizes[0], sizes[1], reason, fix
        # A module that also gets the targets has more samples.
        only_first = set(a["samples"]) - set(b["samples"])
        only_second = set(b["samples"]) - set(a["samples"])
        if only_first and only_second:
            samplers = first[0]["sampler"], second[0]["sampler"]
            reason = f"other samples, transforms or order: {samplers[0]} and {samplers[1]}"
            fix = "the same dataset and seed, and sampler.set_epoch(epoch), in both"
            if samplers[0] != samplers[1]:
                fix = f"shuffle={samplers[0] != 'SequentialSampler'}"
            return "digest of a sample", min(only_first), min(only_second), reason, fix
    return None


def _check_loss(first: Run, second: Run, step: int) -> Finding | None:
    for a, b in zip(first[step]["passes"], second[step]["passes"], strict=False):
        # NaN differs from itself, its text does not.
        if str(a["loss"]) != str(b["loss"]):
            reason, fix = _explain_loss(a, b, len(first[step]["passes"]))
            return "loss", a["loss"], b["loss"], reason, fix
    return None


def _explain_loss(a: Record, b: Record, passes: int) -> Explanation:
    modules = a["eval modules"], b["eval modules"]
    if len(modules[0]) != len(modules[1]):
        which = "first" if len(modules[0]) > len(modules[1]) else "second"
        names = ", ".join(sorted({*modules[0], *modules[1]}))
        reason = f"more modules are in eval mode in the {which}: {names}"
        return reason, "model.train() before training and after each validation"
    if passes > 1 and isclose(a["loss"], b["loss"] * passes, rel_tol=1e-3):
        reason = f"{passes} times smaller: fit divides by accumulate_grad_batches, the step as well"
        return reason, "return the loss of the batch undivided"
    reason = "other targets, outputs, loss functions, precision or random numbers, as for dropout"
    return reason, "the same model, loss, precision= and number of random numbers in both"


def _check_gradients(first: Run, second: Run, step: int) -> Finding | None:
    a, b = first[step], second[step]
    trained = [sum(p["is trained"] for p in record["parameters"]) for record in (a, b)]
    frozen = _find_changed(a, b, "is trained")
    if frozen or trained[0] != trained[1]:
        which = "first" if trained[0] < trained[1] else "second"
        names = _join_names([a for a, _ in frozen]) or "some are not in its optimizer"
        fix = "requires_grad_() and the optimizer for the same parameters in both"
        reason = f"frozen or unused in the {which}: {names}"
        return "trained parameters", trained[0], trained[1], reason, fix
    pairs = _find_changed(a, b, "gradient")
    if not pairs:
        return None
    norms = [hypot(*(p["gradient"]["norm"] for p in run["parameters"])) for run in (a, b)]
    ratios = [b["gradient"]["norm"] / (a["gradient"]["norm"] or 1) for a, b in pairs]
    reason, fix = _explain_gradients(a, b, norms, ratios)
    return "gradient norm", norms[0], norms[1], reason, fix


def _explain_gradients(a: Record, b: Record, norms: Any, ratios: list[float]) -> Explanation:
    which = "first" if a["has old gradients"] else "second"
    if a["has old gradients"] != b["has old gradients"]:
        reason = f"zero_grad() is missing in the {which}: it adds up the gradients of all steps"
        return reason, "optimizer.zero_grad() before each backward"
    if all(isclose(ratio, 1, rel_tol=1e-3) for ratio in ratios):
        reason = "rounding: sums, as of the norm for clipping, in another order"
        return reason, "nothing if the last bits may differ, else the same order of parameters"
    if all(isclose(ratio, ratios[0], rel_tol=1e-3) for ratio in ratios):
        which = "second" if norms[0] > norms[1] else "first"
        reason = f"only the {which} clips or scales gradients, or more"
        return reason, f"gradient_clip_val={min(norms):.4g}, or none, in both"
    reason = "a part of the loss is detached, or gradients are clipped by value, in one only"
    return reason, "the same training step and clipping in both"


def _check_weights(first: Run, second: Run, step: int) -> Finding | None:
    pairs = _find_changed(first[step], second[step], "weights")
    if pairs:
        a, b = (parameter["weights"]["norm"] for parameter in pairs[0])
        reason = "the optimizer's state was loaded or cleared in one only, or rounding"
        return "norm of weights", a, b, reason, "a new optimizer with the same fused= in both"
    buffers = [run[step]["buffers"] for run in (first, second)]
    changed = [(a, b) for a, b in zip(*buffers, strict=False) if a != b]
    if not changed or len(buffers[0]) != len(buffers[1]):
        return None
    reason = "BatchNorm sees other batches in one only, as in a validation in train mode"
    a, b = (buffer["norm"] for buffer in changed[0])
    return "norm of a buffer", a, b, reason, "model.eval() before the validation"


CHECKS = [_check_optimizer, _check_initial_weights, _check_settings, _check_accumulation]
CHECKS += [_check_batch, _check_loss, _check_gradients, _check_weights]
