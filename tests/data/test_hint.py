"""A DataLoader over tensors: what TensorLoader would gain is measured in the first batches and said once, where it pays."""

import pytest
import torch
from clock import Clock
from modules import Classifier, make_data, quiet
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabric_template import FabricLoop, TensorLoader
from fabric_template.data import hint

CLOCK = Clock(look=1e-5)


@pytest.fixture(autouse=True)
def on_the_clock(monkeypatch):
    """To take a sample lasts as long as is said here, and so does a step; to cut a batch, no time but the look's."""
    one = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, i: (CLOCK.sleep(1e-5), one(self, i))[1])
    monkeypatch.setattr(hint, "time", CLOCK)


class Items(Dataset):
    """The same samples, of which nobody knows that they lie in memory."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def fit(loader, steps=40, **words):
    """A long run, of which few steps are trained."""
    torch.manual_seed(0)
    loop = FabricLoop(**{**quiet(), "enable_progress_bar": True, "max_epochs": 10**6, **words})
    module = Classifier()
    step = module.training_step

    def training_step(batch, batch_idx):
        loop.should_stop = loop.global_step + 1 >= steps
        CLOCK.sleep(1e-3)
        return step(batch, batch_idx)

    module.training_step = training_step
    loop.fit(module, loader)
    return [*module.parameters()], torch.get_rng_state()


def loader_over(data, **words):
    return DataLoader(data, batch_size=64, shuffle=True, **words)


def test_it_is_said_once_and_changes_nothing(capsys):
    data = make_data(64 * 30)
    found = fit(loader_over(data))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hint:")]
    assert told == [
        "hint: 39% of a step waits for the DataLoader (0.65 of 1.66 ms), which collates samples that lie in memory;"
        " TensorLoader(x, y, ..., batch_size=64, shuffle=True) cuts such a batch in 0.01 ms: 1.6x"
    ]
    plain = fit(loader_over(data), enable_progress_bar=False)  # nothing is measured
    assert torch.equal(found[1], plain[1])
    assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: loader_over(Items(make_data(64 * 30))), {}),
        (lambda: TensorLoader(*make_data(64 * 30).tensors, batch_size=64), {}),
        (lambda: loader_over(make_data(64 * 30)), {"max_epochs": 2}),  # milliseconds are not worth a line
        (lambda: loader_over(make_data(64 * 20)), {}),  # fewer batches than are measured
    ],
    ids=["items", "tensors", "short-run", "few-batches"],
)
def test_it_is_not_said(capsys, monkeypatch, loader, words):
    fit(loader(), **words)
    assert "hint:" not in capsys.readouterr().err
    assert hint.MEASURED == 20
