"""A pass without batches is an error. A pass that is shorter than its length is a warning, and a whole epoch."""

import itertools
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, by_epoch, make_data, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of, val_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:resume. .* are read again"),
]
SHORT = r"The train loader \((DataLoader|Batches)\) gave 4 batches, expected 6"


class Short(IterableDataset):
    """Gives fewer samples than its length says, in passes from `since` on."""

    def __init__(self, gives=16, says=24, since=0):
        self.gives, self.says, self.since, self.passes = gives, says, since, itertools.count(1)

    def __len__(self):
        return self.says

    def __iter__(self):
        gives = self.gives if next(self.passes) > self.since else self.says
        return iter([make_data(24)[i] for i in range(gives)])


def short(**options):
    return lambda: DataLoader(Short(**options), batch_size=4)


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"}


@pytest.mark.parametrize("optimizers", [by_epoch, plateau])
def test_shorter_than_its_length(tmp_path, optimizers):
    """Weights, rows and files are those of a loader with the right length, also resumed after each step."""
    make = lambda: Classifier(optimizers)  # noqa: E731
    options = {"val": val_loader, "max_epochs": 2, "save_every_n_steps": 1}
    expected = fit(tmp_path / "expected", make, short(says=16), **options)
    copies = [Snapshots(tmp_path / "short", tmp_path / "killed")]
    with pytest.warns(UserWarning, match=SHORT) as caught:
        whole = fit(tmp_path / "short", make, short(), callbacks=copies, **options)
    assert len([warning for warning in caught if "expected 6" in str(warning.message)]) == 1
    assert_same_end(expected, whole)
    assert logs_of(tmp_path / "expected") == logs_of(tmp_path / "short")
    for batches in (1, 4, 7):
        root = tmp_path / "killed" / str(batches)
        with pytest.warns(UserWarning, match=SHORT):
            assert_same_end(whole, fit(root, make, short(), seed=9, resume="last", **options))
        assert logs_of(root) == logs_of(tmp_path / "short")


def test_killed_after_its_last_batch(tmp_path):
    """A resumed run asks for no further batch, and ends the epoch."""

    class Copy(Callback):
        def on_train_epoch_end(self, *_):
            shutil.copytree(tmp_path / "whole", tmp_path / "killed", dirs_exist_ok=True)

    options = {"train": short(), "val": val_loader, "max_epochs": 1, "save_every_n_steps": 1}
    with pytest.warns(UserWarning, match=SHORT):
        whole = fit(tmp_path / "whole", callbacks=[Copy()], **options)
    with pytest.warns(UserWarning, match=SHORT):
        assert_same_end(whole, fit(tmp_path / "killed", seed=9, resume="last", **options))
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "killed")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8]),
        ({"val_check_interval": 0.5}, [3, 4, 7, 8]),
        ({"val_check_interval": 2}, [2, 4, 6, 8]),
        ({"val_check_interval": 5}, []),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
        ({"check_val_every_n_epoch": 2}, [8]),
    ],
    ids=str,
)
def test_validates_once_at_the_end(tmp_path, options, steps):
    """A whole epoch that would validate at its end does so, also if it is short."""
    seen = []

    class Watch(Callback):
        def on_validation_start(self, trainer, *_):
            seen.append(trainer.global_step)

    options = {"num_sanity_val_steps": 0, "callbacks": [Watch()], **options}
    with pytest.warns(UserWarning, match=SHORT):
        fit(tmp_path, train=short(), val=val_loader, max_epochs=2, **options)
    assert seen == steps


class Batches:
    """An iterable without a length."""

    def __iter__(self):
        return iter(list(make_loader(16)))


def test_fewer_than_the_limit(tmp_path):
    with pytest.warns(UserWarning, match=SHORT):
        loop, _, history = fit(tmp_path, train=Batches, val=val_loader, max_epochs=2, limit_train_batches=6)
    assert loop.global_step == 8
    assert history["val_loss"].notna().all()


class Takes(Classifier):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def used_up():
    return (batch for batch in list(make_loader(24)))


@pytest.mark.parametrize(
    ("make", "train", "name"),
    [
        (Classifier, used_up, "generator"),
        (Takes, used_up, "generator"),
    ],
    ids=["used up", "dataloader_iter"],
)
def test_no_batches(tmp_path, make, train, name):
    """last.ckpt is that of the epoch before, and a resume with a new loader continues from there."""
    with pytest.raises(
        ValueError, match=rf"The train loader \({name}\) gave no batch in epoch 1. An iterator is used up"
    ):
        fit(tmp_path, make, train, max_epochs=3)
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 6


def test_empty_epochs_are_warned_of(tmp_path):
    """As in Trainer, an epoch of a DataLoader without batches counts."""
    with pytest.warns(UserWarning, match=r"The train loader \(DataLoader\) gave no batch in this pass"):
        loop, _, history = fit(tmp_path, Classifier, short(gives=0, since=1), max_epochs=3)
    assert (loop.current_epoch, loop.global_step, len(history)) == (3, 6, 3)
