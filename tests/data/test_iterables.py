"""Test that every kind of iterable gives the same batches as with Trainer, even in a resumed run."""

import contextlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from modules import HAS_EXACT_TRAINER, Classifier, assert_parity, make_data, make_loader
from resume_loaders import ShufflesInIter
from runs import Snapshots, assert_same_end, fit, logs_of
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric_template import FabricLoop, MiniLoop
from fabric_template.errors import CheckpointError

BATCHES = list(make_loader(24, shuffle=False))

pytestmark = pytest.mark.filterwarnings("ignore:train_dataloaders. .* cannot be resumed after its first epoch")


class Own:
    """A loader that is its own iterator. ``__iter__`` draws a new order and returns the loader."""

    def __iter__(self):
        self.order = iter(torch.randperm(6).tolist())
        return self

    def __next__(self):
        return BATCHES[next(self.order)]


class OwnWithLength(Own):
    def __len__(self):
        return 6


class Function:
    """An iterable that draws random numbers when its first batch is requested, because __iter__ is a generator."""

    def __iter__(self):
        for index in torch.randperm(6).tolist():
            yield BATCHES[index]


class Items:
    """A loader that defines ``__getitem__`` but not ``__iter__``."""

    def __getitem__(self, index):
        return BATCHES[index]


class OwnDataLoader(torch.utils.data.DataLoader):
    """A DataLoader that is its own iterator."""

    def __init__(self):
        super().__init__(make_loader(24).dataset, batch_size=4, shuffle=True)

    def __iter__(self):
        self.batches = super().__iter__()
        return self

    def __next__(self):
        return next(self.batches)


OWN_BATCHES = {"batch_sampler": ShufflesInIter(range(6)), "num_workers": 2}
own_batches = partial(torch.utils.data.DataLoader, make_loader(24).dataset, **OWN_BATCHES)


@pytest.mark.parametrize("make", [Own, OwnWithLength, Function, Items, OwnDataLoader, own_batches])
def test_iterables_give_the_same_batches_as_with_trainer(make):
    """The runs include a sanity check. Iterables with a length are shortened by limit_train_batches."""
    if make is own_batches and not HAS_EXACT_TRAINER:
        pytest.skip("Trainer of Lightning 2.5.0 cannot validate with this batch sampler")
    limits = {"limit_train_batches": 4, "limit_val_batches": 3} if hasattr(make, "__len__") else {}
    assert_parity(Classifier, make, make, max_epochs=2, **limits)


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize("make", [Own, OwnWithLength, Items])
def test_a_run_resumed_mid_epoch_on_an_iterable_matches_an_uninterrupted_run(tmp_path, make):
    options = {"train": make, "max_epochs": 2, "save_every_n_steps": 1}
    whole = fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "killed")], **options)
    root = tmp_path / "killed/9"
    assert_same_end(whole, fit(root, seed=9, resume="last", **options))
    assert logs_of(root) == logs_of(tmp_path / "whole")


def once():
    """Return an iterator that yields its batches only once."""
    return itertools.chain(BATCHES)


def test_fit_trains_for_one_epoch_on_an_iterator_that_can_be_read_only_once():
    assert_parity(Classifier, once, once, max_epochs=1, num_sanity_val_steps=0)


def test_an_exhausted_iterator_is_refused_in_training_but_not_in_validation(tmp_path):
    """In validation, an exhausted iterator only causes a warning."""
    hint = r"loader \(chain\) yielded no batches in .* An iterator yields its batches only once\. Pass an object"
    with pytest.raises(ValueError, match=f"The train {hint}"):
        fit(tmp_path, train=once, max_epochs=2)
    with pytest.warns(UserWarning, match=f"The val {hint}"):
        fit(tmp_path, val=once, max_epochs=2, num_sanity_val_steps=0)


class Slices:
    """A loader that yields the next five batches of an endless random stream in each epoch."""

    def __init__(self):
        self.stream = self.read()

    def read(self):
        while True:
            if np.random.random() < 0.7:
                yield BATCHES[np.random.randint(6)]

    def __iter__(self):
        yield from itertools.islice(self.stream, 5)


class Doubled:
    """A loader that changes the batches of another iterable, as a pipeline of transforms does."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return ((2 * x, y) for x, y in self.source)


def pipeline():
    """Create a loader that contains an iterator three levels deep."""
    return Doubled(Doubled(Slices()))


class Queue:
    """A loader that is its own iterator. Each epoch continues where the previous epoch ended."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return BATCHES[self.position * 5 % 6 - 1]


class Cycle(torch.utils.data.IterableDataset):
    def __init__(self):
        x, y = make_loader(24).dataset.tensors
        self.samples = itertools.cycle(list(zip(x, y, strict=True)))

    def __iter__(self):
        return itertools.islice(self.samples, 18)


def cycle():
    return torch.utils.data.DataLoader(Cycle(), batch_size=4)


CONTINUED = {Slices: {}, pipeline: {}, cycle: {}, Queue: {"limit_train_batches": 5, "limit_val_batches": 2}}


@pytest.mark.filterwarnings("ignore:resume. .* (are read again|draws random numbers)")
@pytest.mark.parametrize("make", CONTINUED)
def test_resuming_after_epoch_0_is_refused_if_the_loader_does_not_restart_each_epoch(tmp_path, make):
    options = {"train": make, "max_epochs": 3, "save_every_n_steps": 1, **CONTINUED[make]}
    whole = fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "killed")], **options)
    root = tmp_path / "killed" / "2"
    assert_same_end(whole, fit(root, seed=9, resume="last", **options))
    assert logs_of(root) == logs_of(tmp_path / "whole")
    for batch in (5, 7):
        with pytest.raises(CheckpointError, match="contains an iterator that continues across epochs"):
            fit(tmp_path / "killed" / str(batch), resume="last", **options)


