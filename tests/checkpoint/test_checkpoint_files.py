"""Test damaged checkpoint files, a failing disk, and two runs that write to the same version."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from modules import assert_same_weights
from test_exact_resume import Net, fit

from fabric_template import files
from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from fabric_template.checkpoint.run_folders import RunFolders
from fabric_template.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError
from fabric_template.files import claim_version

FOLDER = "checkpoints/run/version_0"
RUN = {"monitor": "val_loss", "save_top_k": -1, "max_epochs": 2}


def flip(path):
    """Flip one bit in the middle of a checkpoint file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "replaced": lambda path: path.write_bytes(b"no checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_skips_a_damaged_checkpoint_with_a_warning(tmp_path, damage):
    fit(tmp_path, **RUN)
    last = tmp_path / FOLDER / "last.ckpt"
    DAMAGES[damage](last)
    with pytest.raises(DamagedCheckpointError, match="last.ckpt"):
        read_checkpoint(last)
    with pytest.warns(UserWarning, match=r"last\.ckpt.*Using the previous checkpoint instead"):
        loop, *_ = fit(tmp_path, resume="last", **{**RUN, "max_epochs": 3})
    assert "epoch=1-step=12" in loop.ckpt_path
    assert (loop.current_epoch, loop.global_step) == (3, 18)
    assert read_checkpoint(last)["epoch"] == 2


def test_resume_auto_starts_a_new_run_if_no_checkpoint_exists(tmp_path):
    with pytest.raises(MissingCheckpointError, match="resume: got 'last', but the newest run has no readable last"):
        fit(tmp_path, resume="last")
    assert fit(tmp_path, resume="auto", max_epochs=1)[0].ckpt_path is None
    loop, *_ = fit(tmp_path, resume="auto", max_epochs=2)
    assert (loop.current_epoch, loop.ckpt_path) == (2, str(tmp_path / FOLDER / "last.ckpt"))
    assert loop.checkpoint_dir == tmp_path / FOLDER
    assert loop.checkpoint_path("last") == tmp_path / FOLDER / "last.ckpt"


class Disk:
    """A disk that fails to sync files with ``name`` in their names during ``epochs``."""

    def __init__(self, monkeypatch, name, epochs):
        self.loop, self.epochs, self.sync = None, epochs, os.fsync
        monkeypatch.setattr(files.os, "fsync", self)
        self.name = name

    def __call__(self, descriptor):
        is_meant = self.name in os.readlink(f"/proc/self/fd/{descriptor}")
        if is_meant and self.loop.current_epoch in self.epochs:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.sync(descriptor)

    def setup(self, trainer, module, stage):
        self.loop = trainer


def test_resume_auto_starts_a_new_run_if_all_checkpoints_are_damaged(tmp_path):
    fit(tmp_path, max_epochs=1)
    flip(tmp_path / FOLDER / "last.ckpt")
    content = (tmp_path / FOLDER / "last.ckpt").read_bytes()
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(MissingCheckpointError, match="no readable last"):
        fit(tmp_path, resume="last", max_epochs=2)
    with pytest.warns(UserWarning, match="damaged"):
        loop, *_ = fit(tmp_path, resume="auto", max_epochs=2)
    assert (loop.ckpt_path, loop.checkpoint_dir.name) == (None, "version_1")
    assert (tmp_path / FOLDER / "last.ckpt").read_bytes() == content


def test_saving_a_checkpoint_does_not_overwrite_the_target_of_a_symlink(tmp_path):
    folder, mine = tmp_path / FOLDER, tmp_path / "mine.ckpt"
    folder.mkdir(parents=True)
    mine.write_bytes(b"mine")
    (folder / "last.ckpt").symlink_to(mine)
    fit(tmp_path, max_epochs=1, version=0)
    assert mine.read_bytes() == b"mine"
    assert read_checkpoint(folder / "last.ckpt")["epoch"] == 0


def test_resuming_removes_no_file_outside_the_run_directory(tmp_path):
    """A crafted checkpoint lists a user's file among the old checkpoints that a save removes."""
    fit(tmp_path, **RUN)
    (tmp_path / "precious.ckpt").write_bytes(b"mine")
    last = tmp_path / FOLDER / "last.ckpt"
    checkpoint = read_checkpoint(last)
    checkpoint["fabric_template"]["checkpoints"]["kept"] = {"../../../precious.ckpt": 99.0}
    AtomicCheckpointIO().save_checkpoint(checkpoint, last)
    fit(tmp_path, resume="last", **{**RUN, "save_top_k": 1, "max_epochs": 3})
    assert (tmp_path / "precious.ckpt").read_bytes() == b"mine"


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_disk_error_is_not_reported_as_a_damaged_checkpoint(tmp_path, monkeypatch, code):
    fit(tmp_path, **RUN)
    read = open

    def fails(path, *args, **kwargs):
        if str(path).endswith("last.ckpt"):
            raise OSError(code, os.strerror(code))
        return read(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fails)
        with pytest.raises((OSError, CheckpointError), match=os.strerror(code)):
            fit(tmp_path, resume="auto", **{**RUN, "max_epochs": 3})
    assert fit(tmp_path, resume="auto", **{**RUN, "max_epochs": 3})[0].ckpt_path.endswith("last.ckpt")


def test_saving_a_checkpoint_syncs_files_and_folders_to_disk(tmp_path, monkeypatch):
    """Saving syncs the checkpoint, the CSV files, and each folder with new files."""
    synced, sync = [], os.fsync
    path_of = lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path_of(descriptor)) or sync(descriptor))
    fit(tmp_path, max_epochs=3)
    files = [path.name.split(".")[-3] if path.suffix == ".tmp" else path.name for path in synced]
    assert sum("last.ckpt" in path.name for path in synced) == 3, files
    assert sum(path.name == "metrics.csv" for path in synced) <= 3
    assert {"run", "version_0", "logs", "checkpoints", tmp_path.name} <= set(files)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")
