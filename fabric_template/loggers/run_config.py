"""Write config.yaml, and collect the hyperparameters for the loggers."""

from __future__ import annotations

import inspect
import os
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from torch.nn.parameter import is_lazy

from .. import __version__
from ..config import to_yaml_value
from ..errors import ConfigurationError, describe
from ..files import write_yaml
from ..lightning_compat.private import logs_hyperparameters
from .csv_logger import CSVLogger

if TYPE_CHECKING:
    from ..config import LoopConfig
    from ..training.run import Run

HEAD = (
    "# Pass this file to `fabric-template fit --config` to repeat the run. The `about` section"
    " is ignored.\n"
)
GIT_STATUS = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-uno"]


def write_run_config(run: Run) -> None:
    """Write config.yaml next to metrics.csv. If writing fails, only show a warning."""
    for logger in run.loggers.csv_loggers if run.fabric.is_global_zero else ():
        path = Path(logger.log_dir, "config.yaml")
        try:
            is_own = path.exists() and "\nabout:\n" in path.read_text("utf-8", "replace")
            # Do not overwrite the config.yaml of a resumed run or of another program.
            if not path.exists() or (is_own and not run.plan.start.resumes):
                write_yaml(path, collect_run_config(run), HEAD)
        except Exception as error:
            warnings.warn(
                f"{path}: the file could not be written: {error!r}. Training continues.",
                stacklevel=2,
            )


def collect_run_config(run: Run) -> dict[str, Any]:
    """Return the content of config.yaml: the options, the model and the data of a run."""
    unknown: dict[str, str] = {}
    options = {**run.loop.recipe, "hparams": run.config.hparams}
    config: dict[str, Any] = {}
    for part, given in (("model", run.model), ("data", run.datamodule)):
        recorded = options.pop(part, None)
        if recorded is None and given is not None:
            recorded = collect_class_config(part, given, unknown)
        if recorded is not None:
            config[part] = recorded
    if "data" not in config and any(loader is not None for loader in run.data.given.values()):
        unknown["data"] = "not recorded, because fit received loaders"
    given_parts = {**run.plan.functions, "optimizer": run.plan.optimizer}
    options |= {name: part for name, part in given_parts.items() if part is not None}
    config |= keep_plain(options, unknown)
    # Omit the run's version from config.yaml, so that a run started from this file gets a new
    # version and overwrites nothing.
    config["version"] = None
    if run.plan.start.path is not None:
        config["resume" if run.plan.start.resumes else "load"] = str(run.plan.start.path)
    optimizers = run.optimization.optimizers
    # A run without training batches has no training loaders.
    loaders = run.data.train.as_given if "train" in run.data.created else None
    about = {
        **describe_process(run.fabric),
        "model": call_or_none(describe_model, run.model, run.network),
        **number_parts("optimizer", [call_or_none(describe_optimizer, o) for o in optimizers]),
        "batch_size": call_or_none(describe_batch_size, loaders),
        "unknown": unknown,
    }
    return to_yaml_value({**config, "about": about})


# Descriptions


