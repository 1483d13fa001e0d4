"""What the loop costs per batch, counted in calls of its own functions: no clock, so no machine makes it fail."""

import sys
from pathlib import Path

import pytest
import torch
from modules import Classifier, make_loader, quiet

import fabric_template
from fabric_template import FabricLoop

PACKAGE = str(Path(fabric_template.__file__).parent)
MORE = 5  # than when the number was written down: a change that adds so many calls to each batch is measured first


def calls_of(train, **words):
    """Calls of the package's functions that each further batch of an epoch brings."""
    counted = []
    for batches in (8, 24):
        torch.manual_seed(1)
        loader, count = make_loader(4 * batches), 0

        def count_ours(frame, event, arg):
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

        loop = FabricLoop(**quiet(max_epochs=1, **words))
        sys.setprofile(count_ours)
        try:
            train(loop, loader)
        finally:
            sys.setprofile(None)
        counted.append(count)
    return (counted[1] - counted[0]) / 16


def with_functions(loop, loader):
    net = torch.nn.Linear(8, 3)
    step = lambda net, batch: torch.nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    loop.fit(net, loader, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=step)


def with_module(loop, loader):
    loop.fit(Classifier(), loader)


EVERYTHING = {"logger": True, "enable_checkpointing": True, "enable_progress_bar": True, "log_every_n_steps": 1000}


@pytest.mark.parametrize(
    ("train", "words", "known"),
    [
        (with_functions, {"barebones": True, "logger": None, "enable_checkpointing": None}, 15),
        (with_functions, EVERYTHING, 24),
        (with_module, {}, 25),
        (with_module, EVERYTHING, 30),
    ],
    ids=["functions-barebones", "functions-everything", "module-quiet", "module-everything"],
)
def test_calls(train, words, known, monkeypatch):
    monkeypatch.setattr("fabric_template.record.bar.SECONDS_BETWEEN", float("inf"))  # a slow machine draws more often
    calls = calls_of(train, **words)
    assert known - MORE <= calls <= known + MORE, "fewer: write the number down here; more: see benchmarks/overhead.py"
