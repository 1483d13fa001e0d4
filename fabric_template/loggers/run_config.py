"""Collect the hyperparameters of a run, and write a config.yaml to repeat the run."""

from __future__ import annotations

import inspect
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch

from .. import __version__
from ..config import to_plain
from ..errors import ConfigurationError, describe
from ..files import write_yaml
from ..lightning_compat.private import logs_hyperparameters

if TYPE_CHECKING:
    from ..training.run import Run

HEAD = "# `fabric-template fit --config` with this file repeats this run. It ignores `about`.\n"


def write_run_config(run: Run) -> None:
    """Write config.yaml beside metrics.csv. If writing fails, warn and continue training.

    Keep an existing config.yaml if the run is resumed, or if another program wrote the file.
    """
    for logger in run.loggers.csv_loggers:
        path = Path(logger.log_dir, "config.yaml")
        try:
            is_own = path.exists() and path.read_text("utf-8", "replace").startswith(HEAD)
            if not path.exists() or (is_own and not run.plan.start.resumes):
                write_yaml(path, collect_run_config(run), HEAD)
        except Exception as error:
            warnings.warn(
                f"{path}: the file could not be written, and training continues: {error!r}",
                stacklevel=2,
            )


def collect_run_config(run: Run) -> dict[str, Any]:
    """Return a run's options, model and data. "unknown" lists the parts that YAML cannot hold."""
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
        unknown["data"] = "fit was given loaders"
    functions = getattr(run.module, "functions", {})
    given_parts = {**functions, "optimizer": run.plan.optimizer}
    options |= {name: part for name, part in given_parts.items() if part is not None}
    config |= keep_plain(options, unknown)
    # Leave out the version, so that a repeated run overwrites nothing.
    config["version"] = None
    if run.plan.start.path is not None:
        config["resume" if run.plan.start.resumes else "load"] = str(run.plan.start.path)
    versions = {
        "fabric_template": __version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    return {**config, "about": {"versions": versions, "unknown": unknown}}


def collect_class_config(part: str, given: Any, unknown: dict[str, str]) -> dict[str, Any] | None:
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
    """Return the values that YAML supports, and describe all other values in ``unknown``."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = to_plain(value, is_strict=True)
        except TypeError:
            unknown[prefix + name] = describe(value)
    return kept


def check_settings(hparams: Mapping[str, Any], *parts: Any) -> None:
    """Raise an error if a part has saved a hyperparameter of another value than in ``hparams``."""
    for part in parts:
        saved = dict(part.hparams_initial) if logs_hyperparameters(part) else {}
        for name in hparams.keys() & saved.keys():
            value = to_plain(saved[name])
            if value != hparams[name] and repr(value) != repr(hparams[name]):
                kind = type(part).__name__
                raise ConfigurationError(
                    f"hparams: got {name}={describe(hparams[name])}, expected {describe(value)}, which"
                    f" {kind} has saved under this name. Leave {name!r} out, or give it another name."
                )


def merge_hyperparameters(
    model: Any, datamodule: Any, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the hyperparameters that a module and a datamodule saved, and the user's own.

    Raises:
        RuntimeError: The module and the datamodule have different values for one name.
    """
    merged: dict[str, Any] = {}
    for part in (model, datamodule):
        hparams = dict(part.hparams_initial) if logs_hyperparameters(part) else {}
        # LightningCLI adds the key _class_path, although a class is not a hyperparameter.
        hparams.pop("_class_path", None)
        # Compare the repr, because == of two arrays returns an array.
        both = hparams.keys() & merged.keys()
        different = sorted(key for key in both if repr(hparams[key]) != repr(merged[key]))
        if different:
            raise RuntimeError(
                f"Error while merging hparams: the keys {different} are present in both the"
                " LightningModule's and LightningDataModule's hparams but have different values."
            )
        merged |= hparams
    return merged | dict(own or {})
