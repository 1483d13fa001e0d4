"""Test which run resume="last" and "auto" continue, and what a run with a given version replaces."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import Classifier
from parameters import halve
from processes import run_processes
from runs import Plain, assert_same_end, fit, logs_of, tree, val_loader

from fabric_template import list_runs, read_logs
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.errors import MissingCheckpointError
from fabric_template.files import read_times


def folder(root, version):
    name = f"version_{version}" if isinstance(version, int) else version
    return Path(root, "checkpoints/run", name)


class Stops(Callback):
    """A callback that raises an error at the given step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


def fail(root, step=1, **options):
    with pytest.raises(RuntimeError, match="stopped"):
        fit(root, Plain, max_epochs=2, callbacks=[Stops(step)], **options)


# Finding the newest run


def touch(root):
    for path in folder(root, 1).iterdir():
        os.utime(path, (time.time() + 1000,) * 2)


def copy(root):
    shutil.copytree(folder(root, 1), folder(root, 7))


def copy_older_files(root):
    """Copy a checkpoint of version_1 to version_9, without a .lock file."""
    folder(root, 9).mkdir()
    shutil.copy(folder(root, 1) / "last.ckpt", folder(root, 9) / "last.ckpt")


def make_empty_folders(root):
    for name in ("version_12", "zzz", "version_x"):
        (folder(root, name)).mkdir()
    (folder(root, 0).parent / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("keyword", "change"), halve(["last", "auto"], [touch, copy, copy_older_files, make_empty_folders])
)
def test_resume_continues_the_run_that_saved_the_latest_checkpoint(tmp_path, change, keyword):
    for _ in range(3):
        fit(tmp_path, Plain, max_epochs=1)
    fit(tmp_path, Plain, max_epochs=2, resume="last", version=0)
    change(tmp_path)
    loop, *_ = fit(tmp_path, Plain, max_epochs=3, resume=keyword)
    assert (loop.ckpt_path, loop.current_epoch) == (str(folder(tmp_path, 0) / "last.ckpt"), 3)


def test_resume_finds_the_newest_run_after_its_folder_was_moved(tmp_path):
    """If the .lock file is missing, FabricLoop uses the time that a checkpoint contains."""
    fit(tmp_path / "a", Plain, max_epochs=1)
    fit(tmp_path / "b", Plain, max_epochs=2)
    for kind in ("checkpoints", "logs"):
        shutil.copytree(tmp_path / "b" / kind / "run/version_0", tmp_path / "a" / kind / "run/moved")
    for path in tmp_path.rglob(".lock"):
        path.unlink()
    for path in folder(tmp_path / "a", 0).iterdir():
        os.utime(path)
    loop, *_ = fit(tmp_path / "a", Plain, max_epochs=3, resume="last")
    assert loop.ckpt_path == str(folder(tmp_path / "a", "moved") / "last.ckpt")


class WithClass(Classifier):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"activation": torch.nn.ReLU})


def test_resume_finds_the_newest_run_even_if_hyperparameters_contain_classes(tmp_path):
    for _ in range(2):
        fit(tmp_path, WithClass, max_epochs=1)
    fit(tmp_path, WithClass, max_epochs=2, resume="last", version=0)
    for path in tmp_path.rglob(".lock"):
        path.unlink()
    loop, *_ = fit(tmp_path, WithClass, max_epochs=3, resume="last")
    assert loop.checkpoint_dir.name == "version_0"


def test_load_best_reads_the_best_checkpoint_of_the_newest_run(tmp_path):
    options = {"val": val_loader, "monitor": "val_loss"}
    for version in ("b", "a"):
        fit(tmp_path, Plain, max_epochs=1, version=version, **options)
    fit(tmp_path, Plain, max_epochs=2, resume="last", version="b", **options)
    loop, *_ = fit(tmp_path, Plain, max_epochs=1, load="best", **options)
    assert loop.ckpt_path == str(folder(tmp_path, "b") / "best.ckpt")


def test_resume_last_prefers_a_fabric_loop_checkpoint_to_newer_trainer_checkpoints(tmp_path):
    fit(tmp_path, Plain, max_epochs=2)
    path = folder(tmp_path, 0) / "last.ckpt"
    foreign = read_checkpoint(path)
    del foreign["fabric_template"]
    for version in (1, 5, "named"):
        folder(tmp_path, version).mkdir()
        torch.save(foreign, folder(tmp_path, version) / "last.ckpt")
    assert fit(tmp_path, Plain, max_epochs=2, resume="last")[0].ckpt_path == str(path)
    shutil.rmtree(path.parent)
    loop, *_ = fit(tmp_path, Plain, max_epochs=2, load="last")
    assert loop.ckpt_path == str(folder(tmp_path, 5) / "last.ckpt")


