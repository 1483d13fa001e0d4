"""Picture: the logs of runs, drawn into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .options import UsageError


def draw(paths: list[str], out: Path, needs_a_loss: bool = True, **words: Any) -> Path | None:
    """Draw the runs into a file; None where there is no loss to draw and none was asked for."""
    import matplotlib

    matplotlib.use("Agg")  # a file is all we want; no window, no display needed
    from .plots import plot_logs

    try:
        axes = plot_logs(paths[0] if len(paths) == 1 else paths, **words)
    except ValueError:
        if needs_a_loss:
            raise
        return None
    figure: Any = (axes if hasattr(axes, "figure") else axes[0]).figure
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the picture {str(out)!r}: {error}; give another file with --out") from error
    return out
