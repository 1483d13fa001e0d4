"""Kill and resume LightningModules from public packages, and continue checkpoints with the other engine.

    python soak/public_modules.py --package mlcolvar            # all modules of one package
    python soak/public_modules.py --package darts --only TCNModel --keep /tmp/tcn

This project does not depend on the packages, and missing packages are skipped. Each run is forked
from a process that has imported the package. For each module:

- parity: an undisturbed run of FabricLoop gives the same numbers as Trainer.
- killed: SIGKILL ends a run three times at random places, and a fresh model resumes the run with
  ``resume="auto"``. Two of the kills are inside an epoch. The weights, buffers, optimizers,
  schedulers, metrics, RNG states and CSV files must equal those of the undisturbed run.
- crossing: a fresh model continues a checkpoint from the end of the first epoch. Trainer continues
  FabricLoop's file, and FabricLoop continues Trainer's file. The numbers must be the same as when
  Trainer continues its own file.
"""

import argparse
import contextlib
import csv
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import search_path  # noqa: F401

# isort: split
import numpy as np
import torch
from kills import fork
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Callback
from public_builders import BUILDERS

from fabric_template import FabricLoop

EPOCHS = 3
SECONDS_PER_RUN = 180
# Comparisons ignore these CSV columns, which differ even between two identical runs.
CLOCK_COLUMNS = ("time", "waiting", "gpu_memory", "samples_per_second")
OPTIONS = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "log_every_n_steps": 1}
OPTIONS |= {"enable_progress_bar": False, "enable_model_summary": False}
HOOKS = [name for name in dir(Callback) if name.startswith("on_")]
HOOKS = [name for name in HOOKS if not name.endswith(("_checkpoint", "_exception"))]


class PlaceCounter(Callback):
    """Counts the calls to hooks, and kills the process at one of these calls."""

    def __init__(self, kill_at=None):
        self.names, self.kill_at = [], kill_at

    def count(self, name):
        self.names.append(name)
        if len(self.names) - 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def make_hook(name):
    def hook(places, *args, **options):
        places.count(name)

    return hook


Places = type("Places", (PlaceCounter,), {name: make_hook(name) for name in HOOKS})


# Functions that train one module with Trainer or FabricLoop


