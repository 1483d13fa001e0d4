"""Compare the errors and warnings that Trainer and FabricLoop give for the same wrong or unusual call.

    python soak/trainer_messages.py              print the cases that differ
    python soak/trainer_messages.py --all        print all cases
    python soak/trainer_messages.py --only clip  cases whose name contains "clip"

A case differs if the exceptions of FabricLoop and Trainer have different classes or texts, if only one of the loops raises an
exception, or if FabricLoop does not give one of Trainer's warnings. ON_PURPOSE contains the reasons for the known differences.
"""

import argparse
import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import warnings

import lightning.pytorch as pl
import search_path  # noqa: F401
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import WarningCache
from modules import Classifier, make_loader
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric_template import FabricLoop

CASES = {}
SILENT = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def case(function):
    """Register a function that takes a loop's class as a case."""
    CASES[function.__name__] = function
    return function


def fit(loop_class, model=None, train=None, val=None, call="fit", given=None, **options):
    """Create a loop and call its method ``call``, such as fit or validate."""
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **SILENT, **options}
    loop = loop_class(**options)
    loaders = [make_loader() if train is None else train]
    if call == "fit":
        loaders.append(val)
    getattr(loop, call)(Classifier() if model is None else model, *loaders, **(given or {}))
    return loop


def changed(**methods):
    """Create a Classifier, and replace some of its methods."""
    return type("Changed", (Classifier,), methods)()


def without(name):
    """Create a Classifier, and replace one of its methods with LightningModule's empty method."""
    return changed(**{name: getattr(pl.LightningModule, name)})


# Cases about the options of the loop

OPTIONS = {
    "fast_dev_run": [-1],
    "limit_train_batches": [1.1, -0.5, "a"],
    "limit_val_batches": [2.5],
    "overfit_batches": [-1],
    "val_check_interval": [1.5, "a", "00:00:0a"],
    "gradient_clip_val": ["a"],
    "gradient_clip_algorithm": ["other"],
    "max_epochs": [-2, 1.5],
    "max_steps": [-2],
    "accelerator": ["other"],
    "strategy": ["other"],
    "devices": [0, "a", []],
    "precision": ["other"],
    "profiler": ["other"],
    "logger": [3],
    "callbacks": [3],
    "check_val_every_n_epoch": [None, 1.5],
    "accumulate_grad_batches": [0, 1.5],
    "log_every_n_steps": [-1],
    "max_time": ["a", 3],
    "num_sanity_val_steps": [-2],
    "reload_dataloaders_every_n_epochs": [-1, 1.5],
    "unknown_option": [1],
    "barebones": [True],
}


def add_options():
    for name, values in OPTIONS.items():
        for value in values:
            CASES[f"option {name}={value!r}"] = lambda loop, n=name, v=value: fit(loop, **{n: v})
    for name in ("enable_checkpointing", "logger", "enable_progress_bar", "detect_anomaly"):
        options = {"barebones": True, name: True}
        CASES[f"option barebones with {name}"] = lambda loop, o=options: fit(loop, **o)


# Cases about models and their steps


def add_models():
    for name in ("training_step", "configure_optimizers"):
        CASES[f"no {name}"] = lambda loop, n=name: fit(loop, without(n))
    for call in ("validate", "test"):
        name = f"{call}_step".replace("validate", "validation")
        CASES[f"{call} without step"] = lambda loop, n=name, c=call: fit(loop, without(n), call=c)
    for hook in ("training_epoch_end", "validation_epoch_end"):
        model = {hook: lambda self, outputs: None}
        CASES[f"removed {hook}"] = lambda loop, m=model: fit(loop, changed(**m), val=make_loader())
    outputs = {"dict without loss": {}, "number": 3.0, "text": "a", "None": None}
    for name, output in outputs.items():
        step = {"training_step": lambda self, batch, batch_idx, o=output: o}
        CASES[f"step returns {name}"] = lambda loop, s=step: fit(loop, changed(**s))
        CASES[f"manual step returns {name}"] = lambda loop, s=step: fit(loop, manual(changed(**s)))


