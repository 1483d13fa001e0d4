"""The command line: fit, validate, test, predict, plot, runs, profile, doctor, tune, export, new, copy, diff, update, verify.

Nothing heavy is imported before a verb needs it: a word of help must not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from .errors import PACKAGE, UsageError, as_typed
from .picture import draw, watch
from .running import run_verb
from .typed import program

VERBS = {
    "fit": "train; without options: the digits, 10 epochs",
    "validate": "run a model's validation_step over its data",
    "test": "run a model's test_step over its data",
    "predict": "run a model's predict_step over its data",
    "plot": "draw the logs of one run or several",
    "runs": "list runs and how they stand; compare two, find the best, write a page to look at",
    "profile": "where a training step goes: a table, a picture, and what to do about it",
    "doctor": "what is wrong with a training: two scripts beside each other, a script's source, a finished run",
    "tune": "find what makes a training faster on this machine, or with --lr a learning rate for it",
    "export": "write a model as a file that others load: safetensors, torch.export, onnx, torchscript",
    "new": "make a small project that trains at once",
    "copy": "copy this package, its single file, or parts of it, into a project of yours",
    "diff": "show what you have changed in a copy, and what upstream has since",
    "update": "bring what is new upstream into a copy, beside what you have changed in it",
    "convert": "make one file of a checkpoint that lies in pieces, or pieces of one file",
    "verify": "read checkpoints from end to end: are they whole?",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (diff, doctor: other; update: conflicts; verify: not whole) or 2 (not done).

    Example:
        >>> main(["fit", "--max_epoch", "3"])
        2
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    try:
        if verb in ("-h", "--help", "help"):
            verbs = "\n".join(f"  {name:10}{line}" for name, line in VERBS.items())
            print(f"usage: {program()} VERB [options]\n\n{verbs}\n\n{program()} VERB --help shows a verb's options.")
        elif verb == "--version":
            from .. import __version__

            print(f"{PACKAGE} {__version__}")
        elif verb not in VERBS:
            raise UsageError(f"there is no {verb!r}: expected one of {', '.join(VERBS)}")
        else:
            if verb not in OTHERS:
                run_verb(verb, rest, VERBS[verb])
            else:
                return OTHERS[verb](verb, rest) or 0
    except SystemExit as stop:  # argparse has said what there is to say
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:  # before or after the training
        print(f"{program()}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not _is_for_users(error):
            raise
        text = as_typed(" ".join(str(error).split()))
        if "is of another model" in text:
            text += ": repeat the --model.* options that its fit was given, or give its folder as --run"
        print(f"{program()}: {text}", file=sys.stderr)
        return 2
    return 0


def _is_for_users(error: Exception) -> bool:
    """Whether an error is one of our own checks, so that a traceback would add nothing.

    It is when we raised it and nobody else's code (a step, a hook, a constructor) stands between the command and it.
    """
    if isinstance(error, UsageError):
        return True
    modules, trace = [], error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        is_ours = name in (PACKAGE, "__main__") or name.startswith(f"{PACKAGE}.")  # __main__: python -m
        modules.append("ours" if is_ours else name.partition(".")[0])
        trace = trace.tb_next
    between = {"lightning", "contextlib"}  # what launches, and what opens and closes a session
    return isinstance(error, ValueError | TypeError) and modules[-1] == "ours" and {*modules} <= {"ours", *between}


# ---- plot, runs, profile, doctor, export, verify; new, copy, diff, update


def _arguments(verb: str, argv: list[str], **options: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{program()} {verb}", description=VERBS[verb], allow_abbrev=False)
    for name, words in options.items():
        parser.add_argument(name.replace("__", "--"), **words)
    return parser.parse_args(argv)


def _plot(verb: str, argv: list[str]) -> None:
    given = _arguments(
        verb, argv,
        PATH={"nargs": "*", "default": ["logs"], "help": "metrics.csv, a run's folder, or the root of all (logs)"},
        __metrics={"nargs": "+", "help": "the columns to draw; by default all losses and accuracies"},
        __x={"default": "epoch", "help": "the horizontal axis: epoch, step, or time, as it was trained"},
        __smooth={"type": float, "help": "0 to 1: how much of a point is the average before it; for steps"},
        __out={"help": "the picture; by default history.png in PATH, or here for several"},
        __watch={"action": "store_true", "help": "draw again as the logs grow, until the runs have ended or Ctrl-C"},
    )  # fmt: skip
    first = Path(given.PATH[0])
    folder = Path() if len(given.PATH) > 1 else first if first.is_dir() else first.parent
    out = Path(given.out or folder / "history.png")
    words = {"metrics": given.metrics, "x": given.x, "smooth": given.smooth}
    if given.watch:
        watch(given.PATH, out, **words)
    else:
        print(f"picture     {draw(given.PATH, out, **words)}")


def _runs(verb: str, argv: list[str]) -> None:
    from .listing import runs_verb

    _print(runs_verb(f"{program()} {verb}", VERBS[verb], argv))


def _doctor(verb: str, argv: list[str]) -> int:
    from .examining import doctor_verb

    text, code = doctor_verb(f"{program()} {verb}", VERBS[verb], argv)
    _print(text)
    return code


def _profile(verb: str, argv: list[str]) -> None:
    from .profile_typed import run_profile

    if (text := run_profile(argv, VERBS[verb])) is not None:
        _print(text)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _export(verb: str, argv: list[str]) -> None:
    from .exporting import run_export

    run_export(argv, VERBS[verb])


def _tune(verb: str, argv: list[str]) -> int:
    import inspect

    from .options import Options, read_options
    from .tune import tune_command

    parser = argparse.ArgumentParser(prog=f"{program()} {verb}", description=VERBS[verb], add_help=False)
    for switch in ("--lr", "--same_numbers"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", default="tuned.yaml")
    own, rest = parser.parse_known_args(argv)

    def read(options: dict[str, Any]) -> Options:
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        found = read_options(verb, [*rest, *words], program(), VERBS[verb])
        if found is None:
            raise SystemExit(0)
        return found

    def build(options: dict[str, Any]) -> tuple[Any, Any, Any]:
        from ..loop import FabricLoop

        found = read(options)
        loop, parts = FabricLoop(**found.make_words()), found.make_parts()
        return loop, parts["model"], parts.get("data")

    parts = read({}).factories
    arguments = {f"{part}.{name}": None for part in parts for name in inspect.signature(parts[part]).parameters}
    return tune_command(build, arguments, **vars(own))


def _copies(verb: str, argv: list[str]) -> int:
    from .copies import COPIES

    text, code = COPIES[verb](f"{program()} {verb}", VERBS[verb], argv)
    if text:
        _print(text)
    return code


def _verify(verb: str, argv: list[str]) -> int:
    from ..files.errors import CheckpointError, UnreadableError
    from ..files.opening import SUFFIXES
    from ..files.reading import verify_checkpoint
    from ..files.shards import check_file

    given = _arguments(verb, argv, PATH={"help": "a checkpoint, or a folder of them; exit code 1 if one is not whole"})
    path, code = Path(given.PATH), 0
    files = [path] if not path.is_dir() else sorted(p for p in path.rglob("[!.]*") if p.suffix in SUFFIXES)
    if not files:
        raise UsageError(f"verify {path}: there is no checkpoint in this folder ({', '.join(SUFFIXES)})")
    for file in files:
        try:
            verify_checkpoint(file)
            if file.suffix == ".ckpt":
                check_file(file)
            print(f"whole       {file}")
        except UnreadableError as error:
            code = code or 2
            print(f"not read    {error}")
        except CheckpointError as error:
            code = 1
            print(f"unusable    {error}")
    return code


def _convert(verb: str, argv: list[str]) -> None:
    from .convert import HELP, convert

    out = {"help": "the file; by default CKPT's name with -whole or -pieces, in this folder"}
    pieces = {"type": int, "help": "make so many, for so many ranks, which read their own; by default one file"}
    trusted = {"action": "store_true", "help": "also where it holds more than plain values, which can run any program"}
    given = _arguments(verb, argv, CKPT=HELP, __out=out, __pieces=pieces, __trusted=trusted)
    made = convert(Path(given.CKPT), Path(given.out) if given.out else None, given.trusted, given.pieces)
    print(f"converted   {made}")


OTHERS = {"plot": _plot, "runs": _runs, "profile": _profile, "doctor": _doctor, "tune": _tune}
OTHERS |= {"export": _export, "convert": _convert, "verify": _verify}
OTHERS |= dict.fromkeys(("new", "copy", "diff", "update"), _copies)

if __name__ == "__main__":
    sys.exit(main())
