"""Listing: the verb runs as it is typed: all of them, two compared, the best; as text, as JSON, as a page."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .columns import Column
from .runs import Listed, best_run, checkpoints_of, diff_runs, find, named

USAGE = """%(prog)s [FOLDER] [--metric METRIC] [--json | --html PAGE]
       %(prog)s diff RUN RUN [--json]
       %(prog)s best [FOLDER] --metric METRIC [--json]"""


def runs_verb(program: str, description: str, argv: list[str]) -> str:
    """What is printed for these words."""
    parser = argparse.ArgumentParser(prog=program, usage=USAGE, description=description, allow_abbrev=False)
    parser.add_argument("WORDS", nargs="*", help="the root of the logs (logs), or diff and two runs, or best")
    parser.add_argument("--metric", help="by what a run is judged; by default its monitor, or what it validated")
    parser.add_argument("--json", action="store_true", help="for programs: all that is known")
    parser.add_argument("--html", metavar="PAGE", help="write a page to look at: table, sorting, curves; one file")
    given = parser.parse_args(argv)
    what, *rest = given.WORDS or ["logs"]
    if what == "diff":
        if len(rest) != 2:
            parser.error("diff takes two runs: their folders, or their names and versions such as digits/version_0")
        found = diff_runs(named(rest[0]), named(rest[1]))
        return to_json(found) if given.json else _diff(found)
    if what == "best":
        if given.metric is None or len(rest) > 1:
            parser.error("best takes --metric, such as --metric val_acc, and no more than one folder")
        best = best_run(find(*rest), given.metric)
        return to_json(best.as_dict(given.metric)) if given.json else _best(best, given.metric)
    if rest:
        parser.error(f"there is no {what!r} {' '.join(rest)!r}: expected one folder, diff or best")
    runs = find(what)
    if given.html is not None:
        from .page import write_page

        write_page(runs, Path(given.html), given.metric)
        return f"page        {given.html}: {len(runs)} run{'s' * (len(runs) != 1)}"
    if given.json:
        return to_json([run.as_dict(given.metric) for run in runs])
    return table([_row(run, given.metric) for run in runs], _HEAD) if runs else f"there are no runs in {what}"


def to_json(value: Any) -> str:
    """As every reader of JSON takes it: what is no number is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=1, allow_nan=False)


_HEAD = ("run", "state", "epochs", "best", "trained", "changed")


def _row(run: Listed, metric: str | None) -> tuple[str, ...]:
    metric = metric or run.metric
    best = run.best(metric) if metric else None
    score = f"{metric} {best[0]:.4g} in epoch {best[1]}" if best else ""
    changed = ", ".join(f"{word}={value}" for word, value in run.changed.items())
    return (run.label, run.state, str(run.epochs), score, duration(run.seconds), changed)


def duration(seconds: float) -> str:
    """Hours or minutes or seconds, as one says it.

    Example:
        >>> duration(5000.0), duration(61.0), duration(2.345), duration(0)
        ('1 h 23 min', '1 min 1 s', '2.3 s', '')
    """
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.1f} s" if seconds else ""


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Columns below each other; in a terminal no line is longer than that."""
    lines = [[clean(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    shown = ["  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in shown)


def clean(text: Any) -> str:
    """A text on one line, without what would move a terminal's cursor: a file may say anything."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def _best(run: Listed, metric: str) -> str:
    value, epoch = run.best(metric) or (math.nan, 0)
    lines = [f"best        {metric} {value:.6g} in epoch {epoch}", f"run         {run.folder}"]
    for name in ("best.ckpt", "last.ckpt"):
        if (path := checkpoints_of(run.folder) / name).is_file():
            lines.append(f"checkpoint  {path}")
    return "\n".join(clean(line) for line in lines)


def _diff(found: dict[str, Any]) -> str:
    def said(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)

    rows: list[tuple[str, ...]] = [(word, said(pair[0]), said(pair[1])) for word, pair in found["words"].items()]
    rows += [(word, said(found[word][0]), said(found[word][1])) for word in ("state", "epochs")]
    rows.append(("trained", duration(found["seconds"][0]), duration(found["seconds"][1])))
    for metric, parts in found["metrics"].items():
        for which in ("last", "best") if Column.of(metric).kind != "learning rate" else ("last",):
            epochs = [f" in epoch {epoch}" * (which == "best" and epoch is not None) for epoch in parts["best_epoch"]]
            pair = [said(value) + epoch for value, epoch in zip(parts[which], epochs, strict=True)]
            rows.append((f"{which} {metric}", *pair))
    lines = [table(rows, ("", *found["runs"])), ""]
    for metric, parts in found["metrics"].items():
        if not parts["epochs_in_both"]:
            lines.append(f"{metric}: no epoch is in both")
        elif parts["first_difference"] is None:
            lines.append(f"{metric}: equal in all {parts['epochs_in_both']} epochs that are in both")
        else:
            most = f"most in epoch {parts['largest_difference_epoch']}, by {parts['largest_difference']:.4g}"
            lines.append(f"{metric}: other from epoch {parts['first_difference']} on, {most}")
    return "\n".join([lines[0], *map(clean, lines[1:])])
