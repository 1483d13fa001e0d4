"""Errors: what was typed and cannot be done, in the words in which it was typed."""

from __future__ import annotations

import re

from ..core.config import LoopConfig
from ..core.elsewhere import FABRIC_WORDS

PACKAGE = __package__.rpartition(".")[0]  # another one in a copy
OF_VERBS = ("resume", "load", "format", "out", "submodule")
WORDS = "|".join({*LoopConfig.__dataclass_fields__, *FABRIC_WORDS, *OF_VERBS} - {"fabric", "plugins", "loggers"})


class UsageError(ValueError):
    """What was typed cannot be done; the message is one line that says what to type instead."""


def as_typed(text: str) -> str:
    """A message of the loop with its words as they are typed.

    Example:
        >>> as_typed("max_epochs=-7: expected None, -1 (no limit) or an int >= 0")
        '--max_epochs=-7: expected None, -1 (no limit) or an int >= 0'
        >>> as_typed("fit(resume='a', load='b'): expected one of them")
        '--resume=a, --load=b: expected one of them'
    """
    text = re.sub(r"An invalid dataloader was passed to `Trainer\.\w+\(.*?\)`\. Found None: ", "", text)
    text = re.sub(rf"(?<![.\w])(?:FabricLoop|fit|validate|test|predict)\(((?:{WORDS})=[^()]*)\)", r"\1", text)
    text = re.sub(rf"(?<![\w./'-])({WORDS})=", r"--\1=", text)
    text = re.sub(rf"(--(?:{WORDS})=)'([\w./:-]+)'", r"\1\2", text)  # quotes are Python's
    return re.sub(r"give it as \w+\(model, loader\)(?:, | or )as datamodule=", "give --data package.module:Class", text)
