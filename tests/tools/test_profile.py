"""Test that profile measures each part of a step and does not change the following run."""

import gc
import multiprocessing
import random
import re
import signal
import sys
import time

import lightning.pytorch as pl
import numpy
import pytest
import torch
from clock import Clock
from modules import Classifier, by_step, make_loader, quiet
from runs import same
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric_template import FabricLoop, TensorLoader
from fabric_template.tools import step_benchmark
from fabric_template.tools.profile import profile, profile_command

LONG = 0.005
CLOCK = Clock()


@pytest.fixture
def fake_clock(monkeypatch):
    """Make only CLOCK.sleep take time, so that the measured times are exact."""
    monkeypatch.setattr(step_benchmark, "time", CLOCK)


class SlowDataset(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        CLOCK.sleep(LONG)
        return torch.ones(4), torch.zeros(1)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CLOCK.sleep(LONG)
        return grad


class SlowOptimizer(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        CLOCK.sleep(LONG)
        return loss


def loss_of(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def slow_step(net, batch):
    CLOCK.sleep(LONG)
    return loss_of(net, batch)


def profile_net(loader=None, step=loss_of, optimizer=torch.optim.SGD, steps=6, **options):
    """Profile a network whose own work takes no time on the fake clock."""
    net = nn.Linear(4, 1)
    if loader is None:
        loader = TensorLoader(torch.ones(16, 4), torch.zeros(16, 1), batch_size=4)
    arguments = {"optimizer": optimizer(net.parameters(), lr=0.1), "training_step": step}
    return FabricLoop(accelerator="cpu", **options).profile(net, loader, steps=steps, **arguments)


@pytest.mark.parametrize(("part", "slow"), [
    ("data", {"loader": DataLoader(SlowDataset(), 1)}),
    ("forward", {"step": slow_step}),
    ("backward", {"step": lambda net, batch: SlowBackward.apply(loss_of(net, batch))}),
    ("optimizer", {"optimizer": SlowOptimizer}),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_profile_measures_the_time_of_each_part_of_a_step(part, slow, fake_clock):
    found = profile_net(**slow)
    assert (found.parts, found.milliseconds) == ({part: 5.0}, 5.0)


def test_profile_measures_each_part_of_a_manual_optimization_step(fake_clock):
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().zero_grad()
                CLOCK.sleep(LONG)
                self.manual_backward(SlowBackward.apply(nn.functional.cross_entropy(self(batch[0]), batch[1])))
                self.optimizers().step()

    module = Manual(lambda module: SlowOptimizer(module.parameters(), lr=0.1))
    found = profile(FabricLoop(accelerator="cpu"), module, make_loader(), steps=3)
    assert found.parts == {"forward": 10, "backward": 10, "optimizer": 10}


def test_the_times_in_a_profile_add_up_to_the_step_time():
    """Options that end fit early, such as max_steps, do not end profiling."""
    found = profile_net(steps=12, accumulate_grad_batches=2, max_steps=1, limit_train_batches=1)
    table = [line.split() for line in str(found).splitlines()[1 : len(found.parts) + 2]]
    assert [cells[0] for cells in table] == list(found.parts) + ["step"]
    numbers = [float(cells[1]) for cells in table]
    assert numbers[-1] == pytest.approx(sum(numbers[:-1]))
    (axes,) = found.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(found.parts)
    assert [round(bar.get_width(), 3) for bar in axes.patches] == numbers[:-1]
    assert axes.get_title() == f"{numbers[-1]:.3f} ms per step on cpu"
    axes.figure.draw_without_rendering()
    assert all(label.get_window_extent().x1 < axes.bbox.x1 for label in axes.texts)


def reading_step(net, batch):
    loss = slow_step(net, batch)
    assert loss.item() == float(loss)
    return loss


def test_profile_finds_a_line_that_reads_a_value_from_the_device(fake_clock):
    assert re.search(r"\nwait: .*test_profile\.py:\d+ reads a value from the GPU", str(profile_net(step=reading_step)))
    assert profile_net(step=slow_step).reads == []


class NoisyDataset(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(8) + random.random() + numpy.random.rand(), torch.tensor(index % 3)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(NoisyDataset(), 4, shuffle=True)


def random_states():
    return [random.getstate(), torch.get_rng_state(), [*numpy.random.get_state()[1]]]


def fit_module(root, profiles):
    pl.seed_everything(1, verbose=False)
    module, data = Classifier(by_step), Data()
    module.net[0].eval()
    loop = FabricLoop(**quiet(default_root_dir=str(root), max_epochs=2, enable_checkpointing=True))
    if profiles:
        before = random_states()
        assert profile(loop, module, data, steps=7).steps == 7
        assert same(random_states(), before)
        assert not module.net[0].training
        assert list(root.rglob("*")) == []
    history = loop.fit(module, data)
    return module.state_dict(), history.drop(columns=["time", "waiting"]).to_csv(), random_states()


@pytest.mark.filterwarnings("ignore")
def test_profiling_does_not_change_the_following_training_run(tmp_path):
    roots = [tmp_path / "with", tmp_path / "without"]
    for root in roots:
        root.mkdir()
    assert same(fit_module(roots[0], True), fit_module(roots[1], False))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"steps": 0}, ValueError, r"profile\(steps\): got 0, expected an int >= 1"),
    ({"devices": 2}, ValueError, r"profile\(loop\): got 2 processes, expected one. Write devices=1"),
    ({"step": lambda net, batch: 1 / 0}, ZeroDivisionError, "division by zero"),
])  # fmt: skip
def test_profile_refuses_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        profile_net(**arguments)


def sleeping_step(net, batch):
    time.sleep(0.02)
    return loss_of(net, batch)


def test_profile_leaves_no_worker_process():
    """The test disables garbage collection, which could also end the workers."""
    running = len(multiprocessing.active_children())
    gc.disable()
    try:
        found = profile_net(DataLoader(SlowDataset(), 1, num_workers=1), sleeping_step, steps=5)
        assert "data" in found.parts
        assert len(multiprocessing.active_children()) == running
    finally:
        gc.enable()


def test_the_profile_command_writes_an_image(tmp_path, capsys):
    loop = FabricLoop(accelerator="cpu")
    assert profile_command(loop, Classifier(), Data(), out="pictures/steps.png", steps=3) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("of 3 steps on cpu")
    assert [path.name for path in tmp_path.rglob("*.*")] == ["steps.png"]


def test_ctrl_c_in_a_notebook_ends_profile_with_keyboard_interrupt(monkeypatch):
    """An interrupted profile must not report that the loader is too short."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    class Interrupted(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    model = Interrupted()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        FabricLoop(**quiet()).profile(model, make_loader())
    assert all(map(torch.equal, before, model.parameters()))
