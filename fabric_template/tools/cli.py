"""Parse the command line, and run the fit, validate, test, predict and verify commands.

Each command's module is imported when the command runs, so that `--help` does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import json
import os
import re
import shlex
import sys
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..config import LoopArguments
from ..demos import DEMOS
from ..files import walk

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from .. import FabricLoop

PACKAGE = __package__.rpartition(".")[0]
# Maps each command to its module and its help text.
COMMANDS = {
    "fit": ("cli", "train a model, or the digits demo if no options are given"),
    "validate": ("cli", "run a model's validation_step on its data"),
    "test": ("cli", "run a model's test_step on its data"),
    "predict": ("cli", "run a model's predict_step on its data"),
    "plot": ("plots", "draw the logs of one or several runs"),
    "runs": ("runs_command", "list runs, compare two (diff RUN RUN) or find the best (best)"),
    "compare": ("compare", "find the first step at which two training runs differ"),
    "profile": ("profile", "show how long each part of a training step takes"),
    "tune": ("tune", "find settings that make training faster"),
    "copy": ("package_copy", "copy this package, or only mini.py, into a project"),
    "diff": ("package_copy", "show how a copy and the installed version have changed"),
    "update": ("package_copy", "merge the installed version into a copy"),
    "verify": ("cli", "check that checkpoints are intact"),
}
# Commands that write to a new folder, such as logs/digits/version_1, unless --resume is given.
TRAINING_COMMANDS = ("fit", "profile", "tune")
EVALUATION_COMMANDS = ("validate", "test", "predict")
LOOP_COMMANDS = (*TRAINING_COMMANDS, *EVALUATION_COMMANDS)
LOAD = {"--load": {"help": 'Read the weights from "last", "best" or a path.'}}
COPY = {"path": {"help": "The folder of a copy, or a copied file."}}
FLAG = {"action": "store_true"}
# Maps each command to its options, and each option to the arguments of `add_argument`.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "fit": {
        "--resume": {"help": 'Resume exactly from "last", "best", "auto" or a path.'},
        **LOAD,
    },
    "validate": LOAD,
    "test": LOAD,
    "predict": {
        **LOAD,
        "--out": {"help": "The output file: .csv (one row per sample) or .pt (a list of batches)."},
    },
    "plot": {
        "paths": {"nargs": "*", "default": ["logs"], "help": "CSV files, or folders of runs."},
        "--metrics": {
            "nargs": "*",
            "help": "The columns or metrics to draw, such as f1. Default: loss and accuracy.",
        },
        "--x": {"help": "The horizontal axis: epoch, step or time."},
        "--smooth": {
            "type": float,
            "help": "The weight of earlier points in a moving average: at least 0, below 1.",
        },
        "--log": {**FLAG, "help": "Draw the values on a logarithmic scale."},
        "--out": {"help": "The image file. Default: history.png next to the logs."},
    },
    "runs": {
        "paths": {"nargs": "*", "default": [], "help": "A folder, diff RUN RUN, or best FOLDER."},
        "--metric": {"help": "The metric that ranks the runs. Default: the run's monitor."},
        "--mode": {"help": "min if smaller values of the metric are better, otherwise max."},
        "--html": {"help": "Write an HTML page with the table and the curves."},
    },
    "compare": {
        "first": {"help": 'The correct script, such as "train.py --lr 0.1", or a recording of it.'},
        "second": {"help": "The script to compare with the first, or a recording of it."},
        "--steps": {"type": int, "default": 50, "help": "The number of steps to compare."},
    },
    "profile": {
        "--out": {"help": "Save a chart of the times to this file."},
        "--steps": {"type": int, "default": 50, "help": "The number of timed batches."},
    },
    "tune": {
        "--only": {
            "nargs": "*",
            "help": "Try only these settings, for example: threads batch_size.",
        },
        "--seconds": {"type": float, "default": 2.0, "help": "The duration of a trial in seconds."},
        "--out": {"default": "tuned.yaml", "help": "The config file to write."},
    },
    "copy": {
        "path": {"help": "The folder to write or, with --mini, the file to write."},
        "--mini": {**FLAG, "help": "Copy only MiniLoop, which is one file."},
    },
    "diff": {
        **COPY,
        "--yours": {**FLAG, "help": "Show only what you have changed."},
        "--upstream": {**FLAG, "help": "Show only what the installed version has changed."},
    },
    "update": {
        **COPY,
        "--dry-run": {**FLAG, "help": "Show what would change, and write nothing."},
    },
    "verify": {"path": {"help": "A checkpoint, or a folder of checkpoints."}},
}
# The parser generates no command-line options for these arguments of FabricLoop.
NOT_TYPED: set[str | int] = {"fabric", "plugins", "loggers", "callbacks"}
FIELDS = [field.name for field in dataclasses.fields(LoopArguments) if field.name not in NOT_TYPED]


class Class(ABC):
    """A type for options that accept any class, such as --model, --data and --callbacks."""

    @abstractmethod
    def __init__(self) -> None: ...

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        is_plain = other.__module__.partition(".")[0] in ("builtins", "jsonargparse")
        return not is_plain and not issubclass(other, type)


# Maps each option whose value is a class, such as --model, to a type and a help text.
CLASS_OPTIONS = {
    "model": (Class, "package.module:Class or demos.NAME. --model.help=CLASS shows its arguments."),
    "data": (Class, "package.module:Class, a class with methods such as train_dataloader."),
    "callbacks": (
        list[Class] | None,
        "--callbacks+=EarlyStopping --callbacks.monitor=val_loss, or your own class.",
    ),
}
SUFFIXES = (".ckpt", ".pt", ".pth")  # The suffixes of checkpoint files.
SUFFIXES_OF_OUTPUT = {"predict": (".csv", ".pt"), "profile": (".png", ".pdf", ".svg")}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Returns:
        0 for success, 1 for differences or damaged files, 2 for a usage error, 130 for Ctrl-C, or
        141 if the reader of the output has closed the pipe.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            lines = "\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())
            print(f"usage: {program()} COMMAND [options]\n\n{lines}\n\nCOMMAND --help shows more.")
            return 0
        if argv[0] == "--version":
            print(f"{PACKAGE} {importlib.import_module(PACKAGE).__version__}")
            return 0
        exit_code = run_command(argv[0], argv[1:])
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:
        # Redirect stdout, because Python would otherwise print a BrokenPipeError when it flushes
        # stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError) as error:
        if not is_users_mistake(error):
            raise
        print(f"{program()}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def is_users_mistake(error: Exception) -> bool:
    """Return whether an error comes from a check in this package, not from the user's code."""
    packages = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        packages.append(PACKAGE if f"{name}.".startswith(f"{PACKAGE}.") else name.partition(".")[0])
    ours = {PACKAGE, "__main__", "lightning", "contextlib", "jsonargparse"}
    return packages[-1] == PACKAGE and {*packages} <= ours


