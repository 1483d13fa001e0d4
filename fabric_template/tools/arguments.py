"""Arguments before they are parsed: names of classes, demos, and the options of a run."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from .. import LoopConfig
from ..demos import DEMOS

LIGHTNING = {"callbacks": "lightning.pytorch.callbacks", "logger": "lightning.pytorch.loggers"}
# These commands train in a version of their own.
TRAINING_COMMANDS = ("fit", "profile", "tune")
SWITCHES = {f"--{f.name}" for f in dataclasses.fields(LoopConfig) if "bool" in str(f.type)}


def join_values(argv: list[str]) -> list[str]:
    """Write --model X as --model=X, and a bare switch as --switch=true."""
    tokens: list[str] = []
    for token in argv:
        is_value = bool(tokens) and not token.startswith("--")
        if is_value and re.fullmatch(r"--(?!only$)[^=]+", tokens[-1]):
            tokens[-1] += f"={token}"
        else:
            tokens.append(token)
    return [f"{token}=true" if token in SWITCHES else token for token in tokens]


def value_of(option: str, tokens: list[str]) -> str | None:
    """Return the last value that was typed for an option."""
    values = [token.partition("=")[2] for token in tokens if token.startswith(f"--{option}=")]
    return values[-1] if values else None


def complete_arguments(command: str, tokens: list[str]) -> list[str]:
    """Put a demo's options first, then files, then classes, all with their import paths."""
    model = value_of("model", tokens) or ""
    is_empty = not any(value_of(option, tokens) for option in ("model", "data", "config", "run"))
    demo = "digits" if is_empty else model.removeprefix("demos.")
    files = [f"--config={json.dumps(DEMOS[demo])}"] if demo in DEMOS else []
    if folder := value_of("run", tokens):
        files.append(f"--config={json.dumps(read_run(command, Path(folder), tokens))}")
    files += [token for token in tokens if token.startswith("--config=")]
    tokens = [token for token in tokens if not token.startswith("--config=")]
    tokens = [resolve_token(token) for token in tokens]
    # jsonargparse needs the class before its arguments.
    tokens.sort(key=lambda token: not token.startswith(("--model=", "--data=")))
    return [*files, *tokens]


def resolve_token(token: str) -> str:
    """Replace the class in an option such as --callbacks+=EarlyStopping by its import path."""
    match = re.fullmatch(r"--(model|data|callbacks|logger)(\+|\.help)?=(\w[\w.:/-]*)", token)
    if match is None or match[3] in ("null", "true", "false"):
        return token
    suffix = match[2] or ("+" if match[1] in LIGHTNING else "")
    return f"--{match[1]}{suffix}={resolve_class(match[1], match[3])}"


def resolve_class(option: str, name: str) -> str:
    """Return the import path of a class.

    Args:
        option: model, data, callbacks or logger.
        name: package.module:Class, demos.NAME, or for callbacks and logger a class of Lightning.
    """
    if name.removeprefix("demos.") in DEMOS and option in ("model", "data"):
        return DEMOS[name.removeprefix("demos.")][option]
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
    names = [*DEMOS] if module_name == "demos" else dir(module)
    near = difflib.get_close_matches(class_name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"--{option}: got {name}, expected a class in the module {module_name}.{hint}")


def is_new_run(command: str, tokens: list[str]) -> bool:
    return command in TRAINING_COMMANDS and value_of("resume", tokens) is None


def read_run(command: str, folder: Path, tokens: list[str]) -> dict[str, Any]:
    """Return the options of a run, and for all but a new training its name and version."""
    import yaml

    try:
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--run: got {folder}, expected a run's folder ({error}).") from error
    unknown = config.pop("about", {}).get("unknown")
    if unknown:
        text = ", ".join(f"{name} ({reason})" for name, reason in unknown.items())
        print(f"{folder} does not record {text}: give these options if needed", file=sys.stderr)
    if command != "fit" or value_of("resume", tokens) or value_of("load", tokens):
        config = {name: config[name] for name in config if name not in ("resume", "load")}
    if not is_new_run(command, tokens):
        folder = folder.absolute()
        number = folder.name.removeprefix("version_")
        config["version"] = int(number) if number.isdigit() else folder.name
        config |= {"name": folder.parent.name, "default_root_dir": str(folder.parents[2])}
    return config


def resolve_checkpoint(command: str, tokens: list[str], settings: Any) -> None:
    """Replace --load best beside --run, which means the newest run, by the file of this run."""
    run = value_of("run", tokens)
    if run and is_new_run(command, tokens) and settings.get("load") in ("best", "last"):
        folder = Path(run).absolute()
        place = Path("checkpoints", folder.parent.name, folder.name, f"{settings.load}.ckpt")
        settings.load = str(folder.parents[2] / place)
