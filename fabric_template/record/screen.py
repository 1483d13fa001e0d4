"""Screen: where bar and lines are seen: a log file; a terminal and the page of a notebook are kinds of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.run import Run
    from .lines import Lines

SECONDS_BETWEEN = 0.2  # what is drawn more often costs steps and shows no more
WIDTH = 80  # of a terminal that does not say how wide it is
IN_WORDS = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"  # a bar without the bar


class Screen:
    """A log file, or whoever reads standard output: a line per epoch; of a long one, a line a minute in the bar's place."""

    patience = 60.0  # seconds more between two draws

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def begin(self) -> None:
        """A bar is going to be drawn."""

    def draw(self, meter: dict[str, Any]) -> None:
        """Draw the bar; a meter is what tqdm's ``format_meter`` takes."""
        from tqdm import tqdm

        self.say(tqdm.format_meter(**meter, bar_format=IN_WORDS))

    def row(self, row: Mapping[str, Any], left: float | None) -> None:
        """An epoch is over: a line in the table, and above it the names of its columns, where they are new."""
        self.say("\n".join(self.lines.add(row, left, columns(sys.stdout))))

    def say(self, text: str) -> None:
        """Print it."""
        with suppress(OSError, ValueError):  # a reader who has gone away costs the lines, not the run
            print(text, flush=True)

    def close(self) -> None:
        """Nothing comes any more; what was drawn stays."""


def columns(stream: Any) -> int | None:
    """How wide a terminal is; None: it is none."""
    try:
        if not stream.isatty():
            return None
    except (ValueError, AttributeError):  # closed, or none at all
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):
        return WIDTH


def seconds_left(run: Run, row: Mapping[str, Any]) -> float | None:
    """How long training is going to take, as the last epochs went; None: nobody knows."""
    rows = run.history.rows[-5:]
    epochs, steps = run.stop.limits()
    each = sum(row["time"] for row in rows) / len(rows)
    left = [(epochs - row["epoch"] - 1) * each] if epochs != -1 else []
    if steps != -1 and (per_epoch := run.at.steps_in_epoch):
        left.append((steps - row["step"]) / per_epoch * each)
    if (deadline := run.stop.signals.deadline) is not None:
        left.append(deadline - time.monotonic())
    return min(left, default=None)
