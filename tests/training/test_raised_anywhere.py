"""An exception raised at any hook and any set-up call: it arrives as it is, all is as it was found, and a next run works.

The points are not listed but found: a run in which every method of module, datamodule, callback, logger, optimizer, scheduler,
strategy and loader notes that it was called. Each point is then the place of an exception of its own; the suite tries some.
"""

import functools
import multiprocessing
import os
import signal
import sys
import threading
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.strategies import SingleDeviceStrategy
from modules import Classifier, make_data
from runs import loud
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from fabric_template import FabricLoop
from fabric_template.errors import CheckpointError


class Broken(RuntimeError):
    pass


KINDS = (Broken, KeyboardInterrupt, SystemExit, AttributeError)


class Points:
    """The calls of a run. One of them fails: an Exception each time, another one once."""

    def __init__(self, at=None, kind=None):
        self.at, self.kind, self.seen, self.raised = at, kind, {}, None

    def hit(self, name):
        self.seen[name] = self.seen.get(name, 0) + 1
        if name == self.at and (self.raised is None or isinstance(self.raised, Exception)):
            error = self.kind("mine")
            self.raised = self.raised or error
            raise error


POINTS = Points()  # of the current run


def noting(part, names, base):
    """A class with these methods, each of which is a point before it does what its base does."""

    def method(name):
        inherited = getattr(base, name, None)

        def call(self, *args, **options):
            POINTS.hit(f"{part}.{name}")
            found = getattr(super(made, self), name, None)
            return found(*args, **options) if found is not None else None

        if callable(inherited):
            functools.update_wrapper(call, inherited)  # its signature is looked at
        call.__module__ = __name__
        return call

    made = type(part.capitalize(), (base,), {name: method(name) for name in names})
    return made


class Complete(Classifier):
    """Has every step and a scheduler."""

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = Optimizer(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": Scheduler(optimizer, 1), "interval": "step"}]


class Loaders(pl.LightningDataModule):
    def loader(self):
        batches = Batches(SequentialSampler(range(8)), 4, False)
        return Loader(TensorDataset(*make_data(8).tensors), batch_sampler=batches)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class Foreign(Logger):
    name, version, save_dir = "foreign", "0", "."

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


STATE = ["state_dict", "on_save_checkpoint", "on_load_checkpoint"]
TRANSFER = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
# Lightning's own on_validation_model_train puts every module into training mode.
MODULE_HOOKS = [
    name
    for name in dir(pl.LightningModule)
    if name.startswith("on_") and name not in TRANSFER and not name.endswith(("_model_train", "_model_eval"))
]
Optimizer = noting("optimizer", ["step", "zero_grad", "state_dict"], torch.optim.SGD)
Scheduler = noting("scheduler", ["step", "state_dict"], torch.optim.lr_scheduler.StepLR)
Own = noting(
    "callback", ["setup", "teardown", *STATE, *(n for n in dir(pl.Callback) if n.startswith("on_"))], pl.Callback
)
Module = noting(
    "module",
    [
        "prepare_data", "setup", "configure_model", "configure_optimizers", "teardown", "training_step",
        "validation_step", "test_step", "predict_step", "backward", "optimizer_step", "optimizer_zero_grad",
        "configure_gradient_clipping", "lr_scheduler_step", "state_dict", *MODULE_HOOKS,
    ],
    Complete,
)  # fmt: skip
Batches = noting("batches", ["__iter__", "__len__"], BatchSampler)
Loader = noting("loader", ["__iter__", "__len__"], DataLoader)
Data = noting(
    "data",
    ["prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "teardown",
     "on_exception", "state_dict", *TRANSFER],
    Loaders,
)  # fmt: skip
Strategy = noting("strategy", ["module_to_device", "optimizer_step", "backward", "barrier"], SingleDeviceStrategy)
Noted = noting("logger", ["log_metrics", "log_hyperparams", "save", "finalize"], Foreign)
OPTIONS = {
    "max_epochs": 2, "num_sanity_val_steps": 1, "gradient_clip_val": 1.0, "log_every_n_steps": 1, "deterministic": True,
    "detect_anomaly": True, "seed": 3, "save_every_n_steps": 1, "monitor": "val_loss", "version": 0,
}  # fmt: skip


def make(stage):
    """A loop with all of these, the module, and a function that calls the loop."""
    fabric = Fabric(strategy=Strategy(torch.device("cpu")), accelerator="cpu")
    options = loud(logger=[Noted()], callbacks=[Own()], **OPTIONS)
    del options["accelerator"]
    loop, module, data = FabricLoop(fabric, **options), Module(), Data()
    given = {"verbose": False} if stage in ("validate", "test") else {}
    return loop, module, lambda **more: getattr(loop, stage)(module, datamodule=data, **given, **more)


def as_found(module):
    """What a run changes, or might, and has to give back."""
    return {
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "dtype": (torch.get_default_dtype(), torch.get_default_device()),
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "sys": (sys.excepthook, threading.excepthook, sys.getprofile(), sys.gettrace(), os.getcwd()),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "group": torch.distributed.is_initialized(),
        "modes": [part.training for part in module.modules()],
        "attributes": sorted(set(vars(module)) - {"_hparams"}),
    }


def points_of(stage):
    """All calls of a run, in order, and those that only a resumed run has."""
    global POINTS
    POINTS = Points()
    make(stage)[2]()
    seen = list(POINTS.seen)
    if stage == "fit":
        POINTS = Points()
        make(stage)[2](resume="last")
        seen += [f"resumed {name}" for name in POINTS.seen if name not in seen]
    return seen


def find_faults(stage, point, kind):
    """What is wrong after an exception at this point."""
    global POINTS
    POINTS, more, faults = Points(), {}, []
    if point.startswith("resumed "):
        make(stage)[2]()
        more = {"resume": "last"}
    loop, module, call = make(stage)
    with torch.no_grad():
        before = as_found(module)
        POINTS = Points(point.removeprefix("resumed "), kind)
        try:
            call(**more)
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, CheckpointError) else error  # of a state that does not fit
            if POINTS.raised is None or POINTS.raised not in (error, cause):
                faults.append(f"{error!r} arrived")
        else:
            faults.append("nothing arrived")
        after = as_found(module)
    faults += [f"{name}: {was} -> {after[name]}" for name, was in before.items() if after[name] != was]
    state = loop.state.status, loop.state.stage, loop.training, loop.validating
    if state != ("interrupted", None, False, False):
        faults.append(f"status {state}")
    POINTS = Points()
    try:
        call()
    except BaseException as error:
        faults.append(f"the next run: {error!r}")
    return faults


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stage", "least", "every"), [("fit", 300, 67), ("validate", 130, 41), ("test", 130, 41), ("predict", 120, 41)]
)
def test_raised_anywhere(stage, least, every):
    """Every so many of them; each kind has its turn."""
    cases = [(point, kind) for point in points_of(stage) for kind in KINDS]
    assert len(cases) >= least
    faults = {(point, kind): find_faults(stage, point, kind) for point, kind in cases[3::every]}
    assert {place: found for place, found in faults.items() if found} == {}