def manual(model):
    model.automatic_optimization = False
    return model


@case
def val_step_has_needless_dataloader_idx(loop):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        return None

    fit(loop, changed(validation_step=validation_step), val=make_loader())


@case
def model_in_eval_mode(loop):
    model = Classifier()
    model.eval()
    fit(loop, model)


# Cases about self.log and self.log_dict


def logs(*args, **kwargs):
    def training_step(self, batch, batch_idx):
        self.log(*args, **kwargs)
        return Classifier.training_step(self, batch, batch_idx)

    return changed(training_step=training_step)


LOGGED = {
    "nothing useful": (("a", 1.0), {"on_step": False, "on_epoch": False}),
    "a dict": (("a", {"b": {"c": 1.0}}), {}),
    "text": (("a", "b"), {}),
    "two values": (("a", torch.zeros(2)), {}),
    "unknown reduction": (("a", 1.0), {"reduce_fx": "other"}),
    "dataloader_idx": (("a/dataloader_idx_0", 1.0), {}),
    "an integer": (("a", torch.tensor(3)), {"on_epoch": True}),
    "with logger but none given": (("a", 1.0), {"logger": True}),
    "a metric that is no attribute": (("a", torchmetrics.MeanMetric()), {}),
    "an unknown argument": (("a", 1.0), {"unknown": True}),
    "a name that is no text": ((3, 1.0), {}),
}


def add_logs():
    for name, (args, kwargs) in LOGGED.items():
        CASES[f"log {name}"] = lambda loop, a=args, k=kwargs: fit(loop, logs(*a, **k))
    hooks = ("setup", "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "teardown")
    hooks += ("configure_optimizers", "train_dataloader", "on_train_epoch_end")
    hooks += ("on_save_checkpoint",)
    for hook in hooks:
        method = getattr(Classifier, hook)

        def logging_hook(self, *args, _method=method, **kwargs):
            self.log("a", 1.0)
            return _method(self, *args, **kwargs)

        model = {hook: logging_hook}
        CASES[f"log in {hook}"] = lambda loop, m=model: fit(loop, changed(**m))


@case
def log_twice(loop):
    def training_step(self, batch, batch_idx):
        self.log("a", 1.0)
        self.log("a", 1.0, prog_bar=True)
        return Classifier.training_step(self, batch, batch_idx)

    fit(loop, changed(training_step=training_step))


@case
def log_on_step_in_epoch_end(loop):
    def on_train_epoch_end(self):
        self.log("a", 1.0, on_step=True)

    fit(loop, changed(on_train_epoch_end=on_train_epoch_end))


@case
def log_nested_dict(loop):
    def training_step(self, batch, batch_idx):
        self.log_dict({"a": {"b": {"c": 1.0}}})

    fit(loop, changed(training_step=training_step))


@case
def log_ambiguous_batch_size(loop):
    data = [{"a": torch.zeros(2, 8), "b": torch.zeros(3, dtype=torch.long)}] * 2

    def training_step(self, batch, batch_idx):
        loss = self(batch["a"]).sum()
        self.log("loss", loss, on_epoch=True)
        return loss

    fit(loop, changed(training_step=training_step), DataLoader(data, batch_size=None))


@case
def log_a_metric_before_its_update(loop):
    def training_step(self, batch, batch_idx):
        self.log("a", self.metric)
        return Classifier.training_step(self, batch, batch_idx)

    model = changed(training_step=training_step)
    model.metric = torchmetrics.MeanMetric()
    fit(loop, model)


# Cases about optimizers and schedulers


def configured(make):
    return changed(configure_optimizers=lambda self: make(torch.optim.SGD(self.parameters(), 0.1)))


def constant(optimizer):
    return lrs.ConstantLR(optimizer)


def one_cycle(optimizer):
    return lrs.OneCycleLR(optimizer, 0.1, total_steps=9)


PLATEAU = lrs.ReduceLROnPlateau
SCHEDULERS = {
    "None": lambda optimizer: None,
    "number": lambda optimizer: 3,
    "extra key": lambda optimizer: {"optimizer": optimizer, "other": 1},
    "extra scheduler key": lambda o: ([o], [{"scheduler": constant(o), "other": 1}]),
    "no scheduler key": lambda o: ([o], [{"interval": "epoch"}]),
    "unknown interval": lambda o: ([o], [{"scheduler": constant(o), "interval": "other"}]),
    "plateau without monitor": lambda o: ([o], [PLATEAU(o)]),
    "plateau of an unknown metric": lambda o: {
        "optimizer": o, "lr_scheduler": PLATEAU(o), "monitor": "other"
    },
    "lenient plateau of an unknown metric": lambda o: (
        [o], [{"scheduler": PLATEAU(o), "monitor": "other", "strict": False}]
    ),
    "one cycle by epoch": lambda o: ([o], [{"scheduler": one_cycle(o), "interval": "epoch"}]),
    "a scheduler of another class": lambda o: ([o], [{"scheduler": object()}]),
    "several optimizers": lambda o: [o, torch.optim.SGD(o.param_groups[0]["params"], 0.1)],
    "a scheduler of another optimizer": lambda o: (
        [o], [constant(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))]
    ),
}  # fmt: skip


