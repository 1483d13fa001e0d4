"""An exception raised at any hook and any set-up call: it arrives as it is, all is as it was found, and a next run works.

The points are not listed but found: a run in which every method of module, datamodule, callback, logger, profiler, optimizer,
scheduler, strategy, loader and dataset notes that it was called. Each point is then the place of an exception of its own. The
suite tries every so many; ``python tests/training/test_raised_anywhere.py`` tries all (ten minutes).
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # the tests' modules, the package

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.pytorch.profilers import SimpleProfiler
from modules import Classifier, make_data
from runs import loud
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from fabric_template import FabricLoop
from fabric_template.checkpoint.run_lock import lock_folders
from fabric_template.errors import CheckpointError

VERBS = ("fit", "validate", "test", "predict")


class Broken(RuntimeError):
    pass


KINDS = (lambda: Broken("mine"), lambda: KeyboardInterrupt("mine"), lambda: SystemExit("mine"),
         lambda: AttributeError("mine"), lambda: StopIteration("mine"))  # fmt: skip


class Points:
    """Which calls there are, in the order in which they come; one of them fails, an Exception from its first time on."""

    def __init__(self, at=None, kind=None):
        self.at, self.kind, self.seen, self.raised = at, kind, {}, None

    def hit(self, name):
        self.seen[name] = self.seen.get(name, 0) + 1
        if name == self.at and not (self.raised and not isinstance(self.raised, Exception)):
            error = self.kind()
            self.raised = self.raised or error
            raise error


POINTS = Points()  # of the run that is on


def noting(part, names, *bases, **methods):
    """A class with these methods, each of which is a point before it does what its base does."""

    def method(name):
        base = next((vars(kind)[name] for kind in (*bases[0].__mro__,) if name in vars(kind)), None)

        def call(self, *args, **words):
            POINTS.hit(f"{part}.{name}")
            found = getattr(super(made, self), name, None)
            return found(*args, **words) if found is not None else None

        if callable(base):
            functools.update_wrapper(call, base)  # its signature is looked at
        call.__module__ = __name__
        return call

    made = type(part.capitalize(), bases, {**{name: method(name) for name in names}, **methods})
    return made


HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_")]
STATE = ["state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint"]
TRANSFER = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


class Complete(Classifier):
    """Has every step, and a scheduler that follows a metric and one that does not."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"mine": 1})
        self.net[2].eval()  # which is given back as it was

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_callbacks(self):
        return [Another()]

    def configure_optimizers(self):
        optimizer = Optimizer(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": Scheduler(optimizer, 1), "interval": "step"}]


Optimizer = noting("optimizer", ["step", "zero_grad", "state_dict"], torch.optim.SGD)
Scheduler = noting("scheduler", ["step", "state_dict"], torch.optim.lr_scheduler.StepLR)
Stateful = type("Stateful", (pl.Callback,), {"state_dict": lambda self: {"mine": 1}})
Own = noting("callback", ["setup", "teardown", *HOOKS, *STATE], Stateful)
Another = noting(
    "another", ["setup", "on_train_start", "on_validation_start", "on_exception", "state_dict"], pl.Callback
)
# Lightning's own on_validation_model_train puts every module into training mode.
MODULE_HOOKS = [
    name
    for name in dir(pl.LightningModule)
    if name.startswith("on_") and name not in TRANSFER and not name.endswith(("_model_train", "_model_eval"))
]
Module = noting(
    "module",
    [
        "configure_callbacks", "prepare_data", "setup", "configure_model", "configure_optimizers", "teardown", "training_step",
        "validation_step", "test_step", "predict_step", "backward", "optimizer_step", "optimizer_zero_grad",
        "configure_gradient_clipping", "lr_scheduler_step", "state_dict", *MODULE_HOOKS,
    ],
    Complete,
)  # fmt: skip
Rows = noting("dataset", ["__getitem__", "__len__"], TensorDataset)
Batches = noting("batches", ["__iter__", "__len__"], BatchSampler)
Loader = noting("loader", ["__iter__", "__len__"], DataLoader)


class Loaders(pl.LightningDataModule):
    def loader(self):
        rows = Rows(*make_data(8).tensors)
        return Loader(rows, batch_sampler=Batches(SequentialSampler(range(8)), 4, False))

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def state_dict(self):
        return {"mine": 1}


Data = noting(
    "data",
    ["prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "teardown",
     "on_exception", "state_dict", "load_state_dict", *TRANSFER],
    Loaders,
)  # fmt: skip
Strategy = noting(
    "strategy",
    [
        "setup_environment",
        "setup_module",
        "module_to_device",
        "optimizer_step",
        "backward",
        "barrier",
        "broadcast",
        "reduce",
    ],
    SingleDeviceStrategy,
)
Profiler = noting("profiler", ["setup", "describe", "summary"], SimpleProfiler)


class Foreign(Logger):
    """Like those of the services that are not there."""

    name, version, save_dir = "foreign", "0", "."

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


Noted = noting("logger", ["log_metrics", "log_hyperparams", "save", "finalize"], Foreign)


WORDS = {
    "max_epochs": 2, "num_sanity_val_steps": 1, "gradient_clip_val": 1.0, "log_every_n_steps": 1, "deterministic": True,
    "benchmark": False, "detect_anomaly": True, "seed": 3, "save_every_n_steps": 1, "monitor": "val_loss", "version": 0,
}  # fmt: skip


def make(verb):
    """A loop with all of these, and how its verb is called."""
    fabric = Fabric(strategy=Strategy(torch.device("cpu")), accelerator="cpu")
    words = loud(logger=[Noted()], callbacks=[Own()], profiler=Profiler(), **WORDS)
    words.pop("accelerator")
    loop, module, data = FabricLoop(fabric, **words), Module(), Data()
    given = {"verbose": False} if verb in ("validate", "test") else {}
    return loop, module, data, lambda **more: getattr(loop, verb)(module, datamodule=data, **given, **more)


def as_found(module, data, callbacks):
    """What a run changes, or might, and has to give back."""
    classes = [kind for kind in (DataLoader, BatchSampler, Loader, Batches)]
    return {
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "dtype": (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "sys": (sys.excepthook, threading.excepthook, sys.displayhook, sys.getprofile(), sys.gettrace(), os.getcwd()),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "patches": [getattr(kind, name) for kind in classes for name in ("__init__", "__setattr__", "__delattr__")],
        "patched": [hasattr(kind, f"__old{name}") for kind in classes for name in ("__init__", "__setattr__", "__delattr__")],
        "children": frozenset(multiprocessing.active_children()),
        "running threads": frozenset(threading.enumerate()),
        "group": torch.distributed.is_initialized(),
        "modes": [part.training for part in module.modules()],
        "attributes": frozenset(
            f"{type(part).__name__}.{name}" for part in (module, data, *callbacks) for name in vars(part)
        ) - {"Module._hparams", "Data._hparams"},
    }  # fmt: skip


def changed(before, after):
    """What is not as it was. Processes and threads only count if they are new: one of another test may have ended meanwhile."""
    return {
        name: str(after[name] - was) if isinstance(was, frozenset) else f"{was} -> {after[name]}"
        for name, was in before.items()
        if (after[name] - was if isinstance(was, frozenset) else after[name] != was)
    }


@contextlib.contextmanager
def another_way():
    """The switches, so that what is not given back is seen."""
    torch.autograd.set_detect_anomaly(False)
    with torch.no_grad():
        yield


def points_of(verb):
    """All calls of a run, in order."""
    global POINTS
    POINTS = Points()
    make(verb)[3]()
    if verb == "fit":
        seen = POINTS.seen
        POINTS = Points()
        make(verb)[3](resume="last")
        POINTS.seen = {**seen, **{f"resumed {name}": 1 for name in POINTS.seen if name not in seen}}
    return list(POINTS.seen)


def trouble(verb, point, kind):
    """What is wrong after an exception at this point; None: nothing."""
    global POINTS
    POINTS = Points()
    more = {}
    if point.startswith("resumed "):
        make(verb)[3]()
        more = {"resume": "last"}
    loop, module, data, call = make(verb)
    callbacks = loop.callbacks
    wrong = []
    with another_way():
        before = as_found(module, data, callbacks)
        POINTS = Points(point.removeprefix("resumed "), kind)
        try:
            call(**more)
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, CheckpointError) else error  # of a state that does not fit
            if POINTS.raised is None or POINTS.raised not in (error, cause):
                wrong.append(f"{error!r} arrived")
        else:
            wrong.append("nothing arrived")
        after = as_found(module, data, callbacks)
        wrong += [f"{name}: {how}" for name, how in changed(before, after).items()]
    state = loop.state.status, loop.state.stage, loop.training, loop.validating
    if state != ("interrupted", None, False, False):
        wrong.append(f"status {state}")
    POINTS = Points()
    try:
        call()
    except BaseException as error:
        wrong.append(f"the next run: {error!r}")
    return wrong


def cases(verb):
    """Every point with every kind; a StopIteration that comes from the data is its end."""
    points = points_of(verb)
    ends = ("loader.__iter__", "batches.__iter__", "dataset.__getitem__")
    return [(point, kind) for point in points for kind in KINDS if point not in ends or kind is not KINDS[-1]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("verb", "least", "every"), [("fit", 450, 83), ("validate", 200, 47), ("test", 200, 47), ("predict", 190, 47)]
)
def test_raised_anywhere(verb, least, every):
    """Every so many of them; each kind has its turn."""
    all_cases = cases(verb)
    assert len(all_cases) >= least
    wrong = {(point, kind()): trouble(verb, point, kind) for point, kind in all_cases[3::every]}
    assert {place: found for place, found in wrong.items() if found} == {}


def test_a_version_that_another_run_writes():
    """Nothing is set before the lock is there."""
    loop, module, data, call = make("fit")
    call()
    loop, module, data, call = make("fit")
    with another_way(), lock_folders([Path("logs/run/version_0"), Path("checkpoints/run/version_0")]):
        before = as_found(module, data, loop.callbacks)
        with pytest.raises(CheckpointError, match="another run"):
            call()
        after = as_found(module, data, loop.callbacks)
    assert changed(before, after) == {}
    assert loop.state.status == "interrupted"
    call()


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


class OneStep(Classifier):
    """Fails in one step, and in one sample."""

    def __init__(self, fails=True):
        super().__init__()
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise Broken("mine")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        if self.fails:
            raise Broken("mine")
        return self(batch[0])


def test_what_fails_on_the_way_out_does_not_take_its_place():
    hears = Hears()
    loop = FabricLoop(**loud(callbacks=[Worse(), hears], logger=[FailsToClose()]))
    given = OneStep(), DataLoader(make_data(8), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Broken, match="mine"):
            loop.fit(*given)
    assert [text for one in caught if "after Broken" in (text := str(one.message))] == [
        "after Broken, on_exception of Worse failed: KeyError: 'another'",
        "after Broken, the loggers could not be closed: OSError: no network",
    ]
    assert hears.heard == ("interrupted", "Broken('mine')")
    with pytest.raises(Broken, match="mine"):  # where warnings are errors, as here
        loop.fit(*given)


class Bad(TensorDataset):
    def __getitem__(self, i):
        if i >= 4:
            raise Broken("mine")
        return super().__getitem__(i)


@pytest.mark.parametrize("verb", ["fit", "validate", "predict"])
@pytest.mark.parametrize("where", ["step", "sample"])
def test_no_worker_process_stays(verb, where):
    data = make_data(16) if where == "step" else Bad(*make_data(16).tensors)
    loop = FabricLoop(**loud(max_epochs=1, logger=False, enable_checkpointing=False))
    before = multiprocessing.active_children()
    with pytest.raises(Broken) as held:  # its frames live as long as this
        getattr(loop, verb)(OneStep(where == "step"), DataLoader(data, batch_size=4, num_workers=1))
    assert [child for child in multiprocessing.active_children() if child not in before] == []
    assert "mine" in str(held.value)


def test_a_log_of_ones_own_stays():
    """A plain object's attribute named log is its own; a run inside a run gives the outer one its log back."""

    class Plain:
        def __init__(self):
            self.net, self.log = torch.nn.Linear(8, 1), ["mine"]

        def training_step(self, batch):
            self.log.append("step")
            return self.net(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    plain, loader = Plain(), DataLoader(make_data(8), batch_size=4)
    FabricLoop(**loud(max_epochs=1)).fit(plain, loader)
    assert plain.log == ["mine", "step", "step"]

    class Inner(Classifier):
        def on_train_epoch_end(self):
            FabricLoop(**loud(logger=False)).validate(self, loader, verbose=False)
            self.log("after", 7.0)

    loop = FabricLoop(**loud(max_epochs=1))
    loop.fit(Inner(), loader)
    assert loop.callback_metrics["after"] == 7


class Unsteady(Foreign):
    def log_metrics(self, metrics, step=None):
        if "train_loss_epoch" in metrics:
            raise Broken("mine")


def test_a_foreign_logger_that_raises_shifts_no_counter():
    loop = FabricLoop(**loud(max_epochs=1, logger=[Unsteady()]))
    counted = {}

    class Counts(pl.Callback):
        def on_exception(self, trainer, module, exception):
            counted.update(batches=trainer.run.progress.logging_step, steps=trainer.global_step)

    loop.callbacks.append(Counts())
    loader = DataLoader(make_data(8), batch_size=4)
    with pytest.raises(Broken):
        loop.fit(Classifier(), loader)
    assert counted == {"batches": 2, "steps": 2}


# ---- several processes

FORK = {"strategy": "ddp_fork", "devices": 2}


class OneRank(Classifier):
    """Fails in one hook, on one rank or on all."""

    def __init__(self, at, rank, error):
        super().__init__()
        self.at, self.rank, self.error = at, rank, error

    def maybe(self, hook):
        if hook == self.at and self.rank in (None, self.global_rank):
            raise self.error

    def setup(self, stage):
        self.maybe("setup")

    def on_train_epoch_end(self):
        self.maybe("on_train_epoch_end")

    def training_step(self, batch, batch_idx):
        self.maybe("training_step")
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.maybe("predict_step")
        return self(batch[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("verb", "at", "rank", "error"),
    [
        ("fit", "setup", 0, FileNotFoundError(2, "mine", "x.txt")),
        ("fit", "training_step", 1, KeyboardInterrupt("mine")),
        ("predict", "predict_step", None, SystemExit(7)),
    ],
)
def test_of_two_processes(monkeypatch, verb, at, rank, error):
    """The error of the rank that failed first arrives in the caller's process, which is as it was found."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module, data = OneRank(at, rank, error), Data()
    loop = FabricLoop(**loud(max_epochs=1, deterministic=True, seed=3, version=0, **FORK))
    before = as_found(module, data, [])
    with pytest.raises(type(error)) as caught:
        getattr(loop, verb)(module, DataLoader(make_data(16), batch_size=4))
    assert (caught.value.args, str(caught.value)) == (error.args, str(error))
    assert "Traceback" in str(caught.value.__cause__)
    after = as_found(module, data, [])
    assert changed(before, after) == {}
    assert loop.state.status == "interrupted"
    module.at = None
    if verb == "fit":
        loop.fit(module, DataLoader(make_data(16), batch_size=4))
        assert loop.global_step == 2


def test_of_two_processes_an_error_that_cannot_be_sent(monkeypatch):
    """Of a class that is known in a function only: its text arrives, as torch tells it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    class Local(RuntimeError):
        pass

    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="mine"):
        FabricLoop(**loud(max_epochs=1, **FORK)).fit(
            OneRank("setup", None, Local("mine")), DataLoader(make_data(16), batch_size=4)
        )


if __name__ == "__main__":
    import tempfile

    os.chdir(tempfile.mkdtemp())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count, losses = 0, []
    for verb in VERBS:
        for point, kind in cases(verb):
            count += 1
            if wrong := trouble(verb, point, kind):
                losses.append([verb, point, repr(kind()), *wrong])
                print(*losses[-1], sep="\n    ", file=sys.stderr, flush=True)
    print(json.dumps({"raised": count, "losses": losses}))
    sys.exit(bool(losses))