def describe_process(fabric: Any) -> dict[str, Any]:
    """Return the command, git commit, package versions, device and number of processes."""
    return {
        "command": call_or_none(read_command),
        "git": call_or_none(read_git_here),
        "versions": {
            "fabric_template": __version__,
            "torch": str(torch.__version__),
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
        "device": str(fabric.device),
        "processes": fabric.world_size,
    }


def call_or_none(describe: Callable[..., Any], *parts: Any) -> Any:
    """Return the result of ``describe``, or None if ``describe`` raises an error."""
    try:
        return describe(*parts)
    except Exception:
        return None


def number_parts(kind: str, parts: Sequence[Any]) -> dict[str, Any]:
    """Return the items of a list as a dict with keys such as "optimizer" and "optimizer_1"."""
    return {f"{kind}_{index}" if index else kind: part for index, part in enumerate(parts)}


def read_command() -> str:
    if "ipykernel" in sys.modules:
        return "notebook"
    return "interactive" if hasattr(sys, "ps1") else shlex.join(sys.argv)


def read_git_here() -> dict[str, Any]:
    return read_git(os.getcwd())


@cache
def read_git(folder: str) -> dict[str, Any]:
    """Return a folder's git commit, and the number of tracked files with changes."""
    try:
        done = subprocess.run(GIT_STATUS, cwd=folder, capture_output=True, timeout=1.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    head, *lines = done.stdout.decode("utf-8", "replace").splitlines()
    changed = sum(not line.startswith("#") for line in lines)
    return {"commit": head.split()[-1], "changed_files": changed}


def describe_model(model: Any, network: Any) -> dict[str, Any]:
    """Return a model's class and its number of parameters."""
    parameters = [p for p in network.parameters() if not is_lazy(p)]
    return {"class": type(model).__name__, "parameters": sum(p.numel() for p in parameters)}


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's class and arguments."""
    described: dict[str, Any] = {"class": type(optimizer).__name__}
    for name in optimizer.defaults:
        # A scheduler may already have changed "lr", but "initial_lr" keeps the first value.
        values = [
            to_yaml_value(g.get(f"initial_{name}", g.get(name))) for g in optimizer.param_groups
        ]
        described[name] = values if any(value != values[0] for value in values) else values[0]
    return described


def describe_batch_size(loader: Any) -> Any:
    """Return the batch size of a loader, or of each loader in a list or dict."""
    if isinstance(loader, list | tuple):
        return [describe_batch_size(item) for item in loader]
    if isinstance(loader, dict):
        return {str(name): describe_batch_size(item) for name, item in loader.items()}
    if getattr(loader, "batch_size", None) is None:
        loader = getattr(loader, "batch_sampler", None)
    return getattr(loader, "batch_size", None)


# Options and hyperparameters


def collect_class_config(part: str, given: Any, unknown: dict[str, str]) -> dict[str, Any] | None:
    """Return an object's class, and the arguments that ``save_hyperparameters`` saved."""
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
            unknown[f"{part}.{name}"] = "not saved by save_hyperparameters"
    arguments = keep_plain(saved, unknown, f"{part}.")
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}


def keep_plain(
    values: Mapping[str, Any], unknown: dict[str, str], prefix: str = ""
) -> dict[str, Any]:
    """Drop values that YAML cannot store, and write their descriptions to the dict ``unknown``."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = to_yaml_value(value, is_strict=True)
        except TypeError:
            unknown[prefix + name] = describe(value)
    return kept


def log_settings(logger: Any, hparams: dict[str, Any], config: LoopConfig) -> None:
    """Send the hyperparameters of a loop to a logger."""
    if isinstance(logger, CSVLogger):
        options = {name: value for name, value in vars(config).items() if name != "hparams"}
        logger.log_hyperparams({"hparams": hparams, "config": options})
    elif hparams:
        logger.log_hyperparams(hparams)


def check_own_hparams(hparams: Mapping[str, Any], *parts: Any) -> None:
    """Raise an error if ``hparams`` contradicts a value that the model or datamodule has saved."""
    for part in parts:
        saved = dict(part.hparams_initial) if logs_hyperparameters(part) else {}
        for name in hparams.keys() & saved.keys():
            value = to_yaml_value(saved[name])
            if value != hparams[name] and repr(value) != repr(hparams[name]):
                kind = type(part).__name__
                raise ConfigurationError(
                    f"hparams: got {name}={describe(hparams[name])}, but save_hyperparameters() in"
                    f" {kind} saved {name}={describe(value)}. Leave out {name!r}, or rename it."
                )


def merge_hyperparameters(
    model: Any, datamodule: Any, own: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Merge the saved hyperparameters of a module and a datamodule with the loop's, ``own``."""
    merged: dict[str, Any] = {}
    for part in (model, datamodule):
        hparams = dict(part.hparams_initial) if logs_hyperparameters(part) else {}
        # Drop _class_path, which LightningCLI adds, because a class is not a hyperparameter.
        hparams.pop("_class_path", None)
        # Compare the values by their repr, because == on two arrays returns an array.
        both = hparams.keys() & merged.keys()
        different = sorted(key for key in both if repr(hparams[key]) != repr(merged[key]))
        if different:
            raise RuntimeError(
                f"Error while merging hparams: the keys {different} are present in both the"
                " LightningModule's and LightningDataModule's hparams but have different values."
            )
        merged |= hparams
    return merged | dict(own or {})
