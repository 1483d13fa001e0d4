"""Ctrl-C and SIGTERM: the step at hand is finished, the run saved; a notebook gets its history, a script ends."""

import os
import signal
import subprocess
import sys
import time

import fabric_template.core.train
import fabric_template.process.launch
import fabric_template.process.leaving
import fabric_template.process.signals
import pytest
import torch
from clock import Clock
from interpreter import ready, ready_python
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from runs import assert_same_end, fit, logs_of, source_of, val_loader
from torch import nn

DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)


class Interrupt(Callback):
    """Raises a signal at one batch of one epoch (counted in batches of the whole fit), in one hook."""

    def __init__(self, at=7, number=signal.SIGINT, hook="on_train_batch_start", times=1):
        self.at, self.number, self.batches, self.times, self.seen = at, number, 0, times, []
        self.hook = hook

    def _maybe(self, hook):
        if hook == self.hook and self.batches == self.at:
            for _ in range(self.times):
                signal.raise_signal(self.number)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches += 1
        self._maybe("on_train_batch_start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((trainer.current_epoch, batch_idx))
        self._maybe("on_train_batch_end")

    def on_validation_start(self, trainer, module):
        self._maybe("on_validation_start")

    def on_train_end(self, trainer, module):
        self.seen.append("end")


@pytest.fixture
def notebook(monkeypatch):
    for room in (fabric_template.core.train, fabric_template.process.leaving, fabric_template.process.launch):
        monkeypatch.setattr(room, "is_interactive", lambda: True)


def train():
    return make_loader(24)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_notebook(tmp_path, notebook, number, hook):
    """Batch 8 of 6 an epoch is the second epoch's second: the first epoch's row is there, the rest is resumed."""
    interrupt = Interrupt(8, number, hook)

    def make():
        module = Classifier(on_step=True)
        module.net[2].eval()  # found in this mode, handed back in it
        return module

    words = {"max_epochs": 3, "log_every_n_steps": 2}
    whole = fit(tmp_path / "whole", make, train, val_loader, **words)
    loop, module, history = fit(tmp_path / "cut", make, train, val_loader, callbacks=[interrupt], **words)
    assert history["epoch"].tolist() == [0]
    assert interrupt.seen == [(0, i) for i in range(6)] + [(1, 0), (1, 1), "end"]
    assert (loop.current_epoch, loop.global_step) == (1, 8)
    assert [part.training for part in module.net] == [True, True, False, True]
    assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGINT) in DEFAULTS
    assert signal.getsignal(signal.SIGTERM) in DEFAULTS
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["global_step"], found["fabric_template"]["batch_idx"]) == (8, 2)
    resumed = fit(tmp_path / "cut", make, train, val_loader, seed=9, resume="last", **words)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("at", "hook", "words"),
    [
        (6, "on_train_batch_end", {}),  # the epoch's last batch
        (6, "on_validation_start", {}),  # in validation
        (1, "on_train_batch_start", {}),  # at once
        (8, "on_train_batch_start", {"accumulate_grad_batches": 4}),  # inside a window
        (9, "on_validation_start", {"val_check_interval": 0.5}),
        (18, "on_train_batch_end", {}),  # the very last
    ],
)
def test_notebook_anywhere(tmp_path, notebook, at, hook, words):
    words = {"max_epochs": 3, "log_every_n_steps": 2, **words}
    make = lambda: Classifier(on_step=True)  # noqa: E731
    whole = fit(tmp_path / "whole", make, train, val_loader, **words)
    callbacks = [Interrupt(at, hook=hook)]
    _, _, history = fit(tmp_path / "cut", make, train, val_loader, callbacks=callbacks, **words)
    assert history["epoch"].tolist() == list(range(at // 6)) if len(history) else at < 6
    resumed = fit(tmp_path / "cut", make, train, val_loader, seed=9, resume="last", **words)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


def test_script_in_process(tmp_path):
    """Outside of a notebook the interrupt goes on after the save, and on_exception hears of it."""
    heard = []

    class Hear(Callback):
        def on_exception(self, trainer, module, exception):
            heard.append(type(exception))

    callbacks = [Interrupt(8), Hear()]
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, train=train, max_epochs=3, callbacks=callbacks)
    assert heard == [KeyboardInterrupt]
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 8
    assert signal.getsignal(signal.SIGINT) in DEFAULTS


def test_second_interrupt_ends_at_once(tmp_path, notebook):
    """The step at hand is not waited for, nothing more is saved; modes, grad mode and handlers are as found."""
    interrupt = Interrupt(8, times=2)

    def make():
        module = Classifier()
        module.net[2].eval()
        return module

    modules = []
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, lambda: modules.append(make()) or modules[0], train, max_epochs=3, callbacks=[interrupt])
    assert interrupt.seen[-1] == (1, 0)
    assert [part.training for part in modules[0].net] == [True, True, False, True]
    assert torch.is_grad_enabled()
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 6
    assert signal.getsignal(signal.SIGINT) in DEFAULTS