def add_optimizers():
    for name, make in SCHEDULERS.items():
        CASES[f"optimizer {name}"] = lambda loop, m=make: fit(loop, configured(m))


# Cases about loaders and datamodules


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(torch.zeros(8, 8), torch.zeros(8, dtype=torch.long)))


class StreamWithLength(Stream):
    def __len__(self):
        return 8


DATA = {
    "no length and a fraction": lambda: (DataLoader(Stream(), 2), {"val_check_interval": 0.5}),
    "no length and a limit": lambda: (DataLoader(Stream(), 2), {"limit_train_batches": 0.5}),
    "interval over the length": lambda: (make_loader(), {"val_check_interval": 1000}),
    "a stream with a length": lambda: (DataLoader(StreamWithLength(), 2), {}),
    "a stream with a length and workers": lambda: (DataLoader(StreamWithLength(), 2, num_workers=2), {}),
    "sequential": lambda: (CombinedLoader([make_loader()], "sequential"), {}),
    "empty": lambda: (DataLoader(TensorDataset(torch.zeros(0, 8))), {}),
    "a number": lambda: (3, {}),
    "None": lambda: ([None, None], {}),
    "shuffled overfit": lambda: (make_loader(shuffle=True), {"overfit_batches": 2}),
    "too few for a row": lambda: (make_loader(), {"log_every_n_steps": 1000, "logger": True}),
}  # fmt: skip


def add_data():
    for name, make in DATA.items():

        def run(loop, make=make):
            train, options = make()
            fit(loop, train=train, val=make_loader(), **options)

        CASES[f"data {name}"] = run


@case
def datamodule_and_module_have_hook(loop):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return make_loader()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    model = changed(on_after_batch_transfer=Data.on_after_batch_transfer)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **SILENT}
    loop(**options).fit(model, datamodule=Data())


# Cases about callbacks and checkpoints

CALLBACKS = {
    "two bars": lambda: [callbacks.TQDMProgressBar(), callbacks.RichProgressBar()],
    "a bar that is disabled": lambda: [callbacks.TQDMProgressBar()],
    "two of a kind with state": lambda: [Counter(), Counter()],
    "early stopping of an unknown metric": lambda: [callbacks.EarlyStopping("other")],
    "early stopping of an unknown metric, lenient": lambda: [callbacks.EarlyStopping("other", strict=False)],
    "a checkpoint of an unknown metric": lambda: [callbacks.ModelCheckpoint(monitor="other")],
    "a learning rate monitor without a logger": lambda: [callbacks.LearningRateMonitor()],
    "a timer and max_time": lambda: [callbacks.Timer("00:00:01:00")],
}  # fmt: skip


class Counter(callbacks.Callback):
    def state_dict(self):
        return {"count": 1}


