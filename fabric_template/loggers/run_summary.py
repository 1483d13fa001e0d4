"""Format the block at the end of a run and the results of an evaluation."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..training.hooks import is_instance_of

if TYPE_CHECKING:
    from ..training.run_state import RunState


def summarize_run(run: RunState, checkpoints: Sequence[Path]) -> dict[str, list[str]]:
    """Return the result of a fit, the reason of its end and its files, as lines by heading.

    Args:
        run: A fit.
        checkpoints: The files to name.
    """
    config, rows, progress = run.config, run.history.rows, run.progress
    seconds = sum(row["time"] for row in rows)
    data = "" if run.datamodule is None else f" on {type(run.datamodule).__name__}"
    done = f"{count_of(progress.epochs_done, 'epoch')}, {count_of(progress.global_step, 'step')}"
    name = getattr(run.model, "__name__", type(run.model).__name__)
    devices = f", {run.fabric.world_size} processes" if run.fabric.world_size > 1 else ""
    logs = [Path(logger.log_dir, "metrics.csv") for logger in run.loggers.csv_loggers]
    lines = {
        "trained": [f"{name}{data}: {done}, {format_duration(seconds)}"],
        "ended": [end_reason(run)],
        "at the end": [", ".join(last_values(rows))],
        "best": [best_value(rows, config.monitor, config.mode)],
        "device": [f"{run.fabric.device}, {run.fabric.strategy.precision.precision}{devices}"],
        "log": [short_path(path) for path in logs if path.is_file()],
        "checkpoint": [short_path(path) for path in dict.fromkeys(checkpoints)],
    }
    if any(path.name == "last.ckpt" for path in checkpoints):
        longer = ""
        for option in ("max_epochs", "max_steps"):
            limit = getattr(config, option)
            longer += "" if limit in (None, -1) else f", with {option}={2 * limit}"
        lines["resume"] = [f"fit(..., resume='last'){longer}"]
    shown = {heading: [text for text in texts if text] for heading, texts in lines.items()}
    return {heading: texts for heading, texts in shown.items() if texts}


def format_summary(lines: Mapping[str, Sequence[str]]) -> str:
    """Return a line for each text, with its heading.

    Example:
        >>> print(format_summary({"trained": ["Net: 1 epoch"], "log": ["logs/run/version_0/metrics.csv"]}))
        trained     Net: 1 epoch
        log         logs/run/version_0/metrics.csv
    """
    return "\n".join(f"{heading:<12}{text}" for heading, texts in lines.items() for text in texts)


def end_reason(run: RunState) -> str:
    """Return the reason why training ended; an empty text while it continues."""
    stop = run.stop
    if stop.signal is not None:
        return signal.Signals(stop.signal).name
    if run.exception is not None:
        return f"{type(run.exception).__name__}: {run.exception}"
    if stop.divergence:
        return stop.divergence
    if stop.has_max_steps:
        return f"max_steps={stop.max_steps} is reached"
    if stop.has_max_epochs:
        return f"max_epochs={stop.max_epochs} is reached"
    if not stop.is_requested:
        return ""
    names = []
    for callback in run.hooks.callbacks:
        if is_instance_of(callback, "EarlyStopping") and callback.stopped_epoch:
            names.append(f"EarlyStopping on {callback.monitor!r}")
        elif is_instance_of(callback, "Timer") and callback.time_remaining() == 0:
            names.append("Timer")
    if not names:
        return "should_stop was set"
    return f"should_stop was set by {', '.join(names)}"


def last_values(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the latest value of each metric, with its epoch where that is not the last one."""
    values = {}
    for row in rows:
        epoch = "" if row is rows[-1] else f" (epoch {row['epoch']})"
        for name, value in row.items():
            is_metric = name not in ("epoch", "step", "time") and not name.startswith("lr")
            if is_metric and isinstance(value, int | float):
                values[name] = f"{name} {format_value(name, value)}{epoch}"
    return list(values.values())


def best_value(rows: Sequence[Mapping[str, Any]], monitor: str | None, mode: str) -> str:
    """Return the best value of the monitored metric and its epoch; an empty text if there is none."""
    monitor = monitor or ""
    found = [
        row
        for row in rows
        if isinstance(row.get(monitor), int | float) and not math.isnan(row[monitor])
    ]
    if not found:
        return ""
    best = (max if mode == "max" else min)(found, key=lambda row: row[monitor])
    return f"{monitor} {format_value('', best[monitor])} in epoch {best['epoch']}"


def format_results(results: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Return the metrics of an evaluation as a table with a column for each loader."""
    loaders = [
        {name.split("/dataloader_idx_")[0]: result[name] for name in result} for result in results
    ]
    names = sorted({name for loader in loaders for name in loader})
    if not names:
        return ""
    heads = [
        f"{stage} metric".capitalize(),
        *(f"DataLoader {index}" for index in range(len(loaders))),
    ]
    table = [heads]
    for name in names:
        table.append([name, *(str(loader.get(name, "")) for loader in loaders)])
    width = max(25, *(len(text) for text in [*names, *heads]))
    lines = [" ".join(f"{cell:^{width}}" for cell in row).rstrip() for row in table]
    rule = "─" * (width + 1) * len(heads)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def format_value(name: str, value: Any) -> str:
    """Return a value as the tables show it.

    Example:
        >>> format_value("loss", 0.25), format_value("loss", 2e-7), format_value("lr", 3e-4)
        ('0.2500', '2.00e-07', '0.0003')
    """
    if isinstance(value, bool) or not isinstance(value, float):
        return " ".join(str(value).split())[:20]
    if not math.isfinite(value):
        return str(value)
    if name in ("time", "left"):
        return format_duration(value)
    if name == "lr" or name.startswith("lr_"):
        return f"{value:.3g}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def format_duration(seconds: float) -> str:
    """Return a length of time.

    Example:
        >>> format_duration(0.34), format_duration(75.0), format_duration(90000.0)
        ('0.3 s', '1:15', '25:00:00')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_path(path: Path) -> str:
    """Return a path relative to the working folder if it is inside of it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
