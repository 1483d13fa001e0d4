"""Write config.yaml, which rebuilds a run from its options, model and data."""

from __future__ import annotations

import inspect
import os
import platform
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch

from .. import __version__
from .csv_logger import PLAIN_TYPES, to_plain, to_yaml, write_text

if TYPE_CHECKING:
    from ..training.run_state import RunState

HEAD = "# `fabric-template fit --config` with this file repeats this run. It ignores `about`.\n"
GIT_SECONDS = 2.0


def write_run_config(run: RunState) -> None:
    """Write config.yaml beside metrics.csv. It never stops a run.

    A resumed run keeps the file of its first start. A file of another program, such as LightningCLI's, stays.
    """
    for logger in run.loggers.csv_loggers:
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
    """Return the options, model and data of a run as plain values.

    A model made by a script is recorded as its class and the arguments that it saved. "about" lists
    the versions, the git commit and everything that a file cannot hold.
    """
    options = dict(run.loop.recipe)
    about = options.pop(
        "about", {"command": shlex.join([os.path.basename(sys.executable), *sys.argv])}
    )
    unknown: dict[str, str] = {}
    config: dict[str, Any] = {}
    for part, given in (("model", run.model), ("data", run.datamodule)):
        if recorded := options.pop(part, None):
            config[part] = keep_plain(recorded, unknown, f"{part}.")
        elif given is not None:
            config[part] = class_config(part, given, unknown)
    if "data" not in config and any(loader is not None for loader in run.data.given.values()):
        unknown["data"] = "fit was given loaders"
    functions = getattr(run.module, "functions", {})
    for name, given in {**functions, "optimizer": run.given_optimizer}.items():
        if given is not None:
            unknown[name] = describe(given)
    config |= keep_plain(options, unknown)
    # The next free version, so that nothing is written over this run.
    config["version"] = None
    if run.checkpoint_path is not None:
        config["resume" if run.resumes else "load"] = str(run.checkpoint_path)
    versions = {
        "fabric_template": __version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }
    about |= {
        "folder": os.getcwd(),
        "versions": {
            name: str(text)
            for name, text in {**versions, "python": platform.python_version()}.items()
        },
        "git": git_state(),
        "unknown": unknown,
    }
    return {**config, "about": about}


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
    """Return the values that YAML can hold. The names of the others are added to unknown."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, timedelta):
            value = {
                "days": value.days,
                "seconds": value.seconds,
                "microseconds": value.microseconds,
            }
        if is_plain(value):
            kept[name] = to_plain(value)
        else:
            unknown[f"{prefix}{name}"] = describe(value)
    return kept


def is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(item) for item in value)
    return isinstance(value, PLAIN_TYPES)


def describe(value: Any) -> str:
    """Return a short text for a value that a file cannot hold."""
    if isinstance(value, list | tuple) and value:
        return f"objects: {', '.join(type(item).__name__ for item in value)}"
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else f"an object: {type(value).__name__}"


@cache
def git_state() -> dict[str, Any] | None:
    """Return the commit of the working folder and whether its files are unchanged; None without git."""
    command = "git --no-optional-locks -c core.fsmonitor=false status --porcelain=v2 --branch --untracked-files=no"
    try:
        done = subprocess.run(
            command.split(),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    commit = re.search(r"^# branch\.oid ([0-9a-f]+)$", "\n".join(lines), re.MULTILINE)
    return {"commit": commit and commit[1], "is_clean": all(line.startswith("#") for line in lines)}
