"""Trying: the verb tune as it is typed: what makes a training faster here, or a learning rate for it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import Misuse
from .errors import UsageError
from .jobs import for_a_trial
from .knobs import BY_NAME, SAID_LR
from .options import Options, read_options
from .typed import again, program

OWN = {"out": "tuned.yaml", "csv": None, "only": None, "max_batch_size": None, "seconds": 2.0, "time_limit": None,
       "lr_min": 1e-7, "lr_max": 10.0, "lr_steps": 100}  # fmt: skip
SWITCHES = ("lr", "same_numbers")
HELP = """usage: {program} tune [--option value ...]
       {program} tune --lr [--option value ...]

{description}

Each trial trains in a process of its own, for some seconds, on one device; nothing is kept of it.

  --out FILE            What pays, as a file for fit --config (tuned.yaml).
  --csv FILE            All trials as a table; with --lr the curve (tuned_lr.csv).
  --only NAMES          Of {names}; by default all that apply.
  --same_numbers        Leave out what changes the numbers.
  --max_batch_size N    The largest to try (4096).
  --seconds S           How long each is measured (2).
  --time_limit S        After so long a trial counts as hung (120; with --lr 600).

  --lr                  Find a learning rate instead: it grows from step to step until the loss blows up.
  --lr_min, --lr_max    From where to where (1e-7 to 10).
  --lr_steps N          In how many steps (100).
  --out FILE            The picture of it (tuned_lr.png).

Beside these, all that fit takes: --model, --data, --run, --config, --precision ...; fit --help lists them.
"""


class TypedJob:
    """What was typed, made anew in each process that tries it."""

    def __init__(self, argv: list[str], description: str) -> None:
        self.argv, self.description = argv, description
        self.options = read_options("tune", argv, program(), description)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "options": None}

    def _options(self) -> Options:
        if self.options is None:  # in a new interpreter
            self.options = read_options("tune", self.argv, program(), self.description)
        assert self.options is not None
        return self.options

    def words(self, folder: str, **words: Any) -> dict[str, Any]:
        """What FabricLoop is given for a trial."""
        options = self._options()
        for word in ("callbacks", "logger"):
            options.settings[word] = None  # those of the run that is to come: they may write
        return for_a_trial(options.make_words(), folder, words)

    def parts(self) -> tuple[Any, dict[str, Any]]:
        """The model, and what fit is given beside it."""
        parts = self._options().make_parts()
        return parts["model"], {"train_dataloaders": parts["data"]} if "data" in parts else {}


def run_tune(argv: list[str], description: str) -> None:
    """Do what was typed, and print what came of it."""
    if {"-h", "--help"} & {*argv}:
        text = f"{description[0].upper()}{description[1:]}."
        print(HELP.format(program=program(), description=text, names=", ".join(BY_NAME)))
        return
    own, rest = _split(argv)
    if own["lr"] and (lost := [word for word in ("only", "max_batch_size", "same_numbers") if own[word]]):
        raise UsageError(f"--lr with --{lost[0]}: a learning rate is found by itself; type one of them")
    for word in ("out", "csv"):
        if own[word] is not None and not Path(own[word]).absolute().parent.is_dir():
            raise UsageError(f"--{word} {own[word]}: there is no folder {str(Path(own[word]).parent)!r}; make it first")
    job = TypedJob(rest, description)
    if job.options is None:
        return
    try:
        (_find_rate if own["lr"] else _find_words)(job, own)
    except Misuse as error:
        raise UsageError(str(error)) from error


def _split(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What is this verb's own, and what fit knows."""
    parser = argparse.ArgumentParser(prog=f"{program()} tune", add_help=False, allow_abbrev=False, exit_on_error=False)
    for word in SWITCHES:
        parser.add_argument(f"--{word}", action="store_true")
    for word, default in OWN.items():
        kind = type(default) if isinstance(default, int | float) else str
        kind = {"max_batch_size": int, "time_limit": float}.get(word, kind)
        parser.add_argument(f"--{word}", type=kind)
    try:
        given, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(f"tune: {error}") from error
    own = vars(given)
    if own["lr"]:
        own["out"] = own["out"] or "tuned_lr.png"
        own["csv"] = own["csv"] or str(Path(own["out"]).with_suffix(".csv"))
    asked = {"only": [part.strip() for part in own["only"].split(",")] if own["only"] else None}
    limits = {"time_limit": own["time_limit"] or (600.0 if own["lr"] else 120.0)}
    own = {**OWN, **{word: value for word, value in own.items() if value is not None}, **asked, **limits}
    for word in ("seconds", "time_limit", "max_batch_size"):
        if own[word] is not None and own[word] <= 0:
            raise UsageError(f"--{word} {own[word]:g}: expected a number above 0")
    return own, rest


