"""Reasons: for each part in which two trainings differ, what is other, why that is likely so, and what to write."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from .batches import batch
from .pairing import IMPLEMENTATION, Pair, begins_alike, is_closed, other_settings, random_parts, sleepers
from .rates import learning_rate
from .sketches import Sketch

Told = tuple[str, str, str]  # what is other, why, what to write


def listed(names: list[str], most: int = 3) -> str:
    """Some names of many.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def figure(value: Any) -> str:
    """A number as one says it, anything else as Python writes it.

    Example:
        >>> figure(0.001), figure(1234.5678), figure((0.9, 0.999))
        ('0.001', '1235', '(0.9, 0.999)')
    """
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def whole(ratio: float | None) -> int:
    """The whole number, 2 or more, that a ratio is or is one over; 0: it is none."""
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return 0
    up = max(ratio, 1 / ratio)
    return round(up) if up > 1.5 and abs(up - round(up)) < 1e-3 * up else 0


# ---- before the first step


def _initial(pair: Pair, at: int) -> Told:
    pairs = pair.initial()
    names = [name for name, a, b in pairs if a != b]
    what = f"the initial weights are others, {len(names)} of {len(pairs)} parameters ({listed(names)})"
    for first, then, who, whose in ((pair.ours, pair.yours, "ours", "yours"), (pair.yours, pair.ours, "yours", "ours")):
        ends = {then.names.get(n, str(n)): one.digest for n, one in then.steps[-1].weights.items()}
        begins = {first.names.get(n, str(n)): one.digest for n, one in first.initial.items()}
        if len(then.steps) < then.limit and ends and all(begins.get(name) == one for name, one in ends.items()):
            return (
                what,
                f"{who} begins where {whose} ended: the same net was trained twice",
                "make a new net for each of them",
            )
    if all(a.is_near(b) for _, a, b in pairs):
        return what, "by rounding: made or loaded in another precision", "make the net in the same dtype"
    drawn = [name for name, a, _ in pairs if len(set(a.samples)) > 1]
    if set(drawn) - set(names):
        return (
            what,
            "the others are the same: these are loaded, or made otherwise, in one only",
            ("load the same weights, and make the layers in the same order"),
        )
    return (
        what,
        "they are drawn from other random numbers",
        "torch.manual_seed(0) right before the net is made, in both",
    )


def _net(pair: Pair, at: int) -> Told:
    sizes = [sum(math.prod(one.shape) for one in each.initial.values()) for each in (pair.yours, pair.ours)]
    counts = [len(each.initial) for each in (pair.yours, pair.ours)]
    what = f"{counts[0]} parameters with {sizes[0]:,} values in yours, {counts[1]} with {sizes[1]:,} here"
    return what, "the nets are others", "the same net in both"


def _between(pair: Pair, at: int) -> Told:
    names = [name for name, _, _ in pair.other("before", at)]
    changed = []
    for recording, who in ((pair.yours, "yours"), (pair.ours, "ours")):
        before, after = recording.steps[at].before, recording.steps[at - 1].weights
        if any(after[number].digest != one for number, one in before.items() if number in after):
            changed.append(who)
    where = f"in {changed[0]} only" if len(changed) == 1 else "otherwise"
    what = f"the weights are changed between two steps {where} ({listed(names)})"
    return (
        what,
        "clamped, averaged (EMA), copied or loaded there",
        "do it in on_train_batch_end, after each optimizer step",
    )


def _optimizer(pair: Pair, at: int) -> Told:
    mine, other = pair.step(at)
    if mine.kind != other.kind:
        return f"{mine.kind} in yours, {other.kind} here", "another optimizer is made", f"torch.optim.{mine.kind}(...)"
    return (
        f"optimizer {mine.optimizer + 1} of yours steps, optimizer {other.optimizer + 1} here",
        "several optimizers step in another order, or not as often", "step them in the order of yours",
    )  # fmt: skip


