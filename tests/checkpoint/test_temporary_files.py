"""Files are made beside their target: under names that nobody knows before, with its permissions, and never left for good."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from fabric_template.files import disk
from fabric_template.files.disk import clear_stale, replace_file, try_lock
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier
from runs import assert_same_end, fit, logs_of, tree

from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from fabric_template.errors import CheckpointError
from fabric_template.tools import cli

LOGS, CHECKPOINTS = "logs/run/version_0", "checkpoints/run/version_0"
LEFT = ".last.ckpt.7.0123abcd.tmp"


def save(path, step=1):
    AtomicCheckpointIO().save_checkpoint({"global_step": step}, path)


WRITERS = {"replace_file": lambda path: replace_file(path, b"new"), "save_checkpoint": save}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS.keys())
def write(request):
    return request.param


# ---- links, permissions, names


def test_no_planted_link_is_followed(tmp_path):
    """Under the names that temporary files once had."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    home = tmp_path / LOGS
    home.mkdir(parents=True)
    for name in ("metrics.csv.tmp", "hparams.yaml.tmp", "steps.csv.tmp"):
        (home / name).symlink_to(precious)
    fit(tmp_path, max_epochs=2, version=0)
    assert precious.read_text() == "mine"
    assert (home / "metrics.csv").is_file()


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o666, 0o444])
def test_permissions_stay(tmp_path, write, mode):
    path = tmp_path / "a.ckpt"
    write(path)
    path.chmod(mode)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_permissions_that_the_process_gives(tmp_path, write):
    before = os.umask(0o027)
    try:
        write(tmp_path / "a.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.ckpt").stat().st_mode) == 0o640


def test_the_files_of_a_run_keep_theirs(tmp_path):
    fit(tmp_path, max_epochs=1)
    files = [tmp_path / LOGS / "metrics.csv", tmp_path / LOGS / "hparams.yaml", tmp_path / CHECKPOINTS / "last.ckpt"]
    for path in files:
        path.chmod(0o640)

    class More(Classifier):
        def on_train_epoch_end(self):
            self.log("more", 1.0)  # a new column: the file is replaced

    fit(tmp_path, More, max_epochs=2, resume="last")
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o640] * 3
    assert "more" in files[0].read_text()


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "pipe")
    assert str(caught.value) == f"could not save '{tmp_path / 'pipe'}': it is no regular file. Give the path of a file."


# ---- renames that report an error


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_a_rename_that_is_done_and_reports_an_error_is_done(tmp_path, monkeypatch, code):
    """As a network file system may answer: no row twice, no warning, every file as without the error."""
    whole = fit(tmp_path / "whole", max_epochs=3)

    def replace(source, target):
        os.replace(source, target)
        raise OSError(code, os.strerror(code), str(source))

    monkeypatch.setattr(disk.fs, "replace", replace)
    assert_same_end(whole, fit(tmp_path / "a", max_epochs=3))
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "a") == tree(tmp_path / "whole")


def test_a_rename_that_is_not_done_is_an_error(tmp_path, monkeypatch, write):
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")

    def replace(source, target):
        raise OSError(errno.EIO, "it failed")

    monkeypatch.setattr(disk.fs, "replace", replace)
    with pytest.raises((OSError, CheckpointError)):
        write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.ckpt"]


# ---- what a kill leaves


def test_the_next_run_of_a_name_clears_what_no_living_one_holds(tmp_path):
    """Killed before its first save: no later save has that target. Of all versions, in both folders; nothing else."""
    left, living = [], []
    for home in ("logs", "checkpoints"):
        for name in ("run/version_0", "run/mine", "other/version_0"):
            folder = tmp_path / home / name
            folder.mkdir(parents=True)
            for number, target in enumerate(("last.ckpt", "epoch=1-val_loss=0.1.ckpt", "metrics.csv", "hparams.yaml")):
                path = folder / f".{target}.7.0123abc{number}.tmp"
                path.write_bytes(b"half")
                left.append(path)
            (folder / ".mine.tmp").write_text("not ours")
            living.append(folder / ".last.ckpt.7.fedcba98.tmp")
    held = [os.open(path, os.O_RDWR | os.O_CREAT) for path in living]
    assert all(map(try_lock, held))
    fit(tmp_path, max_epochs=1)
    assert [path for path in left if path.exists()] == [path for path in left if "other" in path.parts]
    assert all(path.exists() for path in living)
    assert len(list(tmp_path.rglob(".mine.tmp"))) == 6
    for fd in held:
        os.close(fd)
    fit(tmp_path, max_epochs=1)
    assert [path for path in living if path.exists()] == [path for path in living if "other" in path.parts]


