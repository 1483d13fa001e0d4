"""Test edits of MiniLoop's methods: their state, resumed runs, and errors about misuse."""

import enum
from collections import defaultdict, deque, namedtuple
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from modules import assert_same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric_template import MiniLoop

Pair = namedtuple("Pair", "a b")


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


def make_loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)


def step(net, batch):
    return mse_loss(net(batch[0]), batch[1])


class Killed(Exception):
    pass


def train(kind, name="run", kill=None, resume=None, val=True, make_scheduler=None, **options):
    """Train a linear net for 3 epochs of 8 batches. With ``kill``, end before this training step."""
    torch.manual_seed(3)
    net, steps = nn.Linear(4, 1), iter(range(1, 1000))

    def training_step(net, batch):
        if next(steps) == kill:
            raise Killed
        return step(net, batch)

    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    arguments = {"optimizer": optimizer, "training_step": training_step, "resume": resume}
    arguments |= {"val_dataloaders": make_loader(), "validation_step": step} if val else {}
    arguments |= {"scheduler": make_scheduler(optimizer)} if make_scheduler else {}
    loop = kind(accelerator="cpu", name=name, **{"max_epochs": 3, **options})
    loop.fit(net, make_loader(), **arguments)
    return loop, net


def assert_resumes(kind, kill=12, **options):
    """Check that a killed and resumed run ends with the weights and rows of an uninterrupted run."""
    whole, expected = train(kind, "whole", **options)
    with pytest.raises(Killed):
        train(kind, "parts", kill=kill, **options)
    resumed, net = train(kind, "parts", resume="last", **options)
    assert_same_weights(expected, net)
    drop = ("time", "waiting")
    rows = [[{n: v for n, v in row.items() if n not in drop} for row in loop.history] for loop in (whole, resumed)]
    assert rows[0] == rows[1]
    return whole, resumed


# Values that an edit adds to a checkpoint

UNREADABLE = {
    "enum": Phase.WARM,
    "float32": np.float32(0.3),
    "array": np.ones(2),
    "date": date(2020, 1, 1),
    "path": Path("a"),
    "named tuple": Pair(1, 2),
    "deque": deque([1.0], 3),
    "defaultdict": defaultdict(int, a=1),
    "generator": torch.Generator(),
    "module": nn.Linear(1, 1),
    "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
    "set": {Phase.WARM},
    "function": lambda: None,
}


def saves(value):
    class Saves(MiniLoop):
        def _build_checkpoint(self):
            return {**super()._build_checkpoint(), "mine": value}

        def _restore(self, path, checkpoint, is_automatic):
            super()._restore(path, checkpoint, is_automatic)
            self.restored.append(checkpoint["mine"])

    Saves.restored = []
    return Saves


@pytest.mark.parametrize("case", UNREADABLE)
def test_the_first_save_refuses_a_value_of_an_edit_that_no_run_can_read(case):
    with pytest.raises(ValueError, match=r"^checkpoint: got (a value of 'mine'|the NumPy value)"):
        train(saves(UNREADABLE[case]), max_epochs=1)


@pytest.mark.parametrize("value", [np.float64(0.3), {1, 2}, torch.ones(2), [{"a": (None, "b", torch.float32)}]])
def test_a_resumed_run_reads_the_value_that_an_edit_has_saved(value):
    kind = saves(value)
    train(kind, max_epochs=1)
    train(kind, max_epochs=2, resume="last")
    [restored] = kind.restored
    assert torch.equal(restored, value) if isinstance(value, torch.Tensor) else restored == value
    assert type(restored) is (float if isinstance(value, np.float64) else type(value))
