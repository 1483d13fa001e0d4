"""Test that an exception in a hook reaches the caller, and that the loop can be used again."""

import multiprocessing
import os
import signal
import sys
import threading
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.loggers.logger import Logger
from modules import Classifier, make_data
from parameters import once
from runs import with_files
from torch.utils.data import DataLoader

from fabric_template import FabricLoop


class Broken(RuntimeError):
    pass


def global_state(module):
    """Return the global state that a run may change but must restore."""
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


class Complete(Classifier):
    """A module that defines the step methods of fit, validate, test and predict."""

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


FIT_HOOKS = [
    "setup", "configure_optimizers", "on_fit_start", "validation_step", "on_train_start", "on_train_batch_start",
    "training_step", "on_after_backward", "on_train_epoch_end", "on_save_checkpoint", "on_train_end", "teardown",
]  # fmt: skip
PLACES = [("fit", name) for name in FIT_HOOKS] + [
    ("validate", "on_validation_start"),
    ("test", "test_step"),
    ("predict", "predict_step"),
    ("predict", "on_predict_end"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "kind"), once(PLACES, [Broken, KeyboardInterrupt, SystemExit]))
def test_the_model_and_loop_can_be_used_again_after_an_error_in_a_hook(place, kind):
    stage, hook = place
    module, error = Complete(), kind("mine")

    def fail(*args, **kwargs):
        # Restore the hook, because a second call to fit must succeed.
        delattr(module, hook)
        raise error

    options = {"deterministic": True, "detect_anomaly": True, "seed": 3, "monitor": "val_loss"}
    loop = FabricLoop(**with_files(max_epochs=2, num_sanity_val_steps=1, version=0, **options))
    given = {"verbose": False} if stage in ("validate", "test") else {}
    loader = DataLoader(make_data(8), batch_size=4)
    loaders = (loader, loader) if stage == "fit" else (loader,)
    with torch.no_grad():
        before = global_state(module)
        setattr(module, hook, fail)
        with pytest.raises(kind) as caught:
            getattr(loop, stage)(module, *loaders, **given)
        assert caught.value is error
        assert global_state(module) == before
    assert (loop.state.status, loop.state.stage, loop.training) == ("interrupted", None, False)
    getattr(loop, stage)(module, *loaders, **given)


class Foreign(Logger):
    name, version, save_dir = "foreign", "0", "."

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


class Fails(Classifier):
    """A module that raises an error in one method, on one rank or on all ranks."""

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


class RecordsException(pl.Callback):
    recorded = ()

    def on_exception(self, trainer, module, exception):
        self.recorded = (trainer.state.status, repr(exception))


class FailsToClose(Foreign):
    def finalize(self, status):
        raise OSError("no network")


def test_an_error_during_clean_up_does_not_hide_the_first_error():
    recorder = RecordsException()
    loop = FabricLoop(**with_files(callbacks=[Worse(), recorder], logger=[FailsToClose()]))
    given = Fails("training_step", Broken("mine")), DataLoader(make_data(8), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Broken, match="mine"):
            loop.fit(*given)
    assert len([warning for warning in caught if "The clean-up after the error failed" in str(warning.message)]) == 2
    assert recorder.recorded == ("interrupted", "Broken('mine')")
    # In this second call to fit, pytest turns the warnings of the clean-up into errors.
    with pytest.raises(Broken, match="mine"):
        loop.fit(*given)


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_an_error_leaves_no_worker_process_running(stage):
    module = Fails(f"{stage.replace('fit', 'training')}_step", Broken("mine"))
    loop = FabricLoop(**with_files(max_epochs=1, logger=False, enable_checkpointing=False))
    before = multiprocessing.active_children()
    # Keep the exception in _caught, because its frames could keep the worker process running.
    with pytest.raises(Broken, match="mine") as _caught:
        getattr(loop, stage)(module, DataLoader(make_data(16), batch_size=4, num_workers=1))
    assert [child for child in multiprocessing.active_children() if child not in before] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stage", "at", "rank", "error"),
    [
        ("fit", "setup", 0, FileNotFoundError(2, "mine", "x.txt")),
        ("fit", "training_step", 1, KeyboardInterrupt("mine")),
        ("predict", "predict_step", None, SystemExit(7)),
    ],
)
def test_an_error_in_one_of_two_processes_reaches_the_caller(monkeypatch, stage, at, rank, error):
    """The calling process raises the error of the process that failed first."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module, loader = Fails(at, error, rank), DataLoader(make_data(16), batch_size=4)
    options = {"strategy": "ddp_fork", "devices": 2, "deterministic": True, "version": 0}
    loop = FabricLoop(**with_files(max_epochs=1, **options))
    before = global_state(module)
    with pytest.raises(type(error)) as caught:
        getattr(loop, stage)(module, loader)
    assert (caught.value.args, str(caught.value)) == (error.args, str(error))
    assert "Traceback" in str(caught.value.__cause__)
    assert global_state(module) == before
    assert loop.state.status == "interrupted"
    if stage == "fit":
        module.at = None
        loop.fit(module, loader)
        assert loop.global_step == 2
