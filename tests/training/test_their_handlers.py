"""A handler of one's own for SIGTERM or SIGUSR1 is called as well: the run stops and saves all the same."""

import os
import signal
import sys

import pytest
import torch
from modules import Classifier, make_loader
from runs import assert_same_end, fit
from test_interrupt import Interrupt, train

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently there")
NUMBERS = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def heard():
    """The signals that somebody's own handler got."""
    found = []

    def handler(number, frame):
        found.append(number)

    before = {number: signal.signal(number, handler) for number in NUMBERS}
    yield found
    assert [signal.getsignal(number) for number in NUMBERS] == [handler, handler]  # given back
    for number, one in before.items():
        signal.signal(number, one)


def steps(root):
    return torch.load(root / "checkpoints/run/version_0/last.ckpt", weights_only=True)["global_step"]


@pytest.mark.parametrize("number", NUMBERS)
def test_theirs_and_ours(tmp_path, heard, number):
    whole = fit(tmp_path / "whole", train=train, max_epochs=3)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "cut", train=train, max_epochs=3, callbacks=[Interrupt(8, number)])
    assert (ended.value.code, heard, steps(tmp_path / "cut")) == (128 + number, [number], 8)
    assert_same_end(whole, fit(tmp_path / "cut", train=train, seed=9, resume="last", max_epochs=3))


def test_the_second_one_ends_at_once_all_the_same(tmp_path, heard):
    interrupt = Interrupt(8, signal.SIGTERM, times=2)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, train=train, max_epochs=3, callbacks=[interrupt])
    assert (ended.value.code, heard, steps(tmp_path)) == (143, [signal.SIGTERM] * 2, 6)
    assert interrupt.seen[-1] == (1, 0)


def test_what_theirs_raises_arrives(tmp_path, heard):
    def raises(number, frame):
        raise SystemExit("mine")

    before = signal.signal(signal.SIGTERM, raises)
    with pytest.raises(SystemExit, match="mine"):
        fit(tmp_path, train=train, max_epochs=3, callbacks=[Interrupt(8, signal.SIGTERM)])
    assert signal.signal(signal.SIGTERM, before) is raises
    assert steps(tmp_path) == 6


def test_what_is_ignored_stays_so(tmp_path, heard):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loop, _, _ = fit(tmp_path, train=train, max_epochs=2, callbacks=[Interrupt(8, signal.SIGTERM)])
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN
    assert (loop.global_step, heard) == (12, [])


def test_a_job_that_theirs_may_requeue_is_not_requeued_twice(tmp_path, heard, monkeypatch, capsys):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        fit(tmp_path / "run", train=train, max_epochs=3, callbacks=[Interrupt(8, signal.SIGUSR1)])
    assert heard == [signal.SIGUSR1]
    assert not (tmp_path / "asked").exists()


class HitsParent(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 0 and not self.trainer._run.stop.signals.received:
            os.kill(os.getppid(), signal.SIGTERM)
            while self.trainer._run.stop.signals.received is None:  # passed on
                signal.sigtimedwait([], 0.01)
        return super().training_step(batch, batch_idx)


def test_of_forked_ranks_it_is_called_where_it_was_set(tmp_path, heard, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, HitsParent, train=lambda: make_loader(400), max_epochs=3, strategy="ddp_fork", devices=2)
    assert (ended.value.code, heard) == (143, [signal.SIGTERM])
    assert 3 < steps(tmp_path) < 100


class Inner(Interrupt):
    """Fits something else as its epoch starts, and gets the signal there."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.steps = fit("inner", train=train, max_epochs=2, callbacks=[Interrupt(2, signal.SIGTERM)])[
                0
            ].global_step


def test_a_run_around_this_one_hears_itself(tmp_path, heard):
    inner = Inner(at=-1)
    with pytest.raises(SystemExit):
        fit(tmp_path, train=train, max_epochs=3, callbacks=[inner])
    assert (inner.steps, steps(tmp_path), heard) == (12, 7, [signal.SIGTERM])
