"""Test requests to stop before min_epochs and min_steps are reached, and the stages that hooks see."""

import time

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from modules import Classifier, make_loader, quiet, run_loop, run_trainer

from fabric_template import FabricLoop


class Stops(Callback):
    """Asks to stop, in one hook, each time."""

    def __init__(self, hook):
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args):
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("hook", "options", "steps"),
    [
        ("on_train_batch_end", {"min_epochs": 2}, 12),
        ("on_train_batch_end", {"min_steps": 8}, 8),
        ("on_train_epoch_end", {"min_epochs": 2}, 12),
        ("on_train_epoch_end", {"min_epochs": 1}, 6),
        ("on_train_batch_end", {}, 1),
    ],
)
def test_should_stop_waits_for_min_epochs_and_min_steps(hook, options, steps):
    for run in (run_trainer, run_loop):
        trainer, _ = run(Classifier, lambda: make_loader(24), callbacks=[Stops(hook)], max_epochs=4, **options)
        assert trainer.global_step == steps


def test_max_time_waits_for_min_epochs(monkeypatch):
    now, start = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600 * (now() - start))
    loop, _ = run_loop(Classifier, lambda: make_loader(24), max_time="00:00:00:01", min_epochs=2, max_epochs=4)
    assert loop.current_epoch == 2


def test_hooks_get_trainers_stages():
    class Stages:
        def setup(self, *args, stage=None):
            seen.append(stage or args[-1])

        teardown = setup

    class Data(Stages, pl.LightningDataModule):
        def train_dataloader(self):
            return make_loader(8)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    class Module(Stages, Classifier):
        def test_step(self, batch, batch_idx):
            pass

        def predict_step(self, batch, batch_idx):
            return batch_idx

    class Callbacks(Stages, Callback):
        pass

    results = []
    for kind in (pl.Trainer, FabricLoop):
        seen = []
        trainer, module = kind(**quiet(max_epochs=1, callbacks=[Callbacks()], num_sanity_val_steps=0)), Module()
        trainer.fit(module, datamodule=Data())
        for name in ("validate", "test", "predict"):
            getattr(trainer, name)(module, datamodule=Data())
        results.append([stage == TrainerFn(stage) and str(TrainerFn(stage).value) for stage in seen])
    assert results[0] == results[1]
    assert len(results[1]) == 24
