"""Finished: what the files of a run show that is wrong with it, or worth a look; each only where the figures say so."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .columns import Column
from .runs import Listed, checkpoints_of, named
from .typed import program, shown

FEW = 5  # epochs, below which a curve says little
CLEARLY = 0.1  # by which part of itself a value has risen or fallen


@dataclass(frozen=True)
class Fact:
    """What the figures of a run show, and what to do; advice where the run may be meant so."""

    what: str
    write: str
    is_advice: bool = False


def read_run(folder: str | os.PathLike) -> list[Fact]:
    """Read what a run has left and say what its figures show: a loss that is not finite, nothing learned, cut short.

    Example:
        >>> from tempfile import mkdtemp
        >>> from fabric_template import CSVLogger
        >>> logger = CSVLogger(mkdtemp(), name="digits")
        >>> for epoch, loss in enumerate([0.5, float("nan"), float("nan")]):
        ...     logger.log_epoch({"epoch": epoch, "step": 10, "train_loss": loss, "val_loss": loss})
        >>> read_run(logger.log_dir)[0].what
        'train_loss is not finite from epoch 1 on'
    """
    run = named(str(folder))
    return [fact for rule in RULES for fact in rule(run)]


def summary(run: Listed) -> str:
    """A line on the run itself."""
    return f"{run.label}, {run.state}, {run.epochs} epoch{'s' * (run.epochs != 1)}"


def _cut(run: Listed) -> Iterator[Fact]:
    """Damaged, or ended before its end."""
    if run.damage:
        yield Fact(run.damage, f"{program()} verify {shown(checkpoints_of(run.folder))}")
    of = (
        f" of {run.words['max_epochs']}"
        if type(run.words.get("max_epochs")) is int and run.words["max_epochs"] > 0
        else ""
    )
    if run.state in ("interrupted", "failed"):
        last = checkpoints_of(run.folder) / "last.ckpt"
        said = {"failed": "it failed", "interrupted": "it was interrupted, or killed,"}[run.state]
        go_on = (
            f"{program()} fit --run {shown(run.folder)} --resume last"
            if last.is_file()
            else "begin it again, it left no last.ckpt"
        )
        yield Fact(f"{said} after {run.epochs}{of} epochs", go_on)
    elif not run.rows and run.state == "finished":
        yield Fact("it has no row of metrics: no epoch was ended", "look for the error in what it printed")


def _not_finite(run: Listed) -> Iterator[Fact]:
    for name in dict.fromkeys(name for row in run.rows for name in row):
        if Column.of(name).kind != "loss":
            continue
        cells = [(row.get(name) or "").strip().lower() for row in run.rows]
        wrong = [i for i, cell in enumerate(cells) if cell.lstrip("+-") in ("nan", "inf", "infinity")]
        if wrong:
            row = run.rows[wrong[0]].get("epoch") or wrong[0]
            lasting = "from" if wrong == [*range(wrong[0], len(cells))] and len(wrong) > 1 else "in"
            yield Fact(f"{name} is not finite {lasting} epoch {row}{' on' * (lasting == 'from')}", (
                "a lower learning rate, gradient_clip_val=1.0; detect_anomaly=True names the operation"
            ))  # fmt: skip
            return  # the others come of it


def _learning_rate(run: Listed) -> Iterator[Fact]:
    rates = [name for name in run.metrics if Column.of(name).kind == "learning rate"]
    for name in rates:
        if run.values(name) and not any(run.values(name)):
            yield Fact(
                f"{name} is 0 in all epochs: nothing is trained", "the scheduler's warm-up, or lr=, of the optimizer"
            )


def _train_loss(run: Listed) -> Iterator[Fact]:
    name = _training_loss(run)
    values = run.values(name) if name else []
    if len(values) < 3 or len(values) < len(run.rows):
        return
    if len(set(values)) == 1:
        yield Fact(f"{name} is {values[0]:.4g} in all {len(values)} epochs: nothing is learned", (
            "requires_grad of the parameters, what the optimizer was given, and lr="
        ))  # fmt: skip
    elif values[0] > 0 and min(values) == values[0] and values[-1] > values[0] * (1 + CLEARLY):
        yield Fact(f"{name} rises: {values[0]:.4g} in the first epoch, {values[-1]:.4g} in the last, never below the first", (
            "a lower learning rate, or warm-up"
        ))  # fmt: skip


def _training_loss(run: Listed) -> str | None:
    columns = [Column.of(metric) for metric in run.metrics]
    return next((one.name for one in columns if (one.split, one.kind) == ("train", "loss")), None)


def _validation(run: Listed) -> Iterator[Fact]:
    columns = [Column.of(name) for name in run.metrics]
    splits = {one.split for one in columns}
    if "train" in splits and "val" not in splits:
        yield Fact("nothing was ever validated: only the training's own figures are known", (
            "a val loader and a validation_step for fit"
        ), is_advice=True)  # fmt: skip
        return
    name = next((one.name for one in columns if (one.split, one.kind) == ("val", "loss")), None)
    curve = run.curve(name) if name else []
    best = min(curve, key=lambda point: point[1], default=None)
    if name is None or best is None or len(curve) < FEW:
        return
    last = curve[-1]
    worse = last[1] > best[1] + CLEARLY * abs(best[1]) and last[0] - best[0] > 1
    if worse and best[0] == curve[0][0]:
        yield Fact(f"{name} was best in the first epoch ({best[1]:.4g}) and is {last[1]:.4g} in the last", (
            "a lower learning rate; best.ckpt has the first epoch's weights"
        ))  # fmt: skip
    elif worse and _fell(run, best[0]):
        what = f"{name} was {best[1]:.4g} in epoch {best[0]} and is {last[1]:.4g} in the last, while the training's loss fell"
        yield Fact(f"it overfits: {what}", f'load="best", and callbacks=[EarlyStopping("{name}")]', is_advice=True)


def _fell(run: Listed, epoch: int) -> bool:
    """Whether the training's loss fell from there to the end."""
    name = _training_loss(run)
    curve = dict(run.curve(name)) if name else {}
    if epoch not in curve or not curve:
        return False
    then, last = curve[epoch], [*curve.values()][-1]
    return math.isfinite(then) and last < then


def _monitor(run: Listed) -> Iterator[Fact]:
    monitor = run.words.get("monitor")
    if isinstance(monitor, str) and run.rows and not any(monitor in row for row in run.rows):
        logged = ", ".join(run.metrics) or "nothing"
        yield Fact(f"monitor={monitor!r} was never logged, so that no checkpoint is the best; logged were {logged}", (
            f"monitor={run.metric!r}" if run.metric else "self.log of that name"
        ))  # fmt: skip


RULES: tuple[Callable[[Listed], Iterator[Fact]], ...] = (
    _cut, _not_finite, _learning_rate, _train_loss, _validation, _monitor,
)  # fmt: skip