def _accumulation(pair: Pair, at: int) -> Told:
    mine, other = (len(step.passes) for step in pair.step(at))
    what = f"{mine} backward pass{'es' * (mine != 1)} before the step in yours, {other} here"
    if 0 in (mine, other):
        return (
            what,
            f"{'yours' if not mine else 'ours'} steps without new gradients",
            "one optimizer.step() after each backward",
        )
    usual = [len(one.steps[0].passes) for one in (pair.yours, pair.ours)]
    if at and usual[0] == usual[1] and min(mine, other) < usual[0] <= max(mine, other):
        who, whose = ("ours", "yours") if other < mine else ("yours", "ours")
        return (
            what,
            f"at the end of an epoch {who} steps with the batches that are left, {whose} keeps them for the next",
            (f"limit_train_batches to a multiple of {usual[0]}, or a step at the epoch's end in both"),
        )
    if 1 in (mine, other):
        who = "yours" if mine > other else "ours"
        return what, f"{who} adds up the gradients of several batches", f"accumulate_grad_batches={mine}"
    return what, "the gradients of other numbers of batches are added up", f"accumulate_grad_batches={mine}"


# ---- a batch on its way


def _random(pair: Pair, at: int) -> Told:
    what = f"other random numbers ({', '.join(random_parts(pair, at))})"
    begun = [sum(event.startswith("loader") for event in step.events) for step in pair.step(at)]
    # before the first step fit has begun the loader of its sanity check, and put the random numbers back
    if begun[0] != begun[1] and (at or 0 in begun):
        since = "since the last step" if at else "before the first batch"
        why = f"a DataLoader draws a number when it is begun, and {since} yours began {begun[0]}, ours {begun[1]}"
        return what, why, "begin as many in both, or give them generator=torch.Generator().manual_seed(0)"
    if at:
        why = "something has drawn numbers in one only since the last step: an augmentation, a sample, a logger"
        return what, why, "draw as often in both, or from a generator of its own"
    seeds = {"torch": "torch.manual_seed(0)", "numpy": "numpy.random.seed(0)", "python": "random.seed(0)"}
    named = [seeds[name] for name in random_parts(pair, at) if name in seeds] or [seeds["torch"]]
    why = "not seeded, or something has drawn numbers in one only before the first batch"
    return what, why, f"{', '.join(named)} right before the loop, in both"


def _modes(pair: Pair, at: int) -> Told:
    a, b = next((a, b) for a, b in pair.passes(at) if sleepers(a, b) != (0, 0))
    mine, other = sleepers(a, b)
    if mine and other:
        return (
            f"{mine} modules are in eval mode in yours only, {other} in ours only",
            "others are frozen",
            ("call eval() on the same modules, after train()"),
        )
    count, who = (mine, "yours") if mine else (other, "ours")
    what = f"{count} module{'s are' if count > 1 else ' is'} in eval mode in {who} only"
    if at:
        return (
            what,
            "model.eval() is called for the validation, and model.train() not again",
            ("model.train() at the beginning of each epoch"),
        )
    if who == "yours":
        return (
            what,
            "model.train() is not called in yours",
            "model.train() before your loop; or model.eval() before fit",
        )
    if count == b.modules:
        return what, "from_pretrained returns eval mode, your loop calls model.train()", "model.train() before fit"
    return (
        what,
        "some modules were put to eval() by hand, and your loop calls model.train()",
        "model.train() before fit",
    )


def _trained(pair: Pair, at: int) -> Told:
    mine, other = pair.step(at)
    what = f"{len(mine.trained)} parameters are trained, {len(other.trained)} here"
    back = {b: a for a, b in pair.same.items()}
    lost = [number for number in mine.trained if pair.same.get(number, -1) not in other.trained]
    step, theirs, names, who = other, [pair.same.get(number, -1) for number in lost], pair.yours.names, ""
    if not lost:
        lost = [number for number in other.trained if back.get(number, -1) not in mine.trained]
        step, theirs, names, who = mine, [back.get(number, -1) for number in lost], pair.ours.names, " in yours"
    shown = listed([names.get(number, f"parameter {number}") for number in lost])
    if set(theirs) <= set(step.frozen):
        return what, f"frozen by name{who}: {shown}", "requires_grad_(False) for the same parameters in both"
    if not set(theirs) & set(step.held):
        return what, f"the optimizer was not given them{who}: {shown}", "give both optimizers the same parameters"
    return what, f"no gradient comes to them{who}: {shown}", "use the same parts of the net in both steps"


