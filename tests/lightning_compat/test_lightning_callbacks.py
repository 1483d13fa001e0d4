"""Test that Lightning's callbacks have the same effect as with Trainer."""

import math
import warnings
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from both import Notes, assert_same_files, plain, run_both
from lightning.pytorch import callbacks as cb
from modules import Classifier, by_epoch, by_step, make_loader, sgd, weight_averaging
from parameters import once
from runs import same, val_loader, with_files
from torch import nn

from fabric_template import FabricLoop

CKPT = {"enable_checkpointing": True}


class Normed(Classifier):
    """A module with BatchNorm, because weight averaging must update BatchNorm's statistics."""

    def __init__(self, optimizers=None):
        super().__init__(optimizers)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 0, "min_delta": 10.0, "check_on_train_epoch_end": True},
        {"stopping_threshold": 100.0},
        {"mode": "max", "patience": 2},
        {"monitor": "train_loss", "patience": 1, "min_delta": 10.0},
        {"monitor": "nothing"},
    ],
    ids=str,
)
def test_early_stopping_stops_at_the_same_step_as_with_trainer(tmp_path, options):
    options = {"monitor": "val_loss", **options}
    expected, ours = run_both(tmp_path, lambda root: cb.EarlyStopping(**options), max_epochs=5)
    first, second = expected.callbacks[0], ours.callbacks[0]
    assert first.stopped_epoch == second.stopped_epoch
    assert same(first.state_dict(), second.state_dict())
    assert expected.trainer.should_stop == ours.trainer.should_stop
    assert ours.trainer.early_stopping_callback is second
    assert ours.trainer.early_stopping_callbacks == [second]


MODEL_CHECKPOINTS = {
    "plain": {},
    "top_2": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{step}-{val_loss:.3f}"},
    "last": {"monitor": "val_acc", "mode": "max", "save_last": True},
    "link": {"save_last": "link"},
    "steps_monitor": {"every_n_train_steps": 5, "monitor": "train_loss", "save_top_k": 2},
    "steps_val": {"every_n_train_steps": 3, "monitor": "val_loss", "save_top_k": -1},
    "second_epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "train_end": {"save_on_train_epoch_end": True, "monitor": "val_loss", "save_top_k": -1},
    "always": {"train_time_interval": timedelta(0), "save_top_k": 1},
    "weights": {"save_weights_only": True, "save_top_k": -1},
}


@pytest.mark.parametrize("name", MODEL_CHECKPOINTS)
def test_model_checkpoint_writes_the_same_files_as_with_trainer(tmp_path, name):
    options = MODEL_CHECKPOINTS[name]
    expected, ours = run_both(
        tmp_path, lambda root: cb.ModelCheckpoint(root / "kept", **options), lambda: Classifier(by_step), **CKPT
    )
    assert_same_files(expected, ours)
    first, second = expected.callbacks[0], ours.callbacks[0]
    for path in ("best_model_path", "last_model_path", "kth_best_model_path"):
        assert expected.place(getattr(first, path)) == ours.place(getattr(second, path))
    assert same(plain(first.state_dict(), expected), plain(second.state_dict(), ours))
    assert ours.trainer.checkpoint_callback is second
    assert ours.trainer.checkpoint_callbacks == [second]


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 3:
            raise RuntimeError("mine")
        return super().training_step(batch, batch_idx)


def test_on_exception_checkpoint_saves_the_same_file_as_with_trainer(tmp_path):
    expected, ours = run_both(tmp_path, lambda root: cb.OnExceptionCheckpoint(root, "rescued"), Fails, **CKPT)
    assert str(ours.error) == "mine"
    assert_same_files(expected, ours)
    assert list(ours.files()) == ["rescued.ckpt"]


