"""The history of a resumed run begins with the rows of its CSV file, or of the checkpoint where there is none."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from fabric_template.files import disk
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, make_loader
from runs import fit, logs_of, without_time

from fabric_template import CSVLogger

LAST = "checkpoints/run/version_0/last.ckpt"


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)


class Foreign:
    """A logger that is none of ours."""

    name, version, log_dir = "foreign", 0, "foreign"

    def log_metrics(self, metrics, step=None):
        pass

    log_hyperparams = log_metrics

    def finalize(self, status):
        pass


class Odd(Classifier):
    """Logs values of every kind, some in some epochs only, under names that a CSV cannot hold as they are."""

    def training_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("third", torch.tensor(1 / 3, dtype=torch.float64) * 10.0**-epoch, on_step=False, on_epoch=True)
        self.log("=sum", float("nan") if epoch else float("-inf"), on_step=False, on_epoch=True)
        if epoch == 1:
            self.log("late, one", torch.tensor(7.0), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def two():
    return make_loader(8)


def assert_same_rows(one, other):
    pd.testing.assert_frame_equal(one.drop(columns="time"), other.drop(columns="time"), check_exact=True)


@pytest.mark.parametrize("loggers", ["ours", "none", "foreign", "both"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_same_frame_and_file(tmp_path, loggers, epochs):
    words = {"ours": dict, "none": lambda: {"logger": False}, "foreign": lambda: {"loggers": [Foreign()]},
             "both": lambda: {"loggers": [Foreign(), CSVLogger("logs", "run", 0)]}}[loggers]  # fmt: skip
    parts = {}
    for name, steps in (("whole", [4]), ("a", [epochs, 4])):
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / name)
            given = {"version": 0, **words()}
            for until in steps:
                resume = "last" if Path(LAST).exists() else None
                frame = fit(".", Odd, two, max_epochs=until, resume=resume, **given)[2]
                parts[name, until] = frame
    assert_same_rows(parts["whole", 4], parts["a", 4])
    pd.testing.assert_frame_equal(parts["a", 4].iloc[:epochs], parts["a", epochs].reindex(columns=parts["a", 4].columns),
                                  check_exact=True, check_dtype=False)  # fmt: skip
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert (logs_of(tmp_path / "a")[0] is None) == (loggers in ("none", "foreign"))


def test_in_a_new_version_the_rows_of_the_old_one_come_first(tmp_path):
    whole = fit(tmp_path / "whole", Odd, two, max_epochs=3)[2]
    fit(tmp_path / "a", Odd, two, max_epochs=2)
    old = (tmp_path / "a/logs/run/version_0/metrics.csv").read_bytes()
    assert_same_rows(whole, fit(tmp_path / "a", Odd, two, version=7, resume=tmp_path / "a" / LAST, max_epochs=3)[2])
    new = (tmp_path / "a/logs/run/version_7/metrics.csv").read_bytes()
    assert new.startswith(old)
    assert without_time(tmp_path / "a/logs/run/version_7/metrics.csv") == logs_of(tmp_path / "whole")[0]
    assert (tmp_path / "a/logs/run/version_0/metrics.csv").read_bytes() == old
    no_log = fit(tmp_path / "b", Odd, two, logger=False, resume=tmp_path / "a" / LAST, max_epochs=3)[2]
    assert_same_rows(whole, no_log)
    onward = fit(tmp_path / "b", Odd, two, resume="last", max_epochs=4)[2]  # and from there back into a CSV
    assert_same_rows(fit(tmp_path / "four", Odd, two, max_epochs=4)[2], onward)
    assert without_time(tmp_path / "b/logs/run/version_0/metrics.csv") == logs_of(tmp_path / "four")[0]


@pytest.mark.parametrize("keeper", ["folder of its own", "in the log's folder"])
def test_files_of_a_callback(tmp_path, keeper):
    folder = {"dirpath": "mine"} if keeper == "folder of its own" else {}
    path = {"dirpath": "mine/last.ckpt"}.get(next(iter(folder), ""), "logs/run/version_0/checkpoints/last.ckpt")
    whole = fit(tmp_path / "whole", Odd, two, max_epochs=3)[2]
    fit(".", Odd, two, max_epochs=2, callbacks=[ModelCheckpoint(save_last=True, **folder)])
    if not Path(path).exists():  # where this Lightning puts it
        (path,) = Path(".").rglob("last.ckpt")
    frame = fit(".", Odd, two, max_epochs=3, resume=path)[2]
    assert_same_rows(whole, frame)


@pytest.mark.parametrize("beside", [False, True])
def test_moved_away_from_its_log(tmp_path, beside):
    """Or to a log of another run: one line says that the earlier rows are not here, and nothing of another run comes in."""
    fit(tmp_path / "a", Odd, two, max_epochs=2)
    moved = shutil.move(tmp_path / "a" / LAST, tmp_path / "moved.ckpt")
    shutil.rmtree(tmp_path / "a")
    if beside:
        fit(tmp_path / "other", Odd, two, max_epochs=2)
        shutil.copy(tmp_path / "other/logs/run/version_0/metrics.csv", tmp_path)
    with pytest.warns(UserWarning, match="is not with the logs of its run") as warned:
        frame = fit(tmp_path / "b", Odd, two, resume=moved, max_epochs=3)[2]
    assert [text for warning in warned if (text := str(warning.message)).startswith("resume")] == [
        f"resume: '{moved}' is not with the logs of its run, which hold the history of the 2 epochs before: history and logs"
        " begin after them; put that run's metrics.csv beside the file to have them"
    ]
    assert frame["epoch"].tolist() == [2]
    assert len((tmp_path / "b/logs/run/version_0/metrics.csv").read_text().splitlines()) == 2


def test_the_log_of_another_run_in_its_place_is_kept(tmp_path):
    """A version is named in which another run has logged: its rows were cut off, now its file is set aside."""
    fit(tmp_path, Odd, two, max_epochs=1)
    fit(tmp_path, Odd, lambda: make_loader(12), max_epochs=3)
    other = (tmp_path / "logs/run/version_1/metrics.csv").read_bytes()
    frame = fit(tmp_path, Odd, two, version=1, resume=tmp_path / LAST, max_epochs=2)[2]
    assert (tmp_path / "logs/run/version_1/metrics.csv.before").read_bytes() == other
    assert_same_rows(fit(tmp_path / "whole", Odd, two, max_epochs=2)[2], frame)
    assert without_time(tmp_path / "logs/run/version_1/metrics.csv") == logs_of(tmp_path / "whole")[0]
