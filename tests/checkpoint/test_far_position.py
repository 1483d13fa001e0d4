"""To go on at batch 1,000,000 costs no work for each batch before it."""

import sys

import pytest
import torch
from fabric_template.exact.middle import resume
from fabric_template.exact.position import source_of
from modules import Classifier, make_data
from runs import assert_same_end, fit
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from fabric_template import TensorLoader

SIZE, DONE = 1000, 950


class Counted:
    """In a tensor's place: notes each cut."""

    device = torch.device("cpu")

    def __init__(self, size):
        self.values, self.cuts = torch.arange(size), 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.cuts += 1
        return self.values[index]


def resumed(make, done):
    """(the batches of a whole pass behind so many, those of a pass that begins there, its source); each from one state."""
    torch.manual_seed(3)
    whole = source_of(make(), records=True, trains=True)
    batches = iter(whole)
    first = [next(batches) for _ in range(done)]
    state = whole.state({**whole.position(), "taken": done})
    rest = list(batches)
    torch.manual_seed(4)
    source = source_of(make(), records=True, trains=True)
    resume(source, state)
    assert len(first) == done
    return rest, source


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_tensor_loader_cuts_no_batch_that_is_done(shuffle, batch_size, drop_last, shared):
    counted = []

    def make():
        counted.append(Counted(SIZE))
        loader = TensorLoader(counted[-1], batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
        if shared:
            loader.distribute(3, 1, shuffle, repeat=False)
        return loader

    done = len(make()) - 5
    rest, source = resumed(make, done)
    found = list(source)
    assert [batch[0].tolist() for batch in found] == [batch[0].tolist() for batch in rest]
    assert (len(found), counted[-1].cuts) == (5, 5)


SAMPLERS = {
    "in order": lambda data: {"batch_size": 2},
    "shuffled": lambda data: {"batch_size": 2, "shuffle": True},
    "drop_last": lambda data: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "replaced": lambda data: {"batch_size": 2, "sampler": RandomSampler(data, replacement=True)},
    "shared": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, 2, 1)},
    "own batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 2, False)},
    "no batches": lambda data: {"batch_size": None, "shuffle": True},
    "workers": lambda data: {"batch_size": 2, "shuffle": True, "num_workers": 2},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_data_loader_puts_no_batch_together_that_is_done(kind):
    """Plain samplers: their indices are dropped by islice, without a step of Python for each batch."""
    data = range(SIZE)

    def make():
        return DataLoader(data, **SAMPLERS[kind](data), generator=torch.Generator().manual_seed(5))

    rest, source = resumed(make, len(make()) - 10)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and frame.f_code is BatchSampler.__iter__.__code__

    sys.setprofile(count)
    try:
        found = list(source)
    finally:
        sys.setprofile(None)
    assert [torch.as_tensor(batch).tolist() for batch in found] == [torch.as_tensor(batch).tolist() for batch in rest]
    assert calls <= 12


def test_a_run_goes_on_in_the_middle(tmp_path):
    tensors = make_data(64).tensors

    def train():
        return TensorLoader(*tensors, batch_size=3, shuffle=True)

    whole = fit(tmp_path / "whole", train=train, max_epochs=2)
    fit(tmp_path / "a", train=train, max_epochs=2, max_steps=30)
    assert_same_end(whole, fit(tmp_path / "a", Classifier, train, seed=9, max_epochs=2, resume="last"))
