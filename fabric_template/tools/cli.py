"""Run the command line. jsonargparse parses and documents the options of every command.

A command's module is imported when the command runs, so the list of commands needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import re
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import LoopArguments
from ..demos import DEMOS

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from .. import FabricLoop

PACKAGE = __package__.rpartition(".")[0]
COMMANDS = {  # name: (module, help)
    "fit": ("commands", "train a model; without options the digits demo"),
    "validate": ("commands", "run a model's validation_step over its data"),
    "test": ("commands", "run a model's test_step over its data"),
    "predict": ("commands", "run a model's predict_step over its data"),
    "plot": ("plots", "draw the logs of one or several runs"),
    "runs": ("runs", "list runs, compare two (diff RUN RUN), find the best one (best)"),
    "compare": ("compare", "find the first step in which two trainings differ"),
    "profile": ("profile", "show where the time of a training step goes"),
    "tune": ("tune", "find faster options, or with --lr a learning rate"),
    "copy": ("vendoring", "copy this package or its single file into a project"),
    "diff": ("vendoring", "show what you and what upstream have changed in a copy"),
    "update": ("vendoring", "merge what is new upstream into a copy"),
    "verify": ("commands", "check that checkpoints are whole"),
}
LOOP_COMMANDS = ("fit", "validate", "test", "predict", "profile", "tune")
LOAD = 'Take the weights of "last", "best" or a path.'
COPY = "The folder of a copy, or a copied file."
FLAG = {"action": "store_true"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # the arguments of each command's function
    "fit": {
        "--resume": {"help": 'Continue exactly from "last", "best", "auto" or a path.'},
        "--load": {"help": LOAD},
    },
    "validate": {"--load": {"help": LOAD}},
    "test": {"--load": {"help": LOAD}},
    "predict": {
        "--load": {"help": LOAD},
        "--out": {"help": "The file: .csv (a row per sample) or .pt (the list of batches)."},
    },
    "plot": {
        "paths": {"nargs": "*", "default": ["logs"], "help": "CSV files, or folders of runs."},
        "--metrics": {"nargs": "*", "help": "Columns or names (f1, lr). Default: loss, accuracy."},
        "--x": {"help": "The horizontal axis: epoch, step or time."},
        "--smooth": {"type": float, "help": "Weight of the earlier points, from 0 to below 1."},
        "--out": {"help": "The picture. Default: history.png in the folder."},
    },
    "runs": {
        "paths": {"nargs": "*", "default": [], "help": "A folder, diff RUN RUN, or best FOLDER."},
        "--metric": {"help": "The metric that ranks the runs. Default: the run's monitor."},
        "--html": {"help": "Write the table and the curves into this file, for a browser."},
    },
    "compare": {
        "first": {"help": 'The correct script ("train.py --lr 0.1"), or its recording.'},
        "second": {"help": "The script to compare with it, or a recording."},
        "--steps": {"type": int, "default": 50, "help": "The number of optimizer steps."},
    },
    "profile": {
        "--out": {"help": "Draw the table into this file."},
        "--steps": {"type": int, "default": 50, "help": "The number of timed batches."},
    },
    "tune": {
        "--lr": {**FLAG, "help": "Find a learning rate: raise it until the loss blows up."},
        "--only": {"nargs": "*", "help": "Try only these settings, such as threads batch_size."},
        "--seconds": {"type": float, "default": 2.0, "help": "The duration of a trial in seconds."},
        "--out": {"default": "tuned.yaml", "help": "Write a file for fit --config, or the curve."},
    },
    "copy": {
        "path": {"help": "The folder to write, or with --mini the file, src/train_loop.py."},
        "--mini": {**FLAG, "help": "Copy MiniLoop, the single file."},
    },
    "diff": {
        "path": {"help": COPY},
        "--yours": {**FLAG, "help": "Show only what you have changed."},
        "--upstream": {**FLAG, "help": "Show only what the installed version has changed."},
    },
    "update": {
        "path": {"help": COPY},
        "--dry-run": {**FLAG, "help": "Write nothing, only show what would change."},
    },
    "verify": {"path": {"help": "A checkpoint, or a folder of them."}},
}
# These options hold objects, or have a type in CLASS_OPTIONS.
NOT_TYPED: set[str | int] = {"fabric", "plugins", "loggers", "callbacks", "logger"}
FIELDS = [field.name for field in dataclasses.fields(LoopArguments) if field.name not in NOT_TYPED]


class AnyClass(ABC):
    """Let jsonargparse accept any class as model, data, callback or logger."""

    @abstractmethod
    def __init__(self) -> None: ...

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        # Exclude classes, plain values and jsonargparse's own objects.
        is_plain = other.__module__.partition(".")[0] in ("builtins", "jsonargparse")
        return not is_plain and not issubclass(other, type)


CLASS_OPTIONS = {  # name: (type, help)
    "model": (AnyClass, "package.module:Class, or demos.NAME. --model.help=CLASS: its arguments."),
    "data": (AnyClass, "package.module:Class of an object with train_dataloader and the like."),
    "callbacks": (
        list[AnyClass] | None,
        "--callbacks+=EarlyStopping --callbacks.monitor=val_loss, or your own class.",
    ),
    "logger": (
        bool | list[AnyClass] | None,
        "true: the CSV logger. false: none. Or TensorBoardLogger --logger.save_dir=boards.",
    ),
}
LIGHTNING = {"callbacks": "lightning.pytorch.callbacks", "logger": "lightning.pytorch.loggers"}
# These commands train, and each training gets a new version.
TRAINING_COMMANDS = ("fit", "profile", "tune")
SWITCHES = {f"--{f.name}" for f in dataclasses.fields(LoopArguments) if "bool" in str(f.type)}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Returns:
        0; 1 if the command found differences or damage; 2 if it could not run; 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            lines = "\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())
            print(f"usage: {program()} COMMAND [options]\n\n{lines}\n\nCOMMAND --help shows more.")
            return 0
        if argv[0] == "--version":
            print(f"{PACKAGE} {importlib.import_module(PACKAGE).__version__}")
            return 0
        return run_command(argv[0], argv[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print(f"{program()}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError) as error:
        if not is_users_mistake(error):
            raise
        names = "|".join([*FIELDS, "resume", "load"])
        text = re.sub(rf"(?<![\w.'`-])({names})(?==|: got )", r"--\1", " ".join(str(error).split()))
        hint = "; or give --data package.module:Class" if "train_dataloader" in text else ""
        print(f"{program()}: {text}{hint}", file=sys.stderr)
        return 2


def is_users_mistake(error: Exception) -> bool:
    """Return whether a check of this package raised the error, without user code in between."""
    packages, trace = [], error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        packages.append(PACKAGE if f"{name}.".startswith(f"{PACKAGE}.") else name.partition(".")[0])
        trace = trace.tb_next
    ours = {PACKAGE, "__main__", "lightning", "contextlib", "jsonargparse"}
    return packages[-1] == PACKAGE and {*packages} <= ours


def program() -> str:
    """Return the name of the program, so that commands in messages can be copied."""
    name = Path(sys.argv[0]).stem
    return name if name == "fabric-template" else f"python -m {PACKAGE}"


def run_command(name: str, argv: list[str]) -> int:
    """Parse the arguments of a command, create its loop, model and data, and run it."""
    if name not in COMMANDS:
        raise ValueError(f"got the command {name}, expected one of {', '.join(COMMANDS)}.")
    parser = make_parser(name)
    parts: tuple[Any, ...] = ()
    if name not in LOOP_COMMANDS:
        settings = parse(parser, argv)
    elif {"-h", "--help"} & {*argv}:
        parser.print_help()
        return 0
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")
        settings = parse(parser, complete_arguments(name, argv))
        if settings.model is None:
            raise ValueError("--model: got no class, expected --model package.module:Class.")
        parts = build(parser, settings)
    function = getattr(
        importlib.import_module(f".{COMMANDS[name][0]}", __package__), f"{name}_command"
    )
    names = [option.lstrip("-").replace("-", "_") for option in OPTIONS[name]]
    return function(*parts, **{option: settings[option] for option in names})


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
    """Return the last value of an option on the command line."""
    values = [token.partition("=")[2] for token in tokens if token.startswith(f"--{option}=")]
    return values[-1] if values else None


def complete_arguments(command: str, argv: list[str]) -> list[str]:
    """Order the arguments as demo options, files, classes, others. Complete the import paths."""
    tokens = join_values(argv)
    model, folder = value_of("model", tokens) or "", value_of("run", tokens)
    is_empty = not any(value_of(option, tokens) for option in ("model", "data", "config", "run"))
    demo = "digits" if is_empty else model.removeprefix("demos.")
    files = [f"--config={json.dumps(DEMOS[demo])}"] if demo in DEMOS else []
    if folder is not None:
        files.append(f"--config={json.dumps(read_run(command, Path(folder), tokens))}")
    files += [token for token in tokens if token.startswith("--config=")]
    others = [resolve_token(token) for token in tokens if not token.startswith("--config=")]
    # jsonargparse requires the class before its arguments.
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
    """Return the options of a run. Except for a new training, add its name and version."""
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


def make_parser(name: str) -> ArgumentParser:
    """Make the parser of a command."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=f"{program()} {name}",
        description=COMMANDS[name][1],
        exit_on_error=False,
        allow_abbrev=False,
    )
    if name in LOOP_COMMANDS:
        parser.usage = f"{parser.prog} [options]"
        text = "A YAML file of options. The last of several files wins. It can import any class."
        parser.add_argument("--config", action="config", help=text)
        text = "Take model, data and all options from this run, logs/<name>/version_<n>."
        parser.add_argument("--run", help=text)
        parser.add_argument("--about", type=dict | None, help=argparse.SUPPRESS)
        for option, (kind, text) in CLASS_OPTIONS.items():
            parser.add_argument(f"--{option}", type=kind, help=text)
    for option, arguments in OPTIONS[name].items():
        parser.add_argument(option, **arguments)
    if name in LOOP_COMMANDS:
        parser.add_class_arguments(
            LoopArguments, fail_untyped=False, instantiate=False, skip=NOT_TYPED
        )
    return parser


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse the arguments. Raise an error with a one-line message if they are invalid."""
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(explain(parser, str(error))) from None


def explain(parser: ArgumentParser, message: str) -> str:
    """Shorten a message of jsonargparse to one line that names the option."""
    text = " ".join(message.split())
    unknown = re.match(r"Unrecognized arguments:.*?(--[\w.]+)|Option '(\w+)' is not", text)
    if unknown:
        option = unknown[1] or f"--{unknown[2]}"
        known = [string for action in parser._actions for string in action.option_strings]
        near = difflib.get_close_matches(option, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"{parser.prog} --help lists all."
        return f"{option}: {parser.prog} has no such option. {hint}"
    keys = re.findall(r'Parser key "([\w.]+)": ', text)
    text = re.sub(r'Parser key "[\w.]+": ', "", text)
    if union := re.search(
        r"Subtypes: \[(.*?)\] Errors: (.*) Given value type: .* value: (.*)", text
    ):
        # Drop the messages about types that do not match, and keep the constructor's error.
        reasons = [reason for reason in union[2].split("- ") if "Expected a" not in reason]
        text = " ".join(reasons) or f"got {union[3]}, expected {union[1].replace(', ', ' or ')}."
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    return f"--{'.'.join(dict.fromkeys(keys))}: {text}" if keys else text


def build(parser: ArgumentParser, settings: Namespace) -> tuple[FabricLoop, Any, Any]:
    """Create the loop, the model and the data."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from .. import FabricLoop

    plain = {name: settings[name] for name in FIELDS}
    mistakes = (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException)
    try:
        loop = FabricLoop(**plain, **instantiate(parser, settings, "callbacks", "logger"))
    except mistakes as error:
        raise ValueError(explain(parser, str(error))) from error
    classes = settings.as_dict()
    loop.recipe = {**plain, **{name: classes[name] for name in CLASS_OPTIONS}}
    # Create the model after the loop, which seeds the random generators.
    made = instantiate(parser, settings, "model", "data")
    return loop, made["model"], made["data"]


def instantiate(parser: ArgumentParser, settings: Namespace, *options: str) -> dict[str, Any]:
    """Create the objects of the given options."""
    from jsonargparse import Namespace

    # jsonargparse 4.49 renamed instantiate_classes to instantiate.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return vars(make(Namespace(**{option: settings[option] for option in options})))
