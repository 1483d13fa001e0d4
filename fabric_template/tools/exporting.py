"""Exporting: the verb export as it is typed: which checkpoint, of which model, with which example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .configs import file_of_run
from .errors import UsageError
from .options import Options, read_options
from .typed import program, shown

OWN = ("format", "out", "submodule", "input")
HELP = """usage: {program} export CKPT --format FORMAT [--option value ...]

{description}

  CKPT                  A checkpoint's path; with --run or --model also "best" or "last". Nothing in it is run.
  --format FORMAT       safetensors (the weights alone), torch.export, onnx or torchscript. Without it, as --out ends.
  --out FILE            The file; by default CKPT's name, with the ending of the format, in this folder.
  --run FOLDER          The run whose model it is, logs/<name>/version_<n>; by default that which CKPT lies beside.
  --model MODULE:CLASS  The model, where there is no such run, and --model.argument for what its fit was given.
  --submodule NAME      A part of the model: net.encoder. Its input is what the model gives it.
  --input SIZES         What it takes, 1,64 or 1,64:int64, once per argument; by default a batch of the run's validation data.
  --data MODULE:CLASS   Other data for that, with --data.argument.

The file is loaded and compared with the model before it is written: bits for bits, an onnx within a tolerance.
"""


def run_export(argv: list[str], description: str) -> None:
    """Do what was typed, and print what came of it."""
    if {"-h", "--help"} & {*argv} or not argv:
        print(HELP.format(program=program(), description=description[0].upper() + description[1:] + "."))
        return
    own, rest = _split(argv)
    from .formats import format_named

    suffix = Path(own["out"] or "").suffix
    if own["format"] is None and own["out"] is None:
        raise UsageError("export as what? Type --format safetensors, torch.export, onnx or torchscript")
    name, kind = format_named(own["format"], suffix)
    rest = _with_run(own["CKPT"], rest)
    options = read_options("export", rest, program(), description)
    if options is None:
        return
    checkpoint = _checkpoint(own["CKPT"], options)
    checkpoint = Path(shown(checkpoint.absolute()))
    out = Path(own["out"] or f"{checkpoint.stem}{kind.suffix}")
    from ..files.errors import CheckpointError
    from .examples import of_shapes
    from .export import export

    example: Any = of_shapes(own["input"]) if own["input"] else None
    if kind.write is None or example is not None:
        options.factories.pop("data", None)  # nobody asks it
    trusted = "trusted" in options.typed and options.settings.trusted
    parts = options.make_parts()
    if example is None and kind.write is not None and parts.get("data") is not None:
        example = first_batch(parts["data"])
    words = {"checkpoint": checkpoint, "submodule": own["submodule"], "trusted": trusted}
    try:
        done = export(parts["model"], out, name, example, **words)
    except CheckpointError as error:
        if "model" in options.typed or "is of another model" not in str(error):
            raise
        text = str(error).replace("is of another model", "does not fit the model as its run's config.yaml has it")
        raise UsageError(
            f"{text.rpartition(';')[0]}; type --model package.module:Class, or a function that makes it"
        ) from error
    print(done)


def first_batch(data: Any) -> Any:
    """The first batch of the validation data; where there are none, of the others."""
    for hook in ("prepare_data", "setup"):
        if callable(call := getattr(data, hook, None)):
            call(*(("validate",) if hook == "setup" else ()))
    names = [f"{stage}_dataloader" for stage in ("val", "test", "predict", "train")]
    made = next((getattr(data, name)() for name in names if callable(getattr(data, name, None))), data)
    loader = next(iter(made.values())) if isinstance(made, Mapping) else made
    loader = loader[0] if isinstance(loader, list | tuple) and loader else loader
    try:
        return next(iter(loader))
    except (StopIteration, TypeError) as error:
        raise UsageError(
            f"export: {type(data).__name__} gives no batch for an example: type its shape, --input 1,64"
        ) from error


def _split(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What is this verb's own, and what every verb knows: --run, --model, --data."""
    own: dict[str, Any] = {"CKPT": None, "format": None, "out": None, "submodule": None, "input": []}
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        word, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--"):
            if own["CKPT"] is not None:
                raise UsageError(f"export takes one checkpoint: {own['CKPT']} and {token} are two")
            own["CKPT"] = token
            continue
        has_next = not equals and bool(tokens) and not tokens[0].startswith("--")
        if word not in OWN:
            rest += [token, tokens.pop(0)] if has_next else [token]
            continue
        if not equals and not has_next:
            raise UsageError(f"--{word} has no value: expected --{word} VALUE")
        value = value if equals else tokens.pop(0)
        own[word] = [*own["input"], value] if word == "input" else value
    return own, rest


def _with_run(checkpoint: str | None, rest: list[str]) -> list[str]:
    """The words with the run that a checkpoint lies beside, if nobody says whose it is."""
    words = {token[2:].partition("=")[0].partition(".")[0] for token in rest if token.startswith("--")}
    if words & {"run", "model", "config"} or checkpoint in ("best", "last"):  # without a model it is the digits'
        return rest
    if checkpoint is None:
        raise UsageError(
            "export which checkpoint? Type its path, or --run logs/<name>/version_<n> for the best of a run; and --format"
        )
    path = Path(checkpoint).absolute()
    run = path.parents[3] / "logs" / path.parent.parent.name / path.parent.name if len(path.parents) > 3 else path
    if path.parent.parent.parent.name == "checkpoints" and file_of_run(str(run)).is_file():
        return ["--run", shown(run), *rest]
    if not path.exists():
        raise UsageError(f"export {checkpoint}: there is no such file; type the path of a checkpoint")
    raise UsageError(
        f"export {checkpoint}: whose weights are these? There is no run beside it: type --run logs/<name>/version_<n>, or"
        " --model package.module:Class"
    )


def _checkpoint(given: str | None, options: Options) -> Path:
    """The file: as it is typed, or what best and last mean in that run."""
    if given not in (None, "best", "last"):
        return Path(given)
    from ..files.found import find_checkpoint

    words = options.settings
    root, mode = Path(words.default_root_dir or ".") / "checkpoints", words.mode or "min"
    for word in ("best", "last") if given is None else (given,):
        if (path := find_checkpoint(word, root, words.name, words.version, mode)) is not None:
            return path
    whose = f"'{root / words.name}'" + (f", version {words.version}" if words.version is not None else "")
    raise UsageError(f"export {given or 'best'}: there is no such checkpoint in {whose}; type the path of a file")
