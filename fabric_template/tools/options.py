"""Options: what was typed for fit, validate, test or predict, checked word by word, as settings.

The parser is jsonargparse's, made from type hints. What it cannot say in one line is checked here first.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import _CHECKS, FABRIC_WORDS, TRAINER_ONLY, LoopConfig

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

PACKAGE = __package__.rpartition(".")[0]  # another one in a copy
DIGITS = {"model": f"{PACKAGE}.demos.digits:DigitsClassifier", "data": f"{PACKAGE}.demos.digits:DigitsData"}
MOST = 10_000_000  # characters in a config file, as its aliases stand for them
DIGITS_WORDS = {"name": "digits", "max_epochs": 10, "monitor": "val_acc", "mode": "max", "seed": 0}


class UsageError(ValueError):
    """What was typed cannot be done; the message is one line that says what to type instead."""


@dataclass
class Options:
    """What was typed, and what it means."""

    typed: dict[str, Any]  # a text each; of --config a list
    settings: Namespace  # every option's value
    factories: dict[str, Callable]  # the class (or function) of model and data
    parser: ArgumentParser

    def make_parts(self) -> dict[str, Any]:
        """Make the model and the data; their own errors are theirs."""
        for part in self.factories:
            self.settings[part].pop("class")
        settings = self.parser.instantiate_classes(self.settings)  # arguments that are objects themselves
        return {part: factory(**vars(settings[part])) for part, factory in self.factories.items()}


def read_options(verb: str, argv: list[str], program: str, description: str) -> Options | None:
    """Read what follows a verb; None if that was a question for help.

    Raises:
        UsageError: for what is unknown or has the wrong type.
    """
    typed, shows_help = _read_words(argv)
    config = _read_config(typed)
    paths = {part: typed.get(part) or _class_of(config, part) for part in ("model", "data")}
    is_digits = paths["model"] is None
    if is_digits and paths["data"] not in (None, DIGITS["data"]) and not shows_help:
        raise UsageError(f"--data {paths['data']} without --model: expected --model package.module:Class, too")
    if is_digits:
        paths = {part: path or DIGITS[part] for part, path in paths.items()}
    _check_words(verb, typed, config, paths, program)

    if "" not in sys.path:
        sys.path.insert(0, "")  # your own modules, as with python -m
    classes = {part: path for part, path in paths.items() if path is not None}
    factories = {part: _find(part, path) for part, path in classes.items()}
    parser, known = _make_parser(verb, program, description, paths, factories)
    if is_digits:
        parser.set_defaults(DIGITS_WORDS)
    for part, names in known.items():
        written = (f"{part}.{name}" for name in config.get(part, {}) if name != "class")
        _check_arguments(part, classes[part], names, [*typed, *written])
    if shows_help:
        for part in factories:  # what is typed is --model; a file has model: {class: ..., hidden: ...}
            parser._option_string_actions[f"--{part}.class"].option_strings = [f"--{part}"]
            parser._option_string_actions[f"--{part}"].help = argparse.SUPPRESS
        parser.print_help()
        return None
    argv = [f"--config={json.dumps(config, default=str)}"] * bool(config)  # first: what is typed beats what is written
    for word, value in typed.items():
        if word in factories:
            argv.append(f"--{word}.class={value}")
        elif word == "print_config":
            argv.append(f"--{word}={value}" if value else f"--{word}")
        elif word != "config":
            argv.append(f"--{word}={value}")
    return Options(typed, _parse(parser, argv, factories), factories, parser)


def _read_words(argv: list[str]) -> tuple[dict[str, Any], bool]:
    """``--word value``, ``--word=value``, or ``--word`` alone for a switch; the last of two wins, but for --config."""
    words: dict[str, Any] = {}
    shows_help, rest = False, list(argv)
    while rest:
        token = rest.pop(0)
        if token in ("-h", "--help"):
            shows_help = True
            continue
        if not token.startswith("--"):
            raise UsageError(f"{token!r} has no option before it: expected options, such as --max_epochs 10")
        word, equals, value = token[2:].partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        if not equals and word != "print_config":
            if bool not in _CHECKS.get(word, [()])[0]:
                raise UsageError(f"--{word} has no value: expected --{word} VALUE")
            value = "true"
        if word == "val_check_interval" and re.match(r"[1-9]\d*:", value):
            value = f"0{value}"  # "10:00:00:00" is a number to YAML: in base 60
        words[word] = [*words.get(word, ()), value] if word == "config" else value
    return words, shows_help


def _read_config(words: dict[str, Any]) -> dict[str, Any]:
    """What the files say together: a later one wins, word by word; of the same model or data, argument by argument."""
    config: dict[str, Any] = {}
    for path in words.get("config", ()):
        for word, value in _read_file(path, words).items():
            before = config.get(word) if word in ("model", "data") else None
            if before is not None and value.get("class") in (None, before.get("class")):
                value = {**before, **value}
            config[word] = value
    return config


def _read_file(path: str, words: dict[str, Any]) -> dict[str, Any]:
    """The content of a file, with its model and data as ``{"class": path, argument: value, ...}``."""
    import yaml

    try:
        text = Path(path).read_text("utf-8")
        is_long = _unfolded(yaml.compose(text, yaml.SafeLoader), {}) > MOST
        config = {} if is_long else yaml.safe_load(text) or {}
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; --print_config writes such a file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: this is no YAML: {' '.join(str(error).split())}") from error
    if is_long:
        raise UsageError(f"--config {path}: its aliases unfold to more than {MOST:,} characters; write less of them")
    if not isinstance(config, dict):
        raise UsageError(f"--config {path}: expected 'word: value' lines; --print_config writes such a file")
    for part in ("model", "data"):
        value = config.get(part)
        if isinstance(value, str):
            config[part] = {"class": value}
        elif isinstance(value, dict) and "class_path" in value:  # as LightningCLI writes it
            arguments = value.get("init_args") or {}
            if not isinstance(arguments, dict):
                raise UsageError(
                    f"--config {path}: {part}.init_args is {arguments!r}: expected 'argument: value' lines"
                )
            config[part] = {"class": value["class_path"], **arguments}
        elif part in config and not isinstance(value, dict):
            del config[part]  # null
        if part in words and _class_of(config, part) not in (None, words[part]):
            del config[part]  # another class is asked for: the file's arguments are not its
    return config


def _unfolded(node: Any, known: dict[int, int]) -> int:
    """How long a part of a YAML file is, each alias counted as what it stands for; too long, if it holds itself."""
    if id(node) not in known:
        known[id(node)] = MOST + 1
        value = getattr(node, "value", "")
        if not isinstance(value, str):
            parts = [part for item in value for part in (item if isinstance(item, tuple) else (item,))]
            known[id(node)] = min(1 + sum(_unfolded(part, known) for part in parts), MOST + 1)
        else:
            known[id(node)] = min(1 + len(value), MOST + 1)
    return known[id(node)]


def _class_of(config: Mapping[str, Any], part: str) -> str | None:
    return config.get(part, {}).get("class")


def _check_words(
    verb: str, typed: dict[str, str], config: dict[str, Any], paths: dict[str, str | None], program: str
) -> None:
    """Refuse unknown words, all at once and with the nearest known one, before anything is imported."""
    known = [*LoopConfig.__dataclass_fields__, *FABRIC_OPTIONS, "model", "data", "config", "print_config", *OWN[verb]]
    complaints = []
    for word in dict.fromkeys([*typed, *config]):
        if word in known or word.startswith(("model.", "data.")):
            continue
        near = difflib.get_close_matches(word, known, n=1)
        if word in FABRIC_WORDS:
            hint = f"objects are given in a script, FabricLoop({word}=...)"
        elif word in TRAINER_ONLY:
            hint = TRAINER_ONLY[word]
        else:
            hint = f"did you mean --{near[0]}?" if near else f"{program} {verb} --help lists what there is"
        complaints.append(f"{verb} has no option --{word}: {hint}")
    if paths["data"] is None and (lost := [word for word in typed if word.startswith("data.")]):
        complaints.append(f"--{lost[0]} without --data: expected --data package.module:Class")
    if complaints:
        raise UsageError("; ".join(complaints))


def _check_arguments(part: str, path: str, known: list[str], words: list[str]) -> None:
    for word in words:
        owner, dot, name = word.partition(".")
        if owner == part and dot and name.partition(".")[0].rstrip("+") not in known:
            listed = ", ".join(f"--{part}.{name}" for name in known) or "none"
            raise UsageError(f"--{word}: {path} has no argument {name!r}; its arguments are {listed}")


def _find(part: str, path: str) -> Callable:
    """The class (or function) that ``package.module:Class`` names; dots all the way will do."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module_name.endswith(".py") or "/" in module_name:
        stem = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"--{part} {path}: expected a module, not a file: write --{part} {stem}:{name}")
    if not module_name or not name:
        raise UsageError(f"--{part} {path}: expected package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise UsageError(
            f"--{part} {path}: there is no module {error.name!r}, neither in '{os.getcwd()}' nor among the installed"
            " packages"
        ) from None
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        where = getattr(module, "__file__", None) or module_name
        raise UsageError(f"--{part} {path}: there is no class {name!r} in '{where}'; it has {', '.join(own) or 'none'}")
    return found


