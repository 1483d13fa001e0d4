"""Seen: where this process is seen: in a log file, a terminal, the page of a notebook."""

from __future__ import annotations

import multiprocessing
import sys

from .lines import Lines
from .screen import Screen, columns


def find_screen(lines: Lines) -> Screen:
    """Where this process is seen. A rank that was forked off a notebook has no page of its own.

    Example:
        >>> type(find_screen(Lines())).__name__ in ("Screen", "Terminal", "Page")
        True
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None and multiprocessing.parent_process() is None:
        from .notebook import Page

        return Page(lines)
    if columns(sys.stderr) is None:
        return Screen(lines)
    from .terminal import Terminal

    return Terminal(lines)
