"""The learning rate finder: rates grow until the loss blows up, the steepest descent is suggested."""

import math

import pandas as pd
import pytest
import torch
from torch import nn

from fabric_template import FabricLoop, TensorLoader
from fabric_template.tools.lr_finder import LearningRateRamp, save_curve
from fabric_template.tools.tune import trial_options, tune_command

FILES = ["tuned.csv", "tuned.png"]


def quadratic(net, batch):
    """SGD on it diverges above a rate of 2 / 4 = 0.5."""
    return 2 * (net.weight - 3).pow(2).sum() + 0 * batch[0].sum()


def ramped(steps, **options):
    net, ramp = nn.Linear(1, 1, bias=False), LearningRateRamp(1e-4, 10.0, steps)
    nn.init.zeros_(net.weight)
    loop = FabricLoop(accelerator="cpu", **options)
    loader = TensorLoader(torch.zeros(42, 1), batch_size=2)
    trial = FabricLoop(callbacks=[ramp], **trial_options(loop) | {"max_steps": steps})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    trial.fit(net, loader, optimizer=optimizer, training_step=quadratic)
    return ramp


def test_the_ramp_ends_when_the_loss_blows_up_and_the_suggestion_is_below(tmp_path):
    ramp = ramped(steps=80)
    assert ramp.losses[0] == pytest.approx(18)
    assert ramp.rates[1] / ramp.rates[0] == pytest.approx(1e5 ** (1 / 79))
    assert 0.5 < ramp.rates[-1] < 5
    assert ramp.losses[-1] > 4 * 18
    suggestion = save_curve(ramp.rates, ramp.losses, tmp_path / "tuned.yaml")
    assert 1e-3 < suggestion < 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    curve = pd.read_csv(tmp_path / "tuned.csv")
    assert list(curve.columns) == ["lr", "loss", "smoothed"]
    assert len(curve) == len(ramp.rates)


def test_batches_of_one_optimizer_step_share_a_rate():
    ramp = ramped(steps=12, accumulate_grad_batches=3)
    assert len(set(ramp.rates)) == 12
    assert ramp.rates[:3] == [1e-4] * 3
    assert ramp.rates[3] > 1e-4


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0] * 40, None),
        ([2.0] * 20 + [1.0] * 15 + [90.0, 60.0, 3.0, 3.0, 2.0], 20),
        ([2.0] * 20 + [1.0] * 15 + [math.nan], 20),
    ],
    ids=["flat", "oscillating after the minimum", "not finite at the end"],
)
def test_the_suggestion_is_the_steepest_descent_before_the_minimum(losses, expected, tmp_path):
    rates = [10.0 ** (i / 10) for i in range(len(losses))]
    found = save_curve(rates, losses, tmp_path / "curve")
    assert found == expected or abs(rates.index(found) - expected) < 6


def test_the_command_writes_the_curve_and_prints_the_rate(tmp_path, capsys):
    class Model(nn.Linear):
        def training_step(self, batch):
            return (self(batch[0]) - 1).pow(2).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }

    class Data:
        def train_dataloader(self):
            return TensorLoader(torch.ones(64, 2), batch_size=8)

    options = {"lr": True, "only": None, "same_numbers": False, "seconds": 2.0, "out": str(tmp_path / "tuned.yaml")}
    assert tune_command(FabricLoop(accelerator="cpu"), Model(2, 1), Data(), **options) == 0
    assert "suggested   0." in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
