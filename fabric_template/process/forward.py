"""Forward: signals to a process that has started ranks reach them, too."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any

from .signals import CAUGHT, Handlers


class Forward(Handlers):
    """While ranks that we have started train, passes the first signal on to them, and waits: they save, and end.

    A forked rank that does not listen yet ends at once, wherever it waits. So does a script that is the first rank itself,
    once the others are gone: nobody would be left to end them.
    """

    passes_on = True

    def __init__(self, launcher: Any = None) -> None:
        super().__init__()
        self.launcher = launcher
        self.received: int | None = None

    def __enter__(self) -> Forward:
        self._others = {child.pid for child in multiprocessing.active_children()}
        register_after_fork(self, Forward._in_child)
        super().__enter__()
        return self

    def _in_child(self) -> None:
        """Python's own handler waits for torch to return, and torch takes a rank's KeyboardInterrupt for its good end."""
        if os.getppid() == self._pid:  # a rank, and not one of its workers
            for number in self._found:
                signal.signal(number, signal.SIG_DFL)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Pass it on."""
        if self.received is not None:
            self.at_once(number, frame)
            return
        self.received = number
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid not in self._others:
                os.kill(child.pid, number)
        if scripts := getattr(self.launcher, "procs", ()):
            for process in scripts:
                process.kill()
            self.at_once(number, frame)
        self.theirs(number, frame)

    def meaning(self, error: Exception) -> int | None:
        """The signal for which the ranks ended with this error; None for another cause."""
        code = getattr(error, "exit_code", None) or 0
        return next((number for number in CAUGHT if number in (self.received, -code, code - 128)), None)