# ---- what follows from an exception


class Fails(Classifier):
    """Fails in a method, on one rank or on all."""

    def __init__(self, at=None, error=None, rank=None):
        super().__init__()
        self.at, self.rank, self.error = at, rank, error

    def fail_at(self, name):
        if name == self.at and self.rank in (None, self.global_rank):
            raise self.error

    def setup(self, stage):
        self.fail_at("setup")

    def training_step(self, batch, batch_idx):
        self.fail_at("training_step")
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.fail_at("predict_step")
        return self(batch[0])


class Worse(pl.Callback):
    def on_exception(self, trainer, module, exception):
        raise KeyError("another")


class Hears(pl.Callback):
    heard = ()

    def on_exception(self, trainer, module, exception):
        self.heard = (trainer.state.status, repr(exception))


class FailsToClose(Foreign):
    def finalize(self, status):
        raise OSError("no network")


def test_what_fails_on_the_way_out_does_not_take_its_place():
    hears = Hears()
    loop = FabricLoop(**loud(callbacks=[Worse(), hears], logger=[FailsToClose()]))
    given = Fails("training_step", Broken("mine")), DataLoader(make_data(8), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Broken, match="mine"):
            loop.fit(*given)
    assert len([warning for warning in caught if "after Broken" in str(warning.message)]) == 2
    assert hears.heard == ("interrupted", "Broken('mine')")
    with pytest.raises(Broken, match="mine"):  # where warnings are errors, as here
        loop.fit(*given)


class Bad(TensorDataset):
    def __getitem__(self, i):
        if i >= 4:
            raise Broken("mine")
        return super().__getitem__(i)


@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.parametrize("data", [make_data(16), Bad(*make_data(16).tensors)], ids=["step", "sample"])
def test_no_worker_process_stays(stage, data):
    module = Fails() if isinstance(data, Bad) else Fails(f"{stage.replace('fit', 'training')}_step", Broken("mine"))
    loop = FabricLoop(**loud(max_epochs=1, logger=False, enable_checkpointing=False))
    before = multiprocessing.active_children()
    with pytest.raises(Broken) as held:  # its frames live as long as this
        getattr(loop, stage)(module, DataLoader(data, batch_size=4, num_workers=1))
    assert [child for child in multiprocessing.active_children() if child not in before] == []
    assert "mine" in str(held.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stage", "at", "rank", "error"),
    [
        ("fit", "setup", 0, FileNotFoundError(2, "mine", "x.txt")),
        ("fit", "training_step", 1, KeyboardInterrupt("mine")),
        ("predict", "predict_step", None, SystemExit(7)),
    ],
)
def test_of_two_processes(monkeypatch, stage, at, rank, error):
    """The error of the rank that failed first arrives in the caller's process, which is as it was found."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module, loader = Fails(at, error, rank), DataLoader(make_data(16), batch_size=4)
    options = {"strategy": "ddp_fork", "devices": 2, "deterministic": True, "version": 0}
    loop = FabricLoop(**loud(max_epochs=1, **options))
    before = as_found(module)
    with pytest.raises(type(error)) as caught:
        getattr(loop, stage)(module, loader)
    assert (caught.value.args, str(caught.value)) == (error.args, str(error))
    assert "Traceback" in str(caught.value.__cause__)
    assert as_found(module) == before
    assert loop.state.status == "interrupted"
    if stage == "fit":
        module.at = None
        loop.fit(module, loader)
        assert loop.global_step == 2
