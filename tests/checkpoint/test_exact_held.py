"""Non-persistent buffers, requires_grad and training modes, which no state_dict has, are restored by a resume."""

import shutil
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as cb
from modules import Classifier, make_loader, quiet
from runs import Snapshots, assert_same_end, fit, logs_of, same, val_loader
from torch import nn


class Masked(Classifier):
    """Has non-persistent buffers: one is changed in place, the other is replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(8) + 0.5, persistent=False)
        self.register_buffer("seen", torch.zeros(8), persistent=False)

    def forward(self, x):
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        self.mask += 0.01
        return self.net(x * self.mask + self.seen)


def test_non_persistent_buffers(tmp_path):
    """A resume restores them, although the new process has initialized them from another seed."""
    words = {"val": val_loader, "max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": 1}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    whole = fit(whole_root, Masked, loader, callbacks=[Snapshots(whole_root, copies)], **words)
    for batches in (1, 4, 5, 9):
        root = copies / str(batches)
        resumed = fit(root, Masked, loader, seed=99, resume="last", **words)
        assert_same_end(whole, resumed)
        assert logs_of(root) == logs_of(whole_root), f"killed after {batches} batches"
        assert same(dict(whole[1].named_buffers()), dict(resumed[1].named_buffers()))


# ---- flags


class Frozen(Classifier):
    """Its first layer is frozen by whoever makes it; a hook thaws it, and puts BatchNorm into evaluation."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))
        self.net[0].requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 3:
            self.net[0].requires_grad_(True)
            self.net[1].eval()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def flags(module):
    return [p.requires_grad for p in module.parameters()], [part.training for part in module.modules()]


def loader():
    return make_loader(20)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_saved_inside_a_validation(tmp_path):
    """A callback saves there: the modules' modes are those of training; and Trainer reads the file."""
    words = {"max_epochs": 2, "log_every_n_steps": 2, "val": val_loader, "val_check_interval": 2}
    make = lambda name: cb.ModelCheckpoint(tmp_path / name, monitor="val_loss", save_top_k=-1)  # noqa: E731
    whole = fit(tmp_path / "whole", Frozen, loader, callbacks=[make("kept")], **words)
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 4
    shutil.copy(tmp_path / "whole/logs/run/version_0/metrics.csv", tmp_path / "kept")  # the history goes with the files
    for index, path in enumerate(files):
        resumed = fit(
            tmp_path / str(index), Frozen, loader, seed=9, resume=path, callbacks=[make(f"kept{index}")], **words
        )
        assert_same_end(whole, resumed)
        assert flags(whole[1]) == flags(resumed[1])
    trainer = pl.Trainer(**quiet(max_epochs=3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Frozen(), loader(), ckpt_path=path, weights_only=True)
    assert trainer.current_epoch == 3


class Measured(Classifier):
    def __init__(self):
        super().__init__()
        self.all = torchmetrics.CatMetric()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.all.update(batch[0])


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_metric_changes_its_hash_inside_a_validation(tmp_path):
    """It is in training mode all the same when a callback saves there."""
    kept = cb.ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_on_train_epoch_end=False)
    fit(tmp_path / "first", Measured, loader, val=val_loader, callbacks=[kept], max_epochs=1)
    path = kept.best_model_path
    _, module, _ = fit(tmp_path / "on", Measured, loader, val=val_loader, resume=path, max_epochs=2)
    assert all(flags(module)[1])


def test_others_files_and_weights_only(tmp_path):
    """Trainer's files have no such part, and load= begins a new run: what is set up stays."""
    trainer = pl.Trainer(**quiet(max_epochs=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Frozen(), loader())
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")

    class Watch(cb.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.first = getattr(self, "first", flags(module))

    fresh = flags(Frozen())
    for words in ({"resume": tmp_path / "theirs.ckpt"}, {"load": tmp_path / "theirs.ckpt"}):
        watch = Watch()
        fit(tmp_path / "ours", Frozen, loader, max_epochs=2, callbacks=[watch], **words)
        assert watch.first == fresh
    last = tmp_path / "ours/checkpoints/run/version_0/last.ckpt"
    fit(tmp_path / "new", Frozen, loader, load=last, max_epochs=1, callbacks=[watch := Watch()])
    assert watch.first == fresh


def test_what_the_user_has_changed_since(tmp_path):
    """What hooks have left alone is as the new process sets it up: a part frozen for the rest stays so."""

    class Other(Frozen):
        def __init__(self):
            super().__init__()
            self.net[4].requires_grad_(False)

    fit(tmp_path, Frozen, loader, max_epochs=1)
    _, module, _ = fit(tmp_path, Other, loader, resume="last", max_epochs=2)
    assert [p.requires_grad for p in module.net[0].parameters()] == [True, True]
    assert [p.requires_grad for p in module.net[4].parameters()] == [False, False]