def _find_rate(job: TypedJob, own: Mapping[str, Any]) -> None:
    from .ratetest import run_test

    found = run_test(job, own["lr_min"], own["lr_max"], own["lr_steps"], own["time_limit"])
    found.save_csv(own["csv"])
    found.save_picture(own["out"])
    print(found)
    print(f"picture     {own['out']}\ntable       {own['csv']}")
    if found.suggestion is None:
        return
    names = _arguments(job)["model"]
    word = next((f"model.{name}" for name in ("lr", "learning_rate") if name in names), None)
    if word is None:
        print("write       lr= where the optimizer is made: the model's class has no argument lr or learning_rate")
    else:
        print(f"train       {again('fit', {**_typed(job), word: f'{found.suggestion:.3g}'})}")


def _find_words(job: TypedJob, own: Mapping[str, Any]) -> None:
    from .tuning import Tuner

    tuner = Tuner(job, seconds=own["seconds"], time_limit=own["time_limit"], show=lambda line: print(line, flush=True))
    try:
        tuned = tuner.run(own["only"], same_numbers=own["same_numbers"], max_batch_size=own["max_batch_size"])
    finally:
        if own["csv"] is not None and tuner.tuned.trials:
            tuner.tuned.save_csv(own["csv"])
    written = Written(job, tuned.choice)
    if written.words:
        Path(own["out"]).write_text(written.text(), encoding="utf-8")
        for name in written.without_effect(own["out"], tuner):
            tuned.notes.append(f"the file leaves out {name}: the parts took it, and were as before")
    print("\n".join(tuned.said(without=written.names)))
    if own["csv"] is not None:
        tuned.save_csv(own["csv"])
        print(f"table       {own['csv']}")
    if written.words:
        print(f"config      {own['out']}: {', '.join(written.words)}\ntrain       {written.command(own['out'])}")
    else:
        Path(own["out"]).unlink(missing_ok=True) if written.was_written else None
    if "batch_size" in tuned.choice:
        print(f"then        {SAID_LR}")


class Written:
    """What pays, as far as fit can be told: by its own words, and by arguments of the data's or the model's class."""

    def __init__(self, job: TypedJob, choice: Mapping[str, Any]) -> None:
        self.job, self.choice, self.was_written = job, choice, False
        self.words: dict[str, Any] = {}  # as they are typed: precision, data.num_workers
        self._of: dict[str, str] = {}  # each word's name among the knobs
        arguments = _arguments(job)
        for name, value in choice.items():
            for word in _words_of(name, arguments):
                self.words[word], self._of[word] = value, name
                break

    @property
    def names(self) -> set[str]:
        """The knobs that the file says."""
        return {self._of[word] for word in self.words}

    def text(self) -> str:
        """The file; behind each word whether the numbers stay."""
        import yaml

        self.was_written = True
        lines, parts = ["# written by fabric-template tune, for fit --config"], dict[str, list[str]]()
        for word, value in self.words.items():
            numbers = BY_NAME[self._of[word]].numbers
            part, dot, name = word.rpartition(".")
            said = f"  # other numbers: {numbers}" if numbers else "  # the same numbers"
            text = f"{name}: {yaml.safe_dump(value).splitlines()[0]}{said}"
            (parts.setdefault(part, []) if dot else lines).append(text)
        for part, inside in parts.items():
            lines += [f"{part}:", *(f"  {line}" for line in [f"class: {self._class(part)}", *inside])]
        return "\n".join([*lines, ""])

    def _class(self, part: str) -> str:
        settings = self.job.options.settings  # type: ignore[union-attr]
        return str(settings[part]["class"])

    def command(self, out: str) -> str:
        """The fit with it; what was typed and is written now is left out, for it would win."""
        typed = {word: value for word, value in _typed(self.job).items() if word not in self.words}
        return again("fit", {**typed, "config": [*typed.get("config", ()), out]})

    def without_effect(self, out: str, tuner: Any) -> Iterator[str]:
        """Read the file as fit does, and take out what the parts do not heed; its speed is a line of the table."""
        argv = shlex.split(self.command(out).partition(" fit ")[2])
        from functools import partial

        from .throughput import measure

        job = TypedJob(argv, "")
        one, _ = tuner.trial("as written", {}, partial(measure, job, {}, tuner.seconds, tuner.time_limit))
        if one.speed is None:
            return
        facts = one.speed.facts
        found = {"compile": facts.is_compiled, "prefetch": facts.is_prefetched, "fused": facts.is_fused}
        for word, name in list(self._of.items()):
            value = found.get(name, getattr(facts, name, self.choice[name]))
            if value != self.choice[name] and word in self.words:
                del self.words[word]
                yield f"{word}={self.choice[name]}"
        if self.words and len(self.words) < len(self._of):
            Path(out).write_text(self.text(), encoding="utf-8")


def _words_of(name: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    if BY_NAME[name].word:
        yield BY_NAME[name].word
    for part in ("data", "model"):
        yield from (f"{part}.{one}" for one in BY_NAME[name].arguments if one in arguments[part])


def _arguments(job: TypedJob) -> dict[str, set[str]]:
    """The arguments of the classes of model and data."""
    import inspect

    assert job.options is not None
    factories = job.options.factories
    return {
        part: set(inspect.signature(factories[part]).parameters) if part in factories else set()
        for part in ("model", "data")
    }


def _typed(job: TypedJob) -> dict[str, Any]:
    assert job.options is not None
    return dict(job.options.typed)
