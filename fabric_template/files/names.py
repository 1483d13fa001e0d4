"""Names: how the best checkpoints of a run and folders of pieces are called, and which file names are such."""

import re
from typing import Any

ONE = "best.ckpt"  # where a single one is kept
PIECES = ".shards"  # how a folder of pieces ends (shards.py)
SEVERAL = re.compile(r"epoch=[A-Za-z0-9._=+-]+\.ckpt")


def name_of(place: str, monitor: str, score: float) -> str:
    """The name of one of several: where the run stood, and its score.

    Example:
        >>> name_of("epoch=3", "val/loss", 0.25), is_name("epoch=3-val_loss=0.2500.ckpt"), is_name("../mine.ckpt")
        ('epoch=3-val_loss=0.2500.ckpt', True, False)
    """
    return safe_name(f"{place}-{monitor}={score:.4f}") + ".ckpt"


def is_name(value: Any) -> bool:
    """Whether a run may have given this name, and may remove the file: what a checkpoint says is not believed."""
    return isinstance(value, str) and (value == ONE or bool(SEVERAL.fullmatch(value)))


def safe_name(text: Any) -> str:
    """Make a metric's name or value fit to be part of a file name.

    Example:
        >>> safe_name("val/acc=0.93"), safe_name("../../etc")
        ('val_acc=0.93', '_.._etc')
    """
    return re.sub(r"[^A-Za-z0-9._=+-]", "_", str(text)).lstrip(".")[:100] or "_"