def add_callbacks():
    for name, make in CALLBACKS.items():
        options = {}
        if "checkpoint" in name or "two of" in name:
            options["enable_checkpointing"] = True
        if name == "two bars":
            options["enable_progress_bar"] = True
        if "timer" in name:
            options["max_time"] = "00:00:01:00"
        CASES[f"callbacks {name}"] = lambda loop, m=make, o=options: fit(
            loop, val=make_loader(), callbacks=m(), **o
        )


def saved(loop, **options):
    fit(loop, **options).save_checkpoint("saved.ckpt")
    return "saved.ckpt"


@case
def checkpoint_of_weights(loop):
    fit(loop).save_checkpoint("weights.ckpt", weights_only=True)
    fit(loop, max_epochs=2, given={"ckpt_path": "weights.ckpt"})


@case
def checkpoint_of_another_model(loop):
    class Other(Classifier):
        def __init__(self):
            super().__init__()
            self.other = torch.nn.Linear(2, 2)

    fit(loop, Other(), max_epochs=2, given={"ckpt_path": saved(loop)})


@case
def checkpoint_with_a_missing_callback(loop):
    path = saved(loop, callbacks=[Counter()])
    fit(loop, max_epochs=2, given={"ckpt_path": path})


@case
def min_epochs_are_not_met(loop):
    class Stops(callbacks.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = True

    fit(loop, callbacks=[Stops()], min_epochs=2, max_epochs=3)


@case
def deterministic_and_benchmark(loop):
    fit(loop, deterministic=True, benchmark=True)
    torch.use_deterministic_algorithms(False)


# Cases of a single call

CASES |= {
    "manual_clipping": lambda loop: fit(loop, manual(Classifier()), gradient_clip_val=1.0),
    "manual_accumulation": lambda loop: fit(loop, manual(Classifier()), accumulate_grad_batches=2),
    "val_loader_without_step": lambda loop: fit(
        loop, without("validation_step"), val=make_loader()
    ),
    "val_step_without_loader": lambda loop: fit(loop),
    "val_step_needs_dataloader_idx": lambda loop: fit(loop, val=[make_loader(), make_loader()]),
    "model_is_no_module": lambda loop: loop(**SILENT).fit(3),
    "log_without_trainer": lambda loop: Classifier().log("a", 1.0),
    "optimizer_step_without_closure": lambda loop: fit(
        loop, changed(optimizer_step=lambda self, *args: None)
    ),
    "shuffled_validation": lambda loop: fit(loop, val=make_loader(shuffle=True)),
    "loader_and_datamodule": lambda loop: fit(loop, given={"datamodule": pl.LightningDataModule()}),
    "no_loader": lambda loop: loop(max_epochs=1, **SILENT).fit(Classifier()),
    "no_predict_step": lambda loop: fit(loop, without("predict_step"), call="predict"),
    "validate_without_model": lambda loop: loop(**SILENT).validate(dataloaders=make_loader()),
    "predict_returns_none": lambda loop: fit(
        loop, changed(predict_step=lambda self, batch, batch_idx: None), call="predict"
    ),
    "checkpoint_callback_that_is_disabled": lambda loop: fit(
        loop, callbacks=[callbacks.ModelCheckpoint()], enable_checkpointing=False
    ),
    "save_before_fit": lambda loop: loop(**SILENT).save_checkpoint("a.ckpt"),
    "missing_checkpoint": lambda loop: fit(loop, given={"ckpt_path": "missing.ckpt"}),
    "checkpoint_of_a_longer_run": lambda loop: fit(
        loop, given={"ckpt_path": saved(loop, max_epochs=3)}
    ),
    "best_without_checkpoints": lambda loop: fit(loop).validate(
        Classifier(), make_loader(), ckpt_path="best"
    ),
    "max_epochs_are_not_given": lambda loop: fit(loop, max_epochs=None, max_time={"seconds": 0}),
    "half_precision_on_a_cpu": lambda loop: fit(loop, precision="16-mixed"),
    "anomaly_detection": lambda loop: fit(loop, detect_anomaly=True),
}

for add in (add_options, add_models, add_logs, add_optimizers, add_data, add_callbacks):
    add()

# Functions that run a case with both loops and compare errors and warnings


# These cases differ on purpose: (pattern of names, reason). docs/differences.md also lists them.
ON_PURPOSE = [
    ("model_is_no_module|no_loader", "plain modules and objects are models, too"),
    ("half_precision_on_a_cpu|option devices=.*", "Fabric's message, with its own name"),
    ("option (barebones|unknown_option).*|log an unknown argument", "names FabricLoop"),
    ("data sequential", "several loaders one after the other are supported"),
    ("optimizer a scheduler of another class", "an error before training"),
    ("optimizer one cycle by epoch", "no warning about an interval that the user wrote"),
    ("data empty", "names the loader instead of CombinedLoader"),
    ("log a name that is no text", "names the value, which Trainer's error does not"),
    ("data too few for a row", "metrics.csv has a row for each epoch"),
]
# Comparisons ignore warnings that torch raises and messages about the machine.
NOISE = re.compile(r"`isinstance\(treespec|GPU available|TPU available|HPU available|💡|Handling")


class Records(logging.Handler):
    """Collects the messages that Lightning logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def listen(run, loop):
    """Run a case with a loop. Return the error or None, and the warnings."""
    problem, records = None, Records()
    for module in list(sys.modules.values()):
        # Clear Lightning's caches of warnings, because Lightning shows some warnings only once per process.
        if isinstance(vars(module).get("warning_cache"), WarningCache):
            module.warning_cache.clear()
    names = ("lightning.pytorch", "lightning.fabric", "fabric_template")
    names += ("lightning.pytorch.utilities.rank_zero",)
    for name in names:
        logging.getLogger(name).addHandler(records)
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        place = os.getcwd()
        os.chdir(folder)
        try:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                run(loop)
        except (Exception, SystemExit) as error:
            problem = error
        finally:
            os.chdir(place)
            for name in names:
                logging.getLogger(name).removeHandler(records)
    return problem, list(dict.fromkeys([*(str(w.message) for w in caught), *records.lines]))


def start_of(text, number):
    return " ".join(re.findall(r"\w+", text)[:number])


def compare(name, show=False):
    """Print and return the differences between the messages of Trainer and FabricLoop."""
    expected, wanted = listen(CASES[name], pl.Trainer)
    error, given = listen(CASES[name], FabricLoop)
    found = []
    if error is None or expected is None:
        if error is not expected:
            found.append(f"only {'Trainer' if error is None else 'FabricLoop'} raises an error")
    elif not isinstance(error, type(expected)):
        found.append("the class of the error")
    elif start_of(str(error), 4) != start_of(str(expected), 4):
        found.append("the text of the error")
    texts = [start_of(text, 5) for text in given]
    if error is None:
        # After an error, warnings are not compared, because FabricLoop may raise the error earlier.
        missing = [text for text in wanted if start_of(text, 5) not in texts]
        found += [f"without the warning: {text}" for text in missing if not NOISE.match(text)]
    reason = next((why for names, why in ON_PURPOSE if re.fullmatch(names, name)), "")
    if name.startswith("option ") and str(error).startswith(name[7:].split("=")[0] + ": got"):
        reason = "an error of an option names the option, the value and what is expected"
    if show or (found and not reason):
        print(f"\n{name}: {' '.join('; '.join(found).split())[:200] or 'the same'}")
        print(f"  reason:  {reason}" if reason else "")
        for loop, problem in (("Trainer", expected), ("ours", error)):
            print(f"  {loop:8}{type(problem).__name__}: {start_of(str(problem), 20)}")
    return found, reason


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    found = [compare(name, arguments.all) for name in names]
    differing = [reason for differences, reason in found if differences]
    unexplained = differing.count("")
    print(f"{len(names)} cases, {len(differing)} differ, {unexplained} of these without a reason")
    sys.exit(unexplained > 0)


if __name__ == "__main__":
    main()
