"""A disk that fails: the run goes on, the old files stay, what was never saved is told at the end, loudly."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from fabric_template.files import disk
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from modules import Classifier, assert_same_weights
from runs import assert_same_end, fit, logs_of, tree, val_loader

from fabric_template.checkpoint.checkpoint_io import CheckpointError, read_checkpoint

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EIO: "the disk reports an input/output error",
    errno.EACCES: "no permission to write there",
}


class FailAt(Callback):
    """Makes one operation fail on files with a word in their name, in some epochs."""

    def __init__(self, patch, operation, code, word, epochs):
        self.patch, self.operation, self.code, self.word, self.epochs = patch, operation, code, word, epochs
        self.opened = {}

    def on_train_epoch_start(self, trainer, module):
        self.patch.undo()
        if trainer.current_epoch not in self.epochs:
            return

        def opens(path, *args):
            if self.word in os.fspath(path) and self.operation == "open":
                raise OSError(self.code, os.strerror(self.code))
            fd = os.open(path, *args)
            self.opened[fd] = os.fspath(path)
            return fd

        def fails(fd, *args):
            if self.word in self.opened.get(fd, ""):
                raise OSError(self.code, os.strerror(self.code))
            return getattr(os, self.operation)(fd, *args)

        self.patch.setattr(disk.fs, "open", opens)
        if self.operation in ("write", "fsync"):
            self.patch.setattr(disk.fs, self.operation, fails)


@pytest.fixture
def failing():
    with pytest.MonkeyPatch.context() as patch:
        yield lambda operation, code, word, epochs: FailAt(patch, operation, code, word, epochs)


def told(warned):
    """The warnings' words, but for the one of Trainer's about a step that has no loader."""
    return [str(warning.message) for warning in warned if "val_dataloader" not in str(warning.message)]


def last_of(root):
    return Path(root, "checkpoints/run/version_0/last.ckpt")


# ---- checkpoints


@pytest.mark.parametrize("code", CAUSES)
@pytest.mark.parametrize("operation", ["open", "write", "fsync"])
def test_a_save_that_fails_costs_a_warning(tmp_path, failing, operation, code):
    callback = failing(operation, code, "last.ckpt", [1])
    with pytest.warns(UserWarning, match="could not save") as warned:
        loop, module, history = fit(tmp_path / "a", max_epochs=3, callbacks=[callback])
    assert told(warned) == [
        f"could not save '{last_of(tmp_path / 'a')}': {CAUSES[code]}; the old file is unchanged. Mend that, or save to"
        " another folder. Training goes on without this checkpoint."
    ]
    whole = fit(tmp_path / "whole", max_epochs=3)
    assert_same_end(whole, (loop, module, history))
    assert tree(tmp_path / "a") == tree(tmp_path / "whole")
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert read_checkpoint(last_of(tmp_path / "a"))["global_step"] == 30


def test_the_last_state_that_cannot_be_saved_fails_the_run_at_its_end(tmp_path, failing):
    """Loudly, but not before everything else is done: weights trained, hooks called, rows written."""
    heard = []

    class Hear(Callback):
        def on_fit_end(self, trainer, module):
            heard.append("on_fit_end")

        def on_exception(self, trainer, module, exception):
            heard.append(exception)

    modules = []
    make = lambda: modules.append(Classifier()) or modules[0]  # noqa: E731
    callbacks = [failing("write", errno.ENOSPC, "last.ckpt", [1, 2]), Hear()]
    with pytest.warns(UserWarning, match="Training goes on"), pytest.raises(CheckpointError) as error:
        fit(tmp_path / "a", make, max_epochs=3, callbacks=callbacks)
    assert str(error.value) == (
        f"training has come to its end, but not everything is on disk: could not save '{last_of(tmp_path / 'a')}': the disk"
        " is full; the old file is unchanged. Mend that, or save to another folder."
    )
    assert heard == ["on_fit_end"]
    callbacks[0].patch.undo()
    whole = fit(tmp_path / "whole", max_epochs=3)
    assert_same_weights(whole[1], modules[0])
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert read_checkpoint(last_of(tmp_path / "a"))["global_step"] == 10
    assert_same_end(whole, fit(tmp_path / "a", seed=9, resume="last", max_epochs=3))
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "a") == tree(tmp_path / "whole")


def test_the_end_of_the_run_is_one_more_try(tmp_path, failing):
    callback = failing("write", errno.ENOSPC, "last.ckpt", [2])

    class Free(Callback):
        """Room is made while the last epoch's warning is read."""

        def on_save_checkpoint(self, trainer, module, checkpoint):
            self.saves = getattr(self, "saves", 0) + 1
            if self.saves == 4:
                callback.patch.undo()

    with pytest.warns(UserWarning, match="Training goes on"):
        fit(tmp_path, max_epochs=3, callbacks=[callback, Free()])
    assert read_checkpoint(last_of(tmp_path))["global_step"] == 30


