"""Two processes started at once with the same name: each has a version of its own, and one version has one writer."""

import os
import signal
import subprocess
import sys
import time

import pytest
from fabric_template.process.home import _claim
from lightning.fabric import Fabric
from modules import Classifier, make_loader
from runs import fit, logs_of, source_of, tree, without_time

from fabric_template.errors import CheckpointError

RUN = """
import os, sys, time
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from modules import make_loader
from runs import fit

class Meet(Callback):
    def on_train_start(self, trainer, module):
        Path({root!r}, f"ready{{sys.argv[1]}}").touch()
        while not Path({root!r}, {waits_for!r}).exists():
            time.sleep(0.01)

Path({root!r}, f"pid{{sys.argv[1]}}").write_text(str(os.getpid()))
Path({root!r}, f"imported{{sys.argv[1]}}").touch()
while not Path({root!r}, "imported1").exists() or not Path({root!r}, "imported0").exists():
    time.sleep(0.001)
words = {words!r}
callbacks = [Meet()] if {waits_for!r} else []
loop, _, _ = fit({root!r}, train=lambda: make_loader(24), max_epochs=3, seed=int(sys.argv[1]), callbacks=callbacks, **words)
print(loop.log_dir)
"""


def start(root, number, waits_for="", **words):
    command = source_of(RUN.format(root=str(root), words=words, waits_for=waits_for))
    return subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_at_once(tmp_path):
    """Both begin in the same millisecond; each writes its own files only, and they are those of a run that was alone."""
    runs = [start(tmp_path, i) for i in range(2)]
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    versions = [output.strip()[-1] for output, _ in outputs]
    assert sorted(versions) == ["0", "1"]
    for seed, version in enumerate(versions):
        fit(tmp_path / str(seed), train=lambda: make_loader(24), max_epochs=3, seed=seed)
        alone = without_time(tmp_path / f"{seed}/logs/run/version_0/metrics.csv")
        assert logs_of(tmp_path, version=version)[0] == alone
    assert [name for name in tree(tmp_path) if name.startswith("checkpoints")] == [
        f"checkpoints/run/version_{number}/last.ckpt" for number in range(2)
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_one_version_has_one_writer_and_a_kill_leaves_no_lock(tmp_path):
    (tmp_path / "imported1").touch()
    first = start(tmp_path, 0, waits_for="never", version=0, save_every_n_steps=1)
    while not (tmp_path / "ready0").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    pid = int((tmp_path / "pid0").read_text())
    try:
        for resume in (None, "auto"):
            with pytest.raises(CheckpointError) as error:
                fit(tmp_path, Classifier, version=0, resume=resume, max_epochs=1)
            assert str(error.value) == (
                f"'{tmp_path}/logs/run/version_0' is being written by another run (process {pid}): give this one"
                " another name=... or version=..., or stop the other."
            )
    finally:
        os.kill(pid, signal.SIGKILL)
        first.communicate()
    _, _, history = fit(tmp_path, Classifier, version=0, resume="auto", max_epochs=1)
    assert history["epoch"].tolist() == [0]


def test_of_several_that_were_told_the_same_number_one_has_it(tmp_path):
    """Scripts that ask for their folder ahead of fit, all started at once."""
    homes, fabric = [tmp_path / "logs/run", tmp_path / "checkpoints/run"], Fabric(accelerator="cpu")
    assert [_claim(homes, asked, fabric) for asked in (0, 0, None, 1, 5)] == [0, 1, 2, 3, 5]
