"""The command line: fit, validate, test, predict, plot, new, copy, diff, verify.

Nothing heavy is imported before a verb needs it: a word of help must not wait for torch.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import LoopConfig
from .options import FABRIC_OPTIONS, PACKAGE, Options, UsageError, read_options

if TYPE_CHECKING:
    from ..loop import FabricLoop

VERBS = {
    "fit": "train; without options: the digits, 10 epochs",
    "validate": "run a model's validation_step over its data",
    "test": "run a model's test_step over its data",
    "predict": "run a model's predict_step over its data",
    "plot": "draw the logs of one run or several",
    "new": "make a small project that trains at once",
    "copy": "copy this package, or its single file, into a project of yours",
    "diff": "show what a copy has changed",
    "verify": "read checkpoints from end to end: are they whole?",
}

OF_A_RUN = ("model", "data", "config", "name", "version", "default_root_dir", "accelerator", "devices", "precision")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (diff: different; verify: not whole) or 2 (it could not be done).

    Example:
        >>> main(["fit", "--max_epoch", "3"])
        2
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    try:
        if verb in ("-h", "--help", "help"):
            verbs = "\n".join(f"  {name:10}{line}" for name, line in VERBS.items())
            print(f"usage: {_program()} VERB [options]\n\n{verbs}\n\n{_program()} VERB --help shows a verb's options.")
        elif verb == "--version":
            from .. import __version__

            print(f"{PACKAGE} {__version__}")
        elif verb not in VERBS:
            raise UsageError(f"there is no {verb!r}: expected one of {', '.join(VERBS)}")
        else:
            others = {"plot": _plot, "new": _new, "copy": _copy, "diff": _diff, "verify": _verify}
            return others.get(verb, _run)(verb, rest) or 0
    except SystemExit as stop:  # argparse has said what there is to say
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:  # before or after the training
        print(f"{_program()}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not _is_for_users(error):
            raise
        text = " ".join(str(error).split())
        if "is of another model" in text:
            text += ": repeat the --model.* options that its fit was given"
        print(f"{_program()}: {text}", file=sys.stderr)
        return 2
    return 0


def _program() -> str:
    """How the command was typed, so that what is printed can be typed again."""
    typed = Path(sys.argv[0])
    if typed.stem != "fabric-template":
        return f"python -m {PACKAGE}"
    found = shutil.which(typed.name)
    return typed.name if found and os.path.samefile(found, typed) else os.path.relpath(typed)


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


# ---- fit, validate, test, predict


def _run(verb: str, argv: list[str]) -> None:
    options = read_options(verb, argv, _program(), VERBS[verb])
    if options is None:
        return
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from ..loop import FabricLoop

    words = (*FABRIC_OPTIONS, *LoopConfig.__dataclass_fields__)
    try:
        loop = FabricLoop(**{word: options.settings[word] for word in words})
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UsageError(str(error)) from error  # Fabric's own checks of what was typed; no code of a user has run
    parts = options.make_parts()
    {"fit": _fit}.get(verb, _evaluate)(verb, options, loop, parts["model"], parts.get("data"))


def _fit(verb: str, options: Options, loop: FabricLoop, model: Any, data: Any) -> None:
    start, typed = time.perf_counter(), {k: v for k, v in options.typed.items() if k not in ("resume", "load")}
    try:
        loop.fit(model, data, resume=options.settings.resume, load=options.settings.load)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, KeyboardInterrupt) and str(stop):
            print(stop, file=sys.stderr)
        if loop.fabric.is_global_zero and loop.checkpoint_path("last") is not None:
            print(f"\ninterrupted; go on with\n{_again('fit', {'resume': 'last', **typed})}", file=sys.stderr)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    if loop.fabric.is_global_zero:
        what = type(model).__name__ + (f" on {type(data).__name__}" if data is not None else "")
        seconds = time.perf_counter() - start
        done = f"{_count(loop.current_epoch, 'epoch')}, {_count(loop.global_step, 'step')}"
        print(f"\ntrained     {what}: {done}, {seconds:.1f} s")
        _print_summary(loop, typed)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _print_summary(loop: FabricLoop, typed: dict[str, Any]) -> None:
    """What came out, where it is, and what to type next."""
    config, log_dir, rows = loop.config, getattr(loop.logger, "log_dir", None), loop._required("fit").history.rows
    told: dict[str, str] = {}
    for row in rows:  # the latest of each, with its epoch where that is not the last one
        age = "" if row is rows[-1] else f" (epoch {row['epoch']})"
        names = [name for name in row if name not in ("epoch", "step", "time") and not name.startswith("lr")]
        told |= {name: f"{name} {row[name]:.4f}{age}" for name in names if isinstance(row[name], int | float)}
    if told:
        print(f"at the end  {', '.join(told.values())}")
    monitor = config.monitor
    scores = [(row[monitor], row["epoch"]) for row in rows if monitor is not None and monitor in row]
    if scores := [(score, epoch) for score, epoch in scores if not math.isnan(score)]:
        score, epoch = (min if config.mode == "min" else max)(scores, key=itemgetter(0))
        print(f"best        {monitor} {score:.4f} in epoch {epoch}")
    folder = Path(log_dir) if log_dir and Path(log_dir, "metrics.csv").is_file() else None
    if folder is not None:
        print(f"log         {_shown(folder / 'metrics.csv')}")
    last = loop.checkpoint_path("last")
    for path in dict.fromkeys(filter(None, (loop.checkpoint_path("best"), last))):
        print(f"checkpoint  {_shown(path)}")
    if folder is not None and (picture := _draw([str(folder)], folder / "history.png", needs_a_loss=False)):
        print(f"picture     {_shown(picture)}")
    if last is not None:
        limits = {"max_epochs": config.max_epochs, "max_steps": config.max_steps}
        more = {k: str(2 * v) for k, v in limits.items() if v not in (None, -1)}
        print(f"go on       {_again('fit', {'resume': 'last', **typed, **more})}")
    if last is not None and loop.enable_validation:
        same = {word: value for word, value in typed.items() if word.partition(".")[0] in OF_A_RUN}
        print(f"validate    {_again('validate', {'load': 'last' if config.monitor is None else 'best', **same})}")
    if folder is not None:
        print(f"plot        {_program()} plot {shlex.quote(_shown(folder))}")


def _again(verb: str, words: dict[str, Any]) -> str:
    """A command with these words, as it is typed."""
    given = [(word, part) for word, value in words.items() for part in (value if word == "config" else [value])]
    return f"{_program()} {verb} {shlex.join(token for word, part in given for token in (f'--{word}', part))}"


def _evaluate(verb: str, options: Options, loop: FabricLoop, model: Any, data: Any) -> None:
    load, is_first = options.settings.load, loop.fabric.is_global_zero
    if (out := getattr(options.settings, "out", None)) is not None and is_first:
        _try_out(Path(out))
    if load is None and is_first:
        print(f"{_program()}: the weights are new ones; --load best takes those of the last fit", file=sys.stderr)
    results = getattr(loop, verb)(model, data, load=load)
    if verb != "predict" or not is_first:
        return
    print(f"predicted   {len(results)} batches; the first: {' '.join(str(results[:1])[1:-1].split())[:200]}")
    if out is not None:
        from ..files.storage import AtomicCheckpointIO

        AtomicCheckpointIO().save_checkpoint(results, out)
        print(f"saved       {out}")


def _try_out(out: Path) -> None:
    """Prove that the predictions can be saved there, before hours are spent on them."""
    if out.suffix not in ("", ".pt", ".pth", ".ckpt"):
        raise UsageError(f"--out {out}: predictions are written by torch.save: give a name that ends in .pt")
    try:
        if out.exists() and not out.is_file():
            raise UsageError(f"--out {out}: this is no regular file; give the path of a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent) as file:  # without a name: a kill leaves nothing behind
            file.write(b"\n")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}; give another file") from error


def _shown(path: Path) -> str:
    """The path from here, if it lies here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