class Scored(Classifier):
    """Better with every epoch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 3.0 - self.current_epoch)


def test_the_best_that_cannot_be_saved(tmp_path, failing):
    """The old best stays the best until a later one is saved."""
    words = {"monitor": "val_loss", "max_epochs": 3}
    best = last_of(tmp_path).with_name("best.ckpt")
    with pytest.warns(UserWarning, match=r"could not save '.*best\.ckpt': the disk is full"):
        loop, _, _ = fit(tmp_path, Scored, val=val_loader, callbacks=[failing("fsync", 28, "best.ckpt", [1])], **words)
    assert loop.checkpoint_callback.best_model_score == 1.0
    assert read_checkpoint(best)["global_step"] == 30
    with pytest.warns(UserWarning, match="Training goes on"), pytest.raises(CheckpointError, match="best.ckpt"):
        fit(tmp_path / "b", Scored, val=val_loader, callbacks=[failing("fsync", 28, "best.ckpt", [2])], **words)
    assert read_checkpoint(tmp_path / "b/checkpoints/run/version_0/best.ckpt")["global_step"] == 20
    kept = read_checkpoint(last_of(tmp_path / "b"))["fabric_template"]["kept"]
    assert kept == {"best": {"best.ckpt": 2.0}}


def test_a_plugin_that_raises(tmp_path):
    """A user's own CheckpointIO: its saves are tried again, its words are told, its own way to read is used."""

    class Bucket(TorchCheckpointIO):
        def __init__(self):
            super().__init__()
            self.calls = []

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.calls.append(f"save {Path(path).name}")
            if len(self.calls) == 2:
                raise RuntimeError("the bucket is gone")
            super().save_checkpoint(checkpoint, path, storage_options)

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            self.calls.append(f"load {path} {weights_only}")
            return super().load_checkpoint(str(path).removeprefix("bucket://"), map_location, weights_only)

    io = Bucket()
    with pytest.warns(UserWarning, match="the bucket is gone") as warned:
        fit(tmp_path, max_epochs=3, plugins=[io])
    assert told(warned) == [
        f"could not save '{last_of(tmp_path)}': RuntimeError: the bucket is gone. Training goes on without this checkpoint."
    ]
    assert io.calls == ["save last.ckpt"] * 3
    whole = fit(tmp_path / "whole", max_epochs=4)
    io.calls.clear()
    path = f"bucket://{last_of(tmp_path)}"
    shutil.copytree(tmp_path / "logs", tmp_path / "b/logs")  # the history goes with the file
    assert_same_end(whole, fit(tmp_path / "b", seed=9, resume=path, max_epochs=4, plugins=[io]))
    assert io.calls == [f"load {path} True"] * 2 + ["save last.ckpt"]
    with pytest.raises(CheckpointError, match="is a URL; only local files are opened here"):
        fit(tmp_path / "c", resume=path, max_epochs=4)


# ---- logs


@pytest.mark.parametrize("operation", ["open", "write"])
@pytest.mark.parametrize("word", ["metrics.csv", "steps.csv", ".csv"])
def test_rows_that_cannot_be_written_are_written_later(tmp_path, failing, operation, word):
    words = {"log_every_n_steps": 2, "max_epochs": 4}
    make = lambda: Classifier(on_step=True)  # noqa: E731
    whole = fit(tmp_path / "whole", make, **words)
    with pytest.warns(UserWarning, match="cannot write logs to") as warned:
        parts = fit(tmp_path / "a", make, callbacks=[failing(operation, errno.EIO, word, [1, 2])], **words)
    folder = tmp_path / "a/logs/run/version_0"
    assert sorted(set(told(warned))) == [
        f"cannot write logs to '{folder / name}': Input/output error; choose a folder that can be written, e.g."
        " CSVLogger(root_dir='/tmp/logs'), or logger=False to log nothing; training goes on, the rows are kept and written"
        " as soon as that is possible"
        for name in ("metrics.csv", "steps.csv") if word in name
    ]  # fmt: skip
    assert_same_end(whole, parts)
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "a") == tree(tmp_path / "whole")


def test_rows_that_can_never_be_written_fail_the_run_at_its_end_and_are_in_the_checkpoint(tmp_path, failing):
    callback = failing("open", errno.EACCES, "metrics.csv", [1, 2])
    with pytest.warns(UserWarning, match="training goes on"), pytest.raises(CheckpointError) as error:
        fit(tmp_path / "a", max_epochs=3, callbacks=[callback])
    assert str(error.value) == (
        "training has come to its end, but not everything is on disk: the logs are not complete: cannot write logs to"
        f" '{tmp_path}/a/logs/run/version_0/metrics.csv': Permission denied; choose a folder that can be written, e.g."
        " CSVLogger(root_dir='/tmp/logs'), or logger=False to log nothing."
    )
    callback.patch.undo()
    assert len((tmp_path / "a/logs/run/version_0/metrics.csv").read_text().splitlines()) == 2
    whole = fit(tmp_path / "whole", max_epochs=4)
    assert_same_end(whole, fit(tmp_path / "a", seed=9, resume="last", max_epochs=4))
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")


def test_a_log_that_is_a_link_to_elsewhere_is_not_followed(tmp_path):
    class Link(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                path = tmp_path / "a/logs/run/version_0/metrics.csv"
                path.rename(tmp_path / "elsewhere.csv")
                path.symlink_to(tmp_path / "elsewhere.csv")

    with pytest.warns(UserWarning, match="symbolic links"), pytest.raises(CheckpointError, match="symbolic links"):
        fit(tmp_path / "a", max_epochs=2, callbacks=[Link()])
    assert len((tmp_path / "elsewhere.csv").read_text().splitlines()) == 2


def test_before_training_the_disk_must_work(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ValueError, match="cannot make the run's folder"):
        fit(tmp_path, max_epochs=1)
    assert not torch.distributed.is_initialized()


def test_a_first_save_of_which_nothing_arrives(tmp_path, monkeypatch):
    """Files without content end no run: it is said once, and what is trained comes back to the caller."""
    monkeypatch.setattr(torch, "save", lambda state, file: None)
    with pytest.warns(UserWarning, match=r"did not reach the disk: '.*last.ckpt' is damaged or no checkpoint") as told:
        loop, _, history = fit(tmp_path, max_epochs=2)
    assert (loop.current_epoch, len(history)) == (2, 2)
    assert sum("did not reach" in str(warning.message) for warning in told) == 1
