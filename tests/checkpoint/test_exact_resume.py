"""Test that a killed and resumed run ends exactly like an uninterrupted run."""

import itertools
import os
import random
import shutil
import signal
import subprocess

import lightning.pytorch as pl
import numpy as np
import pytest
import runs
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import weight_averaging
from parameters import keep, leave
from resume_loaders import LOADERS, PERSISTENT, Endless, loader, seeded, tensors, with_sampler
from runs import Snapshots, assert_same_end, logs_of, python_command, tree, with_files
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from fabric_template.loop import FabricLoop

pytestmark = [
    pytest.mark.filterwarnings("ignore:resume. .* are read again"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker"),
]


class Net(pl.LightningModule):
    """A model that uses the random numbers of Python, NumPy and torch, and logs per step and per epoch."""

    def __init__(self, manual=False, metric=False):
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3) if metric else None

    def on_train_epoch_start(self):
        random.random(), np.random.rand(), torch.rand(3)

    def training_step(self, batch, batch_idx):
        parts = [part for part in (batch if isinstance(batch[0], list | tuple) else [batch]) if part]
        logits = [self.net(x) for x, _ in parts]
        loss = sum(nn.functional.cross_entropy(z, y) for z, (_, y) in zip(logits, parts, strict=True))
        loss = loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(parts[0][1]))
        if self.accuracy is not None:
            self.accuracy(logits[0], parts[0][1])
            self.log("accuracy", self.accuracy, on_epoch=True)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        # A logger receives this value with a step that counts the
        # validation batches of all epochs, even in a resumed run.
        self.log("val_step", loss, on_step=True, on_epoch=False)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plain:
    """An object with step methods and no base class."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


# Map each case to the options of its run. Most runs are killed after
# the first epoch, and before the last batch of the second epoch.
CASES = {name: {"make_train": make} for name, make in LOADERS.items()} | {
    "endless sampler": {"make_train": with_sampler(lambda data: Endless()), "limit_train_batches": 6},
    "manual": {"make_module": lambda: Net(manual=True)},
    "torchmetrics": {"make_module": lambda: Net(metric=True)},
    "plain": {"make_module": Plain},
    "accumulate": {"accumulate_grad_batches": 2},
    "inside an accumulation window": {"accumulate_grad_batches": 4, "val_check_interval": 1},
    "validation within an epoch": {"val_check_interval": 0.5},
    "validation across epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "validation by steps": {"validate_every_n_steps": 5, "accumulate_grad_batches": 2},
    "validation every second epoch": {"check_val_every_n_epoch": 2, "save_every_n_steps": 3},
    "validation, generator": {"make_val": lambda: loader(generator=seeded()), "val_check_interval": 2},
    "validation, persistent": {"make_val": lambda: loader(**PERSISTENT), "val_check_interval": 2},
    "limit": {"limit_train_batches": 4},
    "limit, persistent": {"make_train": LOADERS["persistent"], "limit_train_batches": 4},
    "reload": {"reload_dataloaders_every_n_epochs": 2},
    "reload, persistent": {"make_train": LOADERS["persistent"], "reload_dataloaders_every_n_epochs": 1},
    "top-k": {"monitor": "val_loss", "save_top_k": 2, "val_check_interval": 1},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
}
KILLS = {
    "reload, persistent": (7,),
    "stream and short loader": (7,),
    "worker_init_fn": (11,),
    "min_size": (1, 5, 8),
    "accumulate": (3, 6, 8),
    "inside an accumulation window": (5, 7, 9),
}


def make_val():
    return DataLoader(TensorDataset(*tensors(8)), batch_size=4)


def fit(root, make_train=loader, make_module=Net, make_val=make_val, **options):
    """Train in the folder ``root``, and return (loop, module, history)."""
    options = {"log_every_n_steps": 1, "max_epochs": 3, **options}
    return runs.fit(root, make_module, make_train, make_val, **options)


def assert_same(one, other, root, other_root):
    """Compare what fit() returned, the log files and the names of all files."""
    assert_same_end(one, other)
    assert logs_of(root) == logs_of(other_root)
    assert tree(root) == tree(other_root)


@pytest.mark.filterwarnings("ignore:resume. Stream draws random numbers")
@pytest.mark.parametrize(
    "name",
    leave(CASES, "workers", "three workers", "combined, workers", "noisy stream", "stateful stream",
          "stream, persistent", "stream, persistent, drop_last", "torchdata", "torchdata, workers",
          "torchdata, sampler", "max_size_cycle", "max_size", "max_size of streams", "sampler generator",
          "TensorLoader", "list", "limit", "limit, persistent", "reload", "validation, generator"),
)  # fmt: skip
def test_a_killed_and_resumed_run_matches_an_uninterrupted_run(tmp_path, name):
    """Copy the run folder before some batches, and resume each copy with a different seed."""
    options = {"save_every_n_steps": 1 if name in KILLS else 5, **CASES[name]}
    kills = KILLS.get(name, (6, 11))
    snapshots = Snapshots(tmp_path / "whole", tmp_path, kills)
    whole = fit(tmp_path / "whole", callbacks=[snapshots], **options)
    for batch in kills:
        root = tmp_path / str(batch)
        assert list(root.rglob("last.ckpt"))
        resumed = fit(root, resume="auto", seed=99, **options)
        assert_same(whole, resumed, tmp_path / "whole", root)


class Raises(Callback):
    """A callback that raises an error when the given hook is called for the n-th time."""

    def __init__(self, hook, batch, error=RuntimeError):
        # Count the batches with an iterator, because a resumed run would restore an int attribute.
        self.batches = itertools.count(1)
        setattr(self, hook, lambda trainer, module, *arguments: self.count(batch, error))

    def count(self, batch, error):
        if next(self.batches) == batch:
            raise error("stop")


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_failed_run_with_two_iterable_datasets_of_different_lengths_resumes_exactly(tmp_path):
    train, raises = LOADERS["cycle of streams"], Raises("on_train_batch_start", 6)
    options = {"save_every_n_steps": 1}
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path / "cut", train, callbacks=[raises], **options)
    resumed = fit(tmp_path / "cut", train, resume="last", seed=9, **options)
    whole = fit(tmp_path / "whole", train, **options)
    assert_same(whole, resumed, tmp_path / "whole", tmp_path / "cut")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("when", ["every_n_train_steps", "every_n_epochs", "validation"])
def test_a_run_resumes_exactly_from_a_file_saved_by_a_model_checkpoint_callback(tmp_path, when):
    """A resumed run repeats everything that followed the save, such as a validation."""
    options = {"val_check_interval": 2, "log_every_n_steps": 1}
    saves = {"every_n_epochs": 1, "save_on_train_epoch_end": False} if when == "validation" else {when: 1}
    saver = lambda name: ModelCheckpoint(tmp_path / name, filename="{step}", save_top_k=-1, **saves)  # noqa: E731
    whole = fit(tmp_path / "whole", callbacks=[saver("saved")], **options)
    for step in (2, 6, 8, 18):
        path = tmp_path / "saved" / f"step={step}.ckpt"
        if not path.exists():
            continue
        shutil.copytree(tmp_path / "whole", tmp_path / str(step), dirs_exist_ok=True)
        again = {"resume": path, "seed": 9, "version": 0, "callbacks": [saver(f"s{step}")]}
        resumed = fit(tmp_path / str(step), **again, **options)
        assert_same(whole, resumed, tmp_path / "whole", tmp_path / str(step))


class Kills(Raises):
    def count(self, batch, error):
        if next(self.batches) == batch:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", keep(["persistent", "TensorLoader"], "TensorLoader"))
def test_a_run_killed_by_sigkill_and_resumed_matches_an_uninterrupted_run(tmp_path, name):
    """The run resumes from its last checkpoint. No temporary file is left."""
    options = {"save_every_n_steps": 2, "val_check_interval": 3}
    whole = fit(tmp_path / "whole", LOADERS[name], **options)
    for batch in (9, 5):
        code = (
            "from test_exact_resume import LOADERS, Kills, fit;"
            f" fit({str(tmp_path / 'cut')!r}, LOADERS[{name!r}], resume='auto', callbacks=[Kills('on_train_batch_end',"
            f" {batch})], **{options})"
        )
        assert subprocess.run(python_command(code, __file__)).returncode == -signal.SIGKILL
    resumed = fit(tmp_path / "cut", LOADERS[name], resume="auto", seed=99, **options)
    assert_same(whole, resumed, tmp_path / "whole", tmp_path / "cut")


class Counts(Callback):
    """A callback with a state_dict()."""

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, *_):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Data(pl.LightningDataModule):
    state_dict, load_state_dict = Counts.state_dict, Counts.load_state_dict
    count = 0

    def train_dataloader(self):
        self.count += 1
        return loader()


def test_resume_restores_the_state_of_callbacks_and_datamodules(tmp_path):
    for max_epochs, resume in ((1, None), (3, "last")):
        counts, data = Counts(), Data()
        loop = FabricLoop(**with_files(tmp_path), max_epochs=max_epochs, callbacks=[counts])
        loop.fit(Net(), data, resume=resume)
    assert (counts.count, data.count) == (18, 2)


class WithBank(Net):
    """A model that changes a buffer in each step. state_dict() does not contain this buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(3), persistent=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.bank += loss.detach()
        return loss


