"""Recipe: config.yaml, what rebuilds a run: model, data, every word of the loop; and what it ran on."""

from __future__ import annotations

import inspect
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import torch

from .. import __version__
from ..core.functions import FunctionSteps
from ..core.run import Run
from ..files.disk import replace_file
from ..files.errors import cause_of
from .logger import CSVLogger, plain, yaml_of

HEAD = "# fabric-template fit --config with this file is this run again; `about` is for people, and not read\n"
PATIENCE = 2.0  # seconds that git may take


def write_recipe(run: Run) -> None:
    """Write config.yaml beside the rows; a run that is resumed keeps the one of its beginning. No failure ends the run.

    One that somebody else has put there, as LightningCLI does, is theirs.
    """
    for logger in run.home.loggers:
        if not isinstance(logger, CSVLogger):
            continue
        path = Path(logger.log_dir, "config.yaml")
        try:
            if not path.exists() or (run.origin.resume_path is None and path.read_bytes().startswith(HEAD.encode())):
                replace_file(path, to_yaml(recipe_of(run)), is_needed=False)
        except Exception as error:  # an object may do anything when it is looked at
            run.said.warn(f"'{path}' is not written, training goes on without it: {cause_of(error)}")


def to_yaml(recipe: dict[str, Any]) -> bytes:
    """The file."""
    return (HEAD + yaml_of(recipe, width=200)).encode("utf-8", "backslashreplace")


def recipe_of(run: Run) -> dict[str, Any]:
    """All that is known of a run as plain values; in ``about`` what is not, by the word that would say it.

    The command line knows its model and data exactly; of a script's, their classes and what save_hyperparameters kept.
    """
    given, unknown = dict(run.home.recipe), dict[str, str]()
    about = given.pop("about", {"command": shlex.join([os.path.basename(sys.executable), *sys.argv])})
    trained, words = run.trained, dict[str, Any]()
    if "model" not in given:
        words["model"] = _rebuilt("model", trained.model, unknown)
        if trained.datamodule is not None:
            words["data"] = _rebuilt("data", trained.datamodule, unknown)
        elif any(loader is not None for loader in run.data.given.loaders.values()):
            unknown["data"] = "fit was given loaders"
        own = trained.owner.functions if isinstance(trained.owner, FunctionSteps) else {}
        by_hand = {**own, "optimizer": run.optimizing.given}
        unknown |= {name: _said(part) for name, part in by_hand.items() if part is not None}
    words |= {part: _known(given.pop(part), unknown, f"{part}.") for part in ("model", "data") if given.get(part)}
    words |= _known(given, unknown)
    words["version"] = None  # the next free one: nothing is written over this run
    if (path := run.origin.load_path) is not None:
        words["load"] = str(path)
    elif (path := run.origin.resume_path) is not None and Path(path).parent != run.home.folder:
        words["resume"] = str(path)
    python, ours = platform.python_version(), {"fabric_template": __version__}
    versions = {**ours, "torch": torch.__version__, "lightning": lightning.__version__, "python": python}
    about |= {"folder": os.getcwd(), "versions": plain(versions), "git": git_state(), "unknown": unknown}
    return {**words, "about": about}


def _rebuilt(part: str, given: Any, unknown: dict[str, str]) -> dict[str, Any]:
    """The class of an object, and its arguments as far as it has kept them."""
    kind, words = type(given), dict[str, Any]()
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        unknown[part] = f"{kind.__qualname__} of {kind.__module__}, which nothing else can import"
    else:
        words["class"] = f"{kind.__module__}:{kind.__qualname__}"
    kept = dict(getattr(given, "hparams_initial", None) or {})
    parameters = inspect.signature(kind).parameters
    names = [name for name, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    if len(names) == len(parameters):
        kept = {name: value for name, value in kept.items() if name in names}
    unknown |= {f"{part}.{name}": "not kept by save_hyperparameters" for name in names if name not in kept}
    return words | _known(kept, unknown, f"{part}.")


def _known(values: Mapping[str, Any], unknown: dict[str, str], prefix: str = "") -> dict[str, Any]:
    """The values that a file can hold; the others are named as unknown."""
    known = {}
    for name, value in values.items():
        try:
            known[name] = plain(value, _no_word)
        except TypeError:
            unknown[prefix + name] = _said(value)
    return known


def _no_word(value: Any) -> Any:
    if isinstance(value, timedelta):
        return {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError


def _said(value: Any) -> str:
    """What stands in no file, by its name."""
    if isinstance(value, list | tuple) and value:
        return f"objects: {', '.join(type(item).__name__ for item in value)}"
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else f"an object: {type(value).__name__}"


@cache
def git_state() -> dict[str, Any] | None:
    """The commit of the working folder, and whether its files are those of the commit; None where there is no git.

    Asked once per process. Files that git does not know (logs/, checkpoints/) do not count.
    """
    words = "git --no-optional-locks -c core.fsmonitor=false status --porcelain=v2 --branch --untracked-files=no"
    try:
        done = subprocess.run(
            words.split(), capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    commit = re.search(r"^# branch\.oid ([0-9a-f]+)$", "\n".join(lines), re.MULTILINE)
    return {"commit": commit and commit[1], "is_clean": all(line.startswith("#") for line in lines)}