def test_someone_elses_handler_stays(tmp_path):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        _, _, history = fit(tmp_path, train=train, max_epochs=2, callbacks=[Interrupt(8)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
    assert len(history) == 2


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_an_exception_leaves_everything_as_found(tmp_path, where):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if where == "training_step":
                raise RuntimeError("mine")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            raise RuntimeError("mine")

    modules = []

    def make():
        modules.append(Fails())
        modules[0].net[1].eval()
        return modules[0]

    with pytest.raises(RuntimeError, match="^mine"):
        fit(tmp_path, make, train, val_loader, max_epochs=1, num_sanity_val_steps=0)
    assert [part.training for part in modules[0].net] == [True, False, True, True]
    assert modules[0].training
    assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGINT) in DEFAULTS
    # and the same module trains afterwards
    net = modules[0].net
    step = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    given = lambda net: {"optimizer": torch.optim.SGD(net.parameters(), 0.1), "training_step": step}  # noqa: E731
    fit(tmp_path, lambda: net, train, given=given, max_epochs=1)


SCRIPT = """
import signal, sys
from runs import fit
from modules import make_loader
from test_interrupt import Interrupt
fit({root!r}, train=lambda: make_loader(24), max_epochs=3, callbacks=[Interrupt(8, signal.{number})])
print("went on")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently there")
@pytest.mark.parametrize(("number", "codes"), [("SIGINT", (130, -2)), ("SIGTERM", (143,)), ("SIGUSR1", (138,))])
def test_script(tmp_path, number, codes):
    """The program ends as the signal would end it, after the save; then it is resumed."""
    whole = fit(tmp_path / "whole", train=train, max_epochs=3)
    code = SCRIPT.format(root=str(tmp_path / "cut"), number=number)
    done = subprocess.run(source_of(code, __file__), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in codes, done.stderr
    assert "went on" not in done.stdout
    assert ("KeyboardInterrupt" in done.stderr) == (number == "SIGINT")
    last = tmp_path / "cut/checkpoints/run/version_0/last.ckpt"
    told = f"{number}: training stops in epoch 1, after step 8; '{last}' is saved: resume='last' goes on after step 8\n"
    assert told in done.stderr
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 8
    assert_same_end(whole, fit(tmp_path / "cut", train=train, seed=9, resume="last", max_epochs=3))


# ---- SLURM


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A scontrol that notes what it is asked, with an exit code to be chosen."""
    (tmp_path / "bin").mkdir()

    def make(code=0):
        path = tmp_path / "bin/scontrol"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "Invalid job id" >&2\nexit {code}\n')
        path.chmod(0o755)
        return tmp_path / "asked"

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    return make


def interrupted(root, number, **words):
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        fit(root, train=train, max_epochs=3, callbacks=[Interrupt(8, number)], **words)
    return getattr(stopped.value, "code", 130)


def test_slurm_requeues_on_its_signal(tmp_path, scontrol, monkeypatch, capsys):
    asked = scontrol()
    # before Lightning asks about SLURM for itself, the job is one of an array
    assert interrupted(tmp_path / "a", signal.SIGUSR1) == 138
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert interrupted(tmp_path / "b", signal.SIGUSR1) == 138
    assert asked.read_text() == "requeue 17\nrequeue 16_2\n"
    assert "requeued job 17; resume='auto' goes on from here" in capsys.readouterr().err
    for name in ("a", "b"):
        found = torch.load(tmp_path / name / "checkpoints/run/version_0/last.ckpt", weights_only=True)
        assert found["global_step"] == 8


def test_slurm_does_not_requeue(tmp_path, scontrol, monkeypatch):
    """Not for SIGTERM, not from an interactive shell, not without a checkpoint."""
    asked = scontrol()
    assert interrupted(tmp_path / "a", signal.SIGTERM) == 143
    with pytest.warns(UserWarning, match="^job 17 is not requeued: it has no checkpoint to go on from$"):
        assert interrupted(tmp_path / "b", signal.SIGUSR1, enable_checkpointing=False) == 138
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert interrupted(tmp_path / "c", signal.SIGUSR1) == 138
    assert not asked.exists()


def test_slurm_refuses(tmp_path, scontrol):
    scontrol(1)
    text = r"^job 17 could not be requeued \(Invalid job id\): submit it again, with resume='auto'$"
    with pytest.warns(UserWarning, match=text):
        assert interrupted(tmp_path, signal.SIGUSR1) == 138


# ---- several ranks

FORK = {"strategy": "ddp_fork", "devices": 2}


class InterruptRank(Interrupt):
    """One rank alone gets the signal."""

    def __init__(self, rank, *args, **words):
        super().__init__(*args, **words)
        self.rank = rank

    def _maybe(self, hook):
        if torch.distributed.get_rank() == self.rank:
            super()._maybe(hook)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_agree_on_the_step(tmp_path, monkeypatch, rank, number, code):
    """The signal reaches one of two ranks: both stop at the same step, in the middle of an epoch, saved once."""
    monkeypatch.setattr(fabric_template.process.signals, "AGREE_EVERY", 0.0)  # at every batch
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = fit(tmp_path / "whole", train=train, max_epochs=4, **FORK)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        fit(tmp_path / "cut", train=train, max_epochs=4, callbacks=[InterruptRank(rank, 8, number)], **FORK)
    assert getattr(stopped.value, "code", 130) == code
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["global_step"], found["fabric_template"]["batch_idx"]) == (8, 2)
    resumed = fit(tmp_path / "cut", train=train, resume="auto", max_epochs=4, **FORK)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


