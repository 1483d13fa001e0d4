"""One version has one writer, and a run that is killed leaves no lock."""

import os
import signal
import subprocess
import sys
import time

import pytest
from modules import Classifier, make_loader
from runs import fit, logs_of, source_of

from fabric_template.errors import CheckpointError

RUN = """
import os, sys, time
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from modules import make_loader
from runs import fit
from torch.utils.data import DataLoader

class Wait(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        Path({root!r}, "ready" + sys.argv[1]).write_text(str(os.getpid()))
        while not Path({root!r}, "go").exists():
            time.sleep(0.01)

def train():
    return DataLoader(make_loader(24).dataset, 4, num_workers=1, persistent_workers=True)

fit({root!r}, train=train, max_epochs=2, seed=int(sys.argv[1]), callbacks=[Wait()], **{options!r})
"""


def start(root, number, **options):
    command = source_of(RUN.format(root=str(root), options=options), __file__)
    return subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True)


def wait_for(path, *runs):
    while not path.exists() or not path.read_text():
        for run in runs:
            assert run.poll() is None, run.communicate()
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_runs_that_start_at_once(tmp_path):
    """Each has a version of its own. A version is free again when its process is killed."""
    runs = [start(tmp_path, number) for number in range(2)]
    for number in range(2):
        wait_for(tmp_path / f"ready{number}", *runs)
    versions = sorted(path.name for path in (tmp_path / "logs/run").iterdir())
    assert versions == ["version_0", "version_1"]
    locks = [(tmp_path / "logs/run" / version / ".lock").read_text().split()[0] for version in versions]
    pids = [(tmp_path / f"ready{number}").read_text() for number in range(2)]
    assert sorted(locks) == sorted(pids)
    with pytest.raises(CheckpointError, match=rf"version_0: another run \(process {locks[0]}\) writes there"):
        fit(tmp_path, Classifier, version=0, max_epochs=1)
    os.kill(int(locks[0]), signal.SIGKILL)
    runs[pids.index(locks[0])].wait()
    fit(tmp_path, Classifier, lambda: make_loader(24), version=0, resume="auto", max_epochs=1)
    assert len(logs_of(tmp_path, 0)[0].splitlines()) == 2
    (tmp_path / "go").touch()
    for run in runs:
        run.communicate()
    assert runs[pids.index(locks[1])].returncode == 0
    assert len(logs_of(tmp_path, 1)[0].splitlines()) == 3
