"""Terminal: a bar that is the last row of a terminal, and lines above it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from .lines import Lines
from .screen import WIDTH, Screen, columns

ROOM = 2  # columns of it behind the bar, where a terminal shows the ^C that is typed
LEAST_BAR = 12  # columns of a terminal's bar; values that leave it fewer are left out


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
            if columns(stream := getattr(sys, name)) is not None:
                self._found[name] = stream
                setattr(sys, name, Above(stream, self))
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]  # of which some only keep a place
        handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
        for handler in handlers:  # which hold the stream that they were made with
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
        width, values = (columns(self._out) or WIDTH) - ROOM - 1, meter["postfix"].split(", ")
        needs = len(tqdm.format_meter(**meter, ncols=0)) + LEAST_BAR
        while needs > width and values:
            needs -= len(", " + values.pop())  # the lines have them all
        self._text = tqdm.format_meter(**{**meter, "postfix": ", ".join(values)}, ncols=width, ascii=is_ascii)
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
