"""Examining: the verb doctor as it is typed: two scripts beside each other, a script's source, what a run has left."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import PACKAGE, UsageError
from .listing import to_json
from .recording import Recording

USAGE = """%(prog)s OLD.py NEW.py [--steps N] [--seed N] [--json] [-- arguments of the scripts]
       %(prog)s SCRIPT.py [--json]
       %(prog)s logs/NAME/version_N [--json]"""
ROOT = Path(__file__).resolve().parents[PACKAGE.count(".") + 2]  # where the package is imported from
CHILD = "import sys; sys.path.append({root!r}); from {package}.tools.examining import run_recorded; run_recorded()"
LAST_LINES = 12


def doctor_verb(program: str, description: str, argv: list[str]) -> tuple[str, int]:
    """What is printed for these words, and the exit code: 1 where something parts or is wrong."""
    argv, scripts_own = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog=program, usage=USAGE, description=description, allow_abbrev=False)
    parser.add_argument(
        "OLD", help="the script with your loop; alone: its source is read, and not run; or a run's folder"
    )
    parser.add_argument("NEW", nargs="?", help="what was made of it; both are run, up to so many steps")
    parser.add_argument("--steps", type=int, default=50, help="how many optimizer steps are compared (50)")
    parser.add_argument("--seed", type=int, help="torch, numpy and random are seeded with it before each script begins")
    parser.add_argument("--json", action="store_true", help="for programs: all that is known")
    given = parser.parse_args(argv)
    for path in filter(None, (given.OLD, given.NEW)):
        if not Path(path).exists():
            raise UsageError(
                f"doctor {path}: there is no such file: expected a script such as train.py, or a run's folder"
            )
    if given.steps < 1:
        raise UsageError(f"--steps={given.steps}: expected how many steps are compared, 1 or more")
    if given.NEW is not None:
        return _two(given, scripts_own)
    if Path(given.OLD).is_dir():
        return _run(given)
    return _script(given)


def _script(given: argparse.Namespace) -> tuple[str, int]:
    from .mistakes import read_source
    from .sources import read_script

    path = Path(given.OLD)
    if path.suffix not in (".py", ".ipynb"):
        raise UsageError(f"doctor {path}: expected a script (.py), a notebook (.ipynb) or a run's folder")
    try:
        found, loops = read_source(path), len(read_script(path).trainings)
    except (ValueError, SyntaxError, KeyError) as error:
        raise UsageError(f"doctor {path}: this is no Python that can be read: {error}") from error
    if given.json:
        return to_json([vars(one) for one in found]), _code(found)
    lines = [_said(one, f"{path}:{one.line}: ") for one in found]
    if not loops:
        lines.append("loops       none is seen that calls backward() and an optimizer's step()")
    elif not found:
        lines.append(f"sound       nothing is seen to be wrong in {loops} training loop{'s' * (loops > 1)}")
    return "\n".join(lines), _code(found)


def _run(given: argparse.Namespace) -> tuple[str, int]:
    from .finished import read_run, summary
    from .runs import named

    found, run = read_run(given.OLD), named(given.OLD)
    if given.json:
        return to_json([vars(one) for one in found]), _code(found)
    lines = [f"run         {summary(run)}", *(_said(one) for one in found)]
    return "\n".join(lines if found else [*lines, "sound       its figures show nothing that is wrong"]), _code(found)


def _said(one: Any, where: str = "") -> str:
    return f"{'consider' if one.is_advice else 'wrong':12}{where}{one.what}\n{'write':12}{one.write}"


def _code(found: Sequence[Any]) -> int:
    return int(any(not one.is_advice for one in found))


def _two(given: argparse.Namespace, arguments: list[str]) -> tuple[str, int]:
    from .parting import compare

    paths = [Path(given.OLD), Path(given.NEW)]
    for path in paths:
        if not path.is_file() or path.suffix != ".py":
            raise UsageError(f"doctor {path}: expected two scripts, OLD.py NEW.py")
    recordings = [record_script(path, given.steps, given.seed, arguments) for path in paths]
    report = compare(*recordings)
    return to_json(report.as_dict()) if given.json else str(report), int(report.first is not None)


def record_script(path: Path, steps: int, seed: int | None, arguments: list[str]) -> Recording:
    """Run a script in a process of its own, until it has made so many steps, and give back what was noted."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder, "recording"), Path(folder, "output")
        words = [str(path), str(out), str(steps), "" if seed is None else str(seed), *arguments]
        command = [sys.executable, "-c", CHILD.format(root=str(ROOT), package=PACKAGE), *words]
        with said.open("wb") as output:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode == 0 and out.is_file():
            with out.open("rb") as file:
                recording = pickle.load(file)  # written by our own process, into a folder that only we can write
            assert isinstance(recording, Recording)
            if not recording.steps:
                raise UsageError(
                    f"doctor {path}: it made no optimizer step: expected a script that trains, in this process (on one device)"
                )
            return recording
        last = said.read_text("utf-8", "replace").splitlines()[-LAST_LINES:]
    print(*(f"  {line}" for line in last), sep="\n", file=sys.stderr)
    raise UsageError(
        f"doctor {path}: the script failed with exit code {done.returncode}; expected one that trains; see above"
    )


class Enough(BaseException):
    """There are as many steps as were asked for: the script need not go on."""


def run_recorded() -> None:
    """In the other process: run the script as ``python script.py`` does, and write what was noted."""
    import runpy

    from .observing import Observer

    path, out, steps, seed, *arguments = sys.argv[1:]
    recording = Recording(path, int(steps))
    sys.argv, sys.path[0] = [path, *arguments], os.path.dirname(os.path.abspath(path))
    if seed:
        _seed(int(seed))

    def enough() -> None:
        raise Enough

    try:
        with Observer(recording, enough):
            runpy.run_path(path, run_name="__main__")
    except Enough:
        pass
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        with open(out, "wb") as file:
            pickle.dump(recording, file)


def _seed(seed: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
