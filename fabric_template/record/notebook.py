"""Notebook: one output of a cell that holds the table and the bar."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from typing import Any

from .lines import Lines
from .screen import IN_WORDS, SECONDS_BETWEEN, Screen

MOST_ROWS = 20  # of a page's table while it grows; all of them stay at the end, to be scrolled


class Page(Screen):
    """A notebook: one output that holds the table and, below it, the bar. No widget, so nothing of it is lost when saved."""

    patience = 0.0

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._handle: Any = None
        self._meter: dict[str, Any] = {}
        self._said: list[str] = []
        self._due = 0.0

    def draw(self, meter: dict[str, Any]) -> None:
        """The bar, and all that has come since the last time."""
        self._meter = meter
        self._show()

    def row(self, row: Mapping[str, Any], left: float | None) -> None:
        """A row of the table; of quick epochs several at a time."""
        self.lines.add(row, left)
        if time.monotonic() >= self._due:
            self._show()

    def say(self, text: str) -> None:
        """It stands below the table."""
        self._said.append(text)
        self._show()

    def close(self) -> None:
        """Every row, and the bar as it stands."""
        if self._meter or self.lines.rows:
            self._show(most=None)

    def _show(self, most: int | None = MOST_ROWS) -> None:
        from IPython.display import display
        from tqdm import tqdm

        self._due = time.monotonic() + SECONDS_BETWEEN
        table = self.lines.html(most)
        if len(self.lines.rows) > MOST_ROWS and most is None:
            table = f'<div style="max-height: 30em; overflow-y: auto">{table}</div>'
        parts, texts = [table], [self.lines.text(most), *self._said]
        parts += [f"<div>{html.escape(text)}</div>" for text in self._said]
        if self._meter:
            texts.append(tqdm.format_meter(**self._meter, ncols=100))
            text = tqdm.format_meter(**self._meter, bar_format=IN_WORDS)
            total = self._meter["total"]
            bar = f'<progress value="{self._meter["n"]}" max="{total}"></progress> ' if total else ""
            parts.append(f'<div style="font-family: monospace; white-space: pre">{bar}{html.escape(text)}</div>')
        data = {"text/html": "\n".join(filter(None, parts)), "text/plain": "\n".join(filter(None, texts))}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
