"""Parting: the first thing in which two recordings part, what comes of it, and what is other without any effect."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.errors import Misuse, MisuseOfType
from .batches import DRAWN, batch
from .pairing import PARTS, STATES, Pair, begins_alike, is_closed, random_parts
from .reasons import REASONS, other_end
from .recording import Recording

EFFECTS = {"batch": "another batch", "loss": "another loss", "optimizer": "another optimizer"}


@dataclass
class Finding:
    """Something in which two trainings differ."""

    step: int
    part: str
    what: str
    why: str = ""
    write: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}{': ' * bool(self.why)}{self.why}"


@dataclass
class Report:
    """What `compare` has found: the first thing that parts, then what comes of it."""

    yours: str
    ours: str
    steps: int
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Finding | None:
        """The first thing that parts; None: nothing does."""
        return self.findings[0] if self.findings else None

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"yours       {self.yours}", f"ours        {self.ours}"]
        if self.first is None:
            lines.append(f"same        nothing parts in {self.steps} step{'s' * (self.steps != 1)}")
        else:
            lines.append(f"first       {self.first}")
            lines += [f"write       {self.first.write}"] * bool(self.first.write)
            effects = ", ".join(finding.what for finding in self.findings[1:])
            lines += [f"then        step {self.findings[-1].step}: {effects}"] * bool(effects)
        return "\n".join([*lines, *(f"note        {note}" for note in self.notes)])


def compare(yours: Recording, ours: Recording) -> Report:
    """Name the first thing in which two recorded trainings part, with the likely reason and what to write.

    What is looked at, in the order in which one comes of the other: initial weights, batches per step, random numbers,
    batches, train and eval mode, trained parameters, losses, gradients before and after clipping, learning rates and the
    optimizer's other settings, weights, buffers. Random numbers, modes and gradients that were not cleared count as soon as
    something has come of them; otherwise they are a note.

    Args:
        yours: what `record` noted of your loop.
        ours: what it noted of the other one.
    """
    for recording in (yours, ours):
        if not isinstance(recording, Recording):
            raise MisuseOfType(
                f"compare got a {type(recording).__name__}: expected what record gives, with record('old') as old: ..."
            )
        if not recording.steps:
            raise Misuse(
                f"compare: no optimizer step was seen in {recording.name!r}: expected a training inside the with block, in"
                " this process (devices=1), with an optimizer of torch.optim"
            )
    pair = Pair(yours, ours)
    report = Report(str(yours), str(ours), len(pair))
    seen: dict[str, int] = {}
    for at in range(len(pair)):
        parts = [part for part, is_other in PARTS.items() if part not in seen and is_other(pair, at)]
        now = [part for part in PARTS if part in parts or (part in seen and part in STATES and PARTS[part](pair, at))]
        seen |= dict.fromkeys(parts, at)
        hard = [part for part in now if part not in STATES]
        if hard:
            report.findings = _findings(pair, at, now, seen)
            break
    if not report.findings and (end := other_end(pair)) is not None:
        report.findings = [Finding(len(pair), "length", *end)]
    report.notes = _notes(pair, seen, report)
    return report


def _findings(pair: Pair, at: int, parts: list[str], seen: dict[str, int]) -> list[Finding]:
    """The cause, then its effects in the same step."""
    hard = next(part for part in parts if part not in STATES)
    if hard == "loss" and "settings" in parts and is_closed(pair, at) and begins_alike(pair, at):
        hard = "settings"
    causes = [part for part in parts if part in STATES and hard in STATES[part] and _is_cause(pair, at, part, hard)]
    first = min(causes, key=lambda part: part == "random numbers") if causes else hard
    begins = seen[first] if first in STATES else at
    findings = [Finding(begins, first, *REASONS[first](pair, begins))]
    left_out = {
        first,
        *STATES,
        *(["clipped gradients"] if "gradients" in parts else []),
        *(parts if first == "net" else []),
    }
    return findings + [Finding(at, part, EFFECTS.get(part, f"other {part}")) for part in parts if part not in left_out]


def _is_cause(pair: Pair, at: int, state: str, effect: str) -> bool:
    if state != "random numbers":
        return True
    if effect == "loss":  # of equal batches
        return any(a.draws and b.draws for a, b in pair.passes(at))
    return batch(pair, at)[1] in DRAWN


def _notes(pair: Pair, seen: dict[str, int], report: Report) -> list[str]:
    if report.first is not None:
        return []
    if seen.get("random numbers") == 0 and not {"torch", "cuda"} & {*random_parts(pair, 0)}:
        del seen["random numbers"]  # two processes, and Python's and NumPy's were never seeded
    return [f"{Finding(at, part, REASONS[part](pair, at)[0])}; nothing has come of it" for part, at in seen.items()]