@pytest.mark.parametrize(
    ("make", "options", "validates"),
    [
        (lambda: Classifier(sgd), {"swa_epoch_start": 2}, True),
        (lambda: Normed(by_epoch), {"swa_epoch_start": 0.3, "annealing_epochs": 2}, True),
        (lambda: Normed(sgd), {"swa_epoch_start": 2}, False),
    ],
    ids=["plain", "batchnorm", "no_val"],
)
def test_stochastic_weight_averaging_gives_the_same_weights_as_with_trainer(tmp_path, make, options, validates):
    val = {} if validates else {"val": None}
    swa = {"swa_lrs": 0.05, **options}
    make_swa = lambda root: cb.StochasticWeightAveraging(**swa)  # noqa: E731
    expected, ours = run_both(tmp_path, make_swa, make, max_epochs=5, **val)
    first, second = expected.callbacks[0].state_dict(), ours.callbacks[0].state_dict()
    assert same(first, second)
    assert second["n_averaged"] == (4 if options["swa_epoch_start"] == 2 else 5)
    rates = [[group["lr"] for group in side.trainer.optimizers[0].param_groups] for side in (expected, ours)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: weight_averaging("EMAWeightAveraging", decay=0.9, update_every_n_steps=3, update_starting_at_step=5),
        lambda: weight_averaging(use_buffers=False),
    ],
    ids=["ema", "mean"],
)
def test_weight_averaging_gives_the_same_weights_as_with_trainer(tmp_path, make):
    """Validation and checkpoints use the averaged weights, which also become the final weights."""

    def two(root):
        return [make(), cb.ModelCheckpoint(root, monitor="val_loss", save_top_k=-1, save_last=True)]

    expected, ours = run_both(tmp_path, two, Normed, accumulate_grad_batches=2, **CKPT)
    assert_same_files(expected, ours)
    for key in ("current_model_state", "averaging_state"):
        assert same(expected.files()["last.ckpt"][key], ours.files()["last.ckpt"][key])


@pytest.mark.parametrize(
    ("options", "optimizers"),
    once(
        [
            {},
            {"logging_interval": "step", "log_momentum": True},
            {"logging_interval": "epoch", "log_weight_decay": True},
        ],
        [sgd, by_step, by_epoch],
    ),
)
def test_learning_rate_monitor_logs_the_same_values_as_with_trainer(tmp_path, optimizers, options):
    expected, ours = run_both(
        tmp_path, lambda root: cb.LearningRateMonitor(**options), lambda: Classifier(optimizers), logger=Notes,
        log_every_n_steps=3, accumulate_grad_batches=2,
    )  # fmt: skip
    assert expected.rows == ours.rows
    assert expected.callbacks[0].lrs == ours.callbacks[0].lrs
    metrics = [
        {name: float(value) for name, value in side.trainer.callback_metrics.items()} for side in (expected, ours)
    ]
    assert metrics[0] == metrics[1]


def test_learning_rate_monitor_accepts_a_module_without_an_optimizer(tmp_path):
    expected, ours = run_both(
        tmp_path, lambda root: cb.LearningRateMonitor(), lambda: Classifier(lambda module: None), logger=Notes,
        log_every_n_steps=1,
    )  # fmt: skip
    assert expected.rows == ours.rows
    assert [optimizer.param_groups for optimizer in ours.trainer.optimizers] == [[]]


class Writes(cb.BasePredictionWriter):
    def __init__(self, folder, interval):
        super().__init__(interval)
        self.folder, self.asked = folder, []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.asked.append((dataloader_idx, batch_idx, indices))
        torch.save(prediction, self.folder / f"{dataloader_idx}-{batch_idx}.pt")

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        torch.save([predictions, indices], self.folder / "all.pt")


class Predicts(Classifier):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])


