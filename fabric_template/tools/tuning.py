"""Tuning: which settings make a training faster on this machine, measured one after another; what pays is kept."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import Misuse
from ..files.disk import replace_file
from ..loop import FabricLoop
from .apart import ask
from .jobs import Job, ObjectJob
from .knobs import BY_NAME, KNOBS, Knob, label
from .throughput import Facts, Speed, measure

WIDTH = 34
FEW = 4  # steps of an epoch, of which a larger batch leaves less
TOGETHER = ("tensors", "fused")  # of small batches from memory: either of them alone may be lost in the spread
CLEAR = 1.1  # times faster, each time it is measured: where windows waver by more than settings differ


@dataclass
class Trial:
    """One line of the table: a choice, and how fast it was or why it was not."""

    name: str
    choice: dict[str, Any]
    speed: Speed | None = None
    failure: str = ""
    is_short_of_memory: bool = False
    gain: float | None = None  # over the training as it is
    is_kept: bool = False

    def __str__(self) -> str:
        if self.speed is None:
            return f"{self.name:{WIDTH}} failed: {self.failure}"
        gain = "" if self.gain is None else f"{self.gain:.2f}x"
        return (
            f"{self.name:{WIDTH}}{_short(self.speed.rate):>10} {'+- ' + _short(self.speed.spread):>11}{gain:>8}"
            f"{self.speed.start:>8.1f} s{'  kept' * self.is_kept}"
        )


HEAD = f"{'':{WIDTH}}{'samples/s':>10} {'spread':>11}{'gain':>8}{'start':>10}"


@dataclass
class Tuned:
    """What came of it: all trials, and what to write."""

    trials: list[Trial] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)  # what pays, by the name of its knob
    gain: float = 1.0  # of all that together over the training as it is, measured twice: the smaller one
    notes: list[str] = field(default_factory=list)  # of what does not fit, or was not tried

    @property
    def words(self) -> dict[str, Any]:
        """What FabricLoop is to be given."""
        return {BY_NAME[name].word: value for name, value in self.choice.items() if BY_NAME[name].word}

    def lines(self, without: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
        """What to write in a script, (line, how it changes the numbers), for all that is chosen but for these."""
        for name, value in self.choice.items():
            if name not in without:
                yield BY_NAME[name].line(value), BY_NAME[name].numbers

    def save_csv(self, path: str | Path) -> None:
        """All trials as a table."""
        text = io.StringIO()
        names = [knob.name for knob in KNOBS]
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["trial", *names, "samples_per_second", "spread", "gain", "start_seconds", "kept", "failure"])
        for one in self.trials:
            speed = one.speed
            told = ["", "", "", ""] if speed is None else [speed.rate, speed.spread, one.gain, speed.start]
            rows.writerow(
                [one.name, *(one.choice.get(name) for name in names), *told, int(one.is_kept), one.failure or None]
            )
        replace_file(Path(path), text.getvalue().encode())

    def __str__(self) -> str:
        return "\n".join([HEAD, *map(str, self.trials), *self.said()])

    def said(self, without: Iterable[str] = ()) -> list[str]:
        """The lines below the table; what is in ``without`` has been written elsewhere."""
        notes = [f"note        {one}" for one in self.notes]
        if not self.choice:
            return [*notes, "result      nothing pays by more than its spread: leave it as it is"]
        found = [f"result      {self.gain:.2f}x: {label(self.choice)}"]
        for line, numbers in self.lines(without):
            found.append(f"write       {line}{'; ' * bool(numbers)}{numbers}")
        same = [name for name in self.choice if not BY_NAME[name].numbers]
        other = [name for name in self.choice if BY_NAME[name].numbers]
        for names, what in ((same, "same        the numbers stay"), (other, "other       the numbers change")):
            if names:
                found.append(f"{what}: {label({name: self.choice[name] for name in names})}")
        return [*notes, *found]


def tune(
    loop: FabricLoop, model: Any, train_dataloaders: Any = None, *, datamodule: Any = None, optimizer: Any = None,
    training_step: Callable | None = None, only: Iterable[str] | None = None, same_numbers: bool = False,
    max_batch_size: int | None = None, seconds: float = 2.0, time_limit: float = 120.0,
    show: Callable[[str], Any] | None = print,
) -> Tuned:  # fmt: skip
    """Try what could make this training faster, each in a process of its own; nothing here is trained or changed.

    Args:
        loop: what fit would be called on; its words are kept, its callbacks and loggers are not asked.
        model: as for fit.
        train_dataloaders: as for fit.
        datamodule: as for fit.
        optimizer: as for fit.
        training_step: as for fit.
        only: names of what to try, such as ["workers", "batch_size"]; None: all that applies here.
        same_numbers: leave out what changes the numbers.
        max_batch_size: the largest to try.
        seconds: how long each is measured, in five windows.
        time_limit: seconds after which a trial counts as hung.
        show: what is given each line of the table as it comes; None: nothing is shown.

    Raises:
        Misuse: where the training fails as it is, or for names that are none.

    Example:
        >>> import torch
        >>> from fabric_template import FabricLoop, TensorLoader
        >>> net = torch.nn.Linear(2, 1)
        >>> loader = TensorLoader(torch.zeros(64, 2), torch.zeros(64, 1), batch_size=8)
        >>> step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
        >>> given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "training_step": step}
        >>> tuned = tune(FabricLoop(accelerator="cpu"), net, loader, **given, only=["fused"], seconds=0.05, show=None)
        >>> [trial.name for trial in tuned.trials][:2]
        ['as it is', 'fused optimizer']
    """
    given = {"train_dataloaders": train_dataloaders, "datamodule": datamodule, "optimizer": optimizer,
             "training_step": training_step}  # fmt: skip
    job = ObjectJob(loop, model, {word: value for word, value in given.items() if value is not None})
    tuner = Tuner(job, seconds=seconds, time_limit=time_limit, show=show)
    return tuner.run(only, same_numbers=same_numbers, max_batch_size=max_batch_size)


class Tuner:
    """One word after another: what pays by more than its spread is kept while the next are tried."""

    def __init__(self, job: Job, *, seconds: float, time_limit: float, show: Callable[[str], Any] | None) -> None:
        self.job, self.seconds, self.time_limit = job, seconds, time_limit
        self.show = show or (lambda line: None)
        self.tuned = Tuned()
        self.base: Speed | None = None  # as it is
        self.best: Speed | None = None  # with what is kept

    def run(self, only: Iterable[str] | None, *, same_numbers: bool, max_batch_size: int | None) -> Tuned:
        """Try all that applies."""
        knobs = chosen_knobs(only, same_numbers)
        limits = {} if max_batch_size is None else {"max_batch_size": max_batch_size}
        self.show(HEAD)
        first, said = self.trial("as it is", {})
        if first.speed is None:
            raise Misuse(
                f"tune: the training fails as it is ({first.failure}); expected one that runs: try it with fit first"
                + f". It said: {' / '.join(said.splitlines())}" * bool(said)
            )
        self.base = self.best = first.speed
        facts = first.speed.facts
        for knob in knobs:
            self.turn(({knob.name: value} for value in knob.values(facts, limits)), knob.doubles)
        self.together([one.name for one in knobs], facts)
        if self.tuned.choice:
            self.check_again()
        size, samples = self.tuned.choice.get("batch_size"), facts.samples
        if size is not None and samples is not None and (steps := -(-samples // size)) < FEW:
            self.tuned.notes.append(
                f"batch size {size} leaves {steps} steps to an epoch: it takes more epochs to learn as much"
            )
        return self.tuned

    def together(self, names: list[str], facts: Facts) -> None:
        """What of TensorLoader and the fused optimizer was not clear of the spread: once more, with all that is kept."""
        missing = {
            name: True for name in TOGETHER if name not in self.tuned.choice and any(BY_NAME[name].values(facts, {}))
        }
        if missing and {*TOGETHER} <= {*names}:
            self.turn([missing], doubles=False)

    def trial(self, name: str, choice: Mapping[str, Any], work: Any = None) -> tuple[Trial, str]:
        """Measure one choice in a process of its own."""
        work = work or partial(measure, self.job, dict(choice), self.seconds, self.time_limit)
        answer = ask(work, self.time_limit)
        one = Trial(name, dict(choice), answer.result, answer.failure, answer.is_short_of_memory)
        if one.speed is not None and self.base is not None:
            one.gain = one.speed.rate / self.base.rate
        self.tuned.trials.append(one)
        self.show(str(one))
        return one, answer.said

    def turn(self, tries: Iterable[dict[str, Any]], doubles: bool) -> None:
        """Try the values of one knob, or of several at once, beside what is kept so far; the best of those that pay is kept."""
        assert self.best is not None
        best, kept, misses, has_won = self.best, None, 0, False
        for more in tries:
            one, _ = self.trial(label(more), {**self.tuned.choice, **more})
            pays = one.speed is not None and one.speed.pays(best)
            if one.speed is not None and (pays or self.wins(one, best, kept.choice if kept else self.tuned.choice)):
                kept, best, misses, has_won = one, one.speed, 0, not pays
            else:
                misses += 1
            if doubles and one.speed is None:
                why = "does not fit into memory" if one.is_short_of_memory else "fails"
                self.tuned.notes.append(f"{label(more)} {why}: {one.failure}")
            if doubles and (one.speed is None or misses == 2):
                break
        if kept is None:
            return
        again, _ = self.trial(f"{label(self.tuned.choice)}, again", self.tuned.choice)
        if not self.tuned.choice and again.speed is not None and again.speed.pays(self.best):
            self.base = again.speed  # it was slow by accident: gains are over this one
        if (
            again.speed is None or has_won or best.pays(again.speed)
        ):  # or the machine was slow for a while, and now is not
            self.tuned.choice, self.best, kept.is_kept = kept.choice, best, True
            self.show(f"kept        {kept.name}")
        elif again.speed.rate > self.best.rate:
            self.best = again.speed

    def wins(self, one: Trial, best: Speed, choice: Mapping[str, Any]) -> bool:
        """Whether it is faster by a tenth than its neighbour in time, three times of three: of a machine whose speed wavers."""
        if one.speed is None or one.speed.rate < CLEAR * best.rate:
            return False
        for _ in range(2):
            before, after = (self.trial(f"{label(each)}, again", each)[0].speed for each in (choice, one.choice))
            if before is None or after is None or after.rate < CLEAR * before.rate:
                return False
        return True

    def check_again(self) -> None:
        """Measure both ends once more, one after the other: a machine may be faster now than it was at the beginning."""
        assert self.best is not None
        assert self.base is not None
        while self.tuned.choice:
            ends = [
                self.trial(f"{name}, again", choice)[0]
                for name, choice in (("as it is", {}), ("all that pays", self.tuned.choice))
            ]
            before, after = (one.speed for one in ends)
            if before is not None and after is not None:
                # the smaller of two measurements, each beside its neighbour in time
                self.tuned.gain = min(after.rate / before.rate, self.best.rate / self.base.rate)
                if not after.pays(before) and self.tuned.gain < CLEAR:
                    self.tuned.notes.append(f"{label(self.tuned.choice)}: measured again, it does not pay")
                    self.tuned.choice = {}
                return
            size = self.tuned.choice.pop("batch_size", None)
            if after is not None or size is None:
                self.tuned.notes.append(f"measured again, it fails: {ends[after is None].failure}")
                self.tuned.choice = {}
                return
            self.tuned.notes.append(f"batch size {size} fits once and not again: {ends[1].failure}")
            smaller = [
                one.choice["batch_size"] for one in self.tuned.trials if one.speed and "batch_size" in one.choice
            ]
            if smaller := [one for one in smaller if one < size]:
                self.tuned.choice["batch_size"] = max(smaller)


def chosen_knobs(only: Iterable[str] | None, same_numbers: bool) -> list[Knob]:
    """Those that are to be tried, in their order.

    Example:
        >>> [knob.name for knob in chosen_knobs(None, same_numbers=True)]
        ['threads', 'workers', 'pin_memory', 'prefetch', 'tensors']
    """
    asked = None if only is None else [only] if isinstance(only, str) else list(only)
    if unknown := [name for name in asked or () if name not in BY_NAME]:
        raise Misuse(f"tune: there is no {', '.join(map(repr, unknown))} to try: expected some of {', '.join(BY_NAME)}")
    if same_numbers and (other := [name for name in asked or () if BY_NAME[name].numbers]):
        raise Misuse(f"tune: {', '.join(other)} changes the numbers: leave it out, or same_numbers")
    return [knob for knob in KNOBS if (asked is None or knob.name in asked) and not (same_numbers and knob.numbers)]


def _short(number: float) -> str:
    """A number with three digits, or as many as it has before its point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