def program() -> str:
    """Return the command that started this program, such as "fabric-template"."""
    name = Path(sys.argv[0]).stem
    return name if name == "fabric-template" else f"python -m {PACKAGE}"


def run_command(name: str, argv: list[str]) -> int:
    """Parse a command's arguments, run the command, and return its exit code."""
    if name not in COMMANDS:
        raise ValueError(f"got the command {name}, expected one of {', '.join(COMMANDS)}.")
    parser = make_parser(name)
    try:
        if name in LOOP_COMMANDS and not {"-h", "--help"} & {*argv}:
            sys.path.insert(0, "")
            argv = complete_arguments(name, argv)
        elif name == "runs":
            argv = put_paths_first(argv)
        settings = parser.parse_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(explain(parser, str(error))) from None
    parts: tuple[Any, ...] = ()
    if name in LOOP_COMMANDS:
        if settings.model is None:
            raise ValueError("--model: got no class, expected --model package.module:Class.")
        check_output(name, settings.get("out"))
        # Commands that train or evaluate a model need a loop, a model and data.
        parts = build(parser, settings)
    module = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
    names = [option.lstrip("-").replace("-", "_") for option in OPTIONS[name]]
    command = getattr(module, f"{name}_command")
    exit_code: int = command(*parts, **{key: settings[key] for key in names})
    if name in EVALUATION_COMMANDS and settings.load is None and parts[0].fabric.is_global_zero:
        hint = "the weights were untrained. To use the weights of the last fit, add --load best"
        print(f"{program()}: {hint}", file=sys.stderr)
    return exit_code


