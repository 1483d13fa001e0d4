"""The command line. jsonargparse makes, parses and explains the options of every command.

The function of a command is imported when the command is used. No help waits for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import json
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from .. import LoopConfig
from ..demos import DEMOS
from .arguments import (
    LIGHTNING,
    OBJECTS,
    join_values,
    name_checkpoint,
    read_config,
    read_run,
    record_classes,
    resolve_class,
    resolve_word,
    starts_new_run,
    values_of,
)

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from .. import FabricLoop

PACKAGE = __package__.rpartition(".")[0]
COMMANDS = {  # name: (module, function, help)
    "fit": ("commands", "fit_command", "train a model; without options the digits demo"),
    "validate": ("commands", "validate_command", "run a model's validation_step over its data"),
    "test": ("commands", "test_command", "run a model's test_step over its data"),
    "predict": ("commands", "predict_command", "run a model's predict_step over its data"),
    "plot": ("plots", "plot_command", "draw the logs of one run or several"),
    "runs": ("runs", "runs_command", "list runs, compare two, find the best one"),
    "compare": ("compare", "compare_command", "find the first step in which two trainings differ"),
    "profile": ("profile", "profile_command", "show where the time of a training step goes"),
    "tune": ("tune", "tune_command", "find faster options, or with --lr a learning rate"),
    "copy": ("vendoring", "copy_command", "copy this package or its single file into a project"),
    "diff": ("vendoring", "diff_command", "show what you and what upstream have changed in a copy"),
    "update": ("vendoring", "update_command", "merge what is new upstream into a copy"),
    "verify": ("commands", "verify_command", "check that checkpoints are whole"),
}
OPTION_HELP = {
    "config": "A YAML file of options. Of several the last wins. It can import any class.",
    "run": "Take model, data and all options from this run, logs/<name>/version_<n>.",
    "model": "package.module:Class, or demos.NAME. --model.help lists its arguments.",
    "data": "package.module:Class of an object with train_dataloader and the like.",
    "callbacks": "--callbacks+=EarlyStopping --callbacks.monitor=val_loss, or your own class.",
    "logger": "true: the CSV logger. false: none. Or TensorBoardLogger --logger.save_dir=boards.",
}
FABRIC_OPTIONS = {  # name: (type, default, help)
    "accelerator": (str, "auto", '"cpu", "gpu", "tpu" or "mps". "auto": what the machine has.'),
    "strategy": (str, "auto", '"ddp", "ddp_spawn", "fsdp", ... "auto": "ddp" for several devices.'),
    "devices": (
        list[int] | int | str,
        "auto",
        'A number, indices such as [0, 2], or "auto" for all.',
    ),
    "num_nodes": (int, 1, "The number of machines."),
    "precision": (
        str | None,
        None,
        '"32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true" ...',
    ),
}
MADE_ARGUMENTS = ("loop", "model", "data", "build", "arguments")  # of functions, not typed
FIELDS = {field.name: str(field.type) for field in dataclasses.fields(LoopConfig)}
FIELDS.pop("logger")


class AnyClass(ABC):
    """The type of model, data, callbacks and logger for jsonargparse. They need no base class."""

    @abstractmethod
    def __init__(self) -> None: ...

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        # Classes, plain values and jsonargparse's own ones do not count as finished objects.
        is_plain = other.__module__.partition(".")[0] in ("builtins", "jsonargparse")
        return not is_plain and not issubclass(other, type)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Returns:
        0; 1 if the command found differences or damage; 2 if it could not run; 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            lines = "\n".join(f"  {name:10}{text}" for name, (_, _, text) in COMMANDS.items())
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
        names = "|".join([*FIELDS, *FABRIC_OPTIONS, "resume", "load"])
        text = re.sub(rf"(?<![\w.'`-])({names})(?==|: got )", r"--\1", " ".join(str(error).split()))
        hint = "; or give --data package.module:Class" if "train_dataloader" in text else ""
        print(f"{program()}: {text}{hint}", file=sys.stderr)
        return 2


def run_command(name: str, argv: list[str]) -> int:
    """Import the function of a command, parse its arguments and call it."""
    if name not in COMMANDS:
        raise ValueError(f"got the command {name}, expected one of {', '.join(COMMANDS)}.")
    module, function_name, _ = COMMANDS[name]
    function = getattr(importlib.import_module(f".{module}", __package__), function_name)
    if next(iter(inspect.signature(function).parameters)) in ("loop", "build"):
        return LoopCommand(name, function).run(argv)
    parser = make_parser(name)
    add_function_options(parser, function)
    return function(**parse(parser, argv).as_dict())


def is_users_mistake(error: Exception) -> bool:
    """Return whether one of our checks raised the error, without code of the user in the traceback."""
    packages, trace = [], error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        packages.append(PACKAGE if f"{name}.".startswith(f"{PACKAGE}.") else name.partition(".")[0])
        trace = trace.tb_next
    ours = {PACKAGE, "__main__", "lightning", "contextlib", "jsonargparse"}
    return packages[-1] == PACKAGE and {*packages} <= ours


def program() -> str:
    """Return how the command is typed, for messages that can be copied."""
    name = Path(sys.argv[0]).stem
    return name if name == "fabric-template" else f"python -m {PACKAGE}"


def make_parser(name: str) -> ArgumentParser:
    """Make the empty parser of a command."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return jsonargparse.ArgumentParser(
        prog=f"{program()} {name}",
        description=COMMANDS[name][2],
        exit_on_error=False,
        allow_abbrev=False,
    )