@pytest.mark.parametrize(("step", "times"), [(0.001, 4), (0.25, 14)])
def test_ranks_agree_about_once_a_second(tmp_path, monkeypatch, step, times):
    """Not at every step: of 48 quick ones at the first, at each epoch's end and at the fit's; else at each fourth, too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    clock = Clock()
    monkeypatch.setattr(fabric_template.process.signals, "time", clock)

    class Count(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            clock.sleep(step)

        def on_fit_start(self, trainer, module):
            self.count, reduce = 0, torch.distributed.all_reduce

            def counted(tensor, *args, **words):
                self.count += tensor.dtype == torch.int64 and tensor.shape == (3,)
                return reduce(tensor, *args, **words)

            torch.distributed.all_reduce = counted

        def on_fit_end(self, trainer, module):
            (tmp_path / f"rank{trainer.global_rank}").write_text(str(self.count))

    fit(tmp_path, train=lambda: make_loader(192), max_epochs=2, callbacks=[Count()], **FORK)
    counts = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert counts == [times, times]


PARENT = """
import os, signal, sys, time
from runs import fit
from modules import Classifier, make_loader
from fabric_template.process import signals

signals.AGREE_EVERY = 0.0  # at every batch: not when a clock says so

class Hit(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 0:
            os.kill({parent}, signal.{number})
            while self.trainer._run.stop.signals.received is None:  # passed on
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)

fit({root!r}, Hit, train=lambda: make_loader(80), max_epochs=3, strategy={strategy!r}, devices=2)
print("went on")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently there")
@pytest.mark.parametrize(
    ("strategy", "parent", "number", "codes"),
    [("ddp_fork", "os.getppid()", "SIGINT", (130, -2)),
     ("ddp", "os.getpid()", "SIGTERM", (143,))],
)  # fmt: skip
def test_a_script_with_two_ranks(tmp_path, strategy, parent, number, codes):
    """The process that was started gets the signal: its ranks save, and it ends as the signal would end it."""
    script = tmp_path / "script.py"  # Lightning's launcher starts the same file again
    head = source_of("")[-1]
    words = {"root": str(tmp_path / "cut"), "strategy": strategy, "parent": parent, "number": number}
    script.write_text(head + PARENT.format(**words))
    environment = {**os.environ, "READY_PYTHON": ready_python()}
    words = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run(ready([sys.executable, str(script)]), **words)
    # On a busy machine one of gloo's threads may meet the interpreter's end after all is done: torch's, see
    # https://github.com/pytorch/pytorch/pull/179291
    is_torchs = "terminate called without an active exception" in done.stderr and done.returncode == -signal.SIGABRT
    assert done.returncode in codes or is_torchs, done.stderr
    assert "went on" not in done.stdout
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["global_step"], found["fabric_template"]["batch_idx"]) == (4, 4)


# ---- max_time


class OutOfTime(Callback):
    """Lets the time be over at one batch."""

    def __init__(self, monkeypatch, at):
        self.patch, self.at, self.batches = monkeypatch, at, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches += 1
        if self.batches == self.at:
            now = time.monotonic
            self.patch.setattr(fabric_template.process.signals.time, "monotonic", lambda: now() + 7200)

    def on_train_end(self, trainer, module):
        self.patch.undo()


@pytest.mark.parametrize("words", [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}, FORK], ids=str)
@pytest.mark.parametrize("at", [2, 8, 12])
def test_max_time(tmp_path, monkeypatch, at, words):
    """Over in the middle of an epoch: the epoch ends as Trainer's does, with its row; a resume goes on in its middle."""
    monkeypatch.setattr(fabric_template.process.signals, "AGREE_EVERY", 0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = words.get("devices", 1)
    loader = lambda: make_loader(24 * ranks)  # noqa: E731
    words = {"max_epochs": 3, "log_every_n_steps": 2, **words}
    make = lambda: Classifier(on_step=True, sync_dist=ranks > 1)  # noqa: E731
    whole = fit(tmp_path / "whole", make, loader, val_loader, **words)
    with pytest.MonkeyPatch.context() as patch:
        callbacks = [OutOfTime(patch, at)]
        _, _, history = fit(
            tmp_path / "cut", make, loader, val_loader, callbacks=callbacks, max_time="00:01:00:00", **words
        )
    window = words.get("accumulate_grad_batches", 1)
    assert history["epoch"].tolist() == list(range((at + 5) // 6))
    assert history["step"].tolist()[-1] == -(-at // window)
    assert history["val_loss"].notna().all()
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == -(-at // window)
    assert found["fabric_template"]["batch_idx"] == at % 6
    resumed = fit(tmp_path / "cut", make, loader, val_loader, seed=9 if ranks == 1 else 1, resume="last", **words)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")
