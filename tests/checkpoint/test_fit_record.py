"""Test which values FabricLoop resets before a run resumes with objects of an earlier fit."""

import importlib
import math
import sys
import warnings
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from modules import HAS_PLAIN_SWALR, Classifier, assert_same_weights, make_loader
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from fabric_template import FabricLoop
from fabric_template.checkpoint.fit_record import FitRecord
from fabric_template.errors import CheckpointError
from fabric_template.plain_state import UNKNOWN, Part, PlainState

MODEL = torch.nn.Identity()


class Slots:
    __slots__ = ("value",)


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def record_fit(holder, folder, change=None, resumes=False, is_training=True, saved=None):
    """Record one fit that calls ``change``, and return the attributes at the start of training."""
    record = FitRecord(str(folder / "last.ckpt") if resumes else None, saved, MODEL, is_training)
    record.reset_and_record_parts({"model.holder": Part(holder)})
    record.keep_resets()
    start = deepcopy(getattr(holder, "__dict__", {}))
    if change is not None:
        change(holder)
    record.store([folder])
    return start


@pytest.mark.parametrize("kind", [Slots, SimpleNamespace])
def test_resume_resets_the_attributes_of_an_object_without_weak_references(tmp_path, kind):
    holder = kind()
    holder.value = 0
    record_fit(holder, tmp_path, add_one)
    record_fit(holder, tmp_path, resumes=True)
    assert holder.value == 0


def set_value(value):
    return lambda holder: setattr(holder, "value", value)


def add_one(holder):
    holder.value += 1


def double(x):
    return 2 * x


