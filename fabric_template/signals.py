"""Signals: Ctrl-C and SIGTERM end a run after the step at hand; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Signals:
    """While inside, notes the first SIGINT or SIGTERM in `received` and gives way to the second.

    Handlers can only be set in the main thread; elsewhere nothing changes. On leaving, the handlers are as found.

    Example:
        >>> with Signals() as signals:
        ...     signal.raise_signal(signal.SIGINT)
        >>> signals.received == signal.SIGINT
        True
    """

    caught = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._found: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.caught:
                handler = signal.getsignal(number)
                # somebody's own handler stays; only Python's and the system's defaults are replaced
                if handler in (signal.default_int_handler, signal.SIG_DFL):
                    self._found[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._found.items():
            signal.signal(number, handler)
        self._found = {}

    def exception(self) -> BaseException:
        """What ends the program as the signal would have: KeyboardInterrupt, or SystemExit with 128 + its number."""
        return KeyboardInterrupt() if self.received == signal.SIGINT else SystemExit(128 + int(self.received or 0))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._found[number])
