"""Ctrl-C, SIGTERM and SIGUSR1: the current step is finished, the run is saved, training ends."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..training.run_state import RunState

_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]

# Several processes agree on a signal this often.
SECONDS_BETWEEN_CHECKS = 1.0


class SignalHandler:
    """Notes signals while a run is on, and lets it end after the current step.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}
        self._group: Any = None
        self._checked_at, self._checked_batch, self._next_batch = time.monotonic(), 0, 0

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
        """Let the run stop if any process has received a signal. All processes call this."""
        received = self.received
        if run.fabric.world_size > 1:
            received = self._agree(run.progress.total_batches, not run.progress.is_in_epoch)
        if received is not None and run.stop.signal is None:
            run.stop.signal = received

    def _agree(self, batches: int, is_between_epochs: bool) -> int | None:
        """Return a signal that any process has received, about once a second and between epochs.

        The processes talk on the CPU, so that no step waits for the device, and at a batch that all know.
        """
        if batches < self._next_batch and not is_between_epochs:
            return None
        if self._group is None:
            is_gloo = torch.distributed.get_backend() == "gloo"
            world = torch.distributed.group.WORLD
            self._group = world if is_gloo else torch.distributed.new_group(backend="gloo")
        until_next = 0
        if torch.distributed.get_rank() == 0:
            seconds = max(time.monotonic() - self._checked_at, 1e-6)
            rate = (batches - self._checked_batch) / seconds
            until_next = max(1, int(rate * SECONDS_BETWEEN_CHECKS))
        values = torch.tensor([self.received or 0, until_next])
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._group)
        received, until_next = values.tolist()
        self._checked_at, self._checked_batch = time.monotonic(), batches
        self._next_batch = batches + until_next
        return received or None
