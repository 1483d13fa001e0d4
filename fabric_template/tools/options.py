"""Options: what was typed for fit, validate, test or predict, checked word by word, as settings.

The parser is jsonargparse's, made from type hints. What it cannot say in one line is checked here first.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.config import _CHECKS, LoopConfig
from ..core.elsewhere import FABRIC_WORDS, TRAINER_ONLY
from .classes import PLACES, find, full_name, names_in, show_help, type_of, with_full_names
from .configs import PARTS, TRAINING, check_known, class_of, file_of_run, read_configs
from .demos import DEFAULT, DEMOS, demo_of, full_path, words_of
from .errors import UsageError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_NONE_TOO = ("skip_none", "skip_unset")  # jsonargparse's word for values that are None, before 4.49 and since

# reasons of a union's other kinds
_OTHERS = ("Expected a <class", "Not a valid subclass", "a class path (", "a dict with")


@dataclass
class Options:
    """What was typed, and what it means."""

    typed: dict[str, Any]  # a text each; of --config a list
    settings: Namespace  # every option's value
    factories: dict[str, Callable]  # the class (or function) of model and data
    parser: ArgumentParser

    def make_words(self) -> dict[str, Any]:
        """Every word of the loop, with its callbacks and loggers made."""
        words = {word: self.settings[word] for word in (*FABRIC_OPTIONS, *LoopConfig.__dataclass_fields__)}
        return {**words, **self._made(*PLACES)}

    def make_parts(self) -> dict[str, Any]:
        """Make the model and the data; their own errors are theirs."""
        for part in self.factories:
            self.settings[part].pop("class")
        made = self._made(*self.factories)  # arguments that are objects themselves
        return {part: factory(**vars(made[part])) for part, factory in self.factories.items()}

    def recipe(self, command: str) -> dict[str, Any]:
        """What rebuilds this run, for its config.yaml; before anything is made."""
        from jsonargparse import set_dumper

        words: dict[str, Any] = {}
        set_dumper("as it is", lambda data: words.update(data) or "")  # objects, too, which no text could hold
        self.parser.dump(self.settings, skip_validation=True, format="as it is", **{_NONE_TOO[self._is_new]: False})
        return {**{word: value for word, value in words.items() if word not in OWN_HELP}, "about": {"command": command}}

    def _made(self, *words: str) -> dict[str, Any]:
        from jsonargparse import Namespace

        asked = Namespace(**{word: self.settings[word] for word in words})
        parser: Any = self.parser
        instantiate = parser.instantiate if self._is_new else parser.instantiate_classes
        return vars(instantiate(asked, instantiate_groups=words != (*PLACES,)))

    @property
    def _is_new(self) -> bool:
        """Whether it is jsonargparse 4.49 or later, in which two words have other names."""
        return hasattr(self.parser, "instantiate")


def read_options(verb: str, argv: list[str], program: str, description: str) -> Options | None:
    """Read what follows a verb; None if that was a question for help.

    Raises:
        UsageError: for what is unknown or has the wrong type.
    """
    typed, shows_help = _read_words(argv)
    for part in PARTS:
        typed.update({part: path} if (path := typed.get(f"{part}.help")) else {})
    config, about = read_configs(verb, typed)
    asked_for = {part: typed.get(part) or class_of(config, part) for part in PARTS}
    demo = DEFAULT if asked_for["model"] is None else demo_of(asked_for["model"])
    paths = {part: full_path(part, name) for part, name in asked_for.items()}
    if asked_for["model"] is None:
        check_known(verb, about, typed, {})
        if paths["data"] not in (None, DEMOS[DEFAULT].path("data")) and not shows_help:
            raise UsageError(f"--data {asked_for['data']} without --model: expected --model package.module:Class, too")
    if demo is not None:
        paths = {part: path or DEMOS[demo].path(part) for part, path in paths.items()}
    _check_words(verb, typed, config, paths, program)

    if "" not in sys.path:
        sys.path.insert(0, "")  # your own modules, as with python -m
    classes = {part: path for part, path in paths.items() if path is not None}
    factories = {part: find(part, path) for part, path in classes.items()}
    if asked := [part for part in PARTS if f"{part}.help" in typed and part in factories]:
        for part in asked:
            show_help(part, classes[part], factories[part], f"{program} {verb}")
        return None
    named = _name_classes({**typed, **{part: paths[part] for part in PARTS if part in typed}}, config)
    for part in PARTS:
        config |= {part: {**config[part], "class": paths[part]}} if class_of(config, part) is not None else {}
    parser, known = _make_parser(verb, program, description, paths, factories, _classes_asked(named, config))
    if demo is not None:
        parser.set_defaults(words_of(demo))
    for part, names in known.items():
        written = (f"{part}.{name}" for name in config.get(part, {}) if name != "class")
        _check_arguments(part, classes[part], names, [*typed, *written])
    if shows_help:
        for part in factories:  # what is typed is --model; a file has model: {class: ..., hidden: ...}
            parser._option_string_actions[f"--{part}.class"].option_strings = [f"--{part}"]
            parser._option_string_actions[f"--{part}"].help = argparse.SUPPRESS
        parser.print_help()
        return None
    if assumed := check_known(verb, about, typed, _defaults_of(factories)):
        print(f"{program}: not known of that run, and taken as by default: {', '.join(assumed)}", file=sys.stderr)
    settings = _parse(parser, _tokens(named, config, factories), factories)
    if verb in TRAINING and "run" in typed and "resume" not in typed:  # a new run; what goes on from it is not that one
        typed = {"config": [str(file_of_run(typed.pop("run"))), *typed.pop("config", ())], **typed}
    return Options(typed, settings, factories, parser)


def _tokens(typed: dict[str, Any], config: dict[str, Any], factories: Mapping[str, Callable]) -> list[str]:
    """What the parser reads: the files first, for what is typed beats what is written."""
    import yaml

    text = yaml.safe_dump(config, default_flow_style=True, width=sys.maxsize)  # unlike JSON it can write infinity
    argv = [f"--config={text}"] * bool(config)
    for word, value in typed.items():
        if word in factories:
            argv.append(f"--{word}.class={value}")
        elif isinstance(value, list) and word != "config":
            argv += value
        elif word == "print_config":
            argv.append(f"--{word}={value}" if value else f"--{word}")
        elif word not in ("config", "run") and not (word == "load" and "load" in config and "run" in typed):
            argv.append(f"--{word}={value}")
    return argv


def _name_classes(typed: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What was typed, and in place what was written, with the whole paths of the classes of callbacks and loggers."""
    named = dict(typed)
    for word in PLACES:
        if config.get(word) is not None:
            config[word] = with_full_names(word, config[word])
        for place, token in enumerate(typed.get(word, ())):
            option, _, name = token.partition("=")
            if not place and option.startswith(f"--{word}.") and not option.endswith(".help") and not config.get(word):
                raise UsageError(f"{token} before any class: expected --{word}+=Class first, then its arguments")
            if option.rstrip("+") == f"--{word}" or option == f"--{word}.help":
                tokens = named[word]
                named[word] = [*tokens[:place], f"{option}={full_name(word, name)}", *tokens[place + 1 :]]
    return named