def check_output(command: str, out: str | None) -> None:
    """Check the name of a command's output file before the command runs, and create the folder."""
    if out is None:
        return
    suffixes = SUFFIXES_OF_OUTPUT.get(command, (Path(out).suffix,))
    if Path(out).suffix not in suffixes or Path(out).is_dir():
        expected = f"a file name that ends in {', '.join(suffixes[:-1])} or {suffixes[-1]}"
        expected = expected if len(suffixes) > 1 else "the name of a file"
        raise ValueError(f"--out: got {out}, expected {expected}.")
    Path(out).parent.mkdir(parents=True, exist_ok=True)


def put_paths_first(argv: list[str]) -> list[str]:
    """Move all paths in front of the options, because argparse expects the paths in one block."""
    paths: list[str] = []
    options: list[str] = []
    for previous, token in zip(["", *argv], argv, strict=False):
        is_value = previous.startswith("--") and "=" not in previous
        (options if token.startswith("-") or is_value else paths).append(token)
    return paths + options


def complete_arguments(command: str, argv: list[str]) -> list[str]:
    """Replace --run options and demo names in ``argv`` by --config options for jsonargparse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    for option in ("model", "data", "run", "resume", "load"):
        parser.add_argument(f"--{option}")
    given, others = parser.parse_known_args(argv)
    files = [f"--config={resolve_config(path)}" for path in given.config]
    is_empty = not (given.model or given.data or given.config or given.run)
    demo = "digits" if is_empty else (given.model or "").removeprefix("demos.")
    is_new_run = command in TRAINING_COMMANDS and given.resume is None
    if given.run is not None:
        run = Path(given.run).absolute()
        config = read_run(command, run, is_new_run)
        warn_of_default_values(config, argv)
        files.insert(0, f"--config={to_yaml(config)}")
        if given.load in ("best", "last") and is_new_run:
            # If a run is in logs/digits/version_0, its checkpoints are in
            # checkpoints/digits/version_0.
            checkpoints = run.parents[2] / "checkpoints" / run.parent.name / run.name
            given.load = f"{checkpoints / given.load}.ckpt"
    if demo in DEMOS:
        files.insert(0, f"--config={json.dumps(DEMOS[demo])}")
    # Put --config, --model and --data first, so that options such as --model.lr override them.
    chosen = {name: getattr(given, name) for name in ("model", "data", "resume", "load")}
    tokens = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    return [*files, *map(resolve_token, [*tokens, *others])]


def resolve_config(path: str) -> str:
    """Complete the class names of Lightning's callbacks in a config file.

    Returns:
        A value for --config: the rewritten YAML text, or ``path`` if nothing was rewritten.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError):
        # ``path`` may be YAML text, which jsonargparse's --config option also accepts.
        return path
    text, options = parse_config(f"--config: got {path}", content)
    if "trainer" in options:
        problem = f"got {path} with a trainer section, which only LightningCLI reads"
        raise ValueError(f"--config: {problem}. Move its options to the top level of the file.")
    start, end = r"""(\bclass_path["']?:\s*["']?)""", r"""(?=["'\s,}]|$)"""
    resolved = re.sub(rf"{start}([A-Z]\w*){end}", name_callback, text)
    return path if resolved == text else resolved


def name_callback(match: re.Match[str]) -> str:
    """Add the module to the name of a Lightning callback, as LightningCLI does."""
    start, name = match.groups()
    package = "lightning.pytorch.callbacks"
    is_callback = hasattr(importlib.import_module(package), name)
    return f"{start}{package}.{name}" if is_callback else match[0]