VALUES = {
    "nan": (0.0, math.nan),
    "list with nan": ([1.0], [1.0, math.nan]),
    "function": (None, double),
    "list of objects": ([], [Holder()]),
    "tensor": (torch.zeros(2), torch.ones(2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_resuming_undoes_changes_that_an_earlier_fit_made_to_model_attributes(tmp_path, name):
    first, last = VALUES[name]
    holder = Holder(value=first)
    record_fit(holder, tmp_path, set_value(last))
    if name == "nan":
        holder.value = float("nan")
    start = record_fit(holder, tmp_path, resumes=True)
    assert torch.equal(start["value"], first) if name == "tensor" else start["value"] == first


@pytest.mark.parametrize("make", [lambda: lambda x: x, lambda: [Holder()], lambda: {"a": Holder()}, lambda: 5])
def test_resuming_keeps_an_attribute_that_the_user_reassigned_after_fit(tmp_path, make):
    holder = Holder(value=None)
    record_fit(holder, tmp_path, set_value(make()))
    mine = [make(), make()][1]
    holder.value = mine if mine != 5 else 6
    mine = holder.value
    record_fit(holder, tmp_path, resumes=True)
    assert holder.value is mine


def test_resuming_an_older_run_keeps_attributes_that_the_user_set_after_that_run(tmp_path):
    holder = Holder(value=0, other=0)
    record_fit(holder, tmp_path / "a", add_one)
    holder.other, holder.new = 7, 8
    record_fit(holder, tmp_path / "b", add_one)
    assert record_fit(holder, tmp_path / "b", resumes=True) == {"value": 1, "other": 7, "new": 8}
    assert record_fit(holder, tmp_path / "a", resumes=True) == {"value": 0, "other": 7, "new": 8}


def test_fit_record_keeps_the_initial_attribute_values_of_only_the_four_newest_runs(tmp_path):
    holder = Holder(value=0)
    for index in range(6):
        record_fit(holder, tmp_path / str(index), add_one)
    assert record_fit(holder, tmp_path / "1", resumes=True) == {"value": 6}
    record_fit(holder, tmp_path / "1", add_one)
    assert record_fit(holder, tmp_path / "3", resumes=True) == {"value": 3}


def test_resuming_undoes_changes_that_validate_made_to_model_attributes(tmp_path):
    holder = Holder(value=0)
    record_fit(holder, tmp_path, add_one)
    record_fit(holder, tmp_path, add_one, is_training=False)
    assert record_fit(holder, tmp_path, resumes=True) == {"value": 0}
    record_fit(holder, tmp_path, add_one)
    holder.value = 9
    record_fit(holder, tmp_path, add_one, is_training=False)
    assert record_fit(holder, tmp_path, resumes=True) == {"value": 10}


@pytest.mark.parametrize("saved", [("model.holder.value.inner", "x"), ("model.holder", "value")])
def test_resuming_does_not_delete_an_object_that_training_created_and_saved(tmp_path, saved):
    holder, created = Holder(), Holder()
    record_fit(holder, tmp_path, set_value(created))
    record_fit(holder, tmp_path, resumes=True, saved={"attributes": {saved: 1}})
    assert holder.value is created
    assert record_fit(holder, tmp_path, resumes=True) == {}


def test_resuming_undoes_changes_to_one_object_even_if_recording_a_second_object_failed(tmp_path):
    class Unreadable(dict):
        def items(self):
            if self.get("fails"):
                raise RuntimeError
            return super().items()

    broken, holder = Unreadable(), Holder(value=0)
    record = FitRecord()
    record.reset_and_record_parts({"broken": Part(broken), "holder": Part(holder)})
    broken["fails"] = holder.value = True
    record.store([tmp_path])
    assert record_fit(holder, tmp_path, resumes=True) == {"value": 0}


def test_a_refused_resume_does_not_change_the_attributes_of_user_objects(tmp_path):
    before = {"number": 1, "items": [1, 2], "tensor": torch.ones(2), "created": Holder()}
    holder = Holder(number=0, items=[], tensor=torch.zeros(2), deleted=3)
    items = holder.items

    def change(holder):
        items.extend([1, 2])
        holder.tensor.add_(1)
        holder.number, holder.created = 1, before["created"]
        del holder.deleted

    record_fit(holder, tmp_path, change)
    record = FitRecord(str(tmp_path / "last.ckpt"))
    record.reset_and_record_parts({"holder": Part(holder)})
    assert (holder.number, holder.items, holder.deleted) == (0, [], 3)
    assert "created" not in vars(holder)
    record.store([tmp_path])
    assert torch.equal(vars(holder).pop("tensor"), before.pop("tensor"))
    assert vars(holder) == before
    assert holder.items is items


def test_fit_record_reads_the_attributes_of_each_object_only_once_and_copies_no_large_list():
    class Counted:
        reads = 0

        def __getattribute__(self, name):
            type(self).reads += name == "__dict__"
            return object.__getattribute__(self, name)

    record, counted = FitRecord(), Counted()
    vars(counted)["value"] = [(str(index), index) for index in range(150_000)]
    record.reset_and_record_parts({"a": Part(counted)})
    reads = Counted.reads
    for _ in range(3):
        record.reset_and_record_parts({"a": Part(counted), "b": Part(counted)})
    assert Counted.reads == reads
    assert PlainState({"a": Part(counted)}).start_values(["a"])["a"]["value"][1] == UNKNOWN


def test_resume_succeeds_even_if_warnings_are_errors(tmp_path):
    holder = Holder(value=torch.zeros(300_000))
    record_fit(holder, tmp_path, lambda holder: holder.value.add_(1))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"changed the attribute model\.holder\.value"):
            record_fit(holder, tmp_path, resumes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_fit(holder, tmp_path, resumes=True)


# Whole runs


class Counting(Classifier):
    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_epoch_start(self):
        self.count += 1
        if self.trainer.current_epoch == 1:
            self.trainer.accumulate_grad_batches = 2
            next(self.parameters()).requires_grad_(False)


def make_loop(root, epochs=2, **options):
    return FabricLoop(accelerator="cpu", max_epochs=epochs, default_root_dir=root, **options)


def test_resuming_from_a_checkpoint_outside_the_run_folder_keeps_model_attributes(tmp_path):
    model, loop, loader = Counting(), make_loop(tmp_path), make_loader()
    loop.fit(model, loader)
    loop.save_checkpoint(tmp_path / "mine.ckpt")
    frozen = next(model.parameters())
    model.scale = 3.0
    loop.max_epochs = 3
    loop.fit(model, loader, resume=tmp_path / "mine.ckpt")
    assert not frozen.requires_grad
    assert (model.count, model.scale, loop.current_epoch, loop.accumulate_grad_batches) == (3, 3.0, 3, 2)


def test_a_failed_resume_changes_neither_model_attributes_nor_requires_grad(tmp_path):
    model, loader = Counting(), make_loader()
    make_loop(tmp_path).fit(model, loader)
    model.double()
    with pytest.raises(CheckpointError, match="float64"):
        make_loop(tmp_path, epochs=3).fit(model, loader, resume="last")
    assert model.count == 2
    assert not next(model.parameters()).requires_grad


def test_resuming_does_not_change_a_dataset_whose_class_is_in_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "installed_data.py").write_text("class Data(list):\n    pass\n")
    monkeypatch.syspath_prepend(package)
    dataset = importlib.import_module("installed_data").Data(make_loader().dataset)
    monkeypatch.delitem(sys.modules, "installed_data")
    dataset.path, loader, model = "data", DataLoader(dataset, 8), Classifier()
    model.data = dataset
    make_loop(tmp_path, epochs=1).fit(model, loader)
    make_loop(tmp_path).fit(Classifier(), loader, resume="last")
    assert dataset.path == "data"


@pytest.mark.skipif(not HAS_PLAIN_SWALR, reason="torch 2.6 saves a function in the state of SWALR")
def test_resume_is_exact_if_the_weight_averaging_callback_is_reused(tmp_path):
    callback, model, loader = StochasticWeightAveraging(0.05, swa_epoch_start=1), Classifier(), make_loader()
    make_loop(tmp_path, 3, callbacks=[callback], monitor="train_loss", save_top_k=-1).fit(model, loader)
    expected = deepcopy(model)
    first = min((tmp_path / "checkpoints/run/version_0").glob("*epoch=0*.ckpt"))
    make_loop(tmp_path, 3, callbacks=[callback]).fit(model, loader, resume=first)
    assert_same_weights(expected, model)


class Noisy(TensorDataset):
    noise = 0.0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.noise, y


class AddsNoise(Classifier):
    def __init__(self, dataset, data):
        super().__init__()
        self.data, self.add_noise = data, lambda: setattr(dataset, "noise", dataset.noise + 0.3)

    def train_dataloader(self):
        return self.data if isinstance(self.data, DataLoader) else DataLoader(self.data, 8, shuffle=True)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.current_epoch > 0:
            self.add_noise()


WRAPPERS = {
    "subset": lambda dataset: Subset(dataset, range(30)),
    "concatenated": lambda dataset: ConcatDataset([dataset, dataset]),
    "loader": lambda dataset: DataLoader(dataset, 8, shuffle=True),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_resuming_from_an_early_checkpoint_undoes_later_changes_to_the_dataset(tmp_path, name):
    dataset = Noisy(*make_loader().dataset.tensors)
    model = AddsNoise(dataset, WRAPPERS[name](dataset))
    make_loop(tmp_path, 3, monitor="train_loss", mode="min", save_top_k=-1, seed=1).fit(model)
    expected = deepcopy(model.state_dict())
    first = min((tmp_path / "checkpoints/run/version_0").glob("*epoch=0*.ckpt"))
    make_loop(tmp_path, 3, seed=1).fit(model, resume=first)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
