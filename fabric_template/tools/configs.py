"""Configs: what the files of --config and the folder of --run say together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .demos import full_path
from .errors import UsageError
from .typed import shown

PARTS = ("model", "data")
TRAINING = ("fit", "tune", "profile")  # verbs that need to know how a run was trained
MOST = 10_000_000  # characters in a config file, as its aliases stand for them


def read_configs(verb: str, typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all words, what a run's own file says beside them): a later file wins, word by word; of one class, argument by argument.

    --run's file comes first; what is typed beats all.
    """
    config: dict[str, Any] = {}
    about: dict[str, Any] = {}
    files = [f"--config {path}" for path in typed.get("config", ())]
    if "run" in typed:
        files.insert(0, f"--run {typed['run']}")
    for label in files:
        file = read_file(label, typed)
        if "about" in file:  # the recipe of a fit, whose beginning is no other verb's
            about = {"label": label, **(file.pop("about") or {})}
            file = {word: value for word, value in file.items() if verb == "fit" or word not in ("resume", "load")}
        for word, value in file.items():
            config[word] = _merged(config.get(word), value, word in PARTS)
    if "resume" in typed or "load" in typed:
        config = {word: value for word, value in config.items() if word not in ("resume", "load")}
    if "run" in typed:
        config |= _place(verb, typed, config)
    return config, about


def file_of_run(run: str) -> Path:
    """The config.yaml of a run's folder; the path of a file in it will do."""
    path = Path(run)
    return (path.parent if path.is_file() else path) / "config.yaml"


def _place(verb: str, typed: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Name, version and root of --run's folder, for a verb that works in that run; for a new fit, the weights of it."""
    folder = file_of_run(typed["run"]).parent.absolute()
    begins_anew = verb in TRAINING and "resume" not in typed
    asked = next((word for word in ("resume", "load") if typed.get(word) in ("last", "best", "auto")), None)
    if folder.parents[1].name != "logs":
        if asked is None:
            return {}
        raise UsageError(
            f"--{asked} {typed[asked]} with --run {typed['run']}: expected logs/<name>/version_<n>, with its checkpoints beside"
            f" logs: type --{asked} with the path of a checkpoint"
        )
    root, number = folder.parents[2], folder.name.removeprefix("version_")
    version = int(number) if number.isdigit() and number != folder.name else folder.name
    if not begins_anew:
        return {"name": folder.parent.name, "version": version, "default_root_dir": shown(root)}
    if asked is None:
        return {}
    from ..files.found import find_checkpoint

    path = find_checkpoint(typed[asked], root / "checkpoints", folder.parent.name, version, config.get("mode") or "min")
    if path is None:
        raise UsageError(f"--load {typed[asked]}: the run {typed['run']} has kept no {typed[asked]}.ckpt; give a path")
    return {"load": str(path)}


def read_file(label: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file, with its model and data as ``{"class": path, argument: value, ...}``."""
    import yaml

    option, _, path = label.partition(" ")
    file = file_of_run(path) if option == "--run" else Path(path)
    hint = "type --model and --data as its fit had them" if option == "--run" else "--print_config writes such a file"
    try:
        text = file.read_text("utf-8")
        is_long = _unfolded(yaml.compose(text, yaml.SafeLoader), {}) > MOST
        config = {} if is_long else yaml.safe_load(text) or {}
    except OSError as error:
        if option == "--run":
            inside = [one for one in Path(path).glob("*/config.yaml")] if Path(path).is_dir() else []
            hint = f"it holds runs: type --run {sorted(inside)[-1].parent}" if inside else hint
            raise UsageError(
                f"{label}: there is no config.yaml in '{file.parent}' ({error.strerror}); {hint}"
            ) from error
        raise UsageError(f"{label}: {error.strerror}; {hint}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{label}: this is no YAML: {' '.join(str(error).split())}") from error
    if is_long:
        raise UsageError(f"{label}: its aliases unfold to more than {MOST:,} characters; write less of them")
    is_good = isinstance(config, dict) and isinstance(config.get("about") or {}, dict)
    if not is_good or not all(isinstance(word, str) for word in config):
        raise UsageError(f"{label}: expected 'word: value' lines; {hint}")
    for part in PARTS:
        value = config.get(part)
        if isinstance(value, str):
            config[part] = {"class": value}
        elif isinstance(value, dict) and "class_path" in value:  # as LightningCLI writes it
            arguments = value.get("init_args") or {}
            if not isinstance(arguments, dict):
                raise UsageError(f"{label}: {part}.init_args is {arguments!r}: expected 'argument: value' lines")
            config[part] = {"class": value["class_path"], **arguments}
        elif part in config and not isinstance(value, dict):
            del config[part]  # null
        if (path_ := class_of(config, part)) is not None and not isinstance(path_, str):
            raise UsageError(f"{label}: {part}.class is {path_!r}: expected package.module:Class")
        if part in typed and path_ is not None and _whole(part, path_) != _whole(part, typed[part]):
            del config[part]  # another class is asked for: the file's arguments are not its
    return config


def class_of(config: Mapping[str, Any], part: str) -> Any:
    """The class of the model or the data, None where there is none."""
    return config.get(part, {}).get("class")


def _whole(part: str, name: Any) -> Any:
    return _dotted(full_path(part, name))


def _dotted(path: Any) -> Any:
    return path.replace(":", ".") if isinstance(path, str) else path


def _merged(before: Any, after: Any, is_part: bool) -> Any:
    """A word of two files: the later one, but together where both are arguments of one class."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    one, other = (_dotted(value.get("class", value.get("class_path"))) for value in (before, after))
    if other not in (None, one) or (one is None and not is_part):
        return after
    return {**before, **{word: _merged(before.get(word), value, word == "init_args") for word, value in after.items()}}


def check_known(
    verb: str, about: Mapping[str, Any], typed: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Refuse a run of which too little is known; returns the arguments that are taken to be as their class has them.

    Only what trains needs to know how the run was trained. Who gives another model gives its steps and optimizers with it.
    """
    step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}.get(verb)
    needed = ("model",) if verb == "export" else (*PARTS, step)
    told = about.get("unknown")
    unknown = {str(word): why for word, why in told.items()} if isinstance(told, dict) else {}
    lacks: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}  # by whether it can be typed: why, and which words
    assumed = []
    for word, why in unknown.items():
        part, dot, _ = word.partition(".")
        is_typeable = part in PARTS or part in ("callbacks", "logger", "accelerator", "profiler", "strategy", "compile")
        if word in typed or (part in typed and not dot) or (not is_typeable and "model" in typed):
            continue
        if (verb not in TRAINING and part not in needed) or (dot and part in unknown and part not in typed):
            continue
        if word in defaults:
            assumed.append(f"--{word}")
        else:
            lacks[is_typeable].setdefault(str(why), []).append(f"{'--' * is_typeable}{word}")
    typeable, by_hand = ([f"{', '.join(words)} ({why})" for why, words in lacks[one].items()] for one in (True, False))
    ways = [f"type {' and '.join(typeable)}"] * bool(typeable)
    if by_hand:
        ways.append(
            f"{' and '.join(by_hand)} cannot be typed: run its script again, or type --model with a class that has it"
        )
    if ways:
        raise UsageError(f"{about['label']} is of a script, and lacks what only that knows: {'; '.join(ways)}")
    return assumed


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