def test_training_continues_with_a_warning_if_a_checkpoint_cannot_be_saved(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, "last.ckpt", [2])
    with pytest.warns(UserWarning, match=r"last\.ckpt: the checkpoint could not be saved: No space left"):
        loop, module, _ = fit(tmp_path / "cut", callbacks=[disk])
    assert_same_weights(module, fit(tmp_path / "whole")[1])
    assert read_checkpoint(loop.checkpoint_path())["epoch"] == 2
    assert [path.name for path in loop.checkpoint_dir.iterdir() if path.name != ".lock"] == ["last.ckpt"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")
def test_fit_raises_an_error_if_the_last_checkpoint_could_not_be_saved(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, "last.ckpt", [2, 3])
    could_not_save = pytest.warns(UserWarning, match="could not be saved")
    with could_not_save, pytest.raises(CheckpointError, match="Training ended, but these files"):
        fit(tmp_path, callbacks=[disk])
    assert disk.loop.current_epoch == 3
    monkeypatch.undo()
    assert fit(tmp_path, resume="last")[0].global_step == 18


def test_two_runs_cannot_write_to_the_same_version_folder(tmp_path):
    fit(tmp_path, max_epochs=1)
    with RunFolders().locked([tmp_path / FOLDER]):
        with pytest.raises(CheckpointError, match=r"another run is writing to this folder \(process \d+\)"):
            fit(tmp_path, resume="last", max_epochs=2)
        assert fit(tmp_path, max_epochs=1)[0].checkpoint_dir.name == "version_1"
    assert fit(tmp_path, resume="last", version=0, max_epochs=2)[0].current_epoch == 2


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_refused_run_does_not_delete_csv_files_that_the_running_one_has_kept(tmp_path):
    """The refused run saves a checkpoint with OnExceptionCheckpoint."""
    loop = fit(tmp_path, max_epochs=1)[0]
    kept = Path(loop.log_dir, ".replaced", "metrics.csv")
    kept.parent.mkdir()
    kept.write_text("epoch,step\n")
    callback = OnExceptionCheckpoint(tmp_path / "failed")
    with RunFolders().locked([tmp_path / FOLDER]), pytest.raises(CheckpointError, match="another run is writing"):
        fit(tmp_path, max_epochs=1, version=0, callbacks=[callback])
    assert (tmp_path / "failed" / "on_exception.ckpt").exists()
    assert kept.exists()


def test_runs_that_start_at_the_same_time_get_different_versions(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(claim_version(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


class Saved(Net):
    def __init__(self, **values):
        super().__init__()
        self.save_hyperparameters()

    def on_train_epoch_start(self):
        """Draw no random numbers, because Trainer does not save generator states."""

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net[:2](batch[0])[:, :3], batch[1])


def test_paths_tuples_and_dicts_in_hyperparameters_are_read_from_a_checkpoint_unchanged(tmp_path):
    values = {"path": Path("data"), "sizes": (1, 2), "rate": 0.1, "layers": {"a": [None, True]}}
    loop, *_ = fit(tmp_path, make_module=lambda: Saved(**values), max_epochs=1)
    found = read_checkpoint(loop.checkpoint_path())
    assert found["hyper_parameters"] == values
    assert Saved.load_from_checkpoint(loop.checkpoint_path(), weights_only=False).hparams["rate"] == 0.1
