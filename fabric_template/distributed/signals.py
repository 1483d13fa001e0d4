"""Ctrl-C, SIGTERM and SIGUSR1: the current step is finished, the run is saved, training ends."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..training.run_state import RunState

_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]


class SignalHandler:
    """Notes signals while a run is on, and lets it end after the current step.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        previous = self._previous.get(number)
        is_own = callable(previous) and previous is not signal.default_int_handler
        if is_own:
            previous(number, frame)

    def check(self, run: RunState) -> None:
        """Let the run stop if any process has received a signal."""
        received = self.received
        if run.fabric.world_size > 1:
            flag = torch.tensor(received or 0, device=run.fabric.device)
            received = int(run.fabric.all_reduce(flag, reduce_op="max")) or None
        if received is not None and run.stop.signal is None:
            run.stop.signal = received
