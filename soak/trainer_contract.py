"""Compare the values that modules and callbacks see in Trainer and in FabricLoop, at each moment of a run.

    python soak/trainer_contract.py              print the attributes that differ for no known reason
    python soak/trainer_contract.py --module Manual --details
    torchrun --nproc-per-node 2 soak/trainer_contract.py     compare under DDP, in each process

Each value is that of a public attribute, property or hook argument at one moment. The moments are after construction, in each
hook of fit, validate, test and predict, after each call, and after an error in a training step. The attributes are read
from the trainer, its loops, its strategy and the LightningModule. The names of the attributes come from Trainer's own classes.
"""

import argparse
import collections
import functools
import os
import re
import sys
import tempfile
import warnings

import lightning.pytorch as pl
import search_path  # noqa: F401

# isort: split
import parity_modules
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from modules import Classifier, by_step, make_loader, quiet

from fabric_template import FabricLoop

HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_")] + ["setup", "teardown"]
MODULE_HOOKS = [
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_optimizers",
    "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "predict_step", "prepare_data", "setup", "teardown",
    "test_step", "train_dataloader", "training_step", "transfer_batch_to_device", "val_dataloader", "validation_step",
]  # fmt: skip
MODULE_HOOKS += [name for name in dir(pl.LightningModule) if name.startswith("on_")]
MODULE_HOOKS.remove("on_gpu")

# Trainer and FabricLoop have different classes for the same purpose. Replace the class by its purpose.
OWN_CLASSES = dict.fromkeys(("FabricLoop", "Trainer"), "trainer")
LOOPS = ("_FitLoop", "_TrainingEpochLoop", "_EvaluationLoop", "_PredictionLoop")
LOOPS += ("_AutomaticOptimization", "_ManualOptimization", "LoopAPI")
OWN_CLASSES |= dict.fromkeys(LOOPS, "a loop")
OWN_CLASSES |= dict.fromkeys(("SingleDeviceStrategy", "DDPStrategy", "StrategyAPI"), "a strategy")
COUNTERS = ("_Progress", "_BatchProgress", "_SchedulerProgress", "SimpleNamespace")
OWN_CLASSES |= dict.fromkeys(COUNTERS, "counters")

# These attributes differ on purpose: (attribute, moments, reason). docs/differences.md also lists them.
ON_PURPOSE = [
    (r"\w+_loop\.(restart|resum|is_resuming|skip|done)\w*", ".*", "states of Trainer's own loops"),
    (r"\w+_loop\.(inference_mode|verbose|num_dataloaders)", ".*", "arguments of a call"),
    (r"predict_loop\.return_predictions", ".*", "an argument of a call"),
    (r"epoch_loop\.scheduler_progress", ".*", "resuming restores the schedulers instead"),
    (r"(validate|test|predict)_loop\.max_batches", ".*", "one limit for the current evaluation"),
    (r"\w+_loop\.batch_idx", ".*", "-1 outside an epoch"),
    (r"fit_loop\.max_batches", ".*", "an evaluation has no training batches"),
    (r"predict_loop\.\w*(indices|predictions)", ".*", "kept even if no callback needs them"),
    (r"strategy\.(handles|lightning_rest|restore_check|strategy_name)\w*", ".*", "Trainer's"),
    (r"trainer\.(callback|logged|progress_bar)_metrics", "setup", "a call starts without metrics"),
    (r"trainer\.num_(val|predict)_batches", "setup", "a call starts without limits"),
    (r"trainer\.is_last_batch", ".*", "False when there is no batch"),
    (r"trainer\.train_dataloader", ".*", "an evaluation keeps the loader of the last fit"),
    (r"trainer\.val_check_batch", ".*", "known before the loaders"),
    (r"arguments of module\.optimizer_step", ".*", "the closure is a function"),
]


class WithSteps(Classifier):
    """A module with steps for fit, validate, test and predict."""

    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class WithoutLogs(Classifier):
    """A module that has steps for fit, validate, test and predict, and logs nothing."""

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step


