"""What a whole fit costs beside its steps, counted in calls: no clock, so no machine makes it fail."""

import gc

import pytest
import torch
from calls import calls_of
from modules import Classifier, make_loader, quiet

from fabric_template import FabricLoop, MiniLoop

EVERYTHING = {"logger": True, "enable_checkpointing": True, "enable_progress_bar": True}


def everything(epochs):
    return FabricLoop(**quiet(max_epochs=epochs, **EVERYTHING))


def mini(epochs):
    return MiniLoop(accelerator="cpu", max_epochs=epochs)


def calls_of_fit(make, epochs):
    """All calls, those of libraries too, in a fit of so many epochs of one step."""
    loop, net, loader = make(epochs), Classifier(), make_loader(4)
    gc.collect()  # what ends with the garbage of other tests is not the fit's
    return calls_of(loop.fit, net, loader)[1]


@pytest.mark.parametrize("further", [0, 10], ids=["once", "each-epoch"])
def test_calls(tmp_path, monkeypatch, further):
    """Some 2.8 times as many as MiniLoop's, which writes the same files; up to 2.89 behind other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fabric_template.record.bar.SECONDS_BETWEEN", float("inf"))  # a slow machine draws more often
    counts = []
    for make in (everything, mini):
        torch.manual_seed(1)
        calls_of_fit(make, 1)  # what is imported, or asked once per process
        once = calls_of_fit(make, 1)
        counts.append(calls_of_fit(make, 1 + further) - once if further else once)
    assert counts[0] / counts[1] < 3.1, f"{counts}: what is new in each fit is measured first, see benchmarks/once.py"
