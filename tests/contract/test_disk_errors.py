"""Test that each loop survives disk errors, and that their messages name the file and the cause."""

import os
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from modules import Classifier, assert_same_weights, make_loader
from runs import val_loader, with_files

from fabric_template import FabricLoop, MiniLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}
IS_ROOT = os.geteuid() == 0


def train(kind, epochs, resume=None, module=None, **options):
    options = with_files(max_epochs=epochs, log_every_n_steps=1, **options)
    if kind == "MiniLoop":
        del options["enable_progress_bar"], options["enable_model_summary"]
    else:
        options["num_sanity_val_steps"] = 0
    loop = LOOPS[kind](seed=1, **options)
    module = module or Classifier()
    loop.fit(module, make_loader(24), val_loader(), resume=resume)
    return loop, module


def steps_of(root, name):
    """Return the steps in the rows of a CSV file."""
    return pd.read_csv(Path(root, "logs/run/version_0", name))["step"].tolist()


@contextmanager
def file_size_limit(size):
    """Let each write beyond a file size fail, like on a full disk."""
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
def test_a_run_in_a_deleted_working_directory_writes_all_files(kind, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    shutil.rmtree(work)
    train(kind, 1, default_root_dir=tmp_path)
    found = {path.name for path in (tmp_path / "logs/run/version_0").iterdir()}
    assert found >= {"config.yaml", "hparams.yaml", "metrics.csv", "steps.csv"}