def _loss(pair: Pair, at: int) -> Told:
    found = [(a, b, a.loss, b.loss) for a, b in pair.passes(at) if a.loss is not None and b.loss is not None]
    a, b, mine, other = next(each for each in found if each[2] != each[3])
    values = [figure(one.samples[0]) if one.samples else "none" for one in (mine, other)]
    same = "the same batch" if set(a.inputs) & set(b.inputs) else "the same weights"
    what = f"{same}, another loss: {values[0]} in yours, {values[1]} here"
    if is_closed(pair, at) and begins_alike(pair, at):
        why = "the closure's first evaluation is the same, then the optimizer goes another way, as of clipped gradients"
        return what, why, "the same clipping inside the closure in both"
    if mine.is_near(other):
        return what, "by rounding: another precision, or another order of sums", "the same precision= and dtype in both"
    if (ratio := mine.ratio(other)) is not None and whole(ratio):
        return what, *_factor(ratio, len(pair.step(at)[0].passes), a.size)
    if a.draws != b.draws:
        return (
            what,
            f"the net draws random numbers, as dropout does, in {'yours' if a.draws else 'ours'} only",
            ("the same dropout in both"),
        )
    gradients = pair.other("raw", at)
    if mine.is_near(other, 0.01) and gradients and all(one.is_near(two, 0.1) for _, one, two in gradients):
        return what, "near, as are the gradients: another precision", "the same precision= (or autocast) in both"
    return (
        what,
        "the targets, the loss function or what is done to the logits before it are others",
        ("the same loss of the same logits and targets in both"),
    )


def _factor(ratio: float, passes: int, size: int) -> tuple[str, str]:
    """Why a loss is a whole number of times larger or smaller."""
    times = whole(ratio)
    if times == passes and ratio < 1:
        why = f"{times} times smaller: fit divides it by accumulate_grad_batches={passes}, and the step does so as well"
        return why, "return the loss of the batch undivided"
    if times == passes:
        return f"{times} times larger: yours divides it by the {passes} batches that are added up", f"loss / {passes}"
    if times == size:
        names = ("mean", "sum") if ratio > 1 else ("sum", "mean")
        why = f"times {figure(ratio)}, the size of the batch: reduction='{names[0]}' in yours, '{names[1]}' here"
        return why, f"reduction='{names[0]}'"
    return f"{times} times {'larger' if ratio > 1 else 'smaller'} here", "the same factor in both"


# ---- gradients and weights


def _clearing(pair: Pair, at: int) -> Told:
    mine, _ = pair.step(at)
    who = "ours" if mine.is_cleared else "yours"
    what = f"the gradients of the step before are still there in {who}"
    return what, "zero_grad() is missing: they are running sums", "optimizer.zero_grad() before each backward"


def _ratio(found: list[tuple[str, Sketch, Sketch]]) -> float | None:
    """What all are multiplied by."""
    ratios = [a.ratio(b) for _, a, b in found]
    known = [one for one in ratios if one is not None]
    return known[0] if len(known) == len(ratios) and known and max(known) < 1.001 * min(known) else None


def _gradients(pair: Pair, at: int) -> Told:
    found = pair.other("raw", at)
    what = f"the same loss, other gradients ({listed([name for name, _, _ in found])})"
    if all(a.is_near(b) for _, a, b in found):
        return what, "by rounding: another order of sums, or another precision", "the same precision= and dtype in both"
    if (ratio := _ratio(found)) is not None:
        return (
            what,
            f"{figure(ratio)} times yours: scaled after the loss",
            "the same factor (GradScaler, hooks, ranks) in both",
        )
    return (
        what,
        "the graph is another: something is detached, or computed under no_grad, in one only",
        ("the same parts of the step with gradient in both"),
    )


