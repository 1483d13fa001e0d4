"""What module, callbacks, datamodule and optimizer hold beside their state_dict, killed at every batch and resumed."""

import random
import shutil
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as cb
from modules import Classifier, make_data, make_loader, quiet
from runs import Snapshots, assert_same_end, fit, logs_of, loud, same, val_loader
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric_template import FabricLoop


class Slots:
    __slots__ = ("__numbers", "level")

    def __init__(self):
        self.level = 1.0
        self.__numbers = np.random.RandomState(4)

    def draw(self):
        return self.__numbers.rand()


class Noise(nn.Module):
    """A submodule with numbers of its own, a mask that no state_dict has, and a cache that it replaces."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator
        self.register_buffer("mask", torch.rand(8) + 0.5, persistent=False)
        self.register_buffer("seen", torch.zeros(8), persistent=False)

    def forward(self, x):
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        self.mask += 0.01
        return x * self.mask + self.seen + 0.1 * torch.rand(x.shape, generator=self.generator)


class Holds(Classifier):
    """Random generators of every kind, at hand and further down."""

    def __init__(self):
        super().__init__()
        self.shared = torch.Generator().manual_seed(3)
        self.noise = nn.ModuleList([Noise(self.shared)])
        self.several = [random.Random(5), {"deep": (np.random.default_rng(6),)}]
        self.slots = Slots()

    def forward(self, x):
        return self.net(self.noise[0](x))

    def training_step(self, batch, batch_idx):
        first, second = self.several
        factor = (
            first.random() + second["deep"][0].random() + self.slots.draw() + self.trainer.callbacks[0].numbers.random()
        )
        return super().training_step(batch, batch_idx) * factor * self.trainer.datamodule.numbers.random()


class Numbers(cb.Callback):
    def __init__(self):
        self.numbers = random.Random(7)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.numbers = random.Random(8)

    def train_dataloader(self):  # the sampler's numbers are the module's: found twice
        return make_loader(20, generator=self.trainer.lightning_module.shared)

    def val_dataloader(self):
        return val_loader()


def run(root, make, seed=1, resume=None, callbacks=(), **words):
    pl.seed_everything(seed, verbose=False)
    module = make()
    words = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": 1, **words}
    loop = FabricLoop(**loud(root, callbacks=[Numbers(), *callbacks], **words))
    return loop, module, loop.fit(module, datamodule=Data(), resume=resume)


def test_generators_and_buffers(tmp_path):
    """Another seed in the new process: neither numbers nor buffers are those of its set-up."""
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    whole = run(whole_root, Holds, callbacks=[Snapshots(whole_root, copies)])
    for batches in (1, 3, 4, 5, 6, 9):
        root = copies / str(batches)
        resumed = run(root, Holds, seed=99, resume="last")
        assert_same_end(whole, resumed)
        assert logs_of(root) == logs_of(whole_root), f"killed after {batches} batches"
        assert same(dict(whole[1].named_buffers()), dict(resumed[1].named_buffers()))


def test_one_that_is_gone(tmp_path):
    class Less(Holds):
        def __init__(self):
            super().__init__()
            self.several[0] = random.SystemRandom()

    run(tmp_path, Holds, max_epochs=1)
    text = r"resume: .* random generators that are not there now \(model.several.0\): what they draw is not what they would"
    with pytest.warns(UserWarning, match=text):
        run(tmp_path, Less, resume="last")


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


class Copies(torch.optim.SGD):
    """Steps on float64 copies of its parameters, of which its state_dict says nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.copies = {"all": [p.detach().double().clone() for p in self.param_groups[0]["params"]]}

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for copy, parameter in zip(self.copies["all"], self.param_groups[0]["params"], strict=True):
                copy -= 0.05 * parameter.grad.double()
                parameter.copy_(copy)
        return loss


def test_copies_that_an_optimizer_keeps(tmp_path):
    words = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": 1}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    make = lambda: Classifier(lambda module: Copies(module.parameters()))  # noqa: E731
    whole = fit(whole_root, make, loader, callbacks=[Snapshots(whole_root, copies)], **words)
    for batches in (1, 4, 5, 8):
        resumed = fit(copies / str(batches), make, loader, seed=9, resume="last", **words)
        assert_same_end(whole, resumed)
        assert same(whole[0].optimizers[0].copies, resumed[0].optimizers[0].copies)


class Draws(Dataset):
    """Its numbers are found in the loader and in the datamodule; made with the first item."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.numbers = getattr(self, "numbers", None) or random.Random(2)
        x, y = make_data(20)[i]
        return x + self.numbers.random(), y


class DrawingData(pl.LightningDataModule):
    def setup(self, stage):
        self.data = Draws()

    def train_dataloader(self):
        return DataLoader(self.data, 4, shuffle=True)


def test_found_in_loader_and_datamodule(tmp_path):
    def run(root, seed=1, resume=None, callbacks=()):
        pl.seed_everything(seed, verbose=False)
        module = Classifier()
        loop = FabricLoop(**loud(root, max_epochs=2, save_every_n_steps=1, callbacks=list(callbacks)))
        return loop, module, loop.fit(module, datamodule=DrawingData(), resume=resume)

    whole = run(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "killed")])
    for batches in (1, 4, 5, 8):
        assert_same_end(whole, run(tmp_path / "killed" / str(batches), seed=9, resume="last"))