def _classes_asked(typed: dict[str, Any], config: dict[str, Any]) -> dict[str, list[str]]:
    """The classes of callbacks and loggers that are asked for; nothing of a word that names none."""
    asked = {}
    for word in PLACES:
        typed_names = [token.partition("=")[2] for token in typed.get(word, ())]
        if word in typed or isinstance(config.get(word), str | list | dict):
            asked[word] = [*names_in(config.get(word)), *names_in(typed_names)]
    return asked


def _defaults_of(factories: Mapping[str, Callable]) -> dict[str, Any]:
    """The arguments of model and data that need not be given."""
    return {
        f"{part}.{name}": parameter.default
        for part, factory in factories.items()
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is not parameter.empty
    }


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
        if not equals and word not in ("print_config", "model.help", "data.help"):
            if bool not in _CHECKS.get(word, [()])[0]:
                raise UsageError(f"--{word} has no value: expected --{word} VALUE")
            value = "true"
        if word == "val_check_interval" and re.match(r"[1-9]\d*:", value):
            value = f"0{value}"  # "10:00:00:00" is a number to YAML: in base 60
        root = word.partition(".")[0].rstrip("+")
        if word == "config":
            words[word] = [*words.get(word, ()), value]
        elif root in PLACES or word.endswith("+"):  # each adds to those before: in their order, as they are typed
            key = root if root in PLACES else word
            words[key] = [*words.get(key, ()), f"--{word}={value}"]
        else:
            words[word] = value
    return words, shows_help


