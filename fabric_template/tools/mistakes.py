"""Mistakes: what is commonly wrong in a training script, found in its text; each only where that is sure."""

from __future__ import annotations

from pathlib import Path

from . import around, slips
from .sources import Mistake, read_script


def read_source(path: str | Path) -> list[Mistake]:
    """Read a script, without running it, and say what is commonly wrong in its training loops, with the lines.

    Said is only what the text shows beyond doubt; a script without remarks may still be wrong.

    Example:
        >>> loop = '''
        ... for x, y in loader:
        ...     loss = mse_loss(net(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ... '''
        >>> _ = Path("train.py").write_text(loop)
        >>> [(mistake.line, mistake.what) for mistake in read_source("train.py")]
        [(4, 'the gradients are never cleared: each step uses the sum of all before it')]
    """
    source = read_script(Path(path))
    return sorted({mistake for rule in (*slips.RULES, *around.RULES) for mistake in rule(source)})