@pytest.mark.parametrize("text", ["", "1\nstarted\nsaved nan\n", "saved 99999999999", "\0\n" * 99, "finished"])
def test_resume_ignores_a_lock_file_with_missing_or_invalid_timestamps(tmp_path, text):
    for epochs in (1, 2):
        fit(tmp_path, Plain, max_epochs=epochs)
    (folder(tmp_path, 0) / ".lock").write_text(text)
    loop, *_ = fit(tmp_path, Plain, max_epochs=3, resume="last")
    assert loop.checkpoint_dir.name == "version_1"


def test_resume_warns_about_a_newer_run_without_a_checkpoint(tmp_path):
    fit(tmp_path, Plain, max_epochs=1)
    fail(tmp_path)
    with pytest.warns(UserWarning, match="resume: version_1 is newer but has no checkpoint, so ver"):
        loop, *_ = fit(tmp_path, Plain, max_epochs=2, resume="last")
    assert loop.checkpoint_dir.name == "version_0"
    # version_0 has now saved the latest checkpoint, so resuming it again causes no warning.
    fit(tmp_path, Plain, max_epochs=3, resume="last")


def test_the_lock_file_records_when_the_run_started_and_when_each_checkpoint_was_saved(tmp_path):
    before = time.time()
    fit(tmp_path, Plain, max_epochs=2)
    started, saved = read_times(folder(tmp_path, 0))
    assert before <= started <= saved <= time.time()
    assert read_checkpoint(folder(tmp_path, 0) / "last.ckpt")["fabric_template"]["saved_at"] == saved
    lines = (folder(tmp_path, 0) / ".lock").read_text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["started", "saved", "saved", "finished"]
    assert (tmp_path / "logs/run/version_0/.lock").read_text().splitlines()[1:] == lines[1:]


def test_resume_finds_the_newest_run_even_if_the_system_clock_was_set_back(tmp_path, monkeypatch):
    fit(tmp_path, Plain, max_epochs=1, version=0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 1000)
    fail(tmp_path, version=0)
    with pytest.raises(MissingCheckpointError):
        fit(tmp_path, Plain, max_epochs=2, resume="last")
    fit(tmp_path, Plain, max_epochs=2, version=0)
    assert fit(tmp_path, Plain, max_epochs=3, resume="last")[0].current_epoch == 3


# Starting a new run in the folder of an existing version

BEST = {"val": val_loader, "monitor": "val_loss"}


