"""Apart: work that is done in a process of its own, so that a crash, a kill or a hang in it is an answer and no end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.errors import Misuse

LAST_LINES = 6
TO_END = 20.0  # seconds, at most, that a process has for its own way out, when it has said what it had to say


@dataclass
class Answer:
    """What came of it: its result, or why there is none."""

    result: Any = None
    failure: str = ""
    said: str = ""  # the last lines that it has printed

    @property
    def is_short_of_memory(self) -> bool:
        """Whether it failed for want of memory, as far as one can know."""
        text = self.failure.lower()
        return any(sign in text for sign in ("memory", "sigkill", "cudnn_status_alloc"))


def ask(work: Callable[[str], Any], time_limit: float) -> Answer:
    """Let a child process do ``work(folder)`` in a folder that is gone afterwards; what it does to this process is nothing.

    Where processes are forked (Linux, without CUDA) it may be anything; elsewhere it has to be pickled.

    Raises:
        Misuse: for work that would have to be pickled, and cannot be.

    Example:
        >>> import os
        >>> ask(lambda folder: 6 * 7, 20).result
        42
        >>> ask(lambda folder: os._exit(3), 20).failure
        'its process ended with exit code 3'
    """
    context: Any = multiprocessing.get_context("fork" if can_fork() else "spawn")
    if not can_fork():
        _check_pickled(work)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        child = context.Process(target=_do, args=(work, sender, folder))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child has it, too
        child.start()
        sender.close()
        try:
            answer = _hear(receiver, child, time_limit)
        finally:
            _end(child)
            receiver.close()
        output = Path(folder, "output")
        lines = output.read_text("utf-8", "replace").splitlines() if output.exists() else []
        answer.said = "\n".join(lines[-LAST_LINES:])
    return answer


def can_fork() -> bool:
    """Whether a child may be a copy of this process: with CUDA it may not, and on other systems than Linux nothing is sure."""
    return sys.platform.startswith("linux") and not torch.cuda.is_available()


def _check_pickled(work: Any) -> None:
    try:
        pickle.dumps(work)
    except Exception as error:
        raise Misuse(
            "with CUDA, and on systems without fork, each trial gets its model and data as a pickle, and this is none"
            f" ({error}): define model, steps and data at the top of a module; or use the command line, fabric-template tune"
            " --model package.module:Class --data package.module:Class"
        ) from error


def _hear(receiver: Any, child: Any, time_limit: float) -> Answer:
    try:
        if not receiver.poll(time_limit):
            return Answer(failure=f"it hung: no end within {time_limit:g} s")
        answer: Answer = receiver.recv()
    except (EOFError, OSError):
        child.join(TO_END)
        code = child.exitcode
        if code is not None and code < 0:
            return Answer(failure=f"its process was killed ({signal.Signals(-code).name})")
        return Answer(failure=f"its process ended with exit code {code}")
    child.join(TO_END)
    return answer


def _end(child: Any) -> None:
    """End the process and those that it has started, however they are."""
    pid = child.pid
    for _ in range(2):  # it, and then those that it had started meanwhile
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):  # the group is its own, or there is none of this number
                os.killpg(pid, signal.SIGKILL)
        child.kill()
        child.join()
    child.close()


def _do(work: Callable[[str], Any], sender: Any, folder: str) -> None:
    """In the child: the work in a thread, for a thread has no pool of threads yet that a fork could have broken."""
    if hasattr(os, "setsid"):
        os.setsid()
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (
        open(number, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    thread = threading.Thread(target=_answer, args=(work, sender, folder), daemon=True)
    parent = os.getppid()
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        if os.getppid() != parent:  # who asked is gone
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(work: Callable[[str], Any], sender: Any, folder: str) -> None:
    try:
        answer = Answer(work(folder))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer = Answer(failure=f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__)
    sender.send(answer)
    sender.close()