def add_function_options(parser: ArgumentParser, function: Callable[..., Any]) -> list[str]:
    """Add the parameters of a command's function, the keyword-only ones as options.

    Returns:
        The names of the parameters.
    """
    from docstring_parser import parse as parse_docstring

    documented = parse_docstring(function.__doc__ or "").params
    texts = {argument.arg_name: argument.description for argument in documented}
    signature = inspect.signature(function).parameters
    parameters = {name: signature[name] for name in signature if name not in MADE_ARGUMENTS}
    # jsonargparse would import what is under TYPE_CHECKING, such as torch, to resolve these types.
    annotations = {name: parameter.annotation for name, parameter in parameters.items()}
    module = sys.modules[function.__module__]
    types = get_type_hints(SimpleNamespace(__annotations__=annotations), vars(module))
    for name, parameter in parameters.items():
        settings: dict[str, Any] = {"type": types[name], "help": texts.get(name)}
        is_required = parameter.default is parameter.empty
        if not is_required:
            default = parameter.default
            settings["default"] = list(default) if isinstance(default, tuple) else default
        if types[name] is bool:
            del settings["type"]
            settings["action"] = "store_true"
        elif re.match(r"(list|Sequence)\[str\]", str(parameter.annotation)):
            settings.update(type=str, nargs="+" if is_required else "*")
        elif parameter.kind is not parameter.KEYWORD_ONLY and not is_required:
            settings["nargs"] = "?"
        names = [name]
        if parameter.kind is parameter.KEYWORD_ONLY:
            names = [*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))]
        parser.add_argument(*names, **settings)
    return [*parameters]


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse, with one line for a mistake."""
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(explain(parser, str(error))) from None


def explain(parser: ArgumentParser, message: str) -> str:
    """Turn a message of jsonargparse into one line that names the option."""
    text = " ".join(message.split())
    if match := re.match(r"Unrecognized arguments: (.*)", text):
        options = [word.partition("=")[0] for word in match[1].split() if word.startswith("--")]
        return "; ".join(unknown_option(parser, option) for option in options) or text
    keys = re.findall(r'Parser key "([\w.]+)"', text)
    owner = re.search(r"given class_path '([\w.]+)'", text)
    option = "--" + ".".join(keys[: 2 if owner else 1])
    if match := re.search(r"Option '(\w+)' is (not accepted|required)", text):
        if owner is None and match[2] == "required":
            return f"{parser.prog} needs {match[1]}. {parser.prog} --help explains it."
        if owner is None:
            return unknown_option(parser, f"--{match[1]}")
        if owner[1].endswith(f".{AnyClass.__name__}"):
            return f"{option}.{match[1]}: got no {option}, expected {option} package.module:Class."
        verb = "is required by" if match[2] == "required" else "is no argument of"
        return f"{option}.{match[1]} {verb} {owner[1]}. {option}.help={owner[1]} lists all."
    inner = text[owner.end() :] if owner else text
    kinds = re.search(r"Subtypes: \[(.*?)\] Errors", inner)
    kinds = kinds or re.search(r"Expected an? (.*?)\. Got", inner)
    value = re.search(r"(?:Got value|Given value): (.*?)(?: - | Given|$)", inner)
    if keys and kinds and value:
        expected = re.sub(r"<class '([\w.]+)'>", r"\1", kinds[1]).replace(", ", " or ")
        return f"{option}: got {value[1]}, expected {expected.replace('NoneType', 'null')}."
    # An error of a constructor is one of the reasons why no type of a union fits.
    if errors := re.search(r"Errors: - (.*?) Given value", text):
        text = re.sub(r"(Expected|Not a valid) .*?( - |$)", "", errors[1])
    return f"{option}: {text}" if keys else text


def unknown_option(parser: ArgumentParser, option: str) -> str:
    """Name the option that is nearest to an unknown one."""
    known = [string for action in parser._actions for string in action.option_strings]
    near = difflib.get_close_matches(option, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"{parser.prog} --help lists all."
    return f"{option}: {parser.prog} has no such option. {hint}"


class LoopCommand:
    """A command that needs a loop, a model and data."""

    def __init__(self, name: str, function: Callable[..., int]) -> None:
        self.name, self.function = name, function
        self.parser = make_parser(name)
        self.parser.usage = f"{self.parser.prog} [options]"
        self.parser.add_argument("--config", action="config", help=OPTION_HELP["config"])
        many = list[AnyClass] | None
        types = {
            "run": str,
            "model": AnyClass,
            "data": AnyClass,
            "callbacks": many,
            "logger": bool | many,
        }
        for option, kind in types.items():
            self.parser.add_argument(f"--{option}", type=kind, help=OPTION_HELP[option])
        self.own_options = add_function_options(self.parser, function)
        add_fields = self.parser.add_class_arguments
        add_fields(LoopConfig, fail_untyped=False, instantiate=False, skip={"logger"})
        for option, (kind, default, text) in FABRIC_OPTIONS.items():
            self.parser.add_argument(f"--{option}", type=kind, default=default, help=text)

    def run(self, argv: list[str]) -> int:
        """Parse the arguments, make what the function takes and call it."""
        if "" not in sys.path:
            sys.path.insert(0, "")
        self.command = f"{program()} {self.name} {shlex.join(argv)}".rstrip()
        typed = join_values(argv, [name for name, kind in FIELDS.items() if "bool" in kind])
        if {"-h", "--help"} & {*typed}:
            self.parser.print_help()
            for part in OBJECTS:
                for name in values_of(part, typed):
                    with contextlib.suppress(SystemExit):
                        parse(self.parser, [f"--{part}.help={resolve_class(part, name)}"])
            return 0
        self.arguments = self.complete(typed)
        settings = self.parse({}).as_dict()
        own = {name: settings[name] for name in self.own_options}
        if "build" not in inspect.signature(self.function).parameters:
            return self.function(*self.build({}), **own)
        arguments = {}
        for part in OBJECTS:
            for name, value in (settings[part] or {}).get("init_args", {}).items():
                arguments[f"{part}.{name}"] = value
        return self.function(self.build, arguments, **own)

    def complete(self, typed: list[str]) -> list[str]:
        """Put files first and classes second, all with the import paths of their classes."""
        import yaml

        runs = [Path(folder) for folder in values_of("run", typed)[-1:]]
        configs = [read_run(self.name, folder, typed) for folder in runs]
        if runs and starts_new_run(self.name, typed):
            typed = name_checkpoint(runs[0], typed)
        configs += [read_config("--config", Path(path)) for path in values_of("config", typed)]
        paths = [(config.get("model") or {}).get("class_path") for config in configs]
        paths += [resolve_class("model", name) for name in values_of("model", typed)]
        model = next((path for path in reversed(paths) if path), None)
        if model is None:
            data = {(config.get("data") or {}).get("class_path") for config in configs}
            data |= {resolve_class("data", name) for name in values_of("data", typed)}
            if data - {None, DEMOS["digits"]["data"]} or any(c.get("model") for c in configs):
                raise ValueError("--model: got no class, expected --model package.module:Class.")
            model = DEMOS["digits"]["model"]
        for name, demo in DEMOS.items():
            if demo["model"] == model:
                classes = {part: {"class_path": demo[part]} for part in OBJECTS}
                configs.insert(0, {"name": name, **demo, **classes})
        arguments = []
        for config in configs:
            text = yaml.safe_dump(config, default_flow_style=True, width=sys.maxsize)
            arguments.append(f"--config={text}")
        words = [word for word in typed if not word.startswith(("--config=", "--run="))]
        words = [resolve_word(word, model) for word in words]
        first = [word for word in words if word.startswith(("--model=", "--data="))]
        last = [word for word in words if ".help=" in word]
        others = [word for word in words if word not in first and word not in last]
        return [*arguments, *first, *others, *last]

    def parse(self, options: dict[str, Any]) -> Namespace:
        """Parse the completed arguments, with these options over them."""
        arguments = list(self.arguments)
        for name, value in options.items():
            arguments.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        return parse(self.parser, arguments)

    def build(self, options: dict[str, Any]) -> tuple[FabricLoop, Any, Any]:
        """Make the loop, the model and the data. These options replace the typed ones."""
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from .. import FabricLoop

        settings = self.parse(options)
        plain = {name: settings[name] for name in (*FIELDS, *FABRIC_OPTIONS)}
        mistakes = (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException)
        try:
            loop = FabricLoop(**plain, **self.instantiate(settings, *LIGHTNING))
        except mistakes as error:
            raise ValueError(explain(self.parser, str(error))) from error
        recorded = record_classes(settings.as_dict())
        loop.recipe = {**plain, **recorded, "about": {"command": self.command}}
        # The loop has seeded the random numbers, so the first weights depend on the seed.
        made = self.instantiate(settings, *OBJECTS)
        return loop, made["model"], made["data"]

    def instantiate(self, settings: Namespace, *options: str) -> dict[str, Any]:
        """Make the objects of some options."""
        from jsonargparse import Namespace

        # jsonargparse 4.49 has renamed instantiate_classes.
        make = getattr(self.parser, "instantiate", None) or self.parser.instantiate_classes
        return vars(make(Namespace(**{option: settings[option] for option in options})))
