"""Test the "waiting" column, which contains the fraction of a row's time spent waiting for batches."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from clock import Clock
from lightning.pytorch.callbacks import ModelCheckpoint
from parameters import halve
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabric_template import FabricLoop, MiniLoop, list_runs, mini
from fabric_template.data import loaders
from fabric_template.loggers import row
from fabric_template.metric_names import is_metric

CLOCK = Clock()


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch):
    monkeypatch.setattr(loaders, "perf_counter", CLOCK.monotonic)
    monkeypatch.setattr(row, "time", CLOCK)
    monkeypatch.setattr(mini, "time", CLOCK)


class Slow(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 8

    def __getitem__(self, index):
        CLOCK.sleep(self.seconds)
        return torch.full((2,), float(index))


class SlowStream(IterableDataset):
    def __iter__(self):
        return (Slow(0.02)[index] for index in range(8))


def train(train_data, val_data=None, step_seconds=0.0, resume=None, make=FabricLoop, **options):
    net = nn.Linear(2, 1)

    def step(net, batch):
        CLOCK.sleep(step_seconds)
        return net(batch).square().mean()

    if make is FabricLoop:
        options = {"enable_model_summary": False, "enable_progress_bar": False, **options}
    loop = make(accelerator="cpu", **{"max_epochs": 2, **options})
    val = {} if val_data is None else {"val_dataloaders": DataLoader(val_data, 2), "validation_step": step}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(train_data, 2)
    return loop, loop.fit(net, loader, optimizer=optimizer, training_step=step, resume=resume, **val)


@pytest.mark.parametrize(
    ("data", "options", "make"),
    halve([Slow(0.02), SlowStream()], [{}, {"validate_every_n_steps": 2}, {"max_steps": 8}], [FabricLoop, MiniLoop]),
)
def test_metrics_csv_contains_the_fraction_of_time_spent_waiting_for_data(data, options, make):
    _, history = train(data, Slow(0.02), step_seconds=0.01, make=make, **options)
    written = pd.read_csv("logs/run/version_0/metrics.csv")
    assert len(written) == len(history)
    # In an epoch, reading eight samples takes 0.16 s and four steps take 0.04 s, so the run waits 80 % of the
    # time. The values of a loader without a length may differ, because such a loader is read one batch in advance.
    assert written["waiting"].tolist() == [pytest.approx(0.8, abs=0.05)] * len(written)


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
def test_time_spent_in_steps_does_not_count_as_waiting_for_data(make):
    _, history = train(Slow(0.0), Slow(0.0), step_seconds=0.05, make=make)
    assert (history["waiting"] == 0).all()


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
def test_the_waiting_column_includes_the_time_spent_waiting_for_validation_batches(make):
    _, history = train(Slow(0.0), Slow(0.03), step_seconds=0.01, make=make)
    assert history["waiting"].tolist() == [0.75, 0.75]


@pytest.mark.parametrize(("make", "options"), [(FabricLoop, {"enable_progress_bar": True}), (MiniLoop, {})])
@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_the_printed_table_has_a_waiting_column_if_training_often_waits_for_data(seconds, make, options, capsys):
    train(Slow(seconds), step_seconds=0.03, make=make, max_epochs=3, **options)
    out = capsys.readouterr().out
    hints = re.findall(r"Training spends \d\d% of the time waiting for batches\. (.*)", out)
    is_slow = seconds > 0
    # MiniLoop must not suggest FabricLoop.tune(), because a user may have copied only mini.py.
    advice = r"Try loop\.tune\(" if make is FabricLoop else "In the DataLoader, try a larger num_workers"
    assert [bool(re.match(advice, hint)) for hint in hints] == [True] * is_slow
    assert len(re.findall(r" waiting$", out, re.MULTILINE)) == is_slow
    assert len(re.findall(r" (?:\d\d%|0\.\d{4})$", out, re.MULTILINE)) == 3 * is_slow


def test_the_waiting_time_of_a_resumed_epoch_includes_the_time_before_the_checkpoint():
    class StoppingLoader(Slow):
        def __getitem__(self, index):
            if index == 6:
                raise RuntimeError("stopped")
            return super().__getitem__(index)

    options = {"max_epochs": 1, "save_every_n_steps": 2}
    with pytest.raises(RuntimeError, match="stopped"):
        train(StoppingLoader(0.1), **options)
    _, history = train(Slow(0.0), resume="last", **options)
    # The first run waited 0.1 s for each of the four samples that it read before the checkpoint.
    assert (history["time"] * history["waiting"]).tolist() == [pytest.approx(0.4, abs=0.001)]


def test_samples_per_second_of_a_resumed_epoch_excludes_validation_time():
    """The checkpoint is saved after the validation but before the epoch's row is written."""
    options = {"max_steps": 4, "max_epochs": 1}
    _, whole = train(Slow(0.0), Slow(0.03), 0.01, callbacks=[ModelCheckpoint("saved")], **options)
    (path,) = Path("saved").iterdir()
    _, resumed = train(Slow(0.0), Slow(0.03), 0.01, resume=path, **options)
    assert whole["samples_per_second"].tolist() == [200.0]
    assert resumed["samples_per_second"].tolist() == [200.0]


def test_list_runs_does_not_rank_runs_by_the_time_spent_waiting_for_batches():
    assert not is_metric("waiting")
    assert not is_metric("gpu_memory")
    train(Slow(0.0))
    assert list_runs()["metric"].tolist() == ["train_loss"]
