"""Arguments before they are parsed: names of classes, demos, and the options of a run."""

from __future__ import annotations

import dataclasses
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


def complete_arguments(command: str, argv: list[str]) -> list[str]:
    """Put a demo's options first, then files, then classes, all with their import paths."""
    tokens = join_values(argv)
    model, folder = value_of("model", tokens) or "", value_of("run", tokens)
    is_empty = not any(value_of(option, tokens) for option in ("model", "data", "config", "run"))
    demo = "digits" if is_empty else model.removeprefix("demos.")
    files = [f"--config={json.dumps(DEMOS[demo])}"] if demo in DEMOS else []
    if folder is not None:
        files.append(f"--config={json.dumps(read_run(command, Path(folder), tokens))}")
    files += [token for token in tokens if token.startswith("--config=")]
    others = [resolve_token(token) for token in tokens if not token.startswith("--config=")]
    # jsonargparse needs the class before its arguments.
    others.sort(key=lambda token: not token.startswith(("--model=", "--data=")))
    load = value_of("load", tokens)
    if folder is not None and load in ("best", "last") and is_new_run(command, tokens):
        # The checkpoints of logs/digits/version_0 are in checkpoints/digits/version_0.
        run = Path(folder).absolute()
        checkpoints = run.parents[2] / "checkpoints" / run.parent.name / run.name
        others.append(f"--load={checkpoints / load}.ckpt")
    return [*files, *others]


def resolve_token(token: str) -> str:
    """Replace the class in an option such as --callbacks+=EarlyStopping by its import path."""
    match = re.fullmatch(r"--(model|data|callbacks|logger)(\+|\.help)?=(\w[\w.:/-]*)", token)
    if match is None or match[3] in ("null", "true", "false"):
        return token
    option, name = match[1], match[3]
    suffix = match[2] or ("+" if option in LIGHTNING else "")
    demo = DEMOS.get(name.removeprefix("demos."), {})
    path = demo.get(option) or name.replace(":", ".")
    if option in LIGHTNING and "." not in path:
        path = f"{LIGHTNING[option]}.{path}"
    return f"--{option}{suffix}={path}"


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