@pytest.mark.filterwarnings("ignore:checkpoint. .*the position of")
@pytest.mark.parametrize("make", [Slices, pipeline, cycle])
def test_fabric_loop_cannot_resume_a_mini_loop_run_if_the_loader_contains_an_iterator(tmp_path, make):
    """MiniLoop does not save the position of an iterator that a loader contains."""
    loop = MiniLoop(max_epochs=1, name="run", default_root_dir=tmp_path, accelerator="cpu")
    loop.fit(Classifier(), make())
    with pytest.raises(CheckpointError, match="contains an iterator that continues across epochs"):
        fit(tmp_path, train=make, max_epochs=2, resume="last")


@pytest.mark.filterwarnings("ignore:checkpoint. .*the position of")
@pytest.mark.parametrize("make", [Slices, pipeline, cycle])
def test_mini_loop_cannot_resume_after_epoch_0_if_the_loader_contains_an_iterator(tmp_path, make):
    options = {"name": "run", "default_root_dir": tmp_path, "accelerator": "cpu"}
    loop = MiniLoop(max_epochs=1, **options)
    loop.fit(Classifier(), make())
    with pytest.raises(ValueError, match=r"resume: .* positions of the loader.s iterators .* load= for a new run"):
        MiniLoop(max_epochs=2, **options).fit(Classifier(), make(), resume="last")


@pytest.mark.filterwarnings("ignore:resume. .* are read again", "ignore:.set_vital. is deprecated")
def test_resuming_after_epoch_0_is_refused_for_a_stateful_loader_with_persistent_workers(tmp_path):
    def make():
        return StatefulDataLoader(make_data(24), 4, num_workers=2, persistent_workers=True)

    options = {"train": make, "max_epochs": 3, "save_every_n_steps": 1}
    whole = fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "killed")], **options)
    assert_same_end(whole, fit(tmp_path / "killed" / "2", seed=9, resume="last", **options))
    with pytest.raises(CheckpointError, match="StatefulDataLoader has persistent workers"):
        fit(tmp_path / "killed" / "8", resume="last", **options)


@pytest.mark.parametrize("make", CONTINUED)
def test_fit_warns_in_the_first_epoch_about_a_loader_that_does_not_restart_each_epoch(tmp_path, make):
    with pytest.warns(UserWarning, match="train_dataloaders: .* cannot be resumed after its first epoch"):
        fit(tmp_path, train=make, max_steps=1, max_epochs=1)


def test_resume_warns_that_earlier_batches_of_an_iterable_are_read_again(tmp_path):
    options = {"train": Own, "max_epochs": 2, "save_every_n_steps": 1}
    fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "killed")], **options)
    with pytest.warns(UserWarning, match="resume: 3 batches of Own are read again"):
        fit(tmp_path / "killed" / "9", resume="last", **options)


@pytest.mark.parametrize("make", [Slices, cycle])
def test_fabric_loop_and_trainer_give_equal_weights_if_a_loader_does_not_restart_each_epoch(make):
    assert_parity(Classifier, make, make, max_epochs=3)


class Refilled(torch.utils.data.Dataset):
    """A dataset that takes its samples from an iterator, and creates the iterator again when it is used up."""

    def __init__(self):
        x, y = make_loader(24).dataset.tensors
        self.samples, self.source = list(zip(x, y, strict=True)), None

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.source = iter(self.samples) if self.source is None else self.source
        sample = next(self.source, None)
        if sample is None:
            self.source = iter(self.samples)
            sample = next(self.source)
        return sample


def refilled():
    return torch.utils.data.DataLoader(Refilled(), batch_size=4)


class StopsAt(Classifier):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def training_step(self, batch, batch_idx):
        if self.global_step == self.step:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:(train_dataloaders|checkpoint).* iterator")
@pytest.mark.parametrize("step", [3, 7])
def test_fabric_loop_refuses_to_resume_if_the_dataset_creates_an_iterator(tmp_path, step):
    options = {"default_root_dir": tmp_path, "accelerator": "cpu", "save_every_n_steps": 1, "max_epochs": 3}
    with contextlib.suppress(KeyboardInterrupt):
        FabricLoop(**options).fit(StopsAt(step), refilled())
    with pytest.raises(CheckpointError, match="contains an iterator that continues across epochs"):
        FabricLoop(**options).fit(Classifier(), refilled(), resume="last")


@pytest.mark.filterwarnings("ignore:(train_dataloaders|checkpoint).* iterator")
def test_mini_loop_refuses_to_resume_after_epoch_0_if_the_dataset_creates_an_iterator(tmp_path):
    options = {"default_root_dir": tmp_path, "accelerator": "cpu", "validate_every_n_steps": 1, "max_epochs": 3}
    val = make_loader(8, shuffle=False)
    with contextlib.suppress(KeyboardInterrupt):
        MiniLoop(**options).fit(StopsAt(7), refilled(), val)
    with pytest.raises(ValueError, match="positions of the loader.s iterators"):
        MiniLoop(**options).fit(Classifier(), refilled(), val, resume="last")
