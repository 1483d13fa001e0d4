"""Test that tune keeps faster settings and reports failed trials."""

import os
import signal
import time

import pytest
import torch
import yaml
from clock import Clock
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabric_template import FabricLoop, TensorLoader
from fabric_template.tools import step_benchmark
from fabric_template.tools import tune as tune_module
from fabric_template.tools.step_benchmark import change_loader
from fabric_template.tools.tune import (
    choose_settings,
    run_in_process,
    tune,
    tune_command,
)

CLOCK = Clock()


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch):
    """Make only CLOCK.sleep take time, so that the results do not depend on the machine."""
    monkeypatch.setattr(step_benchmark, "time", CLOCK)


class Samples(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.ones(2)


def slow_step(net, batch):
    CLOCK.sleep(0.01)
    return net(batch).mean()


def tuned(loader, step=slow_step, **options):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = FabricLoop(accelerator="cpu")
    return tune(loop, net, loader, optimizer=optimizer, training_step=step, seconds=0.1, **options)


def failure_of(function):
    result, failure = run_in_process(function)
    assert result is None
    return failure


# Running a function in a separate process


def interrupt_this_process():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return "finished"


def test_the_child_process_ignores_ctrl_c():
    """Only the parent process handles Ctrl-C, so that only one traceback is printed."""
    assert run_in_process(interrupt_this_process) == ("finished", "")


def test_run_in_process_returns_the_reason_for_a_failure(monkeypatch):
    assert run_in_process(lambda: os.getpid() != os.getppid()) == (True, "")
    assert failure_of(lambda: os._exit(3)) == "no result within 120 seconds, exit code 3"
    assert failure_of(lambda: {}["lost"]) == "KeyError: 'lost'"
    monkeypatch.setattr(tune_module, "TIME_LIMIT", 0.1)
    assert failure_of(lambda: time.sleep(600)) == "no result within 0.1 seconds, exit code -9"


# Choosing the settings that make training faster


def test_tune_reports_which_batch_size_does_not_fit_in_memory(tmp_path, capsys):
    def step(net, batch):
        if len(batch) > 128:
            raise MemoryError("out of memory")
        return slow_step(net, batch)

    loader = DataLoader(Samples(), batch_size=32, shuffle=True)
    found = tuned(loader, step, only=["batch_size"])
    assert found.choice == {"batch_size": 128}
    assert "\nwrite       batch_size=128, and tune" in str(found)
    assert "failed  batch_size 256  MemoryError: out of memory" in capsys.readouterr().out
    assert loader.batch_size == 32
    assert os.listdir(tmp_path) == []


def test_tune_keeps_only_settings_that_make_training_faster():
    def rate(choice):
        return 100.0 * (2 if "precision" in choice else 1) * (0.9 if "fused" in choice else 1)

    assert choose_settings(rate, ["fused", "precision"]) == ({"precision": "bf16-mixed"}, 2.0)


@pytest.mark.parametrize("gains", [(1.02,), (1.5, 1.02), (1.5, 1.5, 1.0), (1.5, 1.5, 1.5, 1.0)], ids=str)
def test_tune_keeps_a_setting_only_if_it_is_faster_in_each_round(gains):
    remaining = iter(gains)
    assert choose_settings(lambda choice: next(remaining) if choice else 1.0, ["fused"]) == ({}, 1.0)
    assert list(remaining) == []


def test_tune_applies_the_chosen_precision_batch_size_and_optimizer_settings():
    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch):
            (optimizer,) = self.trainer.optimizers
            settings = (self.trainer.precision, optimizer.param_groups[0]["fused"], len(batch[0]))
            raise RuntimeError(str(settings))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=8)

    choice = {"precision": "bf16-mixed", "fused": True, "tensor_loader": True, "batch_size": 16}
    parts = {"model": Model(), "train_dataloaders": None}
    with pytest.raises(RuntimeError, match=r"\('bf16-mixed', True, 16\)"):
        tune_module.measure(FabricLoop(accelerator="cpu"), parts, 0.1, choice)


# Changing the settings of a loader


def batches_of(loader):
    torch.manual_seed(3)
    return [[part.tolist() for part in batch] for batch in loader]


def test_change_loader_returns_a_loader_with_the_same_samples():
    data = TensorDataset(torch.arange(10), torch.arange(10, 20))
    loader, plain = DataLoader(data, 4, shuffle=True), DataLoader(data, 3)
    assert batches_of(change_loader(loader, {"num_workers": 2})) == batches_of(loader)
    assert batches_of(change_loader(plain, {"tensor_loader": True})) == batches_of(plain)
    changed = change_loader(loader, {"tensor_loader": True, "batch_size": 5})
    assert (type(changed), changed.batch_size, changed.shuffle) == (TensorLoader, 5, True)
    assert sorted(sum((batch[0] for batch in batches_of(changed)), [])) == list(range(10))


def test_change_loader_refuses_unsupported_loaders_and_excessive_batch_sizes():
    loader = DataLoader(TensorDataset(torch.arange(10)), 4, collate_fn=list)
    with pytest.raises(ValueError, match="not read a TensorDataset with torch's samplers"):
        change_loader(loader, {"tensor_loader": True})
    with pytest.raises(ValueError, match="not between 4 and half of the samples"):
        change_loader(loader, {"batch_size": 8})


# Errors of tune, and the tune command


def test_tune_raises_an_error_for_a_failing_run_or_an_unknown_setting():
    with pytest.raises(ValueError, match="tune: training fails with the current settings"):
        tuned([torch.zeros(4, 2)], lambda net, batch: 1 / 0)
    with pytest.raises(ValueError, match="only: got warp, expected some of threads, tensor_loader"):
        tuned([], only=["warp"])
    for seconds in (0, -2.5, 300, float("nan"), "2"):
        with pytest.raises(ValueError, match=r"tune\(seconds\): got .*, expected a number above 0 and at most 60\."):
            tune(FabricLoop(), nn.Linear(2, 1), [], seconds=seconds)


class Data:
    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=128)


class Model(nn.Linear):
    def training_step(self, batch):
        return slow_step(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_tune_command_writes_a_config_file_for_fit(tmp_path, capsys):
    loop, out = FabricLoop(accelerator="cpu"), tmp_path / "tuned.yaml"
    loop.recipe["data"] = {"class_path": f"{__name__}.Data", "init_args": {"batch_size": 128}}
    options = {"only": ["batch_size"], "seconds": 0.1, "out": str(out)}
    assert tune_command(loop, Model(2, 1), Data(), **options) == 0
    found = yaml.safe_load(out.read_text())
    assert (found["data"]["init_args"], found["max_epochs"]) == ({"batch_size": 256}, None)
    assert capsys.readouterr().out.splitlines()[-1] == f"config      {out}, for fit --config"
