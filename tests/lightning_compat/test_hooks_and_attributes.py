"""Test hooks and attributes that code written for Trainer uses."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from modules import Classifier, make_loader, quiet, run_loop, run_trainer
from runs import fit, val_loader

from fabric_template import FabricLoop


def plain_loader():
    return make_loader(24, shuffle=False)


class Listening(Classifier):
    """A module that records the keys of the checkpoints that the hooks receive."""

    def on_save_checkpoint(self, checkpoint):
        self.saved = (sorted(checkpoint), checkpoint["epoch"], checkpoint["global_step"])

    def on_load_checkpoint(self, checkpoint):
        self.loaded = (sorted(checkpoint), checkpoint["epoch"], checkpoint["global_step"])


class Adds(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.seen = []
            end = LambdaCallback(
                on_train_batch_end=lambda trainer, module, outputs, *_: self.seen.append(outputs["loss"])
            )
            self.trainer.callbacks.append(end)


def test_a_callback_added_during_a_batch_gets_the_outputs_of_that_batch():
    (_, theirs), (_, ours) = (run(Adds, plain_loader, max_epochs=1) for run in (run_trainer, run_loop))
    assert ours.seen == theirs.seen != []


@pytest.mark.parametrize("is_of_class", [True, False])
def test_a_custom_zero_grad_method_is_called_before_each_optimizer_step(is_of_class, monkeypatch):
    calls = []

    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        patched = torch.optim.SGD if is_of_class else optimizer
        monkeypatch.setattr(patched, "zero_grad", lambda *args: calls.append(args))
        return optimizer

    run_loop(lambda: Classifier(configure), plain_loader, max_epochs=1)
    assert len(calls) == 6


def test_checkpoint_hooks_get_the_same_keys_as_with_trainer(tmp_path):
    """The hooks do not get the keys that FabricLoop adds to checkpoints."""
    callback = ModelCheckpoint(dirpath=tmp_path / "trainer", filename="x")
    _, theirs = run_trainer(
        Listening, plain_loader, val_loader, max_epochs=2, enable_checkpointing=True, callbacks=[callback]
    )
    _, ours, _ = fit(tmp_path, Listening, plain_loader, val_loader, max_epochs=2)
    assert ours.saved == theirs.saved
    assert ours.saved[1:] == (1, 12)
    _, again, _ = fit(tmp_path, Listening, plain_loader, val_loader, max_epochs=3, resume="last")
    assert again.loaded == ours.saved


class Scored(Classifier):
    """A module that logs a fixed val_loss per epoch, which is lowest in the second epoch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (3.0, 1.0, 2.0, 2.5)[self.current_epoch])

    def test_step(self, batch, batch_idx):
        self.log("sum", sum(parameter.sum() for parameter in self.parameters()))


@pytest.mark.parametrize("own", [True, False])
def test_calling_test_without_a_model_loads_the_best_weights(tmp_path, own):
    """Like Trainer, FabricLoop loads no checkpoint if a model is passed to test."""
    callback = ModelCheckpoint(dirpath=tmp_path / "trainer", monitor="val_loss")
    trainer, _ = run_trainer(
        Scored, plain_loader, val_loader, max_epochs=3, enable_checkpointing=True, callbacks=[callback]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best, last = trainer.test(None, val_loader(), verbose=False), trainer.test(None, val_loader(), "last")
    options = (
        {"monitor": "val_loss"} if own else {"callbacks": [ModelCheckpoint(tmp_path / "ours", monitor="val_loss")]}
    )
    loop, module, _ = fit(tmp_path, Scored, plain_loader, val_loader, max_epochs=3, **options)
    last = loop.test(module, val_loader(), verbose=False)
    with pytest.warns(UserWarning, match="The best model of the previous `fit` call will be used"):
        found = loop.test(dataloaders=val_loader(), verbose=False)
    assert found == best != last
    assert loop.ckpt_path == loop.checkpoint_callback.best_model_path
    assert loop.test(load="best", dataloaders=val_loader(), verbose=False) == best


class Ignores(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


class NoClosure(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step()


@pytest.mark.parametrize("run", [run_trainer, run_loop])
@pytest.mark.parametrize(
    "make", [NoClosure, lambda: Classifier(lambda m: Ignores(m.parameters(), lr=0.1))], ids=["hook", "step"]
)
def test_an_optimizer_that_does_not_call_its_closure_is_refused(run, make):
    """Without the closure, the training step would not run."""
    with pytest.raises(MisconfigurationException, match="The closure hasn't been executed. HINT: did you call"):
        run(make, plain_loader, max_epochs=1)


def test_init_module_creates_weights_in_the_given_precision():
    with FabricLoop(accelerator="cpu", precision="64-true").init_module():
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float64


def test_setup_and_teardown_get_the_same_stage_as_with_trainer():
    """The stage is a TrainerFn, an enum member that equals a string such as "fit"."""
    received = []

    class Stages(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            received.append(stage)

        teardown = setup

    loop = FabricLoop(**quiet(max_epochs=1, callbacks=[Stages()]))
    module = Classifier()
    loop.fit(module, make_loader())
    loop.validate(module, make_loader(), verbose=False)
    expected = [TrainerFn.FITTING] * 2 + [TrainerFn.VALIDATING] * 2
    assert received == expected == ["fit", "fit", "validate", "validate"]
    assert {type(stage) for stage in received} == {TrainerFn}


def test_the_loop_counters_before_the_first_run_are_the_same_as_in_trainer():
    """Some packages read the counters of Trainer's loops before the first run."""
    sides = [kind(accelerator="cpu", logger=False, barebones=True) for kind in (pl.Trainer, FabricLoop)]
    first, second = (
        [
            loop.fit_loop.epoch_progress.current.completed,
            loop.fit_loop.epoch_loop.batch_progress.total.ready,
            loop.fit_loop.epoch_loop._batches_that_stepped,
            loop.fit_loop._combined_loader,
            loop.fit_loop.max_batches,
            loop.validate_loop.max_batches,
            loop.predict_loop.predictions,
            loop.predict_loop.epoch_batch_indices,
        ]
        for loop in sides
    )
    assert first == second


def test_reading_progress_bar_callback_does_not_add_a_callback():
    loop = FabricLoop(accelerator="cpu", enable_model_summary=False)
    before = list(loop.callbacks)
    assert not loop.progress_bar_callback.is_enabled
    assert loop.callbacks == before
    assert FabricLoop(accelerator="cpu", enable_progress_bar=False).progress_bar_callback is None


def test_a_module_can_read_the_metrics_of_the_progress_bar(tmp_path):
    class ReadsBar(Classifier):
        def on_train_epoch_end(self):
            self.shown = self.trainer.progress_bar_callback.get_metrics(self.trainer, self)

    module = ReadsBar()
    loop = FabricLoop(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path)
    loop.fit(module, make_loader(16))
    assert "v_num" in module.shown