def test_what_a_run_syncs(tmp_path, monkeypatch):
    """What has to survive a power cut, once: nothing that a small run does is dearer."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    each = []
    for epochs in (1, 3):
        synced.clear()
        fit(tmp_path / str(epochs), max_epochs=epochs)
        files = [Path(path).name for path in synced]
        each.append(
            {name: sum(name in file for file in files) for name in ("metrics.csv", "last.ckpt", "hparams", "config")}
        )
        each[-1]["folders"] = len(files) - sum(each[-1].values())
    assert each[0] == {"metrics.csv": 1, "last.ckpt": 1, "hparams": 1, "config": 1, "folders": 9}
    assert each[1] == {"metrics.csv": 3, "last.ckpt": 3, "hparams": 1, "config": 1, "folders": 11}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    ("place", "mine", "logger"),
    [("logs/run/version_0/checkpoints", None, True), ("checkpoints", None, False), ("mine", "mine", True)],
)
def test_what_a_modelcheckpoint_left_goes_too(tmp_path, place, mine, logger):
    """Killed in the run's last save; the next run only sees that there is nothing more to train."""

    def again():
        callback = ModelCheckpoint(mine and tmp_path / mine, save_last=True)
        fit(tmp_path, max_epochs=1, callbacks=[callback], logger=logger, resume="auto")

    again()
    (left := tmp_path / place / LEFT).write_bytes(b"half")
    again()
    assert not left.exists()
    assert (tmp_path / place / "last.ckpt").exists()


def test_pipes_and_links_are_no_stale_files(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.mkfifo(tmp_path / LEFT)
    link = tmp_path / ".last.ckpt.8.0123abcd.tmp"
    link.symlink_to(precious)
    clear_stale(tmp_path)  # opening the pipe would wait for ever
    assert precious.read_text() == "mine"
    assert link.is_symlink()


# ---- predict --out


PREDICT = ["predict", "--accelerator", "cpu", "--limit_predict_batches", "1", "--enable_progress_bar", "false", "--out"]


@pytest.mark.parametrize("out", ["file/p.pt", "/proc/p.pt", ".", "pipe"])
def test_where_predictions_go_is_tried_before_they_are_made(tmp_path, capsys, monkeypatch, out):
    monkeypatch.setattr("fabric_template.loop.FabricLoop.predict", lambda *args, **words: 1 / 0)
    Path("file").write_text("")
    os.mkfifo("pipe")
    assert cli.main([*PREDICT, out]) == 2
    assert f"--out: got {out}, " in capsys.readouterr().err.splitlines()[-1]
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


def test_predictions_are_written_whole_or_not_at_all(tmp_path, capsys, monkeypatch):
    assert cli.main([*PREDICT, "new/p.pt"]) == 0
    before = Path("new/p.pt").read_bytes()
    assert len(torch.load("new/p.pt")) == 1

    def write(fd, data):
        os.write(fd, data[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk.fs, "write", write)
        assert cli.main([*PREDICT, "new/p.pt"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(
            "could not save 'new/p.pt': the disk is full; the old file is unchanged. Mend that, or save to another folder."
        )
    )
    assert Path("new/p.pt").read_bytes() == before
    assert os.listdir("new") == ["p.pt"]


def test_a_checkpoint_is_the_new_one_after_such_a_rename(tmp_path, monkeypatch):
    save(tmp_path / "a.ckpt", 1)
    monkeypatch.setattr(disk.fs, "replace", lambda a, b: (os.replace(a, b), os.stat("nowhere")))
    save(tmp_path / "a.ckpt", 2)
    assert read_checkpoint(tmp_path / "a.ckpt") == {"global_step": 2}
