"""Ending: what came out of a fit, why it ended, and where its files are: the lines below it, and a loop's own words."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.history import is_better
from ..core.reasons import why_ended
from ..core.run import Run
from ..core.said import count
from .lines import cell, duration


def ending(run: Run, checkpoints: Iterable[Path]) -> dict[str, list[str]]:
    """The lines by the word that each begins with; checkpoints are those to name."""
    config, rows, trained, compiling = run.config, run.history.rows, run.trained, run.steps.compiling
    data = f" on {type(trained.datamodule).__name__}" if trained.datamodule is not None else ""
    seconds = sum(row.get("time") or 0.0 for row in rows)
    done = f"{count(run.at.epochs_done, 'epoch')}, {count(run.at.global_step, 'step')}, {duration(seconds)}"
    told: dict[str, list[str]] = {
        "trained": [f"{trained.name}{data}: {done}"],
        "compiled": [f"{duration(compiling.seconds)} of that"] if compiling is not None and compiling.seconds else [],
        "ended": [why_ended(run)],
    }
    values: dict[str, str] = {}
    for row in rows:  # the latest of each, with its epoch where that is not the last one
        age = "" if row is rows[-1] else f" (epoch {row['epoch']})"
        names = [name for name in row if name not in ("epoch", "step", "time") and not name.startswith("lr")]
        values |= {name: f"{name} {cell(name, row[name])}{age}" for name in names if isinstance(row[name], int | float)}
    told["at the end"] = [", ".join(values.values())]
    best: tuple[float | None, Any] = (None, None)
    for row in rows:
        score = row.get(config.monitor or "")
        if isinstance(score, int | float) and is_better(score, best[0], config.mode):
            best = score, row["epoch"]
    if best[0] is not None:
        told["best"] = [f"{config.monitor} {cell('', best[0])} in epoch {best[1]}"]
    processes = f", {run.fabric.world_size} processes" if run.fabric.world_size > 1 else ""
    told["device"] = [f"{run.fabric.device}, {run.fabric.strategy.precision.precision}{processes}"]
    folders = [getattr(logger, "log_dir", None) for logger in run.home.loggers]
    logs = [Path(folder, "metrics.csv") for folder in folders if isinstance(folder, str)]
    told["log"] = [from_here(path) for path in logs if path.is_file()]
    told["checkpoint"] = [from_here(path) for path in dict.fromkeys(checkpoints)]
    if any(Path(path).name == "last.ckpt" for path in told["checkpoint"]):
        limits = {"max_epochs": config.max_epochs, "max_steps": config.max_steps}
        more = ", ".join(f"{word}={2 * most}" for word, most in limits.items() if most not in (None, -1))
        told["go on"] = ["fit(..., resume='last')" + (f", with {more}" if more else "")]
    return {word: found for word, texts in told.items() if (found := [text for text in texts if text])}


def as_lines(told: dict[str, list[str]]) -> str:
    """A line for each.

    Example:
        >>> print(as_lines({"trained": ["Net: 1 epoch, 20 steps, 1.5 s"], "log": ["logs/run/version_0/metrics.csv"]}))
        trained     Net: 1 epoch, 20 steps, 1.5 s
        log         logs/run/version_0/metrics.csv
    """
    return "\n".join(f"{word:<12}{text}" for word, texts in told.items() for text in texts)


def from_here(path: str | Path) -> str:
    """The path from here, if it lies here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
