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


# how Trainer's sentences begin that stand behind a word's: who types has not met it
TRAINERS = "`(?:Timer|max_|check_|reload_|gradient_)|You have passed invalid|Invalid time|fast_dev_run="


def as_typed(text: str) -> str:
    """A message of the loop with its words as they are typed.

    Example:
        >>> as_typed("max_epochs=-7: expected None, -1 (no limit) or an int >= 0")
        '--max_epochs=-7: expected None, -1 (no limit) or an int >= 0'
        >>> as_typed("fit(resume='a', load='b'): expected one of them")
        '--resume=a, --load=b: expected one of them'
    """
    text = re.sub(r"`\w+` must be implemented to be used with the Lightning Trainer\. .*? Found None: ", "", text)
    text = re.sub(rf" \((?:{TRAINERS}).*?\.\)", "", text)
    text = re.sub(rf"(?<![.\w])(?:FabricLoop|fit|validate|test|predict)\(((?:{WORDS})=[^()]*)\)", r"\1", text)
    text = re.sub(rf"(?<![\w./'-])({WORDS})=", r"--\1=", text)
    text = re.sub(rf"(--(?:{WORDS})=)'([\w./:-]+)'", r"\1\2", text)  # quotes are Python's
    return re.sub(r"give it as \w+\(model, loader\)(?:, | or )as datamodule=", "give --data package.module:Class", text)
