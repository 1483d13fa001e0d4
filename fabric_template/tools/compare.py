"""Compare two trainings and explain the first optimizer step in which they differ."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, isclose
from typing import Any

from .recorder import load_steps
from .recorder import record_training as record_training

Record = dict[str, Any]
Run = list[Record]
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
        """Return whether all compared steps are equal."""
        return self.step is None

    def __str__(self) -> str:
        if self.is_equal:
            return f"equal    no difference in {self.steps} steps"
        a, b = (f"{value:.4g}" if isinstance(value, float) else value for value in self.values)
        difference = f"{self.quantity}: {a} in the first, {b} in the second"
        return f"step {self.step:<4}{difference}\nreason   {self.reason}\nfix      {self.fix}"


def compare(first: Any, second: Any, steps: int = 50) -> Comparison:
    """Find the first optimizer step in which two trainings differ.

    Give each training run as a script with its arguments (``"train.py --lr 0.1"``), as a function
    without arguments, or as a file written by `record_training`. A script runs in its own process.

    Args:
        first: The training that is right.
        second: The training to compare with it.
        steps: The number of optimizer steps to compare. Scripts and functions end after them.

    Raises:
        ValueError: If a file is missing, a script fails or a training takes no optimizer step.
    """
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
    """Run two training scripts and explain the first optimizer step in which they differ."""
    comparison = compare(first, second, steps)
    print(comparison)
    return int(not comparison.is_equal)


def find_changed(first: Record, second: Record, quantity: str) -> list[tuple[Record, Record]]:
    """Pair parameters by their weights before the step, or by order. Return the unequal pairs."""
    others: dict[str, list[Record]] = {}
    for parameter in second["parameters"]:
        others.setdefault(parameter["weights before"]["digest"], []).append(parameter)
    pairs = []
    for parameter in first["parameters"]:
        candidates = others.get(parameter["weights before"]["digest"])
        if candidates:
            pairs.append((parameter, candidates.pop(0)))
    if len(pairs) < min(len(first["parameters"]), len(second["parameters"])):
        pairs = list(zip(first["parameters"], second["parameters"], strict=False))
    return [(a, b) for a, b in pairs if a[quantity] != b[quantity]]


def join_names(pairs: list[tuple[Record, Record]]) -> str:
    names = [a["name"] for a, _ in pairs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_optimizer(first: Run, second: Run, step: int) -> Finding | None:
    a, b = first[step]["optimizer"], second[step]["optimizer"]
    reason = "the optimizers have different classes, or step in a different order"
    return None if a == b else ("optimizer", a, b, reason, f"{a} in both")


def check_weights_before(first: Run, second: Run, step: int) -> Finding | None:
    pairs = find_changed(first[step], second[step], "weights before")
    if not pairs:
        return None
    a, b = (parameter["weights before"] for parameter in pairs[0])
    names = join_names(pairs)
    if a["shape"] != b["shape"]:
        return "shape", a["shape"], b["shape"], f"the models differ in {names}", "the same model"
    if step == 0:
        reason = f"{names}: one training initialized, loaded or trained these weights differently"
        fix = "torch.manual_seed(0) before the model is created, and the same checkpoint, in both"
        return "norm of initial weights", a["norm"], b["norm"], reason, fix
    reason = f"{names}: clamped, averaged, copied or loaded between steps in one training only"
    return "norm of weights before", a["norm"], b["norm"], reason, "the same change in both"


def check_settings(first: Run, second: Run, step: int) -> Finding | None:
    pairs = find_changed(first[step], second[step], "settings")
    if not pairs:
        return None
    a, b = (parameter["settings"] for parameter in pairs[0])
    name = next(name for name in a if a[name] != b[name])
    reason, fix = "the optimizers are created with different values", f"{name}={a[name]}"
    groups = [{str(p["settings"]) for p in run[step]["parameters"]} for run in (first, second)]
    changes = [count_steps_with_first_rate(run) for run in (first, second)]
    if len(groups[0]) != len(groups[1]):
        changed = [(a, b) for a, b in pairs if a["settings"][name] != b["settings"][name]]
        reason, fix = f"different groups: {join_names(changed)}", "the same groups in both"
    elif name == "lr" and any(changes):
        interval = "step" if changes[0] == 1 else "epoch"
        reason = f"schedulers change the rate first after {changes[0]} and after {changes[1]} steps"
        fix = f'the same scheduler, "interval": "{interval}" or scheduler.step() after each {interval}'
    return "learning rate" if name == "lr" else name, a[name], b[name], reason, fix


def count_steps_with_first_rate(run: Run) -> int:
    """Return the number of steps before the learning rate changes, or 0 if it is constant."""
    rates = [step["parameters"][0]["settings"].get("lr") for step in run]
    return next((i for i, rate in enumerate(rates) if rate != rates[0]), 0)


def check_accumulation(first: Run, second: Run, step: int) -> Finding | None:
    a, b = len(first[step]["passes"]), len(second[step]["passes"])
    reason = "the step accumulates gradients of a different number of batches"
    return None if a == b else ("backward passes", a, b, reason, f"accumulate_grad_batches={a}")


def check_batch(first: Run, second: Run, step: int) -> Finding | None:
    for a, b in zip(first[step]["passes"], second[step]["passes"], strict=True):
        sizes = a["batch size"], b["batch size"]
        if sizes[0] != sizes[1] and min(sizes) > 0:
            reason, fix = "the loaders have different batch sizes", f"batch_size={sizes[0]}"
            if step > 0:
                reason, fix = "only one drops the last batch", f"drop_last={sizes[0] > sizes[1]}"
            return "batch size", sizes[0], sizes[1], reason, fix
        # A module that also receives the targets has more samples.
        only_first = set(a["samples"]) - set(b["samples"])
        only_second = set(b["samples"]) - set(a["samples"])
        if only_first and only_second:
            reason, fix = explain_samples(first, second, step)
            return "digest of a sample", min(only_first), min(only_second), reason, fix
    return None


def explain_samples(first: Run, second: Run, step: int) -> tuple[str, str]:
    batches = []
    for run in (first, second):
        batches.append([{s for one in record["passes"] for s in one["samples"]} for record in run])
    samplers = first[0]["sampler"], second[0]["sampler"]
    if samplers[0] != samplers[1] and set().union(*batches[0]) & set().union(*batches[1]):
        reason = f"the samplers order the same samples differently: {samplers[0]} and {samplers[1]}"
        return reason, f"shuffle={samplers[0] != 'SequentialSampler'}"
    reason = "the samples, their transforms or their order differ"
    fix = "the same dataset, transforms and generator= in both, and sampler.set_epoch(epoch)"
    return explain_random_state(first, second, step) or (reason, fix)


def explain_random_state(first: Run, second: Run, step: int) -> tuple[str, str] | None:
    for start in range(step + 1):
        for a, b in zip(first[start]["passes"], second[start]["passes"], strict=True):
            states = a["random state"], b["random state"]
            names = [name for name in states[0] if states[0][name] != states[1].get(name)]
            if names:
                reason = f"the random state of {' and '.join(names)} differs from step {start} on"
                return reason, "the same seed before both, and the same number of random draws"
    return None


def check_loss(first: Run, second: Run, step: int) -> Finding | None:
    passes = len(first[step]["passes"])
    for a, b in zip(first[step]["passes"], second[step]["passes"], strict=True):
        # Compare as strings, because NaN != NaN.
        if str(a["loss"]) != str(b["loss"]):
            explanation = explain_modes(a["eval modules"], b["eval modules"], step)
            if explanation is None and a["is random"] and b["is random"]:
                explanation = explain_random_state(first, second, step)
            reason, fix = explanation or explain_loss(a, b, passes)
            return "loss", a["loss"], b["loss"], reason, fix
    return None


def explain_modes(first: list[str], second: list[str], step: int) -> tuple[str, str] | None:
    if len(first) == len(second):
        return None
    which, names = ("first", first) if len(first) > len(second) else ("second", second)
    reason = f"more modules are in eval mode in the {which}: {', '.join(sorted(set(names)))}"
    return reason, f"model.train() {'at the start of each epoch' if step else 'before training'}"


def explain_loss(a: Record, b: Record, passes: int) -> tuple[str, str]:
    def is_close(first: float, second: float, tolerance: float = 1e-3) -> bool:
        return isclose(first, second, rel_tol=tolerance)

    if passes > 1 and is_close(a["loss"], b["loss"] * passes):
        reason = f"{passes} times smaller: fit divides by accumulate_grad_batches, like the step"
        return reason, "return the loss of the batch undivided"
    if passes > 1 and is_close(a["loss"] * passes, b["loss"]):
        return f"{passes} times larger: not divided by the accumulated batches", f"loss / {passes}"
    if a["batch size"] > 1 and is_close(a["loss"] * a["batch size"], b["loss"]):
        return "the mean over the batch in the first, the sum in the second", "reduction='mean'"
    if a["is random"] != b["is random"]:
        which = "first" if a["is random"] else "second"
        return f"the model has dropout or noise in the {which} only", "the same model in both"
    if is_close(a["loss"], b["loss"], 0.02):
        return "rounding, such as in another precision", "the same precision= (or autocast) in both"
    return "other targets, outputs or loss functions", "the same loss of the same outputs in both"


def check_gradients(first: Run, second: Run, step: int) -> Finding | None:
    a, b = first[step], second[step]
    trained = [sum(p["is trained"] for p in record["parameters"]) for record in (a, b)]
    frozen = find_changed(a, b, "is trained")
    if frozen or trained[0] != trained[1]:
        which = "first" if trained[0] < trained[1] else "second"
        names = join_names(frozen) or "some are not in its optimizer"
        fix = "requires_grad_() and the optimizer for the same parameters in both"
        return (
            "trained parameters",
            trained[0],
            trained[1],
            f"frozen or unused in the {which}: {names}",
            fix,
        )
    pairs = find_changed(a, b, "gradient")
    if not pairs:
        return None
    norms = [hypot(*(p["gradient"]["norm"] for p in run["parameters"])) for run in (a, b)]
    ratios = [b["gradient"]["norm"] / (a["gradient"]["norm"] or 1) for a, b in pairs]
    if a["has old gradients"] != b["has old gradients"]:
        which = "first" if a["has old gradients"] else "second"
        reason = f"zero_grad() is missing in the {which}: it adds up the gradients of all steps"
        fix = "optimizer.zero_grad() before each backward"
    elif all(isclose(ratio, 1, rel_tol=1e-3) for ratio in ratios):
        reason = "rounding: sums (such as the norm for clipping) are added in a different order"
        fix = "nothing if the last bits may differ, else the same order of parameters"
    elif not all(isclose(ratio, ratios[0], rel_tol=1e-3) for ratio in ratios):
        reason = "a part of the loss is detached, or gradients are clipped by value, in one only"
        fix = "the same training step and clipping in both"
    else:
        which = "first" if norms[0] < norms[1] else "second"
        reason = f"only the {which} clips or scales gradients, or its limit is stricter"
        fix = f"gradient_clip_val={norms[0]:.4g}" if which == "first" else "no clipping"
    return "gradient norm", norms[0], norms[1], reason, fix


def check_weights(first: Run, second: Run, step: int) -> Finding | None:
    pairs = find_changed(first[step], second[step], "weights")
    if not pairs:
        return None
    a, b = (parameter["weights"]["norm"] for parameter in pairs[0])
    reason = "only one training loaded or cleared the optimizer's state, or rounding"
    return "norm of weights", a, b, reason, "a new optimizer with the same fused= in both"


CHECKS = [check_optimizer, check_weights_before, check_settings, check_accumulation]
CHECKS += [check_batch, check_loss, check_gradients, check_weights]
