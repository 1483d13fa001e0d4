"""A passing error at metrics.csv costs a warning at most: no row is lost, none is there twice, and no training ends."""

import errno
import os
import warnings

import pytest
from fabric_template.files import disk
from fabric_template.record.parsing import read_table
from fabric_template.record.tables import LogsError
from lightning.pytorch.callbacks import Callback
from modules import Classifier
from runs import assert_same_end, fit, logs_of, tree

from fabric_template import CSVLogger

EIO = OSError(errno.EIO, os.strerror(errno.EIO))
ROWS = "epoch,step,val_loss\n0,10,\n1,20,0.5\n2,30,\n"


class More(Classifier):
    """Another column in each epoch: the file is read and replaced."""

    def on_train_epoch_end(self):
        self.log(f"of_{self.current_epoch}", 1.0)


class During(Callback):
    """Calls of os fail on one file while a checkpoint is being saved after the second epoch, and only then."""

    def __init__(self, patch, call):
        self.patch, self.call, self.hits = patch, call, 0

    def on_train_epoch_end(self, trainer, module):
        real = getattr(os, self.call)

        def fails(path, *args, **words):
            if str(path).endswith("metrics.csv"):
                self.hits += 1
                raise EIO
            return real(path, *args, **words)

        if trainer.current_epoch == 1:
            self.patch.setattr(os, self.call, fails)

    def on_train_epoch_start(self, trainer, module):
        self.patch.undo()


@pytest.mark.parametrize(
    ("call", "make"), [("stat", Classifier), ("stat", More), ("open", Classifier)]
)  # a new file is synced
def test_a_save_does_not_end_the_training(tmp_path, call, make):
    whole = fit(tmp_path / "whole", make, max_epochs=3)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        callback = During(patch, call)
        assert_same_end(whole, fit(tmp_path / "a", make, max_epochs=3, callbacks=[callback]))
    assert callback.hits
    told = {str(one.message) for one in warned if "metrics.csv" in str(one.message)}
    assert all("training goes on, the rows are kept" in text for text in told)
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "a") == tree(tmp_path / "whole")


@pytest.mark.parametrize("operation", ["write", "close", "fsync", "replace"])
@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("row", [{"epoch": 1, "step": 20, "val_loss": 0.5}, {"epoch": 1, "step": 20}])
def test_no_row_is_there_twice(tmp_path, monkeypatch, operation, is_done, row):
    """What reports an error is done or not, and nobody can look: the next row finds out, and so does another logger."""
    logger = CSVLogger("logs")
    logger.log_epoch({"epoch": 0, "step": 10})
    path = tmp_path / "logs/run/version_0/metrics.csv"

    def fails(*args):
        if is_done or operation == "close":
            getattr(os, operation)(*args)
        if operation == "replace":
            patch.setattr(os, "lstat", unknown)
        raise EIO

    def unknown(path):
        raise EIO

    with monkeypatch.context() as patch:
        patch.setattr(disk.fs, operation, fails)
        try:
            logger.log_epoch(row)
        except LogsError:
            place = logger.position()["metrics.csv"]
            assert (place["rows"], len(place["waiting"])) == (1, 1)
    again = CSVLogger("logs", version=0)
    position = logger.position()
    logger.log_epoch({"epoch": 2, "step": 30})
    expected = ROWS if "val_loss" in row else "epoch,step\n0,10\n1,20\n2,30\n"
    assert path.read_text() == expected
    again.rewind(position)
    again.log_epoch({"epoch": 2, "step": 30})
    assert path.read_text() == expected


def test_a_file_that_seems_to_end_early_is_not_cut(tmp_path, monkeypatch):
    """What read gave is less than there is: an error, not a torn line."""
    logger = CSVLogger("logs")
    logger.log_epoch({"epoch": 0, "step": 10})
    path = tmp_path / "logs/run/version_0/metrics.csv"
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*real(fd)[:6], 99, *real(fd)[7:])))
    with pytest.raises(OSError, match="ended before its size"):
        read_table(path)


def test_a_table_that_cannot_be_looked_at_ends_the_start(tmp_path, monkeypatch):
    """Before anything is trained; later it would be too late to know how many rows there are."""
    fit(tmp_path, max_epochs=1)
    before, real = tree(tmp_path), os.stat

    def fails(path, *args, **words):
        if str(path).endswith("metrics.csv"):
            raise EIO
        return real(path, *args, **words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        with pytest.raises(LogsError, match="cannot write logs to .*metrics.csv"):
            fit(tmp_path, max_epochs=2, resume="last")
    assert tree(tmp_path) == before
