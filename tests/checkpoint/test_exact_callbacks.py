"""Test exact resume with callbacks that freeze layers, average weights or switch modes."""

from datetime import timedelta

import pytest
import torch
from lightning.pytorch import callbacks as cb
from modules import HAS_PLAIN_SWALR, Classifier, assert_same_weights, by_epoch, make_loader, sgd, weight_averaging
from parameters import halve
from runs import Snapshots, assert_same_end, fit, logs_of, val_loader
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR


class Normed(Classifier):
    def __init__(self, optimizers=None):
        super().__init__(optimizers)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


class Backbone(Normed):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [ExponentialLR(optimizer, 0.9)]


class Unfreezes(cb.BaseFinetuning):
    """A callback that unfreezes the layers of the backbone one after the other."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(module.backbone[epoch - 1], optimizer)


class TwoLayers(Backbone):
    def __init__(self):
        super().__init__()
        self.backbone[1] = nn.Linear(8, 8)


class FreezesLayer(cb.Callback):
    """A callback that freezes a layer and changes accumulate_grad_batches during training."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            module.net[0].weight.requires_grad_(False)
        if trainer.current_epoch == 1 and trainer.is_last_batch:
            trainer.accumulate_grad_batches = 2


CALLBACKS = {
    "accumulation": (Classifier, lambda: cb.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})),
    "swa": (Classifier, lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)),
    "swa_batchnorm": (
        lambda: Normed(by_epoch),
        lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_strategy="linear"),
    ),
    "backbone": (Backbone, lambda: cb.BackboneFinetuning(1, lambda epoch: 2.0, train_bn=False)),
    "unfreezes layers": (TwoLayers, Unfreezes),
    "freezes layer": (Normed, FreezesLayer),
    "ema": (Normed, lambda: weight_averaging("EMAWeightAveraging", decay=0.9, update_every_n_steps=2)),
    "mean": (Normed, lambda: weight_averaging(use_buffers=False)),
    "early_stopping": (
        Normed,
        lambda: cb.EarlyStopping("val_loss", patience=1, min_delta=10.0, check_on_train_epoch_end=False),
    ),
    "early_stopping_train": (
        Normed,
        lambda: cb.EarlyStopping("train_loss", patience=1, min_delta=10.0, check_on_train_epoch_end=True),
    ),
    "rates": (lambda: Classifier(by_epoch), lambda: cb.LearningRateMonitor(log_momentum=True)),
    "timer": (lambda: Classifier(sgd), lambda: cb.Timer(timedelta(hours=1), interval="step")),
}  # fmt: skip


# With BatchNorm, SWA adds an epoch that updates the statistics and takes no optimizer step. A
# run resumed in this epoch does not create SWA's scheduler, so only the weights are compared.
ONLY_WEIGHTS = {"swa_batchnorm": (10,)}


def weights_only(name):
    """Return the value of weights_only= that fit needs to resume a run with this callback."""
    return {"weights_only": HAS_PLAIN_SWALR or not name.startswith("swa")}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_killed_run_with_a_lightning_callback_resumes_exactly(tmp_path, name):
    make, make_callback = CALLBACKS[name]
    options = {"max_epochs": 3, "val": val_loader, "log_every_n_steps": 2, "save_every_n_steps": 1}
    train = lambda: make_loader(12)  # noqa: E731
    kills = (3, 7, 10)
    snapshots = Snapshots(tmp_path / "whole", tmp_path / "killed", kills)
    whole = fit(tmp_path / "whole", make, train, callbacks=[make_callback(), snapshots], **options)
    for batch in kills:
        root = tmp_path / "killed" / str(batch)
        if list(root.rglob("last.ckpt")):
            options["given"] = lambda module: weights_only(name)
            resumed = fit(root, make, train, seed=99, resume="auto", callbacks=[make_callback()], **options)
            if batch in ONLY_WEIGHTS.get(name, ()):
                assert_same_weights(whole[1], resumed[1])
                continue
            assert_same_end(whole, resumed)
            assert logs_of(root) == logs_of(tmp_path / "whole"), batch


