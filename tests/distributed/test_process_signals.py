"""Test signals that are sent to one of several processes."""

import os
import signal
import sys
import time

import pytest
from modules import Classifier
from processes import run_processes
from runs import fit, val_loader

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently on Windows")
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}


class Hit(Classifier):
    """A module that sends a signal to its own process or to the parent process, in one hook on one rank."""

    def __init__(self, hook, rank, number, parent=None):
        super().__init__()
        self.hit = hook, rank, number, parent

    def _maybe(self, hook):
        where, rank, number, parent = self.hit
        if (hook, int(os.environ["LOCAL_RANK"])) == (where, rank):
            os.kill(parent or os.getpid(), getattr(signal, number))
            # Wait until the parent process has forwarded the signal to this process.
            while parent and self.trainer.run.signals.received is None:
                time.sleep(0.01)

    def prepare_data(self):
        self._maybe("prepare_data")

    def setup(self, stage):
        self._maybe("setup")

    def validation_step(self, batch, batch_idx):
        self._maybe("sanity")
        return super().validation_step(batch, batch_idx)

    def on_train_start(self):
        print("trains", file=sys.stderr)


def set_up(rank, strategy, *hit):
    fit("run", lambda: Hit(*hit, *([os.getpid()] if hit[1:] and strategy == "parent" else [])), val=val_loader, max_epochs=1,
        strategy="ddp_fork" if strategy in ("parent", "child") else strategy, devices=2)  # fmt: skip
    print("went on", file=sys.stderr)


@pytest.mark.parametrize(
    ("hook", "rank", "number"),
    [
        ("prepare_data", 0, "SIGTERM"),
        ("setup", 1, "SIGUSR1"),
        ("sanity", 1, "SIGTERM"),
    ],
)
def test_both_processes_stop_if_one_gets_a_signal_before_training(hook, rank, number):
    """If only one process stopped, the other would wait, or end with an error from gloo."""
    codes, errors = run_processes(set_up, "ddp", hook, rank, number)
    assert codes == [CODES[number]] * 2, errors
    assert "trains" not in "".join(errors)


@pytest.mark.parametrize(
    ("who", "hook", "number"),
    [("parent", "setup", "SIGINT"), ("child", "setup", "SIGINT")],
)
def test_all_forked_processes_stop_after_a_signal_that_arrives_before_training(who, hook, number):
    """The parent process or one child process gets the signal."""
    (code,), (error,) = run_processes(set_up, who, hook, 0, number, ranks=1, is_launched=False)
    assert code == CODES[number], error
    assert "trains" not in error
    assert "went on" not in error