def parse_config(given: str, content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text and the options of a config file."""
    try:
        text = content.decode("utf-8-sig")
        options = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{given}, expected a text file. Save the file in UTF-8.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{given}, expected YAML ({error}).") from error
    if not isinstance(options, dict):
        raise ValueError(f"{given}, expected options such as max_epochs: 5.")
    return text, options


def resolve_token(token: str) -> str:
    """Replace a class name in an option such as --callbacks+=EarlyStopping with its import path."""
    match = re.fullmatch(r"(--(model|data|callbacks)(?:\+|\.help)?=)(\w[\w.:]*)", token)
    if match is None:
        return token
    start, option, name = match.groups()
    path = DEMOS.get(name.removeprefix("demos."), {}).get(option) or name.replace(":", ".")
    if option == "callbacks" and "." not in path:
        path = f"lightning.pytorch.callbacks.{path}"
    return start + path


def read_run(command: str, folder: Path, is_new_run: bool) -> dict[str, Any]:
    """Return the options in the config.yaml of a run's folder.

    Args:
        is_new_run: Whether the command starts a new run. If False, the returned options include
            the run's name, version and root directory.
    """
    file = folder / "config.yaml"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"--run: got {folder}, expected the folder of a run ({error}).") from error
    _, config = parse_config(f"--run: got {file}", content)
    if "trainer" in config:
        raise ValueError(
            f"--run: got {folder}, whose config.yaml was written by LightningCLI. Run your own"
            f" script with --config {file}."
        )
    if command != "fit" or not is_new_run:
        config = {name: config[name] for name in config if name not in ("resume", "load")}
    if not is_new_run:
        number = folder.name.removeprefix("version_")
        config["version"] = int(number) if number.isdigit() else folder.name
        config |= {"name": folder.parent.name, "default_root_dir": str(folder.parents[2])}
    return config


def warn_of_default_values(config: dict[str, Any], argv: list[str]) -> None:
    """Warn that default values replace the arguments that the run's script did not save."""
    unknown = (config.get("about") or {}).get("unknown") or {}
    given = {token.partition("=")[0] for token in argv}
    names = [f"--{name}" for name in unknown if "." in name]
    if missing := [name for name in names if name not in given]:
        text = f"--run: the run did not save the values of {', '.join(missing)}, so this command"
        print(f"{program()}: {text} uses their defaults.", file=sys.stderr)


def to_yaml(config: dict[str, Any]) -> str:
    """Return a config as one line of YAML in which every string is quoted."""

    class QuotingDumper(yaml.SafeDumper):
        def represent_str(self, data: str) -> Any:
            return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')

    QuotingDumper.add_representer(str, QuotingDumper.represent_str)
    text: str = yaml.dump(config, Dumper=QuotingDumper, default_flow_style=True, width=10**9)
    return text


def make_parser(name: str) -> ArgumentParser:
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
        text = "A YAML file of options. It can import any class. Later files override earlier ones."
        parser.add_argument("--config", action="config", help=text)
        text = "Use the model, data and options of the run in this folder: logs/<name>/version_<n>."
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


def explain(parser: ArgumentParser, message: str) -> str:
    """Put an error message from jsonargparse on one line, and suggest the most similar option."""
    text = " ".join(message.split())
    # If an unknown option comes from a config file, the message shows its name without "--".
    unknown = re.match(r"(?i)(?:unrecognized arguments:.*?--|option ')([\w.]+)", text)
    options = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(f"--{unknown[1]}", options, n=1) if unknown else []
    return f"{text}. Did you mean {near[0]}?" if near else text


def build(parser: ArgumentParser, settings: Namespace) -> tuple[FabricLoop, Any, Any]:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from .. import FabricLoop

    # ``instantiate`` was called ``instantiate_classes`` before jsonargparse 4.49.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes

    def instantiate(*options: str) -> dict[str, Any]:
        return vars(make(type(settings)(**{option: settings[option] for option in options})))

    plain = {name: settings[name] for name in FIELDS}
    try:
        loop = FabricLoop(**plain, **instantiate("callbacks"))
    except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
        raise ValueError(explain(parser, str(error))) from error
    loop.recipe = {**plain, **record_classes(parser, settings)}
    # Create the loop before the model, because the loop seeds the random generators.
    made = instantiate("model", "data")
    return loop, made["model"], made["data"]


def record_classes(parser: ArgumentParser, settings: Namespace) -> dict[str, Any]:
    """Return the class and arguments of the model, data and callbacks for config.yaml."""
    given, texts = settings.as_dict(), {}
    with contextlib.suppress(Exception):
        dumped = parser.dump(settings, skip_none=False)
        texts = yaml.safe_load(dumped)
        # Load the YAML text again, because parse_object modifies its argument.
        repeated = parser.parse_object(yaml.safe_load(dumped)).as_dict()
        if all(repeated[name] == given[name] for name in CLASS_OPTIONS):
            return {name: texts.get(name) for name in CLASS_OPTIONS}
    recorded: dict[str, Any] = {}
    for name in CLASS_OPTIONS:
        part, text = given[name], texts.get(name)
        if isinstance(part, list):
            pairs = zip(part, text or [None] * len(part), strict=True)
            recorded[name] = [record_class(*pair) for pair in pairs]
        else:
            recorded[name] = record_class(part, text)
    return recorded


def record_class(part: Any, text: Any) -> Any:
    """Return a class and its constructor arguments as values that YAML can store."""
    if not isinstance(part, dict):
        return part
    defaults = find_defaults(part["class_path"])
    texts = text.get("init_args", {}) if isinstance(text, dict) else {}
    arguments = {}
    for name, value in part.get("init_args", {}).items():
        # If YAML cannot store a value, store its text instead. Omit such a value if it is the
        # argument's default.
        if is_plain(value):
            arguments[name] = value
        elif name in texts and repr(value) != repr(defaults.get(name)):
            arguments[name] = texts[name]
    return {**part, "init_args": arguments}


def find_defaults(path: str) -> dict[str, Any]:
    """Return the default values of the constructor arguments of a class and its base classes."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    defaults: dict[str, Any] = {}
    for parent in reversed(getattr(kind, "__mro__", ())):
        parameters = inspect.signature(parent.__init__).parameters.values()
        defaults |= {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults


def is_plain(value: Any) -> bool:
    """Return whether a value keeps its type when it is written to YAML and read again."""
    if type(value) is dict:
        return all(map(is_plain, [*value, *value.values()]))
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def fit_command(
    loop: FabricLoop, model: Any, data: Any, *, resume: str | None, load: str | None
) -> int:
    """Train a model. Print the results and the command to resume the run."""
    from ..loggers.console import format_summary

    try:
        loop.fit(model, data, resume=resume, load=load)
    except (KeyboardInterrupt, SystemExit):
        command = resume_command(loop)
        if command is not None and loop.fabric.is_global_zero:
            print(f"\nThe run was interrupted. Resume it with\n{command}", file=sys.stderr)
        raise
    command, summary = resume_command(loop), loop.ending()
    # The "resume" line of the summary is Python code, so replace it with a command.
    summary.pop("resume", None)
    if command is not None:
        summary["resume"] = [command]
    if loop.fabric.is_global_zero:
        print(f"\n{format_summary(summary)}")
    return 0


def resume_command(loop: FabricLoop) -> str | None:
    """Return the command that resumes a run, or None if the run cannot be resumed."""
    # All processes must read log_dir, because log_dir is broadcast.
    folder = loop.log_dir
    if folder is None or not Path(folder, "config.yaml").is_file():
        return None
    if loop.checkpoint_path("last") is None:
        return None
    return f"{program()} fit --run {shlex.quote(os.path.relpath(folder))} --resume last"


def validate_command(loop: FabricLoop, model: Any, data: Any, *, load: str | None) -> int:
    loop.validate(model, data, load=load)
    return 0


def test_command(loop: FabricLoop, model: Any, data: Any, *, load: str | None) -> int:
    loop.test(model, data, load=load)
    return 0


def predict_command(
    loop: FabricLoop, model: Any, data: Any, *, load: str | None, out: str | None
) -> int:
    size = loop.fabric.world_size
    if out is not None and size > 1:
        text = f"--out: got {size} processes, each of which predicts only some of the samples."
        raise ValueError(f"{text} Add --devices 1.")
    batches = loop.predict(model, data, load=load) or []
    has_several_loaders = len(loop.predict_loop.epoch_batch_indices) > 1
    number = sum(map(len, batches)) if has_several_loaders else len(batches)
    if loop.fabric.is_global_zero:
        print(f"predicted   {number} batches, first: {str(batches[:1])[1:200]}")
        if out is not None:
            save_predictions(batches, has_several_loaders, out)
            print(f"saved       {out}")
    return 0


def save_predictions(batches: list[Any], has_several_loaders: bool, out: str) -> None:
    """Save predictions as a CSV file with one row per sample, or unchanged as a .pt file.

    Args:
        batches: The predictions of each batch. With several loaders, one such list per loader.
    """
    import pandas as pd
    import torch

    if out.endswith(".pt"):
        torch.save(batches, out)
        return
    try:
        if has_several_loaders:
            tables = [make_table(of_loader) for of_loader in batches]
            table = pd.concat(tables, keys=range(len(tables)), names=["loader"])
            table = table.reset_index("loader")
        else:
            table = make_table(batches)
    except (TypeError, ValueError) as error:
        saved = Path(out).with_suffix(".pt")
        torch.save(batches, saved)
        text = f"--out: got predictions that a CSV file cannot contain ({error}). In predict_step,"
        text += " return a tensor, or a tuple or dict of tensors, with one value per sample. The"
        raise ValueError(f"{text} predictions of this run are in {saved}.") from error
    table.to_csv(out, index=False)


def make_table(batches: list[Any]) -> Any:
    """Convert predictions to a DataFrame with one row per sample."""
    import pandas as pd
    import torch
    from lightning_utilities.core.apply_func import apply_to_collection

    tables = []
    for batch in batches:
        columns = []
        for name, value in name_predictions(batch).items():
            if not isinstance(value, torch.Tensor | list):
                raise TypeError(f"a value of type {type(value).__name__}")
            values = torch.atleast_1d(value) if isinstance(value, torch.Tensor) else value
            column = pd.DataFrame(apply_to_collection(values, torch.Tensor, torch.Tensor.tolist))
            names = [f"{name}_{i}" for i in column] if column.shape[1] > 1 else [name]
            columns.append(column.set_axis(names, axis=1))
        lengths = sorted({len(column) for column in columns} - {1})
        if len(lengths) > 1:
            raise ValueError(f"values of lengths {lengths} in one batch")
        tables.append(pd.concat(columns, axis=1))
    return pd.concat(tables)


def name_predictions(batch: Any) -> dict[str, Any]:
    """Return a batch's predictions as a dict that maps column names to values."""
    if isinstance(batch, tuple):
        fields = getattr(batch, "_fields", [f"prediction_{i}" for i in range(len(batch))])
        return dict(zip(fields, batch, strict=True))
    return batch if isinstance(batch, dict) else {"prediction": batch}


def verify_command(path: str) -> int:
    """Read checkpoint files completely, and compare their content with the stored checksums."""
    from ..checkpoint.reader import verify_archive
    from ..errors import CheckpointError, DamagedCheckpointError

    files = [Path(path)]
    if files[0].is_dir():
        found = [folder / name for folder, names in walk(files[0]) for name in names]
        files = sorted(f for f in found if f.suffix in SUFFIXES and not f.name.startswith("."))
    if not files or not Path(path).exists():
        raise ValueError(f"verify: got {path}, expected a folder with {', '.join(SUFFIXES)} files.")
    exit_code = 0
    for file in files:
        try:
            verify_archive(file)
            print(f"intact      {file}")
        except CheckpointError as error:
            is_damaged = isinstance(error, DamagedCheckpointError)
            print(f"{'damaged' if is_damaged else 'unreadable':<11} {error}")
            exit_code = 1
        except OSError as error:
            # The file may be a broken link, or may belong to another user.
            print(f"unreadable  {file}: {error.strerror}")
            exit_code = 1
    return exit_code
