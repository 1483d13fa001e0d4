"""Test that the history and the CSV files of a resumed run have the rows from before."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, make_loader
from runs import fit, logs_of, without_time

LAST = "checkpoints/run/version_0/last.ckpt"


class OtherLogger:
    def log_metrics(self, metrics, step=None):
        pass


class ManyKinds(Classifier):
    """Logs float64, NaN, infinity, and a name with a comma in one epoch only."""

    def training_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("third", torch.tensor(1 / 3, dtype=torch.float64) * 10.0**-epoch, on_step=False, on_epoch=True)
        self.log("special", float("nan") if epoch else float("-inf"), on_step=False, on_epoch=True)
        if epoch == 1:
            self.log("late, one", torch.tensor(7.0), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def two():
    return make_loader(8)


def assert_same_rows(one, other):
    pd.testing.assert_frame_equal(one.drop(columns="time"), other.drop(columns="time"), check_exact=True)


@pytest.mark.parametrize("logger", [True, False, OtherLogger()], ids=["csv", "none", "other"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_same_rows_as_without_a_break(tmp_path, logger, epochs):
    options = {"version": 0, "logger": logger}
    whole = fit(tmp_path / "whole", ManyKinds, two, max_epochs=4, **options)[2]
    fit(tmp_path / "cut", ManyKinds, two, max_epochs=epochs, **options)
    resumed = fit(tmp_path / "cut", ManyKinds, two, max_epochs=4, resume="last", **options)[2]
    assert_same_rows(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")
    assert (logs_of(tmp_path / "cut")[0] is None) == (logger is not True)


def test_a_new_version_has_the_rows_of_the_old_one(tmp_path):
    whole = fit(tmp_path / "whole", ManyKinds, two, max_epochs=3)[2]
    fit(tmp_path / "a", ManyKinds, two, max_epochs=2)
    old = (tmp_path / "a/logs/run/version_0/metrics.csv").read_bytes()
    resumed = fit(tmp_path / "a", ManyKinds, two, version=7, resume=tmp_path / "a" / LAST, max_epochs=3)[2]
    assert_same_rows(whole, resumed)
    assert without_time(tmp_path / "a/logs/run/version_7/metrics.csv") == logs_of(tmp_path / "whole")[0]
    assert (tmp_path / "a/logs/run/version_0/metrics.csv").read_bytes() == old


def test_a_checkpoint_that_was_moved_away_brings_its_rows(tmp_path):
    whole = fit(tmp_path / "whole", ManyKinds, two, max_epochs=3)[2]
    fit(tmp_path / "a", ManyKinds, two, max_epochs=2)
    moved = shutil.move(tmp_path / "a" / LAST, tmp_path / "moved.ckpt")
    shutil.rmtree(tmp_path / "a")
    assert_same_rows(whole, fit(tmp_path / "b", ManyKinds, two, resume=moved, max_epochs=3)[2])
    assert logs_of(tmp_path / "b") == logs_of(tmp_path / "whole")


def test_a_checkpoint_of_a_callback(tmp_path):
    whole = fit(tmp_path / "whole", ManyKinds, two, max_epochs=3)[2]
    keep = ModelCheckpoint(tmp_path / "mine", save_last=True)
    fit(tmp_path / "cut", ManyKinds, two, max_epochs=2, callbacks=[keep])
    resumed = fit(tmp_path / "cut", ManyKinds, two, max_epochs=3, resume=Path(keep.last_model_path))[2]
    assert_same_rows(whole, resumed)


def test_the_time_of_a_resumed_epoch_is_that_of_the_whole_epoch(tmp_path, monkeypatch):
    from fabric_template.loggers import history

    now = [100.0]
    monkeypatch.setattr(history.time, "monotonic", lambda: now[0])

    class Slow(ManyKinds):
        def setup(self, stage):
            now[0] += 1000

        def training_step(self, batch, batch_idx):
            now[0] += 10
            return super().training_step(batch, batch_idx)

    options = {"max_epochs": 2, "save_every_n_steps": 1}
    fit(tmp_path, Slow, two, max_steps=3, **options)
    resumed = fit(tmp_path, Slow, two, resume="auto", **options)[2]
    assert resumed["time"].tolist() == [20.0, 20.0]