def set_random_states(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def options_for(model):
    """Return the arguments of Trainer, with those that anomalib's models require."""
    wanted = getattr(model, "trainer_arguments", {})
    return {**OPTIONS, **wanted, "max_epochs": OPTIONS["max_epochs"]}


def import_lightning(model):
    """Return lightning.pytorch or pytorch_lightning, in which the module's base class is defined."""
    bases = type(model).__mro__
    is_standalone = any(base.__module__.startswith("pytorch_lightning.") for base in bases)
    return importlib.import_module("pytorch_lightning" if is_standalone else "lightning.pytorch")


def train_with_trainer(case, folder, ckpt_path=None, seed=None):
    """Train with Trainer, and save a checkpoint at the end of each epoch."""
    seed_everything(1, verbose=False)
    model, arguments = case()
    lightning = import_lightning(model)
    kind = lightning.callbacks.ModelCheckpoint
    saver = kind(folder / "trainer", "{epoch}", save_top_k=-1, monitor=None)
    options = {"logger": False, "callbacks": [saver], "default_root_dir": folder}
    trainer = lightning.Trainer(**options, **options_for(model))
    if seed is not None:
        set_random_states(seed)
    trainer.fit(model, ckpt_path=ckpt_path, weights_only=False, **arguments)
    return numbers_of(model, trainer)


def train_with_loop(case, folder, every=1, kill_at=None, resume=None, seed=None, weights_only=None):
    """Train with FabricLoop. ``seed`` sets the RNG states after the model is created."""
    seed_everything(1, verbose=False)
    model, arguments = case()
    places = Places(kill_at)
    where = {"name": "run", "version": 0, "default_root_dir": folder}
    options = {**where, **options_for(model), "save_every_n_steps": every}
    loop = FabricLoop(callbacks=[places], **options)
    if seed is not None:
        set_random_states(seed)
    loop.fit(model, resume=resume, weights_only=weights_only, **arguments)
    numbers = numbers_of(model, loop)
    if resume is None:
        (folder / "places.json").write_text(json.dumps(places.names))
    numbers["csv"] = [read_rows(path) for path in sorted(folder.glob("logs/run/*/*.csv"))]
    return numbers


def numbers_of(model, trainer):
    """Return the values of a run that are compared with those of another run."""
    numbers = {
        "weights": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": dict(trainer.callback_metrics),
        "progress": {"epoch": trainer.current_epoch, "step": trainer.global_step},
        "random": {"torch": torch.get_rng_state(), "numpy": repr(np.random.get_state())},
    }
    return as_plain(numbers)


def as_plain(value):
    """Convert nested values to tensors, numbers and strings. Replace any other value with its class name."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {str(key): as_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    is_plain = value is None or isinstance(value, bool | int | float | str | np.number)
    return value if is_plain else type(value).__qualname__


def read_rows(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in CLOCK_COLUMNS} for row in rows]


# Functions that run a training in a forked process


def run_process(folder, function, *args, **options):
    """Run ``function`` in a forked process. Return the function's result, or an error message."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result"
    result.unlink(missing_ok=True)
    _, status = os.waitpid(fork(run_child, folder, function, args, options), 0)
    if result.exists():
        return torch.load(result, weights_only=False)
    code = os.waitstatus_to_exitcode(status)
    return "killed" if code == -signal.SIGKILL else f"the process ended with {code}"


def run_child(folder, function, args, options):
    signal.alarm(SECONDS_PER_RUN)
    os.chdir(folder)
    with open(folder / "output.txt", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        numbers = function(*args, **options)
    except BaseException as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        text = " ".join(str(error).split())
        numbers = f"{type(error).__name__}: {text[:400]} ({where})"
    torch.save(numbers, folder / "result.part")
    os.replace(folder / "result.part", folder / "result")
    sys.stdout.flush()


# Functions that compare the results of two runs


def first_difference(expected, actual, name=""):
    """Return the name of the first value that differs, or None."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return compare_tensors(expected, actual, name)
    if isinstance(expected, dict) and isinstance(actual, dict):
        if set(expected) != set(actual):
            return f"{name}: keys {sorted(map(str, set(expected) ^ set(actual)))[:4]}"
        pairs = [(key, expected[key], actual[key]) for key in expected]
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            return f"{name}: length {len(expected)} and {len(actual)}"
        pairs = [(i, *both) for i, both in enumerate(zip(expected, actual, strict=True))]
    else:
        return compare_values(expected, actual, name)
    for key, one, other in pairs:
        difference = first_difference(one, other, f"{name}.{key}" if name else str(key))
        if difference is not None:
            return difference
    return None


def compare_tensors(expected, actual, name):
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{name}: {expected.dtype} {tuple(expected.shape)}, {actual.dtype} {actual.shape}"
    if expected.layout != torch.strided or torch.equal(expected, actual):
        return None
    is_nan = expected.is_floating_point() and torch.equal(expected.isnan(), actual.isnan())
    if is_nan and torch.equal(expected.nan_to_num(), actual.nan_to_num()):
        return None
    if expected.is_floating_point():
        distance = (expected.double() - actual.double()).abs().max().item()
        return f"{name}: by up to {distance:.2g}"
    return name


def compare_values(expected, actual, name):
    if expected is actual or isinstance(expected, float) and repr(expected) == repr(actual):
        return None
    try:
        is_equal = bool(np.all(expected == actual))
    except Exception:
        is_equal = type(expected) is type(actual)
    if is_equal or type(expected).__eq__ is object.__eq__ and type(expected) is type(actual):
        return None
    return f"{name}: {str(expected)[:60]} and {str(actual)[:60]}"


def describe(expected, actual, ignored=()):
    """Return "same", the difference, or the error of one of the runs."""
    for numbers in (expected, actual):
        if isinstance(numbers, str):
            return numbers
    pair = ({k: v for k, v in n.items() if k not in ignored} for n in (expected, actual))
    return first_difference(*pair) or "same"


# Functions that train the modules of each package, kill the runs and resume them


def choose_places(names, generator):
    """Return two places inside a later epoch, and one anywhere after the first step."""
    starts = [i for i, name in enumerate(names) if name == "on_train_epoch_start"]
    first = names.index("on_train_batch_end") if "on_train_batch_end" in names else 0
    inside, last = [], names.index("on_train_end") if "on_train_end" in names else len(names)
    is_inside = False
    for i, name in enumerate(names):
        if name in ("on_train_batch_end", "on_train_epoch_end"):
            is_inside = name == "on_train_batch_end"
        if is_inside and i > first and (len(starts) < 2 or i > starts[1]):
            inside.append(i)
    inside = inside or [first + 1]
    return [generator.choice(inside), generator.choice(inside), generator.randrange(first, last)]


def try_module(case, folder, generator, options):
    """Run all checks of a module. Return the findings, keyed by the name of the check."""
    found = {}
    trainer = run_process(folder / "a", train_with_trainer, case, folder / "a")
    every = generator.choice([1, 1, 2, 3])
    whole = run_process(folder / "b", train_with_loop, case, folder / "b", every)
    # Do not compare CSV files, because Trainer and FabricLoop write different files.
    found["parity"] = describe(trainer, whole, ignored=("csv",))
    if isinstance(whole, str):
        return found
    names = json.loads((folder / "b" / "places.json").read_text())
    for number, place in enumerate(choose_places(names, generator)):
        where = folder / f"killed{number}"
        killed = run_process(where, train_with_loop, case, where, every, place)
        if killed != "killed":
            found[f"killed {number + 1}"] = f"not killed at {names[place]}: {killed}"
            continue
        # A run that was killed before its first save starts from
        # scratch, so it needs the seed of the uninterrupted run.
        has_saved = any(where.rglob("*.ckpt"))
        again = {"resume": "auto", "seed": options.other_seed if has_saved else None}
        resumed = run_process(where, train_with_loop, case, where, every, **again)
        difference = describe(whole, resumed)
        if "are not created" in difference:
            # Resume with weights_only=False, because the checkpoint contains objects that cannot be loaded otherwise.
            again["weights_only"] = False
            resumed = run_process(where, train_with_loop, case, where, every, **again)
            difference = f"refused by name; trusted: {describe(whole, resumed)}"
        elif difference != "same":
            epoch = names[:place].count("on_train_epoch_start")
            batch = names[:place].count("on_train_batch_start")
            difference += f" [{names[place]}, epoch {epoch}, batch {batch}, every {every}]"
        found[f"killed {number + 1}"] = difference
    found |= try_crossing(case, folder, names, trainer)
    return found


def try_crossing(case, folder, names, trainer):
    """Continue each engine's checkpoint from the end of the first epoch with the other engine."""
    file = folder / "a" / "trainer" / "epoch=0.ckpt"
    # Trainer saves no checkpoint if a module has taken no optimizer step.
    if isinstance(trainer, str) or not file.exists():
        return {}
    starts = [i for i, name in enumerate(names) if name == "on_train_epoch_start"]
    where = folder / "first_epoch"
    run_process(where, train_with_loop, case, where, None, starts[1])
    own = where / "checkpoints" / "run" / "version_0" / "last.ckpt"
    ways = {
        "expected": (train_with_trainer, {"ckpt_path": file}),
        "Trainer continues ours": (train_with_trainer, {"ckpt_path": own}),
        "FabricLoop continues Trainer's": (train_with_loop, {"resume": file}),
    }
    results = {}
    for number, (way, (function, options)) in enumerate(ways.items()):
        where = folder / f"crossing{number}"
        result = run_process(where, function, case, where, seed=7, **options)
        if isinstance(result, str) and "are not created" in result:
            options["weights_only"] = False
            result = run_process(where, function, case, where, seed=7, **options)
        results[way] = result
    expected = results.pop("expected")
    if isinstance(expected, str):
        expected = f"Trainer cannot continue its own file: {expected}"
        return {way: expected if isinstance(r, str) else "works" for way, r in results.items()}
    return {way: describe_crossing(expected, result) for way, result in results.items()}


def describe_crossing(expected, actual):
    """Describe a difference. Ignore a scheduler step that is missing only from Trainer's own file.

    Trainer saves before a scheduler that monitors a metric steps, and skips this step when it resumes.
    """
    difference = describe(expected, actual, ("csv",))
    if not difference.startswith("schedulers."):
        return difference
    rest = describe(expected, actual, ("csv", "schedulers"))
    return "same but a step that Trainer skips" if rest == "same" else difference


def try_package(package, root, options):
    """Check each module of a package. Return a dict of the findings, keyed by module."""
    try:
        cases = BUILDERS[package]()
    except ImportError as error:
        print(f"{package}: skipped, because it cannot be imported: {error}")
        return {}
    found = {}
    for name, case in cases.items():
        if options.only and name not in options.only:
            continue
        folder = root / package / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generator = random.Random(f"{options.seed} {package} {name}")
        found[name] = try_module(case, folder, generator, options)
        print(f"{package} {name}: {json.dumps(found[name])}", flush=True)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def print_summary(found):
    """Print how many modules gave the same results in each check."""
    for title, prefix in (("parity", "parity"), ("killed and resumed", "killed")):
        results = [[v for k, v in way.items() if k.startswith(prefix)] for way in found.values()]
        same = sum(bool(values) and set(values) == {"same"} for values in results)
        print(f"{title}: {same} of {len(results)} the same")
        refused = sum(any(value.startswith("refused") for value in values) for values in results)
        if refused:
            print(f"    {refused} of the others are refused by name")
    for way in ("Trainer continues ours", "FabricLoop continues Trainer's"):
        results = [ways[way] for ways in found.values() if way in ways]
        same = sum(result.startswith("same") for result in results)
        print(f"{way}: {same} of {len(results)} the same")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", nargs="*", default=sorted(BUILDERS))
    parser.add_argument("--only", nargs="*", help="check only these modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--other-seed", type=int, help="the seed of a resumed run")
    parser.add_argument("--keep", type=Path, help="keep the files of all runs in this folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = {}
        for package in options.package:
            results = try_package(package, root.resolve(), options)
            found |= {f"{package} {name}": result for name, result in results.items()}
        print_summary(found)
    outcomes = [outcome for findings in found.values() for outcome in findings.values()]
    as_expected = ("same", "refused by name; trusted: same")
    raise SystemExit(0 if all(outcome.startswith(as_expected) for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
