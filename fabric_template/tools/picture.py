"""Picture: the logs of runs, drawn into a file; once, or as long as they grow."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

from ..files.disk import replace_file
from .options import UsageError

BETWEEN = 1.0  # seconds; who looks sees no more


def draw(paths: list[str], out: Path, needs_a_loss: bool = True, **words: Any) -> Path | None:
    """Draw the runs into a file; None where there is no loss to draw and none was asked for."""
    import matplotlib

    matplotlib.use("Agg")  # a file is all we want; no window, no display needed
    from matplotlib import pyplot

    from .plots import plot_logs

    try:
        axes = plot_logs(paths[0] if len(paths) == 1 else paths, **words)
    except ValueError:
        if needs_a_loss:
            raise
        return None
    figure: Any = (axes if hasattr(axes, "figure") else axes[0]).figure
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=out.suffix[1:] or None)
        replace_file(out, content.getvalue())  # who watches sees no half of it
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the picture {str(out)!r}: {error}; give another file with --out") from error
    finally:
        pyplot.close(figure)
    return out


def watch(paths: list[str], out: Path, **words: Any) -> None:
    """Draw again as the files change, until no run is running any more, or Ctrl-C."""
    seen: Any = None
    try:
        while True:
            is_running, now = _look(paths)
            if now != seen:
                try:
                    draw(paths, out, **words)
                except ValueError:
                    if not is_running:  # otherwise its first row is still to come
                        raise
                else:
                    how = "watched until the run ends, or Ctrl-C" if is_running else "the run has ended"
                    print(f"picture     {out}: {how}", flush=True) if seen is None or not is_running else None
                    seen = now
            if not is_running:
                if now == seen:
                    return
                continue
            time.sleep(BETWEEN)
    except KeyboardInterrupt:
        print(f"picture     {out}: no longer watched")


def _look(paths: list[str]) -> tuple[bool, list[Any]]:
    """Whether one of the runs is running, and how their files stand."""
    from .journal import read_journal

    found: list[Any] = []
    is_running = False
    for path in map(Path, paths):
        folders = [path.parent] if path.is_file() else [Path(place) for place, _, _ in os.walk(path)]
        for folder in folders:
            is_running = is_running or read_journal(folder).is_running
            for name in ("metrics.csv", "steps.csv"):
                try:
                    state = os.stat(folder / name)
                except OSError:
                    continue
                found.append((str(folder), name, state.st_ino, state.st_size, state.st_mtime_ns))
    return is_running, found
