"""Signals: Ctrl-C, SIGTERM and SIGUSR1 end a run after the step at hand, saved; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.fabric import Fabric

CAUGHT = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

AGREE_EVERY = 1.0  # seconds


class Handlers:
    """Sets a handler for the signals that end a run; on leaving, the handlers are as found.

    Handlers can only be set in the main thread; elsewhere nothing changes. Somebody's own handler for SIGTERM or SIGUSR1 is
    called as well, in the process where it was set; one for Ctrl-C stays alone, and what is ignored stays so.
    """

    passes_on = False

    def __init__(self) -> None:
        self._found: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Handlers:
        if threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                handler = signal.getsignal(number)
                owner = getattr(handler, "__self__", None)  # a run around this one hears itself
                is_own = callable(handler) and number != signal.SIGINT and not isinstance(owner, Signals)
                is_rank = getattr(owner, "passes_on", False)  # a script that is a rank itself
                if is_own or is_rank or handler in (signal.default_int_handler, signal.SIG_DFL):
                    self._found[number] = handler
                    signal.signal(number, self.handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        found, self._found = self._found, {}
        for number, handler in found.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What is done when a signal comes."""

    def theirs(self, number: int, frame: FrameType | None) -> bool:
        """Call somebody's own handler, if there is one, and say so."""
        handler = self._found.get(number)
        owner: Any = getattr(handler, "__self__", None)
        if getattr(owner, "passes_on", False):
            return owner.theirs(number, frame)
        if is_own := callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)
        return is_own

    def at_once(self, number: int, frame: FrameType | None) -> None:
        """Give way: the signal does what it does by default, and ends the program after somebody's own handler, too."""
        for caught, handler in self._found.items():
            signal.signal(caught, handler)
        if self.theirs(number, frame):
            raise ending(number)
        signal.raise_signal(number)


class Signals(Handlers):
    """While inside, notes the first signal in `received`, and gives way to the second.

    Several ranks have to stop at the same step. They agree on it when `check` is called, with one small collective on the
    CPU about once a second, at a batch that all of them know beforehand: a step costs them a comparison of two numbers.
    In one process there is nothing to agree on.

    Args:
        together: whether other ranks have to stop at the same step.
        patience: seconds in which a second signal counts as the first: launchers pass on what a terminal has already sent.
        speaks: whether to say that a signal was heard.

    Example:
        >>> with Signals() as signals:
        ...     signal.raise_signal(signal.SIGINT)
        >>> signals.received == signals.agreed == signal.SIGINT
        True
    """

    def __init__(self, together: bool = False, patience: float = 0.0, speaks: bool = False) -> None:
        super().__init__()
        self.together, self.patience, self.speaks = together, patience, speaks
        self.received: int | None = None  # by this process
        self.agreed: int | None = None  # by all
        self.was_theirs = False  # whether somebody's own handler has heard of it, too
        self.deadline: float | None = None  # in time.monotonic's seconds, for max_time
        # what is written while training goes on (files/background.py), and counts where all agree
        self.behind: Any = None
        self._received_at = 0.0
        self._checked_at, self._checked_batch, self._next_batch = time.monotonic(), 0, 0

    def __enter__(self) -> Signals:
        self._group = None
        if self.together:
            is_gloo = torch.distributed.get_backend() == "gloo"
            self._group = torch.distributed.group.WORLD if is_gloo else torch.distributed.new_group(backend="gloo")
        super().__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self.together and error is None and self._group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(self._group)

    @property
    def checks(self) -> bool:
        """Whether `check` has anything to find."""
        return self.together or self.deadline is not None or self.behind is not None

    def check(self, batches: int, now: bool = False) -> bool:
        """Whether the time is over; among several ranks, agree on that and on a signal, after a batch that all know."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        if not self.together:
            if self.behind is not None and not self.behind.is_busy():
                self.behind.commit()
            return late
        if batches < self._next_batch and not now:
            return False
        seconds = time.monotonic() - self._checked_at
        every = 0  # batches until the next time; rank zero's clock counts
        if torch.distributed.get_rank() == 0:
            every = max(1, int((batches - self._checked_batch) * AGREE_EVERY / max(seconds, 1e-6)))
        behind = [] if self.behind is None else [int(self.behind.is_busy())]
        values = torch.tensor([self.received or 0, int(late), every, *behind])
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._group)
        number, late, every, *busy = values.tolist()
        self.agreed = self.agreed or number or None
        self._checked_at, self._checked_batch, self._next_batch = time.monotonic(), batches, batches + every
        if busy == [0]:
            self.behind.commit()
        return bool(late)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first, give way to the second."""
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            if not self.together:
                self.agreed = number
            if self.speaks:
                say_heard(number)
            self.was_theirs = self.theirs(number, frame)
        elif time.monotonic() - self._received_at >= self.patience:
            self.at_once(number, frame)


def starts_processes(fabric: Fabric) -> bool:
    """Whether the strategy forks or spawns the ranks, and this process waits for them."""
    return type(fabric.strategy.launcher).__name__ == "_MultiProcessingLauncher"


def ending(number: int) -> BaseException:
    """What ends the program as the signal would have: KeyboardInterrupt, or SystemExit with 128 + its number.

    SIGTERM's is Lightning's SIGTERMException, a SystemExit too, where lightning.pytorch is in use.

    Example:
        >>> ending(signal.SIGTERM).code, ending(signal.SIGUSR1)
        (143, SystemExit(138))
    """
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    room = sys.modules.get("lightning.pytorch.utilities.exceptions") if number == signal.SIGTERM else None
    return getattr(room, "SIGTERMException", SystemExit)(128 + number)


def say_heard(number: int) -> None:
    """Say at once what happens now: the step at hand may take long."""
    text = f"{signal.Signals(number).name}: stopping after this step; again to stop at once\n"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (RuntimeError, OSError, ValueError, AttributeError):  # in the middle of somebody's print, or there is none
        with suppress(OSError):
            os.write(2, text.encode())