MODULES = {
    kind.__name__: kind
    for kind in vars(parity_modules).values()
    if isinstance(kind, type) and issubclass(kind, pl.LightningModule)
} | {"WithSteps": functools.partial(WithSteps, by_step), "WithoutLogs": WithoutLogs}
OPTIONS = {
    "Module": {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 0.5},
    "StepScheduler": {"max_steps": 7},
    "EpochScheduler": {"fast_dev_run": True},
    "WithoutLogs": {
        "max_epochs": -1,
        "max_steps": 5,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 2,
    },
    "WithSteps": {
        "max_epochs": 2,
        "limit_train_batches": 0.5,
        "gradient_clip_val": 1.0,
        "min_epochs": 2,
    },
}

# Use two processes only under torchrun, which sets WORLD_SIZE.
PROCESSES = {"strategy": "ddp_find_unused_parameters_true", "devices": 2}
PROCESSES = PROCESSES if os.environ.get("WORLD_SIZE") == "2" else {}


def public_names(kind, *objects):
    names = {name for name in dir(kind) if not name.startswith("_")}
    for each in objects:
        names |= {name for name in vars(each) if not name.startswith("_")}
    return sorted(name for name in names if not callable(getattr(kind, name, None)))


def described(value, depth=0):
    """Convert a value to text that does not depend on the process or on the loop's class."""
    if isinstance(value, str) and tempfile.gettempdir() in value:
        return f"{type(value).__name__} path"
    if value is None or isinstance(value, bool | int | str):
        return f"{type(value).__name__} {value}"
    if isinstance(value, torch.Tensor):
        return f"Tensor {tuple(value.shape)} {value.dtype} {value.double().sum().item():.9g}"
    if isinstance(value, float):
        return f"float {value:.9g}"
    if isinstance(value, dict) and depth < 3:
        items = sorted(value.items(), key=str)
        return str({name: described(part, depth + 1) for name, part in items})
    if isinstance(value, list | tuple) and depth < 3:
        return f"{type(value).__name__} {[described(part, depth + 1) for part in value]}"
    return OWN_CLASSES.get(type(value).__name__, type(value).__name__)


def read(found, name):
    try:
        return described(getattr(found, name))
    except Exception as error:  # noqa: BLE001
        return f"error {type(error).__name__}"


class Recorder(pl.Callback):
    """A callback that records the trainer's attributes in each hook."""

    def __init__(self, names):
        self.names = names
        self.values = []
        self.call = "constructed"

    def record(self, trainer, moment, arguments=()):
        found = {"trainer": trainer, "module": getattr(trainer, "lightning_module", None)}
        for part in ("fit_loop", "validate_loop", "test_loop", "predict_loop", "strategy"):
            found[part] = getattr(trainer, part)
        found["epoch_loop"] = getattr(found["fit_loop"], "epoch_loop", None)
        for part, names in self.names.items():
            for name in names if found[part] is not None else ():
                value = read(found[part], name)
                self.values.append((self.call, moment, f"{part}.{name}", value))
        arguments = [described(argument) for argument in arguments]
        self.values.append((self.call, moment, f"arguments of {moment}", str(arguments)))


def _recording(hook):
    def record(self, trainer, module, *args, **kwargs):
        self.record(trainer, hook, (*args, *kwargs.values()))

    return record


for _hook in HOOKS:
    setattr(Recorder, _hook, _recording(_hook))


def record_module_hooks(module, recorder):
    """Record the arguments of each hook of the module."""
    for hook in MODULE_HOOKS:
        method = getattr(module, hook, None)
        if method is None or getattr(type(module), hook, None) is getattr(pl.LightningModule, hook):
            continue

        def recorded(*args, _method=method, _hook=hook, **kwargs):
            arguments = [described(argument) for argument in (*args, *kwargs.items())]
            place = f"module.{_hook}"
            recorder.values.append((recorder.call, place, f"arguments of {place}", str(arguments)))
            return _method(*args, **kwargs)

        setattr(module, hook, functools.wraps(method)(recorded))


