"""Around: what is commonly wrong around a training loop: schedulers, samplers, checkpoints, and what makes it slow."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from .sources import LOOPS, Mistake, Source, Training, argument, called, calls, number, receiver, text, within

WITH_STATE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop")

# ---- schedulers and samplers


def _scheduler_first(source: Source) -> Iterator[Mistake]:
    """scheduler.step() before optimizer.step(), unguarded: the first learning rate is skipped."""
    for training in source.trainings:
        for loop in (training.loop, source.epochs_of(training)):
            for i, statement in enumerate(loop.body if loop is not None else ()):
                call = statement.value if isinstance(statement, ast.Expr) else None
                if not isinstance(call, ast.Call) or called(call) != "step" or call.args or call.keywords:
                    continue
                made = source.schedulers.get(receiver(call))
                optimizer = text(argument(made, 0, "optimizer")) if made is not None else ""
                steps = {one for one, name in training.steps.items() if name == optimizer}
                after = [one for later in loop.body[i + 1 :] for one in within(later) if one in steps] if loop else []
                if after and len(after) == len(steps):
                    yield Mistake(statement.lineno, (
                        "the scheduler is stepped before the optimizer: the first learning rate is never used"
                    ), f"{receiver(call)}.step() after {optimizer}.step()")  # fmt: skip


def _scheduler_elsewhere(source: Source) -> Iterator[Mistake]:
    """By epoch what was made for batches, by batch what was made for epochs."""
    for training in source.trainings:
        epochs = source.epochs_of(training)
        if epochs is None or source.frameworks:
            continue
        for name, made in source.schedulers.items():
            steps = [one for one in calls(epochs, "step", nested=False) if receiver(one) == name]
            everywhere = [one for one in calls(source.tree, "step") if receiver(one) == name]
            if len(source.made[name]) > 1 or not steps or len(everywhere) > len(steps) or made in within(epochs):
                continue
            kind = called(made)
            bare = [one for one in steps if source.parents.get(source.parents[one]) is training.loop]
            if not any(one in steps for one in within(training.loop)):
                if kind == "OneCycleLR" and re.search(r"len\(|steps_per_epoch=(?!1\b)", ast.unparse(made)):
                    yield Mistake(steps[0].lineno, (
                        "OneCycleLR was made for a step with each batch and is stepped with each epoch: it hardly begins"
                    ), f"{name}.step() after each optimizer.step()")  # fmt: skip
            elif bare and _is_for_epochs(made, kind):
                yield Mistake(bare[0].lineno, (
                    f"{kind} has the numbers of epochs and is stepped with each batch: soon the learning rate is nothing"
                ), f"{name}.step() once in each epoch, behind the loop of batches", is_advice=True)  # fmt: skip


def _is_for_epochs(made: ast.Call, kind: str) -> bool:
    every, gamma = number(argument(made, 1, "step_size")), number(argument(made, 2, "gamma"))
    if kind == "StepLR":
        return every is not None and every <= 10 and (gamma if gamma is not None else 0.1) <= 0.5
    return kind == "ExponentialLR" and (number(argument(made, 1, "gamma")) or 1.0) <= 0.9


def _same_order(source: Source) -> Iterator[Mistake]:
    """A DistributedSampler that shuffles every epoch alike."""
    if source.frameworks or "set_epoch" in source.code or not source.trainings:
        return
    for name, made in source.made_by(r"(^|\.)DistributedSampler$").items():
        shuffle = argument(made, 3, "shuffle")
        if isinstance(shuffle, ast.Constant) and shuffle.value is False or re.search("val|test|eval", name):
            continue
        given = [one for one in calls(source.tree, "DataLoader") if text(argument(one, 3, "sampler")) == name]
        loaders = {target for target, found in source.made.items() if {*found} & {*given}}
        loaders = {one for one in loaders if not re.search("val|test|eval", one)}
        loops = [source.epochs_of(one) for one in source.trainings if loaders & _names(one.loop)]
        if any(loop is not None and made not in within(loop) for loop in loops):
            yield Mistake(made.lineno, "each epoch has the same order: the sampler is not told which epoch it is", (
                f"{name}.set_epoch(epoch) at the beginning of each epoch"
            ))  # fmt: skip


def _names(loop: ast.AST) -> set[str]:
    return {text(one) for one in ast.walk(getattr(loop, "iter", loop))}


# ---- checkpoints


def _half_saved(source: Source) -> Iterator[Mistake]:
    """A checkpoint that a run goes on from, without what it needs."""
    loads = [one for one in calls(source.tree, "load") if receiver(one) == "torch"]
    goes_on = any(
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "epoch"
        for node in ast.walk(source.tree)
    )
    if source.frameworks or not loads or not goes_on or "start_epoch" not in source.code:
        return
    for call in calls(source.tree, "save"):
        if receiver(call) != "torch" or not call.args or not isinstance(saved := call.args[0], ast.Dict):
            continue
        keys = {key.value for key in saved.keys if isinstance(key, ast.Constant)}
        said = ast.unparse(saved)
        kinds = {called(made) for made in source.optimizers.values()}
        if "epoch" not in keys or ".state_dict()" not in said or None in saved.keys:
            continue
        if not re.search("optim|opt", said) and kinds & {*WITH_STATE}:
            kind = sorted(kinds & {*WITH_STATE})[0]
            yield Mistake(call.lineno, f"the checkpoint is resumed without the optimizer: {kind} forgets its averages", (
                '"optimizer": optimizer.state_dict() in it, and load_state_dict when it is resumed'
            ))  # fmt: skip
        elif source.schedulers and not re.search("sched|lr", said) and "last_epoch" not in source.code:
            name = next(iter(source.schedulers))
            yield Mistake(call.lineno, "the checkpoint is resumed without the scheduler, which begins anew", (
                f'"scheduler": {name}.state_dict() in it, and load_state_dict when it is resumed'
            ))  # fmt: skip
        if not re.search("rng|random|seed", source.code.partition("torch.save")[2]):
            yield Mistake(call.lineno, "no random state is in the checkpoint: a resumed run shuffles and drops otherwise than"
                          " one that was not interrupted", "torch.get_rng_state() in it, torch.set_rng_state() when it is"
                          " resumed", is_advice=True)  # fmt: skip


# ---- what makes it slow


def _read_back(source: Source) -> Iterator[Mistake]:
    """The loss is read back from the device in each step."""
    if not re.search(r"cuda|mps|accelerator", source.code):
        return
    for training in source.trainings:
        if source.epochs_of(training) is None and not isinstance(source.parents.get(training.loop), ast.FunctionDef):
            continue
        losses = {name for name in training.losses if name.isidentifier()}
        for call in calls(training.loop, "item", "cpu", "tolist", nested=False):
            if receiver(call) in losses and not _is_seldom(source, call, training):
                yield Mistake(call.lineno, f"{ast.unparse(call)} in each step waits for the device", (
                    f"add up {receiver(call)}.detach(), and read it back now and then"
                ), is_advice=True)  # fmt: skip
                break


def _is_seldom(source: Source, node: ast.AST, training: Training) -> bool:
    for up in source.above(node):
        if up is training.loop:
            return False
        if isinstance(up, (ast.If, *LOOPS)):
            return True
    return True


RULES: tuple[Callable[[Source], Iterator[Mistake]], ...] = (
    _scheduler_first, _scheduler_elsewhere, _same_order, _half_saved, _read_back,
)  # fmt: skip
