"""Test the seed option of both loops."""

import random

import numpy as np
import pytest
import torch
from modules import make_data
from torch import nn
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}


def make_loop(kind, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False} if kind == "FabricLoop" else {}
    return LOOPS[kind](accelerator="cpu", **quiet, **options)


def step(net, batch):
    noise = random.random() + np.random.rand()
    return nn.functional.cross_entropy(net(batch[0]) + noise * torch.randn(3), batch[1])


def train(loop, net=None):
    """Train a network with fixed initial weights. Return its losses."""
    net = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5)) if net is None else net
    nn.init.constant_(net[0].weight, 0.1)
    nn.init.constant_(net[0].bias, 0.0)
    loader = DataLoader(make_data(24), batch_size=4, shuffle=True)
    rows = loop.fit(net, loader, optimizer=torch.optim.SGD(net.parameters(), 0.1), training_step=step)
    return list(rows["train_loss"])


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_fabric_loop_and_mini_loop_give_the_same_losses_with_the_same_seed():
    losses = []
    for kind in LOOPS:
        loop = make_loop(kind, max_epochs=2, name=kind, seed=5)
        draw()
        losses += [train(loop), train(loop)]
    assert losses == losses[:1] * 4
    assert train(make_loop("FabricLoop", max_epochs=2, seed=6)) != losses[0]


@pytest.mark.parametrize("kind", LOOPS)
def test_setting_the_seed_attribute_has_the_same_effect_as_passing_a_seed_to_a_new_loop(kind):
    loop = make_loop(kind, max_epochs=2, name="changed", seed=5)
    first = train(loop)
    loop.seed = 8
    assert loop.seed == 8
    assert train(loop) == train(make_loop(kind, max_epochs=2, name="new", seed=8)) != first


@pytest.mark.parametrize("kind", LOOPS)
def test_a_module_created_after_a_loop_with_a_seed_has_reproducible_weights(kind):
    weights = []
    for _ in range(2):
        make_loop(kind, seed=3)
        weights.append(nn.Linear(8, 3).weight.tolist())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_without_a_seed_does_not_seed_the_random_generators(kind):
    torch.manual_seed(1)
    make_loop(kind)
    first = draw()[2]
    torch.manual_seed(1)
    assert draw()[2] == first
    loop = make_loop(kind, max_epochs=2)
    assert train(loop) != train(loop)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_resumed_run_continues_with_the_saved_rng_state(kind):
    whole = train(make_loop(kind, max_epochs=3, name="whole", seed=4))
    train(make_loop(kind, max_epochs=2, name="cut", seed=4))
    net = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5))
    loop, loader = (
        make_loop(kind, max_epochs=3, name="cut", seed=9),
        DataLoader(make_data(24), batch_size=4, shuffle=True),
    )
    options = {"optimizer": torch.optim.SGD(net.parameters(), 0.1), "training_step": step}
    assert list(loop.fit(net, loader, resume="last", **options)["train_loss"]) == whole


@pytest.mark.parametrize("kind", LOOPS)
def test_validate_does_not_seed_the_random_generators(kind):
    loop, drawn = make_loop(kind, seed=2), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        loop.validate(nn.Linear(8, 3), DataLoader(make_data(8)), validation_step=lambda net, batch: net(batch[0]).sum())
        drawn.append(torch.rand(()).item())
    assert drawn[0] != drawn[1]
