"""Test that each loop survives disk errors, and that error messages name the file and the cause."""

import os
import resource
import shutil
import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import pytest
from modules import Classifier, assert_same_weights, make_loader
from runs import val_loader, with_files

from fabric_template import FabricLoop, MiniLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}
IS_ROOT = os.geteuid() == 0


def train(kind, epochs, resume=None, make_module=Classifier, **options):
    options = with_files(max_epochs=epochs, log_every_n_steps=1, **options)
    if kind == "MiniLoop":
        del options["enable_progress_bar"], options["enable_model_summary"]
    else:
        options["num_sanity_val_steps"] = 0
    loop = LOOPS[kind](seed=1, **options)
    module = make_module()
    loop.fit(module, make_loader(24), val_loader(), resume=resume)
    return loop, module


def steps_of(root, name):
    """Return the steps in the rows of a CSV file."""
    return pd.read_csv(Path(root, "logs/run/version_0", name))["step"].tolist()


@contextmanager
def file_size_limit(size):
    """Make each write beyond a file size fail, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("size", [2000, 6000])
@pytest.mark.filterwarnings("ignore:.*could not be saved")
def test_the_error_about_a_failed_save_names_the_file_and_the_cause(kind, size, tmp_path):
    """After a failed write, torch.save raises a RuntimeError that does not mention the disk."""
    _, expected = train(kind, 2, default_root_dir=tmp_path / "whole")
    root = tmp_path / "cut"
    train(kind, 1, default_root_dir=root)
    assert (root / "checkpoints/run/version_0/last.ckpt").stat().st_size > 6000
    text = r"File too large.*last\.ckpt|last\.ckpt: File too large"
    with file_size_limit(size), pytest.raises((ValueError, OSError), match=text):
        train(kind, 2, resume="last", default_root_dir=root)
    # The previous checkpoint is undamaged, and the incomplete file is removed.
    assert read_checkpoint(root / "checkpoints/run/version_0/last.ckpt")["global_step"] == 6
    assert list(root.rglob(".*.tmp")) == []
    _, module = train(kind, 2, resume="last", default_root_dir=root)
    assert_same_weights(expected, module)
    assert steps_of(root, "metrics.csv") == [6, 12]


@pytest.mark.parametrize("kind", LOOPS)
def test_a_full_disk_at_the_start_is_reported_with_the_path_of_the_file(kind, tmp_path):
    with file_size_limit(1), pytest.raises(OSError, match=r"File too large: .*hparams\.yaml"):
        train(kind, 1, default_root_dir=tmp_path)
    train(kind, 1, default_root_dir=tmp_path)


class Fails(Classifier):
    """A model that makes each write to the disk fail, and raises an error in the same training step."""

    def __init__(self, limits):
        super().__init__()
        self.limits = limits

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 4:
            self.limits.enter_context(file_size_limit(1))
            raise KeyError("own error")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_full_disk_does_not_hide_the_error_that_ends_a_run(kind, tmp_path):
    with ExitStack() as limits, pytest.raises(KeyError, match="own error"):
        train(kind, 1, make_module=lambda: Fails(limits), default_root_dir=tmp_path)


@pytest.mark.skipif(IS_ROOT, reason="root may read every file")
@pytest.mark.parametrize("kind", LOOPS)
def test_an_unreadable_checkpoint_is_not_replaced_by_an_older_one(kind, tmp_path):
    train(kind, 2, default_root_dir=tmp_path, monitor="val_loss")
    last = tmp_path / "checkpoints/run/version_0/last.ckpt"
    last.chmod(0)
    with pytest.raises((ValueError, OSError), match="Permission denied"):
        train(kind, 3, resume="auto", default_root_dir=tmp_path, monitor="val_loss")
    last.chmod(0o600)
    assert read_checkpoint(last)["global_step"] == 12


@pytest.mark.parametrize("kind", LOOPS)
def test_a_folder_in_place_of_a_checkpoint_is_refused(kind, tmp_path):
    train(kind, 1, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="got the folder '.*version_0', expected a checkpoint file"):
        train(kind, 2, resume=tmp_path / "checkpoints/run/version_0", default_root_dir=tmp_path)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_in_a_deleted_working_directory_writes_all_files(kind, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    shutil.rmtree(work)
    train(kind, 1, default_root_dir=tmp_path)
    found = {path.name for path in (tmp_path / "logs/run/version_0").iterdir()}
    assert found >= {"config.yaml", "hparams.yaml", "metrics.csv", "steps.csv"}


def to_semicolons(text):
    return text.replace(",", ";").replace(".", ",")


def without_last_line_break(text):
    return text.removesuffix("\n")


def with_tabs(text):
    return "\ufeff" + text.replace(",", "\t")


def sorted_from_last_to_first(text):
    header, *lines = text.splitlines()
    return "\n".join([header, *reversed(lines), ""])


CHANGES = [to_semicolons, without_last_line_break, with_tabs, sorted_from_last_to_first]


def edit(root, name, change):
    path = Path(root, "logs/run/version_0", name)
    path.write_text(change(path.read_text()), encoding="utf-8")


class Edits(Classifier):
    """A model that calls a function before the given optimizer step."""

    def __init__(self, step, function):
        super().__init__()
        self.function, self.step = function, step

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.step:
            self.function()
        return super().training_step(batch, batch_idx)


def rows_by_step(root, name):
    table = pd.read_csv(Path(root, "logs/run/version_0", name)).drop(columns=["time", "waiting"], errors="ignore")
    return table.sort_values("step", kind="stable").reset_index(drop=True)


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["metrics.csv", "steps.csv"])
@pytest.mark.filterwarnings("ignore:.*another program changed this file")
def test_a_resumed_run_keeps_all_rows_of_a_csv_file_that_a_user_saved_in_a_different_format(
    kind, change, name, tmp_path
):
    train(kind, 3, default_root_dir=tmp_path / "whole")
    train(kind, 2, default_root_dir=tmp_path / "cut")
    edit(tmp_path / "cut", name, change)
    train(kind, 3, resume="last", default_root_dir=tmp_path / "cut")
    for file in ("metrics.csv", "steps.csv"):
        pd.testing.assert_frame_equal(*(rows_by_step(tmp_path / root, file) for root in ("whole", "cut")))


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("change", CHANGES[:3])
@pytest.mark.parametrize("name", ["metrics.csv", "steps.csv"])
def test_training_keeps_all_rows_of_a_csv_file_that_a_user_saves_in_a_different_format(kind, change, name, tmp_path):
    train(kind, 3, default_root_dir=tmp_path / "whole")
    root = tmp_path / "cut"
    train(kind, 3, make_module=lambda: Edits(14, lambda: edit(root, name, change)), default_root_dir=root)
    for file in ("metrics.csv", "steps.csv"):
        pd.testing.assert_frame_equal(*(rows_by_step(tmp_path / root, file) for root in ("whole", "cut")))


@pytest.mark.parametrize("kind", LOOPS)
def test_a_resumed_run_writes_the_rows_that_could_not_be_written_before_the_checkpoint(kind, tmp_path):
    """The logs and the checkpoints may be on different disks, and only the disk of the logs may be full."""
    train("FabricLoop", 3, default_root_dir=tmp_path / "whole")
    root = tmp_path / "cut"
    logs = root / "logs/run/version_0"

    def block():
        logs.rename(root / "moved")
        logs.write_text("")

    with pytest.warns(UserWarning, match="rows could not be written"), pytest.raises(ValueError, match="logs"):
        train("FabricLoop", 2, make_module=lambda: Edits(9, block), default_root_dir=root)
    logs.unlink()
    (root / "moved").rename(logs)
    assert steps_of(root, "steps.csv")[-1] == 9
    if kind == "FabricLoop":
        # Resuming a finished run also writes the missing rows.
        train(kind, 2, resume="last", default_root_dir=root)
        assert steps_of(root, "steps.csv")[-1] == 12
    train(kind, 3, resume="last", default_root_dir=root)
    for file in ("metrics.csv", "steps.csv"):
        pd.testing.assert_frame_equal(*(rows_by_step(tmp_path / root, file) for root in ("whole", "cut")))


def test_a_deleted_metrics_csv_does_not_remove_the_rows_of_steps_csv_that_could_not_be_written(tmp_path):
    root = tmp_path / "cut"
    steps, metrics = (root / "logs/run/version_0" / name for name in ("steps.csv", "metrics.csv"))

    def block():
        steps.rename(root / "moved")
        steps.mkdir()

    with pytest.warns(UserWarning, match="rows could not be written"), pytest.raises(ValueError, match="logs"):
        train("FabricLoop", 2, make_module=lambda: Edits(9, block), default_root_dir=root)
    steps.rmdir()
    (root / "moved").rename(steps)
    metrics.unlink()
    with pytest.warns(UserWarning, match=r"metrics\.csv: the rows from before the checkpoint are missing"):
        train("FabricLoop", 3, resume="last", default_root_dir=root)
    assert steps_of(root, "steps.csv") == list(range(1, 19))
    assert steps_of(root, "metrics.csv") == [18]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")
@pytest.mark.parametrize("kind", LOOPS)
def test_saving_a_checkpoint_syncs_the_csv_files_first(kind, tmp_path, monkeypatch):
    """After a power cut, the CSV files must contain all rows that the checkpoint counts."""
    synced, sync = [], os.fsync

    def record(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    train(kind, 3, default_root_dir=tmp_path)
    saves = [index for index, name in enumerate(synced) if "last.ckpt" in name]
    assert len(saves) == 3
    for start, end in zip([-1, *saves], saves, strict=False):
        names = "".join(synced[start + 1 : end])
        assert "metrics.csv" in names
        assert "steps.csv" in names
