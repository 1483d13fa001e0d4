"""find_lr: a rate between those that are too small and those that blow up; all is as it was afterwards."""

import os

import pytest
import torch
from torch import nn

from fabric_template import FabricLoop, TensorLoader
from fabric_template.core.errors import Misuse
from fabric_template.tools.ratetest import RateTest, find_lr


def quadratic(net, batch):
    """SGD on it blows up above a rate of 2 / 4 = 0.5."""
    return 2 * (net.weight - 3).pow(2).sum() + 0 * batch[0].sum()


def parts(lr=0.25):
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    return (
        net,
        torch.optim.SGD(net.parameters(), lr=lr, momentum=0.0),
        TensorLoader(torch.zeros(40, 1), batch_size=2, shuffle=True),
    )


def test_a_quadratic(tmp_path):
    net, optimizer, loader = parts()
    numbers = torch.get_rng_state()
    found = find_lr(FabricLoop(accelerator="cpu"), net, loader, optimizer=optimizer, training_step=quadratic)
    assert found.losses[0] == pytest.approx(18)
    assert found.rates[1] / found.rates[0] == pytest.approx(10 ** (8 / 99))
    assert found.rates[-1] < 5  # it has ended before: the loss blew up
    assert 0.5 < found.blows_up < 5
    assert 1e-3 < found.suggestion < 0.5
    assert found.why in ("steepest descent", "a tenth of where it blows up")
    assert found.suggestion == min(found.steepest, found.blows_up / 10)
    assert net.weight.item() == 0
    assert net.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(numbers, torch.get_rng_state())
    assert os.listdir(tmp_path) == []

    found.save_csv("curve.csv")
    rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert rows[0] == "lr,loss,smoothed"
    assert rows[1] == "1e-07,18.0,18.0"
    assert len(rows) == len(found.rates) + 1
    found.save_picture("curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"suggested   {found.suggestion:.3g}: {found.why}" in str(found)


def test_each_rate_is_of_a_whole_window():
    net, optimizer, loader = parts()
    loop = FabricLoop(accelerator="cpu", accumulate_grad_batches=3)
    found = find_lr(loop, net, loader, optimizer=optimizer, training_step=quadratic, steps=12, high=1e-3)
    assert len(found.rates) == len(found.losses) == 12
    assert found.rates[-1] == pytest.approx(1e-3)
    assert found.blows_up is None
    assert "blows up nowhere in this range" in str(found)


def test_curves_that_suggest_nothing_and_ways_to_suggest():
    rates = [10.0 ** (k / 10) for k in range(-40, 0)]
    flat = RateTest(rates, [1.0] * 40)
    assert (flat.suggestion, flat.why) == (None, "the loss falls at none of these rates")
    cliff = RateTest(rates, [2.0] * 30 + [1.9, 1.0, 0.5] + [float("nan")] * 7)
    assert cliff.blows_up == rates[33]
    assert cliff.why == "a tenth of where it blows up"
    assert cliff.suggestion == pytest.approx(rates[23])


class TwoOptimizers(nn.Linear):
    automatic_optimization = False

    def __init__(self):
        super().__init__(1, 1)

    def training_step(self, batch):
        return self(batch[0]).mean()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


def test_what_is_refused():
    net, optimizer, loader = parts()
    loop = FabricLoop(accelerator="cpu")
    with pytest.raises(Misuse, match=r"lr from 1 to 0\.1: expected two rates above 0, the smaller one first"):
        find_lr(loop, net, loader, optimizer=optimizer, training_step=quadratic, low=1, high=0.1)
    with pytest.raises(Misuse, match="lr_steps=3: expected 10 or more"):
        find_lr(loop, net, loader, optimizer=optimizer, training_step=quadratic, steps=3)
    with pytest.raises(
        Misuse,
        match="^tune: a test of learning rates needs one optimizer, stepped by the loop: for several, find each by hand$",
    ):
        find_lr(loop, TwoOptimizers(), loader)
    with pytest.raises(
        Misuse, match=r"the test of learning rates fails \(KeyError: 7\); expected a training that runs"
    ):
        find_lr(loop, net, loader, optimizer=optimizer, training_step=lambda net, batch: {}[7])
