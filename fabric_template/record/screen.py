"""Screen: where bar and lines are seen: a log file, a terminal, the page of a notebook."""

from __future__ import annotations

import html
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .lines import Lines

SECONDS_BETWEEN = 0.2  # what is drawn more often costs steps and shows no more
WIDTH = 80  # of a terminal that does not say how wide it is
ROOM = 2  # columns of it behind the bar, where a terminal shows the ^C that is typed
IN_WORDS = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"  # a bar without the bar
LEAST_BAR = 12  # columns of a terminal's bar; values that leave it fewer are left out
MOST_ROWS = 20  # of a page's table while it grows; all of them stay at the end, to be scrolled


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
        self.say("\n".join(self.lines.add(row, left, _columns(sys.stdout))))

    def say(self, text: str) -> None:
        """Print it."""
        with suppress(OSError, ValueError):  # a reader who has gone away costs the lines, not the run
            print(text, flush=True)

    def close(self) -> None:
        """Nothing comes any more; what was drawn stays."""


class Terminal(Screen):
    """The bar is the last row; what is printed while it is up, by whomever, stands above it."""

    patience = 0.0

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._out = sys.stderr
        self._text, self._width = "", 0  # the bar; how much of it is to be seen
        self._in_line = False  # of somebody else, which has no end yet
        self._found: dict[str, Any] = {}
        self._handlers: list[tuple[logging.StreamHandler, Any]] = []

    def begin(self) -> None:
        """Stand between those who print and the terminal, until `close`."""
        for name in ("stdout", "stderr"):
            if _columns(stream := getattr(sys, name)) is not None:
                self._found[name] = stream
                setattr(sys, name, Above(stream, self))
        named = logging.root.manager.loggerDict.values()
        for logger in (logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))):
            for handler in logger.handlers:  # which hold the stream that they were made with
                for name, stream in self._found.items():
                    if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                        self._handlers.append((handler, handler.setStream(getattr(sys, name))))

    def draw(self, meter: dict[str, Any]) -> None:
        """Over what was drawn last."""
        from tqdm import tqdm

        try:
            "█".encode(self._out.encoding or "ascii")
            is_ascii = False
        except UnicodeEncodeError:
            is_ascii = True
        width, values = (_columns(self._out) or WIDTH) - ROOM - 1, meter["postfix"].split(", ")
        while len(tqdm.format_meter(**meter, ncols=0)) + LEAST_BAR > width and values:
            values.pop()  # the lines have them all
            meter = {**meter, "postfix": ", ".join(values)}
        self._text = tqdm.format_meter(**meter, ncols=width, ascii=is_ascii)
        if not self._in_line:
            self._put("\r" + self._text + " " * (self._width - len(self._text)))
            self._width = len(self._text)

    def erase(self) -> None:
        """Take the bar away, for what is about to be printed."""
        if self._width:
            self._put("\r" + " " * (self._width + ROOM) + "\r")
            self._width = 0

    def printed(self, text: str) -> None:
        """The bar again, below what was printed; below an unfinished line it waits."""
        self._in_line = not text.endswith("\n")
        if self._text and not self._in_line:
            self._put(self._text)
            self._width = len(self._text)

    def close(self) -> None:
        """Leave the bar as it stands, and give back what was taken."""
        for name, stream in self._found.items():
            if getattr(getattr(sys, name), "stream", None) is stream:  # else somebody has put his own there
                setattr(sys, name, stream)
        for handler, stream in self._handlers:
            if isinstance(handler.stream, Above):
                handler.setStream(stream)
        self._found, self._handlers = {}, []
        if self._width:
            self._put("\n")
        self._text, self._width = "", 0

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone costs the bar, not the run
            self._out.write(text)
            self._out.flush()


class Above:
    """A stream of the terminal that keeps the bar below what is written."""

    def __init__(self, stream: Any, terminal: Terminal) -> None:
        self.stream, self._terminal = stream, terminal

    def write(self, text: str) -> int:
        """Write it where the bar stood, and the bar below."""
        self._terminal.erase()
        count = self.stream.write(text)
        if text:
            self.stream.flush()
            self._terminal.printed(text)
        return count

    def writelines(self, texts: Any) -> None:
        """Write them as one."""
        self.write("".join(texts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


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


def find_screen(lines: Lines) -> Screen:
    """Where this process is seen. A rank that was forked off a notebook has no page of its own.

    Example:
        >>> type(find_screen(Lines())).__name__ in ("Screen", "Terminal", "Page")
        True
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None and multiprocessing.parent_process() is None:
        return Page(lines)
    return Screen(lines) if _columns(sys.stderr) is None else Terminal(lines)


def _columns(stream: Any) -> int | None:
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
