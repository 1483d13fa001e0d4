"""Samplers and datasets with a state of their own, and samplers that draw as they are asked, killed at every batch."""

import random

import pytest
import torch
from modules import Classifier, assert_parity, make_data
from runs import Snapshots, assert_same_end, fit, logs_of
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler


class Counts:
    """An order that depends on how much was drawn before, in all passes; with a state."""

    def __init__(self, size=20):
        self.size, self.drawn = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        for i in range(self.size):
            self.drawn += 1
            yield (i * 7 + self.drawn // 3) % self.size

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class Batches(BatchSampler):
    """The same for a batch sampler, whose sampler has one, too."""

    def __init__(self):
        super().__init__(Counts(), 4, False)
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for indices in super().__iter__():
            yield [(i + self.passes) % 20 for i in indices]

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class Ages(Dataset):
    """A dataset that fades with each item that was loaded."""

    def __init__(self):
        self.data, self.age = make_data(20), 0

    def __len__(self):
        return 20

    def __getitem__(self, i):
        x, y = self.data[i]
        self.age += 1
        return x / (1 + self.age / 10), y

    def state_dict(self):
        return {"age": self.age}

    def load_state_dict(self, state):
        self.age = state["age"]


class Stream(IterableDataset):
    """The same as a stream."""

    def __init__(self):
        self.items = Ages()

    def __iter__(self):
        return (self.items[i] for i in range(20))

    def state_dict(self):
        return self.items.state_dict()

    def load_state_dict(self, state):
        self.items.load_state_dict(state)


class Lazy:
    """A batch drawn by itself, whenever one is asked for, from the numbers that dropout draws from."""

    def __len__(self):
        return 5

    def __iter__(self):
        for _ in range(5):
            yield torch.randint(20, (4,)).tolist()


class OwnNumbers(Lazy):
    def __init__(self):
        self.numbers = random.Random(3)

    def __iter__(self):
        for _ in range(5):
            yield [self.numbers.randrange(20) for _ in range(4)]


class AtOnce:
    """The whole order is drawn when a pass is asked for, as in many samplers that people write."""

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(torch.randperm(20).tolist())


class BatchesAtOnce:
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(torch.randperm(20).reshape(5, 4).tolist())


LOADERS = {
    "sampler": lambda workers: DataLoader(make_data(20), 4, sampler=Counts(), num_workers=workers),
    "batch_sampler": lambda workers: DataLoader(make_data(20), batch_sampler=Batches(), num_workers=workers),
    "at_once": lambda workers: DataLoader(make_data(20), 4, sampler=AtOnce(), num_workers=workers),
    "batches_at_once": lambda workers: DataLoader(make_data(20), batch_sampler=BatchesAtOnce(), num_workers=workers),
    "dataset": lambda workers: DataLoader(Ages(), 4, shuffle=True, num_workers=workers),
    "stream": lambda workers: DataLoader(Stream(), 4, num_workers=workers),
    "lazy": lambda workers: DataLoader(make_data(20), batch_sampler=Lazy(), num_workers=workers),
    "own_numbers": lambda workers: DataLoader(make_data(20), batch_sampler=OwnNumbers(), num_workers=workers),
    "random": lambda workers: DataLoader(
        make_data(20), batch_sampler=BatchSampler(RandomSampler(range(20)), 4, False), num_workers=workers
    ),
}


def kill_everywhere(tmp_path, loader, where, val=None):
    words = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": 1, "val": val}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    whole = fit(whole_root, Classifier, loader, callbacks=[Snapshots(whole_root, copies)], **words)
    for batches in where:
        root = copies / str(batches)
        assert_same_end(whole, fit(root, Classifier, loader, seed=99, resume="last", **words))
        assert logs_of(root) == logs_of(whole_root), f"killed after {batches} batches"


@pytest.mark.filterwarnings("ignore:resume. DataLoader is asked again")
@pytest.mark.parametrize("name", LOADERS)
def test_in_this_process(tmp_path, name):
    kill_everywhere(tmp_path, lambda: LOADERS[name](0), (1, 3, 4, 5, 7, 9))


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "at_once", "batches_at_once", "own_numbers", "random"])
def test_with_workers(tmp_path, name):
    kill_everywhere(tmp_path, lambda: LOADERS[name](1), (1, 3, 5, 7))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["at_once", "batches_at_once", "random"])
def test_drawn_when_trainer_draws(name, workers):
    """Before or behind the seed of the workers: the order is Trainer's."""
    assert_parity(Classifier, lambda: LOADERS[name](workers), max_epochs=2)


@pytest.mark.filterwarnings("ignore:resume. Lazy draws a batch as it is sent to a worker")
def test_drawn_ahead_of_training(tmp_path):
    """What workers were sent already comes, and what is drawn then is drawn where the run stood."""
    kill_everywhere(tmp_path, lambda: LOADERS["lazy"](1), (1, 2, 4, 5, 6, 8))


def test_a_line_for_what_is_drawn_ahead(tmp_path):
    with pytest.warns(
        UserWarning, match="resume: Lazy draws a batch as it is sent to a worker, from random numbers that"
    ):
        kill_everywhere(tmp_path, lambda: LOADERS["lazy"](1), (3,))


def test_a_line_for_a_dataset_in_workers(tmp_path):
    """Its copies there cannot be asked; between two epochs there are none, and it is exact."""
    kill_everywhere(tmp_path / "between", lambda: LOADERS["dataset"](1), (5,))
    with (
        pytest.warns(UserWarning, match="resume: Ages has state_dict, but its copies in the worker processes change"),
        pytest.raises(AssertionError),
    ):
        kill_everywhere(tmp_path / "inside", lambda: LOADERS["dataset"](1), (3,))


def test_in_validation(tmp_path):
    kill_everywhere(tmp_path, lambda: LOADERS["random"](0), (4, 5, 7), val=lambda: LOADERS["dataset"](0))