def _check_words(
    verb: str, typed: dict[str, str], config: dict[str, Any], paths: dict[str, str | None], program: str
) -> None:
    """Refuse unknown words, all at once and with the nearest known one, before anything is imported."""
    known = [*LoopConfig.__dataclass_fields__, *FABRIC_OPTIONS, *PARTS, *PLACES, "config", "print_config", *OWN[verb]]
    complaints = []
    trainers = config.get("trainer")
    for word in dict.fromkeys(
        [*typed, *config, *(f"trainer.{word}" for word in trainers or () if isinstance(trainers, dict))]
    ):
        path, _, inner = word.partition("trainer.")
        if word in known or word.startswith(("model.", "data.")) or (inner in known and "trainer" in config):
            continue
        word = inner if not path and inner not in known else word
        near = difflib.get_close_matches(inner or word, known, n=1)
        if word in FABRIC_WORDS:
            hint = f"objects are given in a script, FabricLoop({word}=...)"
        elif word in LIGHTNING_CLI or word in TRAINER_ONLY:
            hint = (LIGHTNING_CLI | TRAINER_ONLY)[word]
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


OWN = {"fit": ("run", "resume", "load"), **dict.fromkeys(("validate", "test"), ("run", "load")),
       "predict": ("run", "load", "out"), "export": ("run",), "tune": ("run",), "profile": ("run",)}  # fmt: skip
OWN_HELP = {
    "run": "A run's folder, logs/<name>/version_<n>: its model and data and all its words, from the config.yaml there.",
    "resume": 'Go on exactly from "last", "best", "auto" (last, if there is one) or a path.',
    "load": 'Take the weights of a path, "last" or "best".',
    "out": "Save the predictions: .csv (a row per sample), .npz (arrays), .pt (a list by batch, as torch.save writes it).",
}
PLACES_HELP = {
    "callbacks": "Classes, Lightning's by their name alone: --callbacks+=EarlyStopping --callbacks.monitor=val_loss; again for"
    " another one. --callbacks.help=EarlyStopping lists what it takes.",
    "logger": "true: the CSV logger. false: none. Or classes: --logger TensorBoardLogger --logger.save_dir=tensorboard.",
}
CONFIG_HELP = (
    "A YAML file with any of these options; a later one wins, and what is typed. It is trusted like a program: the classes"
    " that it names are imported and run."
)
# words of LightningCLI's files; the rest of them is ours, too
LIGHTNING_CLI = {
    "trainer": "its words stand by themselves here: max_epochs: 10 without trainer: above it",
    "seed_everything": "it is called seed here",
    "optimizer": "the model's configure_optimizers makes it, of arguments of the model",
    "lr_scheduler": "the model's configure_optimizers returns it beside the optimizer",
}
FABRIC_OPTIONS = tuple(inspect.signature(fabric_options).parameters)


def _make_parser(
    verb: str,
    program: str,
    description: str,
    paths: dict[str, str | None],
    factories: dict[str, Callable],
    asked: dict[str, list[str]],
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
    for word, text in PLACES_HELP.items():
        parser.add_argument(f"--{word}", type=type_of(word, asked[word]) if word in asked else Any, help=text)
    parser.add_class_arguments(LoopConfig, fail_untyped=False, instantiate=False, skip={*PLACES})
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
        elif key in PLACES:
            raise UsageError(_wrong_class(key, text)) from None
        else:
            raise UsageError(f"--{key}: {text}" if key else text) from None
        raise UsageError(f"--{key}={value[1] if value else '?'}: expected {expected}") from None


def _wrong_class(word: str, text: str) -> str:
    """What is wrong with a callback's or logger's arguments, in a line."""
    found = re.search(r"given class_path '([\w.]+)': (.*?)(?: - |$)", text)
    name, why = (found[1].rpartition(".")[2], found[2]) if found else ("", reason_in(text))
    if match := re.search(r"Option '(\w+)' is required|arguments are required: (\w+)", why):
        return f"--{word}.{match[1] or match[2]} is missing: {name} needs it; --{word}.help={name} lists what it takes"
    if match := re.search(r"Option '(\w+)' is not accepted", why):
        return f"--{word}.{match[1]}: {name} has no such argument; --{word}.help={name} lists what it takes"
    if match := re.search(r'Parser key "(\w+)": Expected an? (?:<class )?(.*?)>?\. Got value: (.*)', why):
        expected = match[2].strip("'")
        return f"--{word}.{match[1]}={match[3]}: {name} expects {expected}"
    return f"--{word}: {name} {why}"


def reason_in(text: str) -> str:
    """The one reason in what jsonargparse says of a union: the class's own, among those of what it was not."""
    if "Errors:" not in text:
        return text
    text = " ".join(text.partition("Errors:")[2].partition("Given value")[0].split())
    reasons = text.removeprefix("- ").split(" - ")
    return next((reason for reason in reversed(reasons) if not reason.startswith(_OTHERS)), reasons[-1])
