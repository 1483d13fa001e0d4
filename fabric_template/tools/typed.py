"""Typed: commands and paths as they are typed, so that what is printed can be typed again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from .options import PACKAGE


def program() -> str:
    """How the command was typed, so that what is printed can be typed again."""
    typed = Path(sys.argv[0])
    if typed.stem != "fabric-template":
        return f"python -m {PACKAGE}"
    found = shutil.which(typed.name)
    return typed.name if found and os.path.samefile(found, typed) else os.path.relpath(typed)


def again(verb: str, words: dict[str, Any]) -> str:
    """A command with these words, as it is typed."""
    given = [(word, part) for word, value in words.items() for part in (value if word == "config" else [value])]
    return f"{program()} {verb} {shlex.join(token for word, part in given for token in (f'--{word}', part))}"


def shown(path: Path) -> str:
    """The path from here, if it lies here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