class FreezesAndKeepsZeros(Net):
    """A model that sets gradients to zero instead of None, so momentum still changes a frozen bias."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def on_train_epoch_start(self):
        self.net[0].bias.requires_grad_(self.current_epoch == 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_resuming_restores_the_momentum_of_frozen_parameters(tmp_path):
    def train(epochs, folder, resume=None):
        torch.manual_seed(1)
        module = FreezesAndKeepsZeros()
        loop = FabricLoop(max_epochs=epochs, default_root_dir=tmp_path / folder, logger=False, seed=1)
        loop.fit(module, loader(), resume=resume)
        return module.state_dict()

    expected = train(3, "whole")
    train(1, "parts")
    assert runs.same(train(3, "parts", "last"), expected)


def test_resume_restores_the_buffers_of_the_averaged_model(tmp_path):
    """The averaged model has its own copies of the buffers, which the final model takes over."""
    make = lambda: [weight_averaging()]  # noqa: E731
    snapshots = Snapshots(tmp_path / "whole", tmp_path, [8])
    options = {"make_module": WithBank, "save_every_n_steps": 1}
    whole = fit(tmp_path / "whole", callbacks=[*make(), snapshots], **options)
    resumed = fit(tmp_path / "8", resume="last", seed=99, callbacks=make(), **options)
    assert_same(whole, resumed, tmp_path / "whole", tmp_path / "8")
    assert torch.equal(whole[1].bank, resumed[1].bank)


class RandomSplit(pl.LightningDataModule):
    """A datamodule that splits the data at random when the validation loader is created."""

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        data = TensorDataset(*tensors(24))
        return DataLoader(random_split(data, [8, 16])[0], batch_size=4)


@pytest.mark.parametrize("batch", [3, 8])
def test_a_random_validation_split_is_the_same_in_a_resumed_run(tmp_path, batch):
    options = {
        **with_files(tmp_path / "whole"),
        "max_epochs": 4,
        "check_val_every_n_epoch": 2,
        "num_sanity_val_steps": 0,
    }
    options |= {"save_every_n_steps": 1, "seed": 3}
    ends = []
    for root, resume in ((tmp_path / "whole", None), (tmp_path / str(batch), "last")):
        callbacks = [Snapshots(root, tmp_path, [batch])] if resume is None else []
        loop, module = FabricLoop(**options | {"default_root_dir": str(root), "callbacks": callbacks}), Net()
        ends.append((loop, module, loop.fit(module, RandomSplit(), resume=resume)))
    assert_same(*ends, tmp_path / "whole", tmp_path / str(batch))
