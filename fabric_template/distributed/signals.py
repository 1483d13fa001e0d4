"""On Ctrl-C, SIGTERM or SIGUSR1, finish the current step, save a checkpoint and end training."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cached_property
from multiprocessing.util import register_after_fork
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from lightning.fabric import Fabric

SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]
SECONDS_BETWEEN_CHECKS = 1.0
_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)


class SignalHandler:
    """Records the first signal during a run, and ends the program on the second.

    The user's own handlers for SIGTERM and SIGUSR1 are also called. A handler that the user has set
    for Ctrl-C stays in place. Signals that the user ignores stay ignored. At the end of the run,
    SignalHandler restores the previous signal handlers.

    Args:
        fabric: The run's Fabric object. Only the main process prints a message when a signal
            arrives. Without a Fabric object, no process prints a message.

    Attributes:
        received: The signal that this process has received.
        is_check_due: Whether this process or another one may have received a signal.
    """

    def __init__(self, fabric: Fabric | None = None) -> None:
        self.received: int | None = None
        self._is_main = fabric is not None and fabric.is_global_zero
        self._has_others = self.is_check_due = fabric is not None and fabric.world_size > 1
        # On Ctrl-C, a launched process gets one signal from the terminal and another from its
        # launcher, so ignore a second signal within two seconds.
        is_launched = self._has_others or "TORCHELASTIC_RUN_ID" in os.environ
        self._patience = 2.0 if is_launched else 0.0
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}
        self._checked_at, self._checked_batch, self._next_batch = time.monotonic(), 0, 0

    def __enter__(self) -> SignalHandler:
        self._pid = os.getpid()
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                previous = signal.getsignal(number)
                # If this run was started inside another run, the outer run handles signals.
                is_ours = isinstance(getattr(previous, "__self__", None), SignalHandler)
                is_of_user = callable(previous) and number != signal.SIGINT and not is_ours
                if previous in _DEFAULTS or is_of_user:
                    self._previous[number] = previous
                    signal.signal(number, self.handle)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def handle(self, number: int, frame: Any) -> None:
        previous = self._previous.get(number)
        is_of_user = callable(previous) and previous not in _DEFAULTS
        is_first = self.received is None
        if is_first:
            self.received, self._received_at = number, time.monotonic()
            self.is_check_due = True
            # Loader workers, which are forked from this process, inherit this handler.
            if self._is_main and os.getpid() == self._pid:
                # Do not use sys.stderr, because this handler may interrupt a write to sys.stderr.
                text = (
                    f"{signal.Signals(number).name}: stopping after this step. A second signal"
                    " stops at once.\n"
                )
                with suppress(OSError):
                    # In a terminal, print the message below the progress bar.
                    os.write(2, f"\n{text}".encode() if os.isatty(2) else text.encode())
        elif time.monotonic() - self._received_at < self._patience:
            return
        else:
            self.__exit__()
        if is_of_user:
            previous(number, frame)  # type: ignore[misc]
        if not is_first:
            raise error_of_signal(number)

    def agree(self, known: int | None, batches: int, is_due: bool = False) -> int | None:
        """Return a signal that at least one process has received, or None.

        Args:
            known: The result of the previous call.
            batches: The number of training batches so far.
            is_due: Whether to exchange signals now.
        """
        if not self._has_others:
            return self.received
        if batches < self._next_batch and not is_due:
            return known
        # All processes must stop after the same training step, so they exchange received signals
        # about once a second. The main process chooses the number of batches until the next
        # exchange.
        wait = 0
        if self._is_main:
            seconds = max(time.monotonic() - self._checked_at, 1e-6)
            done = batches - self._checked_batch
            wait = max(1, int(done * SECONDS_BETWEEN_CHECKS / seconds))
        number, wait = self.find_largest([self.received or 0, wait])
        self._checked_at, self._checked_batch = time.monotonic(), batches
        self._next_batch = batches + wait
        return known or number or None

    def broadcast(self, numbers: list[int]) -> list[int]:
        """Return rank 0's ``numbers`` in every process."""
        values = torch.tensor(numbers)
        torch.distributed.broadcast(values, 0, self._cpu_group)
        return values.tolist()

    def find_largest(self, numbers: list[int]) -> list[int]:
        """Return the element-wise maximum over the lists of all processes."""
        values = torch.tensor(numbers)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, self._cpu_group)
        return values.tolist()

    @cached_property
    def _cpu_group(self) -> Any:
        """A gloo process group, in which processes exchange numbers without waiting for the GPU."""
        if torch.distributed.get_backend() == "gloo":
            return torch.distributed.group.WORLD
        return torch.distributed.new_group(backend="gloo")


class SignalForwarder(SignalHandler):
    """Forwards the first signal to the child processes, which save a checkpoint and stop."""

    def __enter__(self) -> SignalForwarder:
        # In forked processes, reset the handled signals to SIG_DFL. Python's SIGINT handler would
        # raise KeyboardInterrupt, and torch would treat the interrupted process as successful.
        register_after_fork(self, SignalForwarder._restore_defaults)
        super().__enter__()
        return self

    def _restore_defaults(self) -> None:
        if os.getppid() == self._pid:
            for number in self._previous:
                signal.signal(number, signal.SIG_DFL)

    def handle(self, number: int, frame: Any) -> None:
        if self.received is None:
            for child in multiprocessing.active_children():
                if child.pid is not None:
                    os.kill(child.pid, number)
        super().handle(number, frame)


def error_of_signal(number: int) -> BaseException:
    """Return an exception that ends the program with the signal's usual exit code."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return SIGTERMException(143) if number == signal.SIGTERM else SystemExit(128 + number)


def is_notebook() -> bool:
    """Return whether Python keeps running after Ctrl-C, as in a notebook or a Python shell."""
    return hasattr(sys, "ps1") or find_shell() is not None


def find_shell() -> Any:
    """Return the IPython shell of a terminal or a notebook, or None in a script."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()
