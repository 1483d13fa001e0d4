"""Words: the configuration of a run, read from its folder without trusting it, as one flat dict."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_WORDS = 1_000_000, 1_000  # of a file that somebody else may have written
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
                _flatten("" if part == "config" else str(part), value, words)
    return words


def _read(path: Path) -> Any:
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES or b"<<" in text:  # merged keys can unfold without end, and no run of ours has any
            return None
        # the loader in C, where there is one: a thousand files in a second
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None


def _flatten(name: str, value: Any, words: dict[str, Any], depth: int = 0) -> None:
    if len(words) >= MOST_WORDS:
        return
    if isinstance(value, Mapping) and value and depth < 5:
        for key, part in value.items():
            _flatten(f"{name}.{key}"[:200] if name else str(key)[:200], part, words, depth + 1)
    elif value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 200):
        words[name] = value
    else:
        words[name] = value[:200] if isinstance(value, str) else reprlib.repr(value)[:200]