# ---- plot, new, copy, diff, verify


def _arguments(verb: str, argv: list[str], **options: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{_program()} {verb}", description=VERBS[verb], allow_abbrev=False)
    for name, words in options.items():
        parser.add_argument(name.replace("__", "--"), **words)
    return parser.parse_args(argv)


def _plot(verb: str, argv: list[str]) -> None:
    given = _arguments(
        verb, argv,
        PATH={"nargs": "*", "default": ["logs"], "help": "metrics.csv, a run's folder, or the root of all (logs)"},
        __metrics={"nargs": "+", "help": "the columns to draw; by default all losses and accuracies"},
        __x={"default": "epoch", "help": "the horizontal axis: epoch, step, or time, the seconds trained"},
        __out={"help": "the picture; by default history.png in PATH, or here for several"},
    )  # fmt: skip
    first = Path(given.PATH[0])
    folder = Path() if len(given.PATH) > 1 else first if first.is_dir() else first.parent
    out = Path(given.out or folder / "history.png")
    print(f"picture     {_draw(given.PATH, out, metrics=given.metrics, x=given.x)}")


def _draw(paths: list[str], out: Path, needs_a_loss: bool = True, **words: Any) -> Path | None:
    """Draw the runs into a file; None where there is no loss to draw and none was asked for."""
    import matplotlib

    matplotlib.use("Agg")  # a file is all we want; no window, no display needed
    from .plots import plot_logs

    try:
        axes = plot_logs(paths[0] if len(paths) == 1 else paths, **words)
    except ValueError:
        if needs_a_loss:
            raise
        return None
    figure: Any = (axes if hasattr(axes, "figure") else axes[0]).figure
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the picture {str(out)!r}: {error}; give another file with --out") from error
    return out


def _new(verb: str, argv: list[str]) -> None:
    from .new import make_project

    given = _arguments(verb, argv, NAME={"help": "the folder to make, such as my_digits; its runs have its name"})
    with _writing(f"new {given.NAME}"):
        files = make_project(given.NAME)
    there = f"cd {shlex.quote(given.NAME)} && python"
    print(f"made        {given.NAME}: {', '.join(files)}\ntrain       {there} train.py\ntest        {there} -m pytest")


def _copy(verb: str, argv: list[str]) -> None:
    from .copying import copy_mini, copy_package

    given = _arguments(
        verb, argv,
        DEST={"help": "the folder to make, such as src/my_loop, or with --mini the file, such as src/train_loop.py"},
        __mini={"action": "store_true", "help": "MiniLoop, the single file, instead of the folder"},
        __force={"action": "store_true", "help": "renew an older copy; what it has changed is kept in .before_<n>"},
    )  # fmt: skip
    target, kept_as, start = Path(given.DEST), "is what was there before", ""
    name = target.resolve().stem
    with _writing(f"copy {target}"):
        if given.mini:
            what, loop, kept = "MiniLoop", "MiniLoop", copy_mini(target, given.force)
        else:
            files, kept = copy_package(target, given.force)
            what, loop, kept_as = f"{len(files)} files", "FabricLoop", "has those that were other before"
            start = f"try         {'' if target.parent == Path() else f'cd {target.parent} && '}python -m {name} fit\n"
    print(
        f"copied      {what} to {target}; {'it is' if given.mini else 'they are'} yours now\n"
        f"{f'kept        {_shown(kept)} {kept_as}{chr(10)}' if kept else ''}"
        f"use         from {name} import {loop}\n"
        f"{start}compare     {_program()} diff {target}"
    )


@contextmanager
def _writing(said: str) -> Iterator[None]:
    """What the disk refuses is one line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{said}: cannot be written: {error.strerror}; give another place") from error


def _diff(verb: str, argv: list[str]) -> int:
    from .copying import diff_package

    given = _arguments(verb, argv, DEST={"help": "the folder of a copy, or a single file; exit code 1 if it differs"})
    print(text := diff_package(given.DEST), end="")
    return 1 if text else 0


def _verify(verb: str, argv: list[str]) -> int:
    from ..files.opening import SUFFIXES, CheckpointError, UnreadableError
    from ..files.reading import verify_checkpoint

    given = _arguments(verb, argv, PATH={"help": "a checkpoint, or a folder of them; exit code 1 if one is not whole"})
    path, code = Path(given.PATH), 0
    files = [path] if not path.is_dir() else sorted(p for p in path.rglob("[!.]*") if p.suffix in SUFFIXES)
    if not files:
        raise UsageError(f"verify {path}: there is no checkpoint in this folder ({', '.join(SUFFIXES)})")
    for file in files:
        try:
            verify_checkpoint(file)
            print(f"whole       {file}")
        except UnreadableError as error:
            code = code or 2
            print(f"not read    {error}")
        except CheckpointError as error:
            code = 1
            print(f"unusable    {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
