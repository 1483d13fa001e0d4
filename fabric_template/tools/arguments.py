"""Arguments before they are parsed: names of classes, files of --config and --run."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..demos import DEMOS

OBJECTS = ("model", "data")
LIGHTNING = {"callbacks": "lightning.pytorch.callbacks", "logger": "lightning.pytorch.loggers"}
TRAINING_COMMANDS = ("fit", "profile", "tune")


def join_values(argv: list[str], switches: list[str]) -> list[str]:
    """Write --model X as --model=X, likewise for files, and a bare switch as --switch=true."""
    names = {*OBJECTS, *LIGHTNING, "config", "run", "load", "resume"}
    joined: list[str] = []
    for word, following in pairwise([*argv, "--"]):
        option = joined[-1][2:].rstrip("+").removesuffix(".help") if joined else ""
        if option in names and not word.startswith("--"):
            joined[-1] += f"={word}"
        elif word[2:] in switches and following.startswith("--"):
            joined.append(f"{word}=true")
        else:
            joined.append(word)
    return joined


def values_of(option: str, typed: list[str]) -> list[str]:
    """Return the values of an option in the order in which they were typed."""
    return [word.partition("=")[2] for word in typed if word.startswith(f"--{option}=")]


def resolve_class(option: str, name: str) -> str:
    """Return the import path of a class.

    Args:
        option: model, data, callbacks or logger.
        name: package.module:Class, demos.NAME, or for callbacks and logger a class of Lightning.
    """
    if option in OBJECTS and name.startswith("demos.") and name[6:] in DEMOS:
        return DEMOS[name[6:]][option]
    path = name.replace(":", ".")
    if option in LIGHTNING and "." not in path:
        path = f"{LIGHTNING[option]}.{name}"
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"--{option}: got {name}, expected package.module:Class.")
    module = None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A failed import inside the user's module keeps its traceback.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
    if callable(getattr(module, class_name, None)):
        return path
    names = {key.lower(): key for key, value in vars(module or object).items() if callable(value)}
    near = difflib.get_close_matches(class_name.lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {names[near[0]]}?" if near else ""
    if module_name == "demos":
        hint = f" The demos are {', '.join(DEMOS)}."
    raise ValueError(f"--{option}: got {name}, expected a class in the module {module_name}.{hint}")


def resolve_word(word: str, model: str) -> str:
    """Replace the class in an option such as --callbacks+=EarlyStopping by its import path."""
    if word == "--model.help":
        return f"--model.help={model}"
    match = re.fullmatch(r"--(model|data|callbacks|logger)(\+|\.help)?=(\w[\w.:/-]*)", word)
    if match is None or match[3] in ("null", "true", "false"):
        return word
    suffix = match[2] or ("+" if match[1] in LIGHTNING else "")
    return f"--{match[1]}{suffix}={resolve_class(match[1], match[3])}"


def resolve_value(option: str, value: Any) -> Any:
    """Return what a file says of a class as jsonargparse takes it: class_path and init_args."""
    if isinstance(value, list):
        return [resolve_value(option, item) for item in value]
    if isinstance(value, str):
        resolved: dict[str, Any] = {"class_path": resolve_class(option, value)}
    elif isinstance(value, dict):
        path = value.get("class_path", value.get("class"))
        arguments = {key: value[key] for key in value if key not in ("class_path", "class")}
        resolved = {"init_args": arguments.get("init_args", arguments)}
        if path is not None:
            resolved["class_path"] = resolve_class(option, str(path))
    elif isinstance(value, bool) or value is None:
        return value
    else:
        raise ValueError(f"--{option}: got {value!r}, expected package.module:Class.")
    return resolved


def read_config(option: str, path: Path) -> dict[str, Any]:
    """Read a file of options.

    Args:
        option: --config or --run, for the messages.
        path: A YAML file.
    """
    import yaml

    try:
        config = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{option}: got {path}, expected a YAML file ({error}).") from error
    if not isinstance(config, dict):
        raise ValueError(f"{option}: got {path}, expected lines such as max_epochs: 3.")
    unrecorded = config.pop("about", {}).get("unknown", {})
    if unrecorded:
        texts = ", ".join(f"{key} ({reason})" for key, reason in unrecorded.items())
        print(f"{path} does not record {texts}: give these options if needed", file=sys.stderr)
    for key in {*OBJECTS, *LIGHTNING} & {*config}:
        value = resolve_value(key, config[key])
        config[key] = [value] if key in LIGHTNING and isinstance(value, dict) else value
    return config


def starts_new_run(command: str, typed: list[str]) -> bool:
    """Return whether a command trains in a version of its own."""
    return command in TRAINING_COMMANDS and not values_of("resume", typed)


def read_run(command: str, folder: Path, typed: list[str]) -> dict[str, Any]:
    """Read the options of a run, and for all but a new training its name and version.

    Args:
        command: The command that asks.
        folder: logs/<name>/version_<n>.
        typed: The typed options.
    """
    config = read_config("--run", folder / "config.yaml")
    folder = folder.absolute()
    if command != "fit" or values_of("resume", typed) or values_of("load", typed):
        config = {key: config[key] for key in config if key not in ("resume", "load")}
    if starts_new_run(command, typed):
        return config
    number = folder.name.removeprefix("version_")
    version = int(number) if number.isdigit() else folder.name
    root = str(folder.parents[2])
    return {**config, "name": folder.parent.name, "version": version, "default_root_dir": root}


def name_checkpoint(folder: Path, typed: list[str]) -> list[str]:
    """Replace --load=best and --load=last, which mean the newest run, by the file of this run."""
    folder = folder.absolute()
    checkpoints = folder.parents[2] / "checkpoints" / folder.parent.name / folder.name
    files = {f"--load={word}": f"--load={checkpoints / word}.ckpt" for word in ("best", "last")}
    return [files.get(word, word) for word in typed]


def record_classes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the classes as a run's config.yaml has them: model and data with their arguments."""
    recorded = {option: settings[option] for option in LIGHTNING}
    for part in OBJECTS:
        if settings[part] is not None:
            module, _, name = settings[part]["class_path"].rpartition(".")
            recorded[part] = {"class": f"{module}:{name}", **settings[part].get("init_args", {})}
    return recorded