def _clipped(pair: Pair, at: int) -> Told:
    found = pair.other("gradients", at)
    if all(a.is_near(b) for _, a, b in found):
        return (
            "same random numbers, other gradients",
            "the norm is summed in another order",
            ("nothing, if the last bits may differ; or clip_grad_norm_ of the same parameters in the same order"),
        )
    norms = [math.hypot(*(one.norm for one in step.gradients.values())) for step in pair.step(at)]
    raw = [math.hypot(*(one.norm for one in step.raw.values())) for step in pair.step(at)]
    is_cut = [abs(norm - before) > 1e-6 * before for norm, before in zip(norms, raw, strict=True)]
    what = (
        f"the same gradients of backward, others at the step: norm {figure(norms[0])} in yours, {figure(norms[1])} here"
    )
    if is_cut == [True, False]:
        return what, "they are clipped or scaled in yours only", f"gradient_clip_val={figure(norms[0])}"
    if is_cut == [False, True]:
        return what, "they are clipped or scaled in ours only", "without gradient_clip_val"
    if _ratio(found) is not None:
        return what, "they are clipped to other norms", f"gradient_clip_val={figure(norms[0])}"
    return what, "they are clipped in other ways, by norm and by value", "gradient_clip_algorithm as in yours"


def _settings(pair: Pair, at: int) -> Told:
    others = other_settings(pair, at)
    word, found = next(iter(others.items()))
    name, mine, other = found[0]
    total = len(pair.step(at)[0].trained)
    of = f" for {name}" + f" and {len(found) - 1} more" * (len(found) > 1) if len(found) < total else ""
    said = {"lr": "learning rate"}.get(word, word)
    what = f"{said} {figure(mine)} in yours, {figure(other)} here{of}"
    kinds = [len({repr(one.get(word)) for one in step.settings.values()}) for step in pair.step(at)]
    if of and kinds[0] != kinds[1]:
        return what, "the parameters are grouped otherwise", "the same parameter groups in both"
    if word == "lr" and (told := learning_rate(pair, at)) is not None:
        return what, *told
    return what, "the optimizer is made with another value", f"{word}={figure(mine)}"


def _weights(pair: Pair, at: int) -> Told:
    found = pair.other("weights", at)
    what = f"the same gradients and settings, other weights ({listed([name for name, _, _ in found])})"
    mine, other = (next(iter(step.settings.values()), {}) for step in pair.step(at))
    flags = [
        word for word in sorted(IMPLEMENTATION) if word in ("foreach", "fused") and mine.get(word) != other.get(word)
    ]
    if flags and all(a.is_near(b) for _, a, b in found):
        return (
            what,
            f"by rounding: {flags[0]}={mine.get(flags[0])} in yours, {other.get(flags[0])} here",
            "the same in both",
        )
    return (
        what,
        "what the optimizer remembers is other: its state was loaded, kept or emptied in one only",
        ("a new optimizer in both, or optimizer.load_state_dict in both"),
    )


def _buffers(pair: Pair, at: int) -> Told:
    names = [name for name, _, _ in pair.other("buffers", at)]
    what = f"other buffers ({listed(names)})"
    why = "BatchNorm has seen other batches: the net is in train mode while one of them validates, or once more called"
    return what, why, "model.eval() before validation, model.train() after it"


REASONS: dict[str, Callable[[Pair, int], Told]] = {
    "net": _net, "initial weights": _initial, "weights between steps": _between, "optimizer": _optimizer,
    "accumulation": _accumulation,
    "random numbers": _random, "batch": batch, "modes": _modes, "trained parameters": _trained, "loss": _loss,
    "clearing": _clearing, "gradients": _gradients, "clipped gradients": _clipped, "settings": _settings,
    "weights": _weights, "buffers": _buffers,
}  # fmt: skip


def other_end(pair: Pair) -> Told | None:
    """What there is to say if one went on when the other had ended; None: nothing."""
    mine, other = len(pair.yours.steps), len(pair.ours.steps)
    if mine == other:
        return None
    sizes = Counter(one.size for one in (pair.yours if mine > other else pair.ours).passes() if one.size)
    what = f"{mine} steps in yours, {other} here"
    if len(sizes) == 2 and min(sizes.values()) <= abs(mine - other):
        return what, "the last batch of an epoch, a smaller one, is left out in one only", "drop_last= as in yours"
    return what, "one of them ends earlier", "the same number of epochs (max_epochs=) and of batches"