AVERAGES = {
    "swa": (Classifier, lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=1)),
    "swa_batchnorm": (Normed, lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=0.5)),
    "ema": (Normed, lambda: weight_averaging("EMAWeightAveraging", decay=0.8, update_every_n_steps=2)),
    "mean": (Classifier, weight_averaging),
}


@pytest.mark.parametrize(("name", "resume"), halve(AVERAGES, ["auto", "last"]))
def test_resuming_a_finished_run_does_not_average_the_weights_again(tmp_path, name, resume):
    make, make_callback = AVERAGES[name]
    options = {"max_epochs": 3, "train": lambda: make_loader(12)}
    whole = fit(tmp_path, make, callbacks=[make_callback()], **options)
    options["given"] = lambda module: weights_only(name)
    again = fit(tmp_path, make, callbacks=[make_callback()], seed=9, resume=resume, **options)
    assert_same_weights(whole[1], again[1])
    momenta = [getattr(module, "momentum", None) for module in whole[1].modules()]
    assert momenta == [getattr(module, "momentum", None) for module in again[1].modules()]


class Frozen(Classifier):
    """A model with a frozen first layer, which a hook unfreezes during training."""

    def __init__(self, freezes_last=False):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[3].requires_grad_(not freezes_last)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 3:
            self.net[0].requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_layer_that_the_user_froze_before_resuming_stays_frozen(tmp_path):
    """A resumed run restores requires_grad only where a hook of the saved run changed it."""
    fit(tmp_path, Frozen, max_epochs=1)
    _, module, _ = fit(tmp_path, lambda: Frozen(freezes_last=True), resume="last", max_epochs=2)
    flags = [[p.requires_grad for p in layer.parameters()] for layer in (module.net[0], module.net[3])]
    assert flags == [[True, True], [False, False]]
    watched = fit(tmp_path, Frozen, load=tmp_path / "checkpoints/run/version_0/last.ckpt", max_steps=1)[1]
    assert not watched.net[0].weight.requires_grad


class EvalBackbone(Backbone):
    """A model that switches its backbone to eval mode at the start of an epoch, as linear probes do."""

    def on_train_epoch_start(self):
        if self.current_epoch > 0:
            self.backbone.eval()


class EvalInStep(Backbone):
    """A model that switches its backbone between train mode and eval mode in training steps."""

    def training_step(self, batch, batch_idx):
        self.backbone.train(self.global_step % 4 < 2)
        return super().training_step(batch, batch_idx)


class EvalFromOwnHook(EvalBackbone):
    """A model that overrides the hook on_validation_model_train."""

    def on_validation_model_train(self):
        self.net.train()


def saver():
    """Return a callback that saves after each validation, while the network is in eval mode."""
    return cb.ModelCheckpoint(save_last=True, save_on_train_epoch_end=False)


@pytest.mark.parametrize("make", [EvalBackbone, EvalInStep, EvalFromOwnHook])
def test_resume_restores_the_train_or_eval_mode_of_each_submodule(tmp_path, make):
    options = {"max_epochs": 3, "val": val_loader, "save_every_n_steps": 1}
    train = lambda: make_loader(12)  # noqa: E731
    snapshots = Snapshots(tmp_path / "whole", tmp_path / "killed", (1, 5, 8))
    whole = fit(tmp_path / "whole", make, train, callbacks=[snapshots], **options)
    for batch in (1, 5, 8):
        root = tmp_path / "killed" / str(batch)
        assert_same_end(whole, fit(root, make, train, seed=99, resume="auto", **options))


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")
@pytest.mark.parametrize("make", [EvalBackbone, EvalInStep, EvalFromOwnHook])
def test_resuming_from_a_checkpoint_saved_during_validation_restores_train_mode(tmp_path, make):
    options = {"max_epochs": 2, "val": val_loader, "val_check_interval": 2}
    train = lambda: make_loader(18)  # noqa: E731
    snapshots = Snapshots(tmp_path / "whole", tmp_path / "killed", (3, 7))
    whole = fit(tmp_path / "whole", make, train, callbacks=[saver(), snapshots], **options)
    for batch in (3, 7):
        root = tmp_path / "killed" / str(batch)
        assert_same_end(whole, fit(root, make, train, seed=99, resume="auto", callbacks=[saver()], **options))
