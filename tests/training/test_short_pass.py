"""A pass of no batches is an error; one that is shorter than its length says is a warning, and a whole epoch."""

import itertools
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, by_epoch, make_data, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of, val_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")


class Says(IterableDataset):
    """Gives fewer samples than its length says, in passes from `since` on."""

    def __init__(self, gives=16, says=24, since=0):
        self.gives, self.says, self.since, self.passes = gives, says, since, itertools.count(1)

    def __len__(self):
        return self.says

    def __iter__(self):
        number = next(self.passes)
        return iter([make_data(24)[i] for i in range(self.gives if number > self.since else self.says)])


def says(**words):
    return lambda: DataLoader(Says(**words), batch_size=4)


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"}


TOLD = "ignore:.*of this epoch that were trained before, which takes the time of loading them"
SHORT = r"gave 4 batches where 6 were to come \(its len\(\), or limit_train_batches\): that counts as a whole epoch$"


@pytest.mark.filterwarnings(TOLD)
@pytest.mark.parametrize("optimizers", [by_epoch, plateau])
def test_shorter_than_its_length(tmp_path, optimizers):
    """Weights, rows and files are those of a loader that says the truth; also resumed after each step."""
    make, words = lambda: Classifier(optimizers), {"val": val_loader, "max_epochs": 2, "save_every_n_steps": 1}
    truth = fit(tmp_path / "truth", make, says(says=16), **words)
    copies = [Snapshots(tmp_path / "short", tmp_path / "killed")]
    with pytest.warns(UserWarning, match=rf"the train loader \(DataLoader\) {SHORT}") as caught:
        short = fit(tmp_path / "short", make, says(), callbacks=copies, **words)
    assert len([warning for warning in caught if "where 6 were to come" in str(warning.message)]) == 1
    assert_same_end(truth, short)
    assert logs_of(tmp_path / "truth") == logs_of(tmp_path / "short")
    found = torch.load(tmp_path / "short/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["fabric_template"]["epoch"], found["fabric_template"]["batch_idx"]) == (2, 0)
    for batches in (1, 4, 7):  # copied before the batch that follows: 4 is between the epochs
        root = tmp_path / "killed" / str(batches)
        with pytest.warns(UserWarning, match=SHORT):
            assert_same_end(short, fit(root, make, says(), seed=9, resume="last", **words))
        assert logs_of(root) == logs_of(tmp_path / "short")


@pytest.mark.filterwarnings(TOLD)
def test_killed_after_its_last_batch(tmp_path):
    """What was saved there takes no further batch, and ends the epoch."""

    class Copy(Callback):
        def on_train_epoch_end(self, *_):
            shutil.copytree(tmp_path / "whole", tmp_path / "killed", dirs_exist_ok=True)

    words = {"train": says(), "val": val_loader, "max_epochs": 1, "save_every_n_steps": 1}
    with pytest.warns(UserWarning, match=SHORT):
        whole = fit(tmp_path / "whole", callbacks=[Copy()], **words)
    with pytest.warns(UserWarning, match=SHORT):
        assert_same_end(whole, fit(tmp_path / "killed", seed=9, resume="last", **words))
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "killed")


@pytest.mark.parametrize(
    ("words", "seen"),
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
def test_validations(tmp_path, words, seen):
    """Where there is one at the end of a whole epoch, there is one, once."""

    class Watch(Callback):
        def __init__(self):
            self.seen = []

        def on_validation_start(self, trainer, *_):
            self.seen.append(trainer.global_step)

    watch = Watch()
    with pytest.warns(UserWarning, match=SHORT):
        fit(tmp_path, train=says(), val=val_loader, max_epochs=2, num_sanity_val_steps=0, callbacks=[watch], **words)
    assert watch.seen == seen


def test_gradients_that_wait(tmp_path):
    with pytest.warns(UserWarning, match="as a whole epoch, and the gradients of the last 1 batches are lost$"):
        loop, *_ = fit(tmp_path, train=says(gives=12), max_epochs=2, accumulate_grad_batches=2)
    assert (loop.current_epoch, loop.global_step) == (2, 2)


def test_fewer_than_the_limit(tmp_path):
    with pytest.warns(UserWarning, match=SHORT):
        loop, _, history = fit(
            tmp_path, train=lambda: iter_each(4), val=val_loader, max_epochs=2, limit_train_batches=6
        )
    assert loop.global_step == 8
    assert history["val_loss"].notna().all()


class iter_each:  # noqa: N801
    """Batches anew with each pass; it has no length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(list(make_loader(4 * self.batches)))


class Takes(Classifier):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "train", "kind"),
    [
        (Classifier, lambda: (batch for batch in list(make_loader(24))), "generator"),
        (Classifier, says(gives=0, since=1), "DataLoader"),
        (Takes, lambda: (batch for batch in list(make_loader(24))), "generator"),
    ],
    ids=["used_up", "nothing", "dataloader_iter"],
)
def test_no_batches(tmp_path, make, train, kind):
    """last.ckpt is of the epoch before, and a resume with a new loader goes on from there."""
    with pytest.raises(
        ValueError, match=rf"the train loader \({kind}\) gave no batch in epoch 1: an iterator is used up"
    ):
        fit(tmp_path, make, train, max_epochs=3)
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["epoch"], found["global_step"], found["fabric_template"]["batch_idx"]) == (0, 6, 0)
    loop, _, history = fit(tmp_path, make, train, max_epochs=2, resume="last")
    assert (loop.current_epoch, loop.global_step, history["epoch"].tolist()) == (2, 12, [0, 1])