@pytest.mark.parametrize(
    ("first", "version"),
    halve([{}, BEST, {**BEST, "save_top_k": 2}, {**BEST, "save_last": False}], [0, "tuned"]),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_fit_refuses_resume_last_if_a_newer_run_in_the_folder_has_no_checkpoint(tmp_path, first, version):
    root = tmp_path / "runs"
    fit(root, Plain, max_epochs=2, version=version, **first)
    old = {path.name: path.read_bytes() for path in folder(root, version).glob("*.ckpt")}
    fail(root, version=version)
    fail(root, version=version, step=3)
    assert {path.name: path.read_bytes() for path in folder(root, version).glob("*.ckpt")} == old
    for given in (version, None):
        with pytest.raises(MissingCheckpointError, match="newest run has no readable last checkpoint in "):
            fit(root, Plain, max_epochs=3, version=given, resume="last")
    # The older run continues if resume is the path of one of its checkpoints.
    path = max(folder(root, version).glob("*.ckpt"), key=lambda path: read_checkpoint(path)["global_step"])
    shutil.copytree(root, tmp_path / "again")
    loop, _, rows = fit(root, Plain, max_epochs=3, version=version, resume=path, **first)
    assert (loop.current_epoch, loop.global_step) == (3, 30)
    assert rows["epoch"].tolist() == read_logs(root / "logs")["epoch"].tolist() == [0, 1, 2]
    assert not Path(loop.log_dir, ".replaced").exists()
    if "save_last" not in first:
        assert fit(root, Plain, max_epochs=4, resume="last", **first)[0].current_epoch == 4
    # resume="auto" starts a new run instead of raising an error.
    root = tmp_path / "again"
    loop, _, rows = fit(root, Plain, max_epochs=1, version=version, resume="auto", **first)
    assert (loop.ckpt_path, len(rows)) == (None, 1)
    names = [path.name for path in folder(root, version).glob("*.ckpt")]
    assert {read_checkpoint(folder(root, version) / name)["global_step"] for name in names} == {10}


def test_a_run_in_an_existing_folder_removes_old_checkpoints_at_its_first_save(tmp_path):
    fit(tmp_path, Plain, max_epochs=4, version=0, **BEST, save_top_k=3)
    (folder(tmp_path, 0) / "mine.ckpt").write_bytes(b"mine")
    (folder(tmp_path, 0) / "notes.txt").write_text("mine")
    old, seen = set(os.listdir(folder(tmp_path, 0))), []

    class Look(Callback):
        def on_train_batch_start(self, trainer, *_):
            seen.append(set(os.listdir(folder(tmp_path, 0))))

    fit(tmp_path, Plain, max_epochs=2, version=0, callbacks=[Look()])
    assert seen[:10] == [old] * 10
    assert list_runs(tmp_path / "logs")["epochs"].tolist() == [2]
    assert seen[10:] == [{".lock", "last.ckpt", "mine.ckpt", "notes.txt"}] * 10


@pytest.mark.parametrize("step", [3, 9, 10, 11])
def test_resume_auto_ignores_an_older_run_in_a_reused_version_folder(tmp_path, step):
    fit(tmp_path, Plain, max_epochs=2, version=0, **BEST, save_top_k=2)
    codes, errors = run_processes(kill_new_run, str(tmp_path), step, ranks=1, is_launched=False)
    assert codes == [-signal.SIGKILL], errors
    loop, *_ = fit(tmp_path, Plain, max_epochs=2, version=0, resume="auto", seed=7)
    assert loop.global_step == 20
    assert (loop.ckpt_path is None) == (step < 10)


class Kills(Stops):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_new_run(rank, root, step):
    fit(root, Plain, max_epochs=2, version=0, callbacks=[Kills(step)])


def test_continuing_version_0_as_version_1_removes_the_old_checkpoints_of_version_1(tmp_path):
    fit(tmp_path, Plain, max_epochs=1, version=0)
    fit(tmp_path, Plain, max_epochs=4, version=1, **BEST)
    path = folder(tmp_path, 0) / "last.ckpt"
    fit(tmp_path, Plain, max_epochs=2, version=1, resume=path)
    assert [path.name for path in folder(tmp_path, 1).glob("*.ckpt")] == ["last.ckpt"]
    assert fit(tmp_path, Plain, max_epochs=3, version=1, resume="last")[0].global_step == 30


def test_resuming_from_a_copy_of_a_checkpoint_continues_the_same_run(tmp_path):
    whole = fit(tmp_path / "whole", Plain, max_epochs=3, version=0, **BEST)
    fit(tmp_path / "cut", Plain, max_epochs=2, version=0, **BEST)
    shutil.copy(folder(tmp_path / "cut", 0) / "last.ckpt", tmp_path / "copy.ckpt")
    again = fit(tmp_path / "cut", Plain, max_epochs=3, version=0, resume=tmp_path / "copy.ckpt", **BEST)
    assert_same_end(whole, again)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")
    scores = [run[0].checkpoint_callback.best_model_score for run in (whole, again)]
    assert scores[0] == scores[1]


def test_resume_last_raises_an_error_if_the_newest_run_saved_no_checkpoints(tmp_path):
    fit(tmp_path, Plain, max_epochs=1, version=0)
    fit(tmp_path, Plain, max_epochs=1, version=0, enable_checkpointing=False)
    with pytest.raises(MissingCheckpointError, match="newest run"):
        fit(tmp_path, Plain, max_epochs=2, version=0, resume="last")
    fit(tmp_path / "other", Plain, max_epochs=1, version=0)
    fit(tmp_path / "other", Plain, max_epochs=1, version=0, fast_dev_run=True)
    assert fit(tmp_path / "other", Plain, max_epochs=2, version=0, resume="last")[0].global_step == 20


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_resume_finds_the_newest_run_that_used_a_model_checkpoint_callback(tmp_path):
    def run(resume=None, callbacks=(), **options):
        callbacks = [ModelCheckpoint(save_last=True), *callbacks]
        return fit(tmp_path, Classifier, resume=resume, callbacks=callbacks, **options)[0]

    for _ in range(2):
        run(max_epochs=1)
    run("last", max_epochs=2, version=0)
    loop = run("last", max_epochs=3)
    assert Path(loop.ckpt_path) == tmp_path / "logs/run/version_0/checkpoints/last.ckpt"
    with pytest.raises(RuntimeError, match="stopped"):
        run(max_epochs=3, version=0, callbacks=[Stops(1)])
    with pytest.raises(MissingCheckpointError, match="newest run"):
        run("last", max_epochs=3, version=0)
    run("auto", max_epochs=1, version=0)
    assert logs_of(tmp_path)[0].count("\n") == 1
