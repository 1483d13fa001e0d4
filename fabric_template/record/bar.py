"""Bar: one bar for training and validation, on rank zero, in a terminal or a notebook."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..core.said import is_interactive

SECONDS_BETWEEN = 0.2  # a bar that is drawn more often costs steps and shows no more


class Bar:
    """A tqdm bar that looks at the clock in each step, and at the values only when it is drawn.

    Example:
        >>> bar = Bar()
        >>> bar.start("epoch 0", 10); bar.advance(1); bar.close()
    """

    def __init__(self, values: Callable[[], Mapping[str, float]] = dict) -> None:
        self.enabled, self._values = False, values
        self._bar: Any = None
        self._due = 0.0

    def show(self) -> None:
        """Let it be seen."""
        self.enabled = True

    def start(self, title: str, total: int | float, done: int = 0) -> None:
        """Begin an epoch of so many batches, or an endless one."""
        if not self.enabled:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text, not a warning
            from tqdm.auto import tqdm

        self.close()
        known = None if total == float("inf") else total
        self._bar = tqdm(
            desc=title, total=known, initial=done, leave=False, dynamic_ncols=True, mininterval=0.0, maxinterval=0
        )
        self._due = time.monotonic() + SECONDS_BETWEEN

    def advance(self, done: int) -> None:
        """So many batches are done: draw the bar, if it is time to."""
        if self._bar is None or time.monotonic() < self._due:
            return
        self._bar.n = done
        self._bar.set_postfix({name: f"{value:.4g}" for name, value in self._values().items()}, refresh=False)
        self._bar.refresh()
        self._due = time.monotonic() + SECONDS_BETWEEN

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def can_show_bar() -> bool:
    """Whether somebody sees a bar: a terminal, or a notebook."""
    return is_interactive() or sys.stderr.isatty()


def summarize(net: nn.Module) -> str:
    """The table of a module's children and their parameters.

    Example:
        >>> print(summarize(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
        name  type    parameters
        0     Linear  9
        1     ReLU    0
              total   9 (9 trainable)
    """
    rows = [("name", "type", "parameters")]
    for name, child in list(net.named_children()) or [("", net)]:
        rows.append((name, type(child).__name__, f"{sum(p.numel() for p in child.parameters()):,}"))
    everything = sum(p.numel() for p in net.parameters())
    trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
    rows.append(("", "total", f"{everything:,} ({trainable:,} trainable)"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count}" for name, kind, count in rows)
