"""Journal: what a run's lock says: whether it runs, how it ended, where it was resumed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

ENDS = ("finished", "interrupted", "failed")
_RESUMED = re.compile(r"resumed after step (\d{1,15}) from (.+)")
_MOST_BYTES = 100_000


@dataclass
class Journal:
    """What is known of a run beside its numbers."""

    is_there: bool = False
    is_running: bool = False
    end: str = ""  # a word of ENDS; none: nothing has said how it ended, so it was killed, or the machine was
    resumed: list[tuple[int, str]] = field(default_factory=list)  # after which step, from which file


def read_journal(folder: Path) -> Journal:
    r"""Read a folder's lock file, and try for a moment whether somebody holds it.

    Example:
        >>> _ = Path(".lock").write_text("17\nresumed after step 20 from last.ckpt\nfinished\n")
        >>> read_journal(Path("."))
        Journal(is_there=True, is_running=False, end='finished', resumed=[(20, 'last.ckpt')])
    """
    journal = Journal()
    try:
        fd = os.open(folder / ".lock", os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return journal
    try:
        journal.is_running = _is_held(fd)
        size = os.fstat(fd).st_size
        os.lseek(fd, max(0, size - _MOST_BYTES), os.SEEK_SET)
        lines = os.read(fd, _MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return journal
    finally:
        os.close(fd)
    journal.is_there = True
    journal.end = lines[-1] if lines and lines[-1] in ENDS else ""
    for line in lines:
        if found := _RESUMED.fullmatch(line):
            step = int(found[1])
            # what was done after an earlier one has been done again from here
            journal.resumed = [before for before in journal.resumed if before[0] < step]
            journal.resumed.append((step, found[2]))
    return journal


def _is_held(fd: int) -> bool:
    """Whether another process writes there; shared, so that two who look do not see each other."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False
