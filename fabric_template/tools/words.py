"""Words: the configuration of a run, read from its folder without trusting it, as one flat dict."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_WORDS = 1_000_000, 1_000  # of a file that somebody else may have written
_LINE = re.compile(r"((?:  )*)([A-Za-z_][\w.]*): ?([\w.+/-](?:[^#:\[\]{}&*!|>'\"%@`]|:(?=\S))*|)")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3  # of 6: lists that name each other nine times over are millions of them at that depth
_NOT_WORDS = ("about", "version")  # of config.yaml: what it tells of the machine, and that a new run has a new number


def words_of(folder: Path) -> dict[str, Any]:
    r"""Every word of a run with its value: of hparams.yaml, and of config.yaml, if there is one.

    Example:
        >>> _ = Path("hparams.yaml").write_text("hparams: {lr: 0.1}\nconfig: {max_epochs: 3}")
        >>> words_of(Path("."))
        {'hparams.lr': 0.1, 'max_epochs': 3}
    """
    words: dict[str, Any] = {}
    for name in ("config.yaml", "hparams.yaml"):  # of a resumed run the second is the newer
        content = _read(folder / name)
        for part, value in content.items() if isinstance(content, Mapping) else ():
            if part not in _NOT_WORDS:
                _flatten("" if part in ("config", "trainer") else str(part), value, words)  # LightningCLI says trainer
    return words


def _read(path: Path) -> Any:
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES or b"<<" in text:  # merged keys can unfold without end, and no run of ours has any
            return None
        lines = text.decode().partition("\nabout:")[0].splitlines()
        if (plain := _read_lines([line for line in lines if line and not line.startswith("#")])) is not None:
            return plain
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None


def _read_lines(lines: list[str]) -> dict[str, Any] | None:
    """What most of these files are, ``word: value`` in two levels or three; None: it takes a parser, and ten times as long."""
    content: dict[str, Any] = {}
    levels = [content]
    for line in lines:
        found = _LINE.fullmatch(line)
        depth = len(found[1]) // 2 if found else 0
        if found is None or depth >= len(levels):
            return None
        del levels[depth + 1 :]
        if found[3]:
            levels[depth][found[2]] = _scalar(found[3])
        else:  # a level of its own, or nothing
            levels.append(levels[depth].setdefault(found[2], {}))
    return content


@lru_cache(10_000)
def _scalar(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _flatten(name: str, value: Any, words: dict[str, Any], depth: int = 0) -> None:
    if len(words) >= MOST_WORDS:
        return
    if isinstance(value, Mapping) and value and depth < 5:
        for key, part in value.items():
            _flatten(f"{name}.{key}"[:200] if name else str(key)[:200], part, words, depth + 1)
    elif value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 200):
        words[name] = value
    else:
        words[name] = value[:200] if isinstance(value, str) else _SHORT.repr(value)[:200]