def names_of_trainer():
    trainer = pl.Trainer(**quiet())
    names = public_names(pl.Trainer, trainer)
    # Without a training loader, reading this attribute fails and leaves DataLoader patched.
    names.remove("estimated_stepping_batches")
    return {
        "trainer": names,
        "module": public_names(pl.LightningModule),
        "strategy": public_names(SingleDeviceStrategy, trainer.strategy),
        "epoch_loop": public_names(type(trainer.fit_loop.epoch_loop), trainer.fit_loop.epoch_loop),
        **{
            loop: public_names(type(getattr(trainer, loop)), getattr(trainer, loop))
            for loop in ("fit_loop", "validate_loop", "test_loop", "predict_loop")
        },
    }


def run_all_calls(kind, name, root):
    """Run all calls of one module with Trainer or FabricLoop. Return the recorded values."""
    pl.seed_everything(1, verbose=False)
    module = MODULES[name]()
    recorder = Recorder(names_of_trainer())
    given = OPTIONS.get(name, {"max_epochs": 2}) | PROCESSES
    options = quiet(callbacks=[recorder], default_root_dir=str(root), **given)
    trainer = kind(**options)
    recorder.record(trainer, "constructed")
    if hasattr(parity_modules, name):
        loaders = parity_modules.train(), parity_modules.val()
    else:
        loaders = make_loader(24), make_loader(8, shuffle=False)
    calls = {
        "fit": lambda: trainer.fit(module, *loaders),
        "validate": lambda: trainer.validate(module, loaders[1], verbose=False),
        "validate again": lambda: trainer.validate(module, loaders[1], verbose=False),
    }
    if not hasattr(parity_modules, name):
        calls |= {
            "test": lambda: trainer.test(module, loaders[1], verbose=False),
            "predict": lambda: trainer.predict(module, loaders[1]),
            "predict again": lambda: trainer.predict(module, loaders[1]),
        }
    record_module_hooks(module, recorder)
    for recorder.call, call in calls.items():
        record_call(trainer, recorder, call)

    def fail(*args):
        raise ZeroDivisionError

    recorder.call, module.training_step = "fit with an error", fail
    trainer = kind(**options)
    record_call(trainer, recorder, lambda: trainer.fit(module, *loaders))
    return recorder.values


def record_call(trainer, recorder, call):
    try:
        call()
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {str(error)[:40]}"
        recorder.values.append((recorder.call, "after", "error", text))
    recorder.record(trainer, "after")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", choices=MODULES, nargs="*", default=list(MODULES))
    parser.add_argument("--details", action="store_true", help="print each moment of a difference")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    number, differences = 0, collections.defaultdict(list)
    for name in options.module:
        sides = []
        for kind in (pl.Trainer, FabricLoop):
            with tempfile.TemporaryDirectory() as root:
                sides.append(run_all_calls(kind, name, root))
        expected, found = (index_values(side) for side in sides)
        number += len(expected)
        for key in expected | found:
            if expected.get(key) != found.get(key):
                differences[key[2]].append((name, *key, expected.get(key), found.get(key)))
    unexplained = 0
    for attribute, places in sorted(differences.items()):
        unknown = [place for place in places if not is_on_purpose(attribute, place[2])]
        unexplained += bool(unknown)
        if not options.details:
            places = unknown
        if not places:
            continue
        module, call, moment, _, _, expected, found = places[0]
        first = f"first in {module}, {call}, {moment}: {expected} | {found}"
        print(f"{attribute}: {len(places)}, {first}")
        if options.details:
            for place in places[1:]:
                print("   ", *place)
    num_different = sum(map(len, differences.values()))
    print(
        f"{number} values, {num_different} differ, of {len(differences)} attributes;"
        f" {unexplained} attributes without a reason"
    )
    sys.exit(unexplained > 0)


def is_on_purpose(attribute, moment):
    return any(
        re.fullmatch(pattern, attribute) and re.fullmatch(moments, moment)
        for pattern, moments, _ in ON_PURPOSE
    )


def index_values(values):
    """Return {(call, moment, attribute, number): value}."""
    counts, indexed = collections.Counter(), {}
    for *key, value in values:
        counts[tuple(key)] += 1
        indexed[(*key, counts[tuple(key)])] = value
    return indexed


if __name__ == "__main__":
    main()