def fabric_options(
    accelerator: str = "auto", strategy: str = "auto", devices: list[int] | int | str = "auto", num_nodes: int = 1,
    precision: str | None = None,
) -> None:  # fmt: skip
    """Where it runs, Fabric's own words.

    Args:
        accelerator: "cpu", "gpu", "tpu", "mps"; "auto" takes what is there.
        strategy: "ddp", "ddp_spawn", "fsdp", "deepspeed", ...; "auto" takes "ddp" for several devices.
        devices: How many, which ones ([0, 2]), or "auto" for all.
        num_nodes: Machines.
        precision: "32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", ... None: "32-true".
    """


OWN = {"fit": ("resume", "load"), "validate": ("load",), "test": ("load",), "predict": ("load", "out")}
OWN_HELP = {
    "resume": 'Go on exactly from "last", "best", "auto" (last, if there is one) or a path.',
    "load": 'Take the weights of a path, "last" or "best".',
    "out": "Save the predictions, a list by batch, with torch.save.",
}
CONFIG_HELP = (
    "A YAML file with any of these options; a later one wins, and what is typed. It is trusted like a program: the classes"
    " that it names are imported and run."
)
FABRIC_OPTIONS = tuple(inspect.signature(fabric_options).parameters)


def _make_parser(
    verb: str, program: str, description: str, paths: dict[str, str | None], factories: dict[str, Callable]
) -> tuple[ArgumentParser, dict[str, list[str]]]:
    """A parser for every word, and the names of the arguments of model and data."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)  # LoopConfig's help under each field
    parser = jsonargparse.ArgumentParser(
        prog=f"{program} {verb}", usage=f"{program} {verb} [--option value ...]", description=description,
        exit_on_error=False,
    )  # fmt: skip
    parser.add_argument("--config", action="config", help=CONFIG_HELP)
    for word in OWN[verb]:
        parser.add_argument(f"--{word}", type=str | None, help=OWN_HELP[word])
    known: dict[str, list[str]] = {}
    for part, path in paths.items():
        factory = factories.get(part)
        if factory is None:
            parser.add_argument(f"--{part}", type=str | None, help="package.module:Class of what has the loaders.")
            continue
        parser.add_argument(f"--{part}.class", default=path, metavar="PACKAGE.MODULE:CLASS", help=f"The {part}.")
        if inspect.isclass(factory):
            added = parser.add_class_arguments(factory, part, fail_untyped=False, instantiate=False)
        else:
            added = parser.add_function_arguments(factory, part, fail_untyped=False)
        known[part] = [key.split(".")[1] for key in added]
    parser.add_class_arguments(LoopConfig, fail_untyped=False, instantiate=False)
    parser.add_function_arguments(fabric_options)
    return parser, known


def _parse(parser: ArgumentParser, argv: list[str], factories: dict[str, Callable]) -> Namespace:
    """Parse, with one line for what has the wrong type."""
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
        match = re.match(r'Parser key "([\w.]+)": (.*)', text)
        key, text = match.groups() if match else ("", text)
        value = re.search(r"(?:Got value|Given value): (.*?)$", text)
        part, _, name = key.partition(".")
        if key in _CHECKS:
            expected = _CHECKS[key][2]
        elif part in factories and (parameter := inspect.signature(factories[part]).parameters.get(name)):
            expected = inspect.formatannotation(parameter.annotation).strip("'")
        else:
            raise UsageError(f"--{key}: {text}" if key else text) from None
        raise UsageError(f"--{key}={value[1] if value else '?'}: expected {expected}") from None
