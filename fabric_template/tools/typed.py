"""Typed: commands and paths as they are typed, so that what is printed can be typed again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from .errors import PACKAGE


def program() -> str:
    """How the command was typed, so that what is printed can be typed again."""
    typed = Path(sys.argv[0])
    if typed.stem != "fabric-template":
        return f"python -m {PACKAGE}"
    found = shutil.which(typed.name)
    return typed.name if found and os.path.samefile(found, typed) else os.path.relpath(typed)


def again(verb: str, words: dict[str, Any]) -> str:
    """A command with these words, as it is typed."""
    tokens: list[str] = []
    for word, value in words.items():
        parts = value if isinstance(value, list) else [value]  # of --config, or of words that add to each other
        for part in parts:
            tokens += [part] if isinstance(value, list) and word != "config" else [f"--{word}", part]
    return f"{program()} {verb} {shlex.join(tokens)}"


def shown(path: Path) -> str:
    """The path from here, if it lies here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