@pytest.mark.parametrize(("interval", "several"), [("batch", True), ("epoch", False), ("batch_and_epoch", True)])
def test_prediction_writers_get_the_same_predictions_as_with_trainer(tmp_path, interval, several):
    sides = run_both(tmp_path, lambda root: Writes(root, interval), Predicts, max_epochs=1)
    for side in sides:
        loaders = [make_loader(10, shuffle=False), val_loader()] if several else make_loader(10, drop_last=True)
        pl.seed_everything(2, verbose=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert side.trainer.predict(side.module, loaders, return_predictions=False) is None
    expected, ours = sides
    assert expected.callbacks[0].asked == ours.callbacks[0].asked
    names = [sorted(path.name for path in side.root.glob("*.pt")) for side in sides]
    assert names[0] == names[1]
    assert len(names[1]) == (8 if several else 3) * (interval != "epoch") + (interval != "batch")
    for name in names[0]:
        assert same(*(torch.load(side.root / name) for side in sides)), name


def test_callbacks_log_the_same_values_as_with_trainer(tmp_path):
    class Logs(pl.Callback):
        def on_train_start(self, trainer, module):
            self.log("at_start", 1.0)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.log("twice", outputs["loss"] * 2, on_step=True, on_epoch=True, prog_bar=True)

        def on_validation_epoch_end(self, trainer, module):
            self.log_dict({"val_a": 1.0, "val_b": trainer.current_epoch})

    expected, ours = run_both(tmp_path, lambda root: Logs(), logger=Notes, log_every_n_steps=4)
    assert expected.rows == ours.rows
    metrics = [
        {name: float(value) for name, value in side.trainer.callback_metrics.items()} for side in (expected, ours)
    ]
    assert metrics[0] == metrics[1]
    # FabricLoop must remove the log() method that it has added to the callback.
    assert "log" not in vars(ours.callbacks[0])


def test_configure_callbacks_replaces_callbacks_of_the_same_class(tmp_path):
    """Callbacks of the module replace callbacks of the same class.

    Checkpoint callbacks come last.
    """

    class Stop(cb.EarlyStopping):
        pass

    class Own(Classifier):
        def configure_callbacks(self):
            return [Stop("val_loss", patience=9), cb.ModelCheckpoint(filename="own"), cb.Timer()]

    def make(root):
        saving = [cb.ModelCheckpoint(filename="mine"), cb.OnExceptionCheckpoint(root)]
        return [*saving, cb.EarlyStopping("val_loss"), cb.LambdaCallback()]

    expected, ours = run_both(tmp_path, make, Own, max_epochs=1, **CKPT)
    names = [[type(callback).__name__ for callback in side.trainer.callbacks] for side in (expected, ours)]
    assert names[0] == names[1] == ["LambdaCallback", "Stop", "Timer", "OnExceptionCheckpoint", "ModelCheckpoint"]
    assert list(expected.files()) == list(ours.files()) == ["checkpoints/own.ckpt"]


def test_attributes_of_fit_loop_that_have_no_effect_cannot_be_set():
    loop = FabricLoop(accelerator="cpu", max_epochs=3)
    loop.fit_loop.max_epochs = 5
    assert loop.max_epochs == loop.fit_loop.max_epochs == 5
    with pytest.raises(AttributeError, match="restarting"):
        loop.fit_loop.restarting = True
    assert math.isinf(loop.fit_loop.max_batches)
    assert math.isinf(loop.num_training_batches)


def own_callback(name, base):
    """Return an instance of a user-defined class with the same name as a Lightning class."""

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = True

    return type(name, (base,), {"on_train_epoch_end": on_train_epoch_end})()


@pytest.mark.parametrize("base", [pl.Callback, object])
def test_user_defined_callbacks_may_have_the_same_names_as_lightning_classes(base):
    names = [*(name for name in cb.__all__ if name != "Callback"), "ProgressBar"]

    def fit(epochs, resume=None, **options):
        callbacks = [own_callback(name, base) for name in names]
        loop = FabricLoop(**with_files(max_epochs=epochs, callbacks=callbacks, **options))
        loop.fit(Classifier(), make_loader(), val_loader(), resume=resume)
        return loop

    loop = fit(3)
    assert loop.early_stopping_callback is None
    assert loop.checkpoint_callback is loop.run.checkpoints
    assert "should_stop was set" in repr(loop)
    assert fit(2, resume="last", max_time="00:01:00:00").current_epoch == 2
    assert fit(2, resume="last").current_epoch == 2
