"""Bar: one bar for a whole fit, or for a validation, test or prediction by itself, on rank zero."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from .screen import SECONDS_BETWEEN, Screen, columns

if TYPE_CHECKING:
    from .lines import Lines


class Bar:
    """A bar that looks at the clock in each step, and at the values only when it is drawn.

    Args:
        values: what stands beside it.

    Example:
        >>> bar = Bar()
        >>> bar.start("epoch 0/1", 10); bar.advance(1); bar.close()
    """

    def __init__(self, values: Callable[[], Mapping[str, float]] = dict) -> None:
        self.enabled, self._values = False, values
        self._screen: Screen | None = None
        self._is_up = False
        self._due = 0.0
        self._words, self._total, self._done = "", 0.0, 0
        self._first, self._began = 0, 0.0  # with how many batches this began, and when
        self._beside: float | None = None  # batches of the validation that is on
        self._beside_done = 0

    def show(self, screen: Screen) -> None:
        """Let it be seen, where there is a place for it."""
        self._screen, self.enabled = screen, True

    def start(self, words: str, total: int | float, done: int = 0) -> None:
        """So many batches begin, or endlessly many: the first, or the next epoch's."""
        if not self.enabled or self._screen is None:
            return
        self._words, self._total, self._done, self._first = words, total, done, done
        self._began = time.monotonic()
        is_new, self._is_up = not self._is_up, True
        self._due = self._began + self._screen.patience + SECONDS_BETWEEN
        if is_new:
            self._screen.begin()
            if not self._screen.patience:  # at once: the first batch may take long
                self._draw()

    def advance(self, done: int) -> None:
        """So many batches are done, of the validation if one is on: draw the bar, if it is time to."""
        if time.monotonic() < self._due or not self._is_up:
            return
        if self._beside is None:
            self._done = done
        else:
            self._beside_done = done
        self._draw()

    def validate(self, total: int | float, done: int) -> None:
        """Inside a fit a validation begins, behind so many batches: they stay, and its own stand in words."""
        self._beside, self._beside_done, self._done = total, 0, done

    def go_on(self) -> None:
        """The validation is over."""
        self._beside = None

    def close(self, done: int = 0, words: str = "") -> None:
        """Leave it as it stands; complete in other words when all went well, also if that was in an epoch's middle."""
        if self._is_up:
            self._done = done
            if words:
                self._words, self._beside, self._total = words, None, done
            if self._screen is not None and not self._screen.patience:
                self._draw()
            self._is_up = False
        if self._screen is not None:
            self._screen.close()
            self._screen, self.enabled = None, False

    def _draw(self) -> None:
        words = self._words
        if self._beside is not None:
            total = "" if self._beside == float("inf") else f"/{self._beside}"
            words += f", validating {self._beside_done}{total}"
        assert self._screen is not None
        self._screen.draw({
            "n": self._done,
            "total": None if self._total == float("inf") else self._total,
            "elapsed": time.monotonic() - self._began,
            "initial": self._first,
            "prefix": words,
            "postfix": ", ".join(f"{name}={value:.4g}" for name, value in self._values().items()),
        })  # fmt: skip
        self._due = time.monotonic() + self._screen.patience + SECONDS_BETWEEN


def find_screen(lines: Lines) -> Screen:
    """Where this process is seen. A rank that was forked off a notebook has no page of its own.

    Example:
        >>> from fabric_template.record.lines import Lines
        >>> type(find_screen(Lines())).__name__ in ("Screen", "Terminal", "Page")
        True
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None and multiprocessing.parent_process() is None:
        from .notebook import Page

        return Page(lines)
    if columns(sys.stderr) is None:
        return Screen(lines)
    from .terminal import Terminal

    return Terminal(lines)


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
        kinds = [base.__name__ for base in type(child).__mro__]
        kind = kinds[0].removeprefix("FSDP") if "FSDPModule" in kinds else kinds[0]  # which fully_shard has put there
        rows.append((name, kind, f"{sum(p.numel() for p in child.parameters()):,}"))
    everything = sum(p.numel() for p in net.parameters())
    trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
    rows.append(("", "total", f"{everything:,} ({trainable:,} trainable)"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count}" for name, kind, count in rows)
