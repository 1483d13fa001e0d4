"""What a resume cannot bring back is named: plain attributes that hooks change, and a hook that is not called again."""

import shutil
import time
import warnings

import pytest
import torch
from calls import calls_of
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, Timer
from modules import Classifier, make_data, make_loader
from runs import fit, val_loader
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric_template.files import noticed


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.fixed = 0, [1, {"a": "b"}]

    def forward(self, x):
        self.calls += 1
        return x


class Forgets(Classifier):
    """Changes attributes of every plain kind, whose values nothing keeps."""

    def __init__(self):
        super().__init__()
        self.part = Part()
        self.save_hyperparameters()
        self.count, self.best, self.word, self.flag = 0, float("inf"), "", False
        self.losses, self.seen, self.table = [], set(), {}
        self.nothing, self.same = None, 5

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.best = min(self.best, float(batch[0].sum()))
        self.word += "x"
        self.flag = not self.flag
        self.losses.extend([0.5] * 200)
        self.seen.add(self.count)
        self.table.setdefault("rows", []).append(batch_idx)
        self.nothing = self.count if self.nothing is None else self.nothing
        self.part(batch[0])
        return super().training_step(batch, batch_idx)


class Remembers(Callback):
    """Has a state_dict."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Anew(Classifier):
    """Sets its attributes before it looks at them, or back at an epoch's end: nothing is lost."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def on_train_start(self):
        self.began = time.perf_counter()

    def on_validation_epoch_start(self):
        self.outputs = []

    def training_step(self, batch, batch_idx):
        self.size = float(batch[0].sum())
        if self.trainer.is_last_batch:
            self.trace.append(self.size)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.outputs.append(1)
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.trace = []


class EachEpoch(Classifier):
    def on_train_epoch_start(self):
        self.stamp = time.perf_counter()


class Buffered(Classifier):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.copy = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.copy += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["copy"] = self.copy

    def on_load_checkpoint(self, checkpoint):
        self.copy = checkpoint["copy"]


class Counts(Dataset):
    def __init__(self):
        self.data, self.loaded = make_data(24), 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.loaded += 1
        return self.data[index]


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.stages = 0

    def train_dataloader(self):
        return make_loader(24)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.stages += 1
        return batch


class Copies(Callback):
    """The folder as a kill would leave it after so many steps."""

    def __init__(self, root, at):
        self.root, self.at, self.batches = root, at, 0

    def on_train_batch_start(self, *_):
        if self.batches == self.at:
            shutil.copytree(self.root / "whole", self.root / "killed")
        self.batches += 1


def said(root, capsys, make, at, train=lambda: make_loader(24), callbacks=list, **words):
    """What a resume says of a run that was killed after so many of its 12 steps: warnings, and lines."""
    words = {"train": train, "val": val_loader, "max_epochs": 2, "save_every_n_steps": 1, **words}
    fit(root / "whole", make, callbacks=[*callbacks(), Copies(root, at)], **words)
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(root / "killed", make, callbacks=callbacks(), resume="last", **words)
    found = [str(warning.message) for warning in caught] + capsys.readouterr().err.splitlines()
    return [line for line in found if line.startswith("resume: ")]


LOST = (
    "had changed in training, which no state_dict has brought back: keep such values in a buffer, a state_dict, or"
    " on_save_checkpoint and on_load_checkpoint"
)


@pytest.mark.parametrize("at", [3, 6, 9])
def test_attributes_that_are_lost(tmp_path, capsys, at):
    names = "best, Forgets.count, Forgets.flag, Forgets.losses, Forgets.nothing, Forgets.part.calls, Forgets.seen"
    names = sorted([*f"Forgets.{names}".split(", "), "Forgets.table", "Forgets.word"])
    if at % 2 == 0:
        names.remove("Forgets.flag")
    (line,) = said(tmp_path, capsys, Forgets, at)
    told, _, rest = line.removeprefix("resume: ").partition(" had ")
    assert sorted(told.split(", ")) == names
    assert f"had {rest}" == LOST


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (Classifier, lambda: [Remembers(), EarlyStopping("val_loss", patience=9), Timer("00:01:00:00"), LearningRateMonitor()]),
        (Anew, list),
        (Buffered, list),
    ],
    ids=["callbacks", "anew", "buffers"],
)  # fmt: skip
def test_no_false_alarm(tmp_path, capsys, make, callbacks, at):
    assert said(tmp_path, capsys, make, at, callbacks=callbacks) == []


def test_a_dataset_that_counts(tmp_path, capsys):
    assert said(tmp_path, capsys, Classifier, 3, train=lambda: DataLoader(Counts(), batch_size=4)) == [
        f"resume: Counts.loaded {LOST}"
    ]


def test_a_datamodule_and_two_callbacks_of_one_class(tmp_path, capsys):
    class Remains(Remembers):
        state_dict = Callback.state_dict

    def run(root, **words):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(root, train=Data, callbacks=[Remains(), Remains()], **words)
        return [str(warning.message) for warning in caught if "resume: " in str(warning.message)]

    run(tmp_path, max_epochs=1)
    assert run(tmp_path, max_epochs=2, resume="last") == [
        f"resume: Remains.batches, Remains#2.batches, Data.stages {LOST}"
    ]


def test_on_train_epoch_start_is_not_called_again(tmp_path, capsys):
    class Prints(Callback):
        def on_train_epoch_start(self, *_):
            torch.rand(1)

    hook = "on_train_epoch_start of {} was called before, and is not called again in this epoch"
    assert said(tmp_path / "a", capsys, Classifier, 3, callbacks=lambda: [Prints()]) == [
        f"resume: {hook.format('Prints')}"
    ]
    assert said(tmp_path / "b", capsys, Classifier, 6, callbacks=lambda: [Prints()]) == []
    assert said(tmp_path / "c", capsys, EachEpoch, 9) == [f"resume: {hook.format('EachEpoch')}; EachEpoch.stamp {LOST}"]
    assert said(tmp_path / "d", capsys, EachEpoch, 6) == []  # it is called now


def test_it_looks_at_no_more_than_it_may():
    """A long list counts by its length and its end, large nests are data; so a save does not wait for it."""
    million = list(range(1_000_000))

    def look():
        assert noticed._text(million) != noticed._text(million[:-1])
        assert noticed._text({"a": million, "b": [million] * 100}) is None
        assert noticed._text({index: index for index in range(10_000)}) == "10000 []"
        assert noticed._text([torch.ones(1)]) is None

    assert calls_of(look)[1] < 20_000
