"""What Trainer says and goes on, said once: a stop that is held back, a max_time that yields to a Timer. And its stages."""

import time

import fabric_template.process.signals
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.trainer.states import TrainerFn
from modules import Classifier, make_loader, quiet, run_loop


class Stops(Callback):
    """Asks to stop, in one hook, each time."""

    def __init__(self, hook="on_train_batch_end"):
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args):
        trainer.should_stop = True


HELD = (
    "The loop was signaled to stop but the required `min_epochs={}` or `min_steps={}` has not been met. Training will"
    " continue..."
)


@pytest.mark.parametrize(
    ("hook", "words", "steps", "held"),
    [
        ("on_train_batch_end", {"min_epochs": 2}, 12, (2, None)),
        ("on_train_batch_end", {"min_steps": 8}, 8, (None, 8)),
        ("on_train_epoch_end", {"min_epochs": 2}, 12, (2, None)),
        ("on_train_epoch_end", {"min_epochs": 1}, 6, None),  # it has them
        ("on_train_batch_end", {}, 1, None),
    ],
)
def test_a_stop_held_back(capfd, hook, words, steps, held):
    loop, _ = run_loop(Classifier, lambda: make_loader(24), callbacks=[Stops(hook)], max_epochs=4, **words)
    assert loop.global_step == steps
    said = [line for line in capfd.readouterr().err.splitlines() if "Training will continue" in line]
    assert said == ([HELD.format(*held)] if held else [])


def test_a_max_time_held_back(capfd, monkeypatch):
    now = time.monotonic
    monkeypatch.setattr(fabric_template.process.signals.time, "monotonic", lambda: now() + 3600 * (now() - began))
    began = now()
    loop, _ = run_loop(Classifier, lambda: make_loader(24), max_time="00:00:00:01", min_epochs=2, max_epochs=4)
    assert loop.current_epoch == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "Training will continue" in line]
    assert said == [HELD.format(2, None).replace("The loop was signaled to stop", "max_time='00:00:00:01' is over")]


def test_a_max_time_that_yields_to_a_timer(capfd):
    loop, _ = run_loop(
        Classifier, lambda: make_loader(24), callbacks=[Timer("00:01:00:00")], max_time="00:00:00:01", max_epochs=2
    )
    assert loop.current_epoch == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "Timer" in line]
    assert said == ["max_time='00:00:00:01' is ignored: the callbacks have a Timer already"]


def test_stages_are_trainers():
    """Words that equal the members of its enum, and have their value."""
    heard = []

    class Hears(Callback):
        def setup(self, trainer, module, stage):
            heard.append(stage)

        teardown = setup

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return make_loader(8)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

        def setup(self, stage):
            heard.append(stage)

        teardown = setup

    class Module(Classifier):
        def setup(self, stage):
            heard.append(stage)

        def test_step(self, batch, batch_idx):
            pass

        def predict_step(self, batch, batch_idx):
            return batch_idx

        teardown = setup

    def run(kind):
        heard.clear()
        loop, data = kind(**quiet(max_epochs=1, callbacks=[Hears()], num_sanity_val_steps=0)), Data()
        module = Module()
        loop.fit(module, datamodule=data)
        for verb in ("validate", "test", "predict"):
            getattr(loop, verb)(module, datamodule=data)
        return [(stage.value, stage == TrainerFn(stage.value)) for stage in heard]

    assert run(fabric_template.FabricLoop) == run(pl.Trainer)
