"""Callbacks that change what trains, killed at every step: resumed, the run ends as the one that nobody disturbed."""

from datetime import timedelta

import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as cb
from modules import Classifier, by_epoch, make_loader, sgd
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


class Thaw(cb.BaseFinetuning):
    """Frozen parts are trained later, one after another."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(module.backbone[epoch - 1], optimizer)


class ByHand(cb.Callback):
    """What users write in hooks: a group is added, a part is frozen, Dropout fades, the window grows."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            module.net[3].p = 0.05
            module.net[1].eval()
            module.net[0].weight.requires_grad_(False)
        if trainer.current_epoch == 1 and trainer.is_last_batch:
            trainer.accumulate_grad_batches = 2


class AddsGroup(cb.Callback):
    def on_fit_start(self, trainer, module):
        self.parts = [module.backbone[0]]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and self.parts:
            trainer.optimizers[0].add_param_group({"params": list(self.parts.pop().parameters()), "lr": 0.002})


class Head(Backbone):
    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


CALLBACKS = {
    "accumulation": (Classifier, lambda: cb.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})),
    "swa": (Classifier, lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)),
    "swa_batchnorm": (
        lambda: Normed(by_epoch),
        lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_strategy="linear"),
    ),
    "backbone": (Backbone, lambda: cb.BackboneFinetuning(1, lambda epoch: 2.0, train_bn=False)),
    "thaw": (Backbone, Thaw),
    "by_hand": (Normed, ByHand),
    "adds_group": (Head, AddsGroup),
    "ema": (Normed, lambda: cb.EMAWeightAveraging(decay=0.9, update_every_n_steps=2)),
    "mean": (Normed, lambda: cb.WeightAveraging(use_buffers=False)),
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


@pytest.mark.parametrize("name", CALLBACKS)
def test_killed_at_every_step(tmp_path, name):
    make, make_callback = CALLBACKS[name]
    killed_at_every_step(tmp_path, make, make_callback, 12, max_epochs=3, val=val_loader)


def killed_at_every_step(tmp_path, make, make_callback, samples, **words):
    words |= {"log_every_n_steps": 2, "save_every_n_steps": 1}
    train = lambda: make_loader(samples)  # noqa: E731
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    snapshots = Snapshots(whole_root, copies)
    whole = fit(whole_root, make, train, callbacks=[make_callback(), snapshots], **words)
    assert len(list(copies.iterdir())) > 4
    seen, wrong = 0, {}
    for root in sorted(copies.iterdir(), key=lambda path: int(path.name)):
        if not (root / "checkpoints/run/version_0/last.ckpt").exists():  # killed in the first window
            continue
        seen += 1
        try:
            resumed = fit(root, make, train, seed=99, resume="auto", callbacks=[make_callback()], **words)
            assert_same_end(whole, resumed)
            assert logs_of(root) == logs_of(whole_root)
        except Exception as error:
            wrong[root.name] = repr(error)[:200]
    assert not wrong, (seen, wrong)


class MeasuresValidation(Classifier):
    """Logs a metric that keeps each batch, in validation."""

    def __init__(self):
        super().__init__()
        self.auroc = torchmetrics.classification.MulticlassAUROC(3, thresholds=None)

    def validation_step(self, batch, batch_idx):
        self.auroc.update(self(batch[0]).softmax(1), batch[1])
        self.log("val_auroc", self.auroc)
        return super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_file_saved_as_validation_ends_has_measured_nothing_of_the_next(tmp_path):
    """ModelCheckpoint saves before the metrics are reset."""
    make = lambda: [cb.ModelCheckpoint(monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=False)]  # noqa: E731
    whole = fit(tmp_path / "whole", MeasuresValidation, val=val_loader, callbacks=make(), max_epochs=2)
    first, *_ = sorted((tmp_path / "whole").rglob("epoch=0*.ckpt"))
    resumed = fit(
        tmp_path / "on", MeasuresValidation, val=val_loader, callbacks=make(), max_epochs=2, seed=9, resume=first
    )
    assert_same_end(whole, resumed)
