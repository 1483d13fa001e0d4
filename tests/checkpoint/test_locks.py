"""The lock is on what is written, the logs and the checkpoints: no two runs write one version, however they come to it."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from fabric_template.files import disk, locks
from fabric_template.files.locks import one_writer
from lightning.pytorch.callbacks import Callback
from modules import make_loader
from runs import fit, tree

from fabric_template import CSVLogger
from fabric_template.checkpoint.checkpoint_io import CheckpointError


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)


def short(root=".", **words):
    return fit(root, train=lambda: make_loader(8), max_epochs=1, **words)


class Meanwhile(Callback):
    """While a run trains, tries others; keeps what they were told."""

    def __init__(self, *others):
        self.others, self.told = others, []

    def on_train_start(self, trainer, module):
        for other in self.others:
            try:
                other()
            except CheckpointError as error:
                self.told.append(str(error))
            else:
                self.told.append(None)


def refused(folder):
    return (
        f"'{folder}' is being written by another run (process {os.getpid()}): give this one another name=... or version=...,"
        " or stop the other."
    )


def test_three_ways_to_one_version(tmp_path):
    """Without a log, with a log of its own elsewhere, with another root but the same log."""
    here, there = str(tmp_path), str(tmp_path / "b")
    own = CSVLogger("elsewhere", "run", 0)
    others = Meanwhile(
        lambda: short(here, version=0, logger=False),
        lambda: short(here, version=0, loggers=[own]),
        lambda: short(there, version=0, loggers=[CSVLogger(f"{here}/logs", "run", 0)]),
        lambda: short(here, version=1, loggers=[CSVLogger("more", "run", 3), CSVLogger(f"{here}/logs", "run", 0)]),
        lambda: short(there, version=0),
    )
    short(here, version=0, callbacks=[others])
    checkpoints, logs = f"{here}/checkpoints/run/version_0", f"{here}/logs/run/version_0"
    assert others.told == [refused(checkpoints), refused(checkpoints), refused(logs), refused(logs), None]
    assert len((tmp_path / "logs/run/version_0/metrics.csv").read_text().splitlines()) == 2
    assert [name for name in tree(here) if name.endswith((".ckpt", "metrics.csv"))] == [
        "b/checkpoints/run/version_0/last.ckpt", "b/logs/run/version_0/metrics.csv",
        "checkpoints/run/version_0/last.ckpt", "logs/run/version_0/metrics.csv",
    ]  # fmt: skip


@pytest.mark.parametrize("leaves", ["refused", "failed", "done"])
def test_nothing_is_held_afterwards(tmp_path, leaves):
    """Whichever way a run ends, be it that only one of its two locks was to be had."""
    words = {"version": 0, "loggers": [CSVLogger("elsewhere", "run", 0)]}
    if leaves == "refused":
        with one_writer(["checkpoints/run/version_0"]), pytest.raises(CheckpointError, match="another run"):
            short(**words)
    elif leaves == "failed":
        boom = Callback()
        boom.on_train_start = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError) as kept:
            short(**words, callbacks=[boom])
        assert kept.value.__traceback__ is not None  # which holds every frame
    else:
        short(**words)
    with one_writer(["elsewhere/run/version_0", "checkpoints/run/version_0"]):
        pass


def test_logs_and_checkpoints_in_one_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    for _ in range(2):
        short(version=0, loggers=[CSVLogger("checkpoints", "run", 0), CSVLogger("link", "run", 0)])
    assert tree(tmp_path / "checkpoints") == [
        "run/version_0/" + name for name in ("config.yaml", "hparams.yaml", "last.ckpt", "metrics.csv")
    ]


def test_where_files_cannot_be_locked_a_line_says_so(tmp_path, monkeypatch):
    def flock(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked") as warned:
        short(version=0)
    assert [text for warning in warned if "locked" in (text := str(warning.message))] == [
        f"'{folder}/run/version_0' is where files cannot be locked: nothing keeps a second run from writing there; see to it"
        " that each has a name=... or version=... of its own"
        for folder in ("logs", "checkpoints")
    ]


class Raises(Callback):
    """Ends a run in its first batch, in one way or another."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise self.error


def lines(kind="logs"):
    return Path(f"{kind}/run/version_0/.lock").read_text().splitlines()


def test_who_wrote_and_how_it_ended_is_left_beside_the_lock():
    """One line for each of its writers, and for what they have noted; nothing else is left to say so."""
    me = str(os.getpid())
    short(version=0)
    assert lines("logs") == lines("checkpoints") == [me, "finished"]
    words = {"resume": "last", "train": lambda: make_loader(8), "version": 0}
    with pytest.raises(RuntimeError):
        fit(".", max_epochs=2, callbacks=[Raises(RuntimeError("no"))], **words)
    path = "checkpoints/run/version_0/last.ckpt"
    told = [me, "finished", me, f"resumed after step 2 from {path}", "failed"]
    assert lines() == told
    with pytest.raises(KeyboardInterrupt):
        fit(".", max_epochs=2, callbacks=[Raises(KeyboardInterrupt())], **words)
    told += [me, f"resumed after step 2 from {path}", "interrupted"]
    assert lines() == told
    fit(".", max_epochs=1, **words)  # there is nothing to do: it goes on from nowhere
    assert lines() == [*told, me, "finished"]


def test_a_moment_s_look_keeps_no_run_from_beginning(monkeypatch):
    with one_writer(["a"]):
        pass
    with open("a/.lock") as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: looked.close())
        with one_writer(["a"]):
            pass
