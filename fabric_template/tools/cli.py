"""The command line: fit, validate, test, predict, plot, runs, profile, compare, tune, copy, diff, update, verify.

Nothing heavy is imported before a verb needs it: a word of help must not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from .errors import PACKAGE, UsageError, as_typed
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
    "compare": "run two scripts and explain the first optimizer step in which they differ",
    "tune": "find what makes a training faster on this machine, or with --lr a learning rate for it",
    "copy": "copy this package, or its single file, into a project of yours",
    "diff": "show what you have changed in a copy, and what upstream has since",
    "update": "bring what is new upstream into a copy, beside what you have changed in it",
    "verify": "read checkpoints from end to end: are they whole?",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (diff, compare; update: conflicts; verify: not whole) or 2 (not done).

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


# ---- plot, runs, profile, compare, verify; copy, diff, update


def _arguments(verb: str, argv: list[str], **options: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{program()} {verb}", description=VERBS[verb], allow_abbrev=False)
    for name, words in options.items():
        parser.add_argument(name.replace("__", "--"), **words)
    return parser.parse_args(argv)


def _plot(verb: str, argv: list[str]) -> int:
    from .plots import plot_command

    given = _arguments(
        verb, argv,
        PATH={"nargs": "*", "default": ["logs"]},
        __metrics={"nargs": "+"},
        __x={},
        __smooth={"type": float},
        __out={},
        __watch={"action": "store_true"},
    )  # fmt: skip
    words = vars(given)
    return plot_command(words.pop("PATH"), **words)


def _runs(verb: str, argv: list[str]) -> int:
    from .runs import runs_command

    given = _arguments(verb, argv, paths={"nargs": "*"}, __metric={}, __mode={}, __html={})
    return runs_command(given.paths, metric=given.metric, mode=given.mode, html=given.html)


def _compare(verb: str, argv: list[str]) -> int:
    from .compare import compare_command

    given = _arguments(
        verb, argv,
        first={"help": 'the script that is right, with its arguments ("train.py --lr 0.1"), or a recording'},
        second={"help": "the script to compare with it, or a recording"},
        __steps={"type": int, "default": 50, "help": "the number of optimizer steps to compare (50)"},
    )  # fmt: skip
    return compare_command(given.first, given.second, steps=given.steps)


def _profile(verb: str, argv: list[str]) -> int:
    from .options import read_options
    from .profile import profile_command

    parser = argparse.ArgumentParser(prog=f"{program()} {verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out")
    parser.add_argument("--trace")
    own, rest = parser.parse_known_args(argv)
    options = read_options(verb, rest, program(), VERBS[verb])
    if options is None:
        return 0
    from ..loop import FabricLoop

    loop = FabricLoop(**{**options.make_words(), "profiler": None})
    parts = options.make_parts()
    return profile_command(loop, parts["model"], parts.get("data"), out=own.out, trace=own.trace, steps=own.steps)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tune(verb: str, argv: list[str]) -> None:
    from .trying import run_tune

    run_tune(argv, VERBS[verb])


def _copies(verb: str, argv: list[str]) -> int:
    from .vendoring import copy_command, diff_command, update_command

    options: dict[str, list[str]] = {
        "copy": ["mini", "force"],
        "diff": ["yours", "upstream"],
        "update": ["dry_run", "force"],
    }
    flags = {f"__{name.replace('_', '-')}": {"action": "store_true"} for name in options[verb]}
    given = vars(_arguments(verb, argv, path={}, **flags))
    commands: dict[str, Any] = {"copy": copy_command, "diff": diff_command, "update": update_command}
    try:
        return commands[verb](given["path"], **{name: given[name] for name in options[verb]})
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        raise UsageError(f"{verb}: {error.filename}: {error.strerror}") from error


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


OTHERS = {"plot": _plot, "runs": _runs, "profile": _profile, "compare": _compare, "tune": _tune}
OTHERS |= {"verify": _verify}
OTHERS |= dict.fromkeys(("copy", "diff", "update"), _copies)

if __name__ == "__main__":
    sys.exit(main())
