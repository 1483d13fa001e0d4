"""Classes: what a name means that is typed for a model, data, a callback or a logger, and what it takes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import or_
from typing import Any

from .demos import DEMOS
from .errors import UsageError

# where a name without a module is looked up, and what is at home there
PLACES = {"callbacks": ("lightning.pytorch.callbacks", "Callback"), "logger": ("lightning.pytorch.loggers", "Logger")}
NO_NAMES = ("null", "None", "true", "True", "false", "False")


def find(part: str, path: str) -> Callable:
    """The class (or function) that ``package.module:Class`` names; dots all the way will do."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module_name.endswith(".py") or "/" in module_name:
        stem = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"--{part} {path}: expected a module, not a file: write --{part} {stem}:{name}")
    if not module_name or not name:
        raise UsageError(f"--{part} {path}: expected package.module:Class")
    known = f"; the package's own are {', '.join(f'demos.{one}' for one in DEMOS)}" if module_name == "demos" else ""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise UsageError(
            f"--{part} {path}: there is no module {error.name!r}, neither in '{os.getcwd()}' nor among the installed"
            f" packages{known}"
        ) from None
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        where = getattr(module, "__file__", None) or module_name
        listed = ", ".join(own) or "none"
        raise UsageError(f"--{part} {path}: there is no class {name!r} in '{where}'; it has {listed}{known}")
    return found


def full_name(word: str, name: str) -> str:
    """The whole path of a callback's or logger's class; a name without a module is one of Lightning's."""
    if name in NO_NAMES or name.startswith(("[", "{")):
        return name
    if "." in name or ":" in name:
        find(word, name)
        return name.replace(":", ".")
    modules = [PLACES[word][0], *(module for module, _ in PLACES.values() if module != PLACES[word][0])]
    for module in modules:
        if inspect.isclass(getattr(importlib.import_module(module), name, None)):
            return f"{module}.{name}"
    names = {one.lower(): one for one in importlib.import_module(modules[0]).__all__}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]}" if near else f"there are {', '.join(names.values())}"
    raise UsageError(f"--{word}={name}: {modules[0]} has no such class: {hint}; one of yours is package.module.Class")


def with_full_names(word: str, value: Any) -> Any:
    """The same for what a file says of callbacks or a logger: names, or ``{class_path: name, init_args: ...}``, or a list."""
    if isinstance(value, list):
        return [with_full_names(word, one) for one in value]
    if isinstance(value, str):
        return full_name(word, value)
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        return {**value, "class_path": full_name(word, value["class_path"])}
    if isinstance(value, bool) or value is None:
        return value
    raise UsageError(
        f"--{word}: {value!r} is no class: expected its path, or class_path: and init_args: with what it takes"
    )


def type_of(word: str, names: Iterable[str]) -> Any:
    """What a word takes, for the parser: Lightning's classes, and those of one's own that are asked for."""
    module, base_name = PLACES[word]
    base = getattr(importlib.import_module(module), base_name)
    asked = [find(word, name) for name in names]
    own = [one for one in asked if inspect.isclass(one) and not issubclass(one, base)]
    kind = reduce(or_, dict.fromkeys([base, *own]))
    return kind | list[kind] | None if word == "callbacks" else bool | kind | list[kind] | None  # type: ignore[valid-type]


def names_in(value: Any) -> Iterator[str]:
    """The full names in what a file says of callbacks or a logger."""
    for one in value if isinstance(value, list) else [value]:
        name = one.get("class_path") if isinstance(one, dict) else one
        if isinstance(name, str) and "." in name:
            yield name


def show_help(part: str, path: str, factory: Callable, command: str) -> None:
    """The arguments of a class with their types, defaults and docstrings."""
    import jsonargparse

    usage = f"{command} --{part} {path} [--{part}.argument value ...]"
    parser = jsonargparse.ArgumentParser(usage=usage, add_help=False)
    add: Any = parser.add_class_arguments if inspect.isclass(factory) else parser.add_function_arguments
    if not add(factory, part, fail_untyped=False):
        parser.description = f"{path} takes no arguments."
    parser.print_help()
