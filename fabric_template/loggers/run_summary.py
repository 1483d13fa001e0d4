"""Write config.yaml, which rebuilds a run, and print its results."""

from __future__ import annotations

import inspect
import math
import os
import platform
import signal
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch

from .. import __version__
from ..errors import describe
from ..training.hooks import is_instance_of
from .csv_logger import PLAIN_TYPES, to_plain, to_yaml, write_text

if TYPE_CHECKING:
    from ..training.run_state import RunState

NO_METRICS = ("epoch", "step", "samples_per_second", "time")
HEAD = "# `fabric-template fit --config` with this file repeats this run. It ignores `about`.\n"


def write_run_config(run: RunState) -> None:
    """Write config.yaml beside metrics.csv. An error is a warning, and training continues.

    A resumed run keeps its first config.yaml. A file of LightningCLI or another program stays.
    """
    for logger in run.history.csv_loggers:
        path = Path(logger.log_dir, "config.yaml")
        try:
            is_own = path.exists() and path.read_text("utf-8", "replace").startswith(HEAD)
            if not path.exists() or (is_own and not run.resumes):
                write_text(path, HEAD + to_yaml(run_config(run)))
        except Exception as error:
            warnings.warn(
                f"{path}: it could not be written, and training continues: {error!r}", stacklevel=2
            )


def run_config(run: RunState) -> dict[str, Any]:
    """Return a run's options, model and data. "unknown" lists the parts that YAML cannot hold."""
    unknown: dict[str, str] = {}
    options = dict(run.loop.recipe)
    config: dict[str, Any] = {}
    for part, given in (("model", run.model), ("data", run.datamodule)):
        recorded = options.pop(part, None)
        if recorded is None and given is not None:
            recorded = class_config(part, given, unknown)
        if recorded is not None:
            config[part] = recorded
    if "data" not in config and any(loader is not None for loader in run.data.given.values()):
        unknown["data"] = "fit was given loaders"
    functions = getattr(run.module, "functions", {})
    given_parts = {**functions, "optimizer": run.given_optimizer}
    options |= {name: part for name, part in given_parts.items() if part is not None}
    config |= keep_plain(options, unknown)
    # A repeated run takes the next free version and overwrites nothing.
    config["version"] = None
    if run.checkpoint_path is not None:
        config["resume" if run.resumes else "load"] = str(run.checkpoint_path)
    versions = {
        "fabric_template": __version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    return {**config, "about": {"versions": versions, "unknown": unknown}}


def class_config(part: str, given: Any, unknown: dict[str, str]) -> dict[str, Any] | None:
    """Return the class of an object and the arguments that ``save_hyperparameters`` kept."""
    kind = type(given)
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        unknown[part] = f"{kind.__qualname__} of {kind.__module__}, which cannot be imported"
        return None
    saved = dict(getattr(given, "hparams_initial", None) or {})
    parameters = inspect.signature(kind).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if len(names) == len(parameters):
        saved = {name: value for name, value in saved.items() if name in names}
    for name in names:
        if name not in saved:
            unknown[f"{part}.{name}"] = "not kept by save_hyperparameters"
    arguments = keep_plain(saved, unknown, f"{part}.")
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}


def keep_plain(
    values: Mapping[str, Any], unknown: dict[str, str], prefix: str = ""
) -> dict[str, Any]:
    """Return the values that YAML supports. Add the names of other values to unknown."""
    kept = {}
    for name, value in values.items():
        if is_plain(value):
            kept[name] = to_plain(value)
        else:
            unknown[prefix + name] = describe(value)
    return kept


def is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(item) for item in value)
    return isinstance(value, PLAIN_TYPES)


def summarize_run(run: RunState, checkpoints: Sequence[Path]) -> dict[str, list[str]]:
    """Return the results of a fit, why it ended, and its files, as lines by heading."""
    config, rows, progress = run.config, run.history.rows, run.progress
    seconds = sum(row["time"] for row in rows)
    data = "" if run.datamodule is None else f" on {type(run.datamodule).__name__}"
    done = f"{count_of(progress.epochs_done, 'epoch')}, {count_of(progress.global_step, 'step')}"
    name = getattr(run.model, "__name__", type(run.model).__name__)
    devices = f", {run.fabric.world_size} processes" if run.fabric.world_size > 1 else ""
    logs = [Path(logger.log_dir, "metrics.csv") for logger in run.history.csv_loggers]
    newest: dict[str, Any] = {}
    for row in rows:
        newest |= row
    metrics = [
        f"{name} {format_value(name, value)}"
        for name, value in newest.items()
        if name not in NO_METRICS and not name.startswith("lr")
    ]
    lines = {
        "trained": [f"{name}{data}: {done}, {format_duration(seconds)}"],
        "ended": [end_reason(run)],
        "at the end": [", ".join(metrics)],
        "best": [best_value(rows, config.monitor or "", config.mode)],
        "device": [f"{run.fabric.device}, {run.fabric.strategy.precision.precision}{devices}"],
        "log": [short_path(path) for path in logs if path.is_file()],
        "checkpoint": [short_path(path) for path in dict.fromkeys(checkpoints)],
    }
    if any(path.name == "last.ckpt" for path in checkpoints):
        lines["resume"] = ["fit(..., resume='last')"]
    return {heading: texts for heading, texts in lines.items() if texts and texts[0]}


def format_summary(lines: Mapping[str, Sequence[str]]) -> str:
    """Format each line of the summary after its heading."""
    return "\n".join(f"{heading:<12}{text}" for heading, texts in lines.items() for text in texts)


def end_reason(run: RunState) -> str:
    """Return the reason why training ended, or an empty string during training."""
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
    for callback in run.hooks.callbacks:
        if is_instance_of(callback, "EarlyStopping") and callback.stopped_epoch:
            return f"should_stop was set by EarlyStopping on {callback.monitor!r}"
    return "should_stop was set"


def best_value(rows: Sequence[Mapping[str, Any]], monitor: str, mode: str) -> str:
    """Return the best value of the monitored metric and its epoch, or an empty string."""
    found = [row for row in rows if not math.isnan(row.get(monitor, math.nan))]
    if not found:
        return ""
    choose = max if mode == "max" else min
    best = choose(found, key=lambda row: row[monitor])
    return f"{monitor} {format_value('', best[monitor])} in epoch {best['epoch']}"


def format_results(results: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Return the metrics of an evaluation as a table with a column for each loader."""
    import pandas

    loaders = {}
    for index, result in enumerate(results):
        # The header of the column names the loader.
        values = {name.split("/dataloader_idx_")[0]: value for name, value in result.items()}
        loaders[f"DataLoader {index}"] = values
    table = (
        pandas.DataFrame(loaders).sort_index().rename_axis(columns=f"{stage} metric".capitalize())
    )
    return "" if table.empty else table.to_string(na_rep="", float_format=str)


def format_value(name: str, value: Any) -> str:
    """Format a value for the tables, such as 0.2500 or 2.00e-07, or 0.0003 (learning rate)."""
    if isinstance(value, bool) or not isinstance(value, float):
        return " ".join(str(value).split())[:20]
    if name in ("time", "left"):
        return format_duration(value)
    if name == "samples_per_second":
        return f"{value:.0f}"
    if name == "lr" or name.startswith("lr_") or not math.isfinite(value):
        return f"{value:.3g}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def format_duration(seconds: float) -> str:
    """Format a duration, such as "0.3 s", "1:15" or "25:00:00"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside that directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
