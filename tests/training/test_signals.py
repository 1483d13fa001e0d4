"""Test SIGINT, SIGTERM and SIGUSR1 in scripts and notebooks."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from interpreter import fork_command, forking_python
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from modules import Classifier, make_loader
from parameters import once
from runs import assert_same_end, fit, logs_of, python_command, val_loader

from fabric_template.distributed import signals
from fabric_template.training import lifecycle

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently on Windows")
DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)
FORK = {"strategy": "ddp_fork", "devices": 2}


class Interrupt(Callback):
    """A callback that raises a signal in one hook of one batch. Batches are counted over the whole fit."""

    def __init__(self, at=8, number=signal.SIGINT, hook="on_train_batch_start", times=1, rank=0):
        self.at, self.number, self.hook, self.times, self.rank = at, number, hook, times, rank
        self.batches, self.seen = 0, []

    def _raise_signal(self, trainer, hook):
        if hook == self.hook and self.batches == self.at and trainer.global_rank == self.rank:
            for _ in range(self.times):
                signal.raise_signal(self.number)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches += 1
        self._raise_signal(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((trainer.current_epoch, batch_idx))
        self._raise_signal(trainer, "on_train_batch_end")

    def on_validation_start(self, trainer, module):
        self._raise_signal(trainer, "on_validation_start")

    def on_train_end(self, trainer, module):
        self.seen.append("end")


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(lifecycle, "is_notebook", lambda: True)


def train():
    return make_loader(24)


def saved_step(root):
    return torch.load(root / "checkpoints/run/version_0/last.ckpt", weights_only=True)["global_step"]


def assert_resumes(tmp_path, whole, make=Classifier, val=None, seed=9, **options):
    resumed = fit(tmp_path / "cut", make, train, val, seed=seed, resume="last", **options)
    assert_same_end(whole, resumed)
    # Compare only metrics.csv, because steps.csv has an additional row for the validation at which the run stopped.
    assert logs_of(tmp_path / "cut")[0] == logs_of(tmp_path / "whole")[0]


@pytest.mark.parametrize(
    ("at", "hook", "number", "options"),
    [
        pytest.param(8, "on_train_batch_start", "SIGINT", {}, marks=pytest.mark.soak),
        (8, "on_train_batch_end", "SIGTERM", {}),
        # The signal arrives in the last batch of an epoch.
        (6, "on_train_batch_end", "SIGINT", {}),
        (6, "on_validation_start", "SIGINT", {}),
        pytest.param(1, "on_train_batch_start", "SIGINT", {}, marks=pytest.mark.soak),
        (8, "on_train_batch_start", "SIGINT", {"accumulate_grad_batches": 4}),
        (9, "on_validation_start", "SIGINT", {"val_check_interval": 0.5}),
        # The signal arrives in the last batch of the run.
        (18, "on_train_batch_end", "SIGINT", {}),
    ],
)
def test_fit_in_a_notebook_returns_the_history_after_ctrl_c(tmp_path, notebook, at, hook, number, options):
    options = {"max_epochs": 3, "log_every_n_steps": 2, **options}
    whole = fit(tmp_path / "whole", on_step, train, val_loader, **options)
    interrupt = Interrupt(at, getattr(signal, number), hook)
    loop, module, history = fit(tmp_path / "cut", on_step, train, val_loader, callbacks=[interrupt], **options)
    assert history["epoch"].tolist() == list(range(at // 6)) if len(history) else at < 6
    assert interrupt.seen[-1] == "end"
    assert [part.training for part in module.net] == [True, True, False, True]
    assert torch.is_grad_enabled()
    assert all(signal.getsignal(number) in DEFAULTS for number in signals.SIGNALS)
    assert loop.state.status == "interrupted"
    assert saved_step(tmp_path / "cut") == loop.global_step
    assert_resumes(tmp_path, whole, on_step, val_loader, **options)


def test_a_run_can_resume_after_ctrl_c_in_the_last_call_to_on_train_epoch_end(tmp_path, notebook):
    whole = fit(tmp_path / "whole", train=train, max_epochs=2)
    interrupt = LambdaCallback(on_train_epoch_end=lambda *_: signal.raise_signal(signal.SIGINT))
    fit(tmp_path / "cut", train=train, max_steps=4, callbacks=[interrupt])
    assert_resumes(tmp_path, whole, max_epochs=2)


def on_step():
    module = Classifier(on_step=True)
    module.net[2].eval()
    return module


@pytest.mark.parametrize("options", [{"save_last": True}, {"save_last": "link"}, {}, {"dirpath": "kept"}])
@pytest.mark.parametrize("at", [2, 8])
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_signal_saves_a_checkpoint_beside_those_that_model_checkpoint_saved(tmp_path, notebook, at, options):
    def saver(folder):
        folders = {"dirpath": tmp_path / folder / options["dirpath"]} if "dirpath" in options else {}
        return ModelCheckpoint(**{**options, **folders})

    # Each run is interrupted twice, so a resumed run must choose the newer of two checkpoints.
    whole = fit(tmp_path / "whole", train=train, max_epochs=3, callbacks=[saver("whole")])
    for step in (at, at + 7):
        callbacks = [saver("cut"), Interrupt(step)]
        cut = fit(tmp_path / "cut", train=train, max_epochs=3, resume="auto", callbacks=callbacks)
        assert cut[0].global_step == step
        assert list((tmp_path / "cut").rglob("last-v1.ckpt")) == []
    resumed = fit(tmp_path / "cut", train=train, max_epochs=3, seed=9, resume="auto", callbacks=[saver("cut")])
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut")[0] == logs_of(tmp_path / "whole")[0]


def test_a_signal_adds_no_checkpoint_to_a_folder_of_checkpoints_with_only_weights(tmp_path, notebook):
    saver = ModelCheckpoint(dirpath=tmp_path / "kept", save_weights_only=True)
    fit(tmp_path, train=train, max_epochs=3, callbacks=[saver, Interrupt(8)])
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=0-step=6.ckpt"]


def test_ctrl_c_in_a_script_calls_on_exception(tmp_path):
    errors = []

    class Listener(Callback):
        def on_exception(self, trainer, module, exception):
            errors.append(type(exception))

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, train=train, max_epochs=3, callbacks=[Interrupt(), Listener()])
    assert errors == [KeyboardInterrupt]
    assert saved_step(tmp_path) == 8
    assert signal.getsignal(signal.SIGINT) in DEFAULTS


def test_a_second_ctrl_c_stops_training_immediately(tmp_path, notebook):
    interrupt, modules = Interrupt(times=2), []

    def make():
        modules.append(on_step())
        return modules[0]

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, make, train, max_epochs=3, callbacks=[interrupt])
    assert interrupt.seen[-1] == (1, 0)
    assert [part.training for part in modules[0].net] == [True, True, False, True]
    assert saved_step(tmp_path) == 6
    assert signal.getsignal(signal.SIGINT) in DEFAULTS


SCRIPT = """
import signal, sys
from runs import fit
from modules import make_loader
from test_signals import Interrupt
fit({root!r}, train=lambda: make_loader(24), max_epochs=3, callbacks=[Interrupt(8, signal.{number})])
print("after fit")
"""


@pytest.mark.parametrize(
    ("number", "codes"),
    [("SIGINT", (130, -2)), ("SIGTERM", (143,)), pytest.param("SIGUSR1", (138,), marks=pytest.mark.soak)],
)
def test_a_script_stopped_by_a_signal_exits_with_the_code_of_the_signal(tmp_path, number, codes):
    whole = fit(tmp_path / "whole", train=train, max_epochs=3)
    code = SCRIPT.format(root=str(tmp_path / "cut"), number=number)
    done = subprocess.run(python_command(code, __file__), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in codes, done.stderr
    assert "after fit" not in done.stdout
    assert ("KeyboardInterrupt" in done.stderr) == (number == "SIGINT")
    assert f"{number}: training stops in epoch 1, after step 8." in done.stderr
    assert "last.ckpt', write resume='last'." in done.stderr
    assert saved_step(tmp_path / "cut") == 8
    assert_resumes(tmp_path, whole, max_epochs=3)


SIGNALS_GROUP = """
import os, signal
from runs import fit
from modules import Classifier, make_loader

class SignalsGroup(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            os.killpg(os.getpgrp(), signal.{number})
        return super().training_step(batch, batch_idx)

options = {{"num_workers": 2, "multiprocessing_context": {context!r}}}
fit({root!r}, SignalsGroup, train=lambda: make_loader(80, **options), max_epochs=3)
"""


@pytest.mark.parametrize(
    ("context", "number", "codes"),
    [("fork", "SIGTERM", (143,)), pytest.param("spawn", "SIGINT", (130, -2), marks=pytest.mark.soak)],
)
def test_a_signal_to_the_whole_process_group_does_not_end_the_workers(tmp_path, context, number, codes):
    """The timeout command and Ctrl-C in a terminal send signals to the whole process group."""
    code = SIGNALS_GROUP.format(root=str(tmp_path / "cut"), context=context, number=number)
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "start_new_session": True}
    command = [sys.executable, "-c", python_command("", __file__)[-1] + code]
    done = subprocess.run(command, **options)
    assert done.returncode in codes, done.stderr
    assert done.stderr.count("stopping after this step") == 1
    assert saved_step(tmp_path / "cut") == 4


# Signal handlers installed by the user


@pytest.fixture
def received():
    """Install a user's signal handler and return the signals that it receives. Restore the handlers at the end."""
    found, numbers = [], [signal.SIGTERM, signal.SIGUSR1]

    def handler(number, frame):
        found.append(number)

    before = {number: signal.signal(number, handler) for number in numbers}
    yield found
    assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    for number, previous in before.items():
        signal.signal(number, previous)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_also_calls_the_handler_installed_by_the_user(tmp_path, received, number):
    whole = fit(tmp_path / "whole", train=train, max_epochs=3)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "cut", train=train, max_epochs=3, callbacks=[Interrupt(8, number)])
    assert (ended.value.code, received, saved_step(tmp_path / "cut")) == (128 + number, [number], 8)
    assert_resumes(tmp_path, whole, max_epochs=3)


def test_an_exception_raised_by_the_users_signal_handler_reaches_the_caller(tmp_path, received):
    def raises(number, frame):
        raise SystemExit("mine")

    before = signal.signal(signal.SIGTERM, raises)
    with pytest.raises(SystemExit, match="mine"):
        fit(tmp_path, train=train, max_epochs=3, callbacks=[Interrupt(8, signal.SIGTERM)])
    assert signal.signal(signal.SIGTERM, before) is raises
    assert saved_step(tmp_path) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_script_handles_or_ignores_does_not_stop_the_run(tmp_path, received, number):
    handler = signal.SIG_IGN if number == signal.SIGTERM else lambda number, frame: received.append(number)
    before = signal.signal(number, handler)
    try:
        loop, _, _ = fit(tmp_path, train=train, max_epochs=2, callbacks=[Interrupt(8, number)])
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert loop.global_step == 12
    assert received == ([signal.SIGINT] if number == signal.SIGINT else [])


# Signals to one of two processes


@pytest.mark.parametrize(("rank", "number", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGINT, 130)])
def test_two_processes_stop_at_the_same_step_after_a_signal(tmp_path, monkeypatch, rank, number, code):
    monkeypatch.setattr(signals, "SECONDS_BETWEEN_CHECKS", 0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = fit(tmp_path / "whole", train=train, max_epochs=4, **FORK)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        fit(tmp_path / "cut", train=train, max_epochs=4, callbacks=[Interrupt(8, number, rank=rank)], **FORK)
    assert getattr(stopped.value, "code", 130) == code
    assert saved_step(tmp_path / "cut") == 8
    assert_resumes(tmp_path, whole, seed=1, max_epochs=4, **FORK)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_two_processes_save_one_checkpoint_in_the_folder_of_model_checkpoint_after_a_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "SECONDS_BETWEEN_CHECKS", 0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def train_with_saver(root, *callbacks, **given):
        saver = ModelCheckpoint(dirpath=tmp_path / root / "kept")
        return fit(tmp_path / root, train=train, max_epochs=3, callbacks=[saver, *callbacks], **FORK, **given)

    whole = train_with_saver("whole")
    with pytest.raises(SystemExit):
        train_with_saver("cut", Interrupt(8, signal.SIGTERM, rank=1))
    assert (tmp_path / "cut/kept/signal-step=8.ckpt").exists()
    assert_same_end(whole, train_with_saver("cut", resume="auto"))


TWO_RANKS = """
import os, signal, sys, time
from runs import fit
from modules import Classifier, make_loader
from fabric_template.distributed import signals

signals.SECONDS_BETWEEN_CHECKS = 0.0

class SignalsParent(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 0:
            os.kill({process}, signal.{number})
            while self.trainer.run.signals.received is None:
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)

fit({root!r}, SignalsParent, train=lambda: make_loader(80), max_epochs=3, strategy={strategy!r}, devices=2)
print("after fit")
"""


@pytest.mark.parametrize(
    ("strategy", "process", "number", "codes"),
    [("ddp_fork", "os.getppid()", "SIGINT", (130, -2)), ("ddp", "os.getpid()", "SIGTERM", (143,))],
)
def test_a_signal_ends_both_processes_of_a_distributed_script(tmp_path, strategy, process, number, codes):
    script = tmp_path / "script.py"
    options = {"root": str(tmp_path / "cut"), "strategy": strategy, "process": process, "number": number}
    script.write_text(python_command("")[-1] + TWO_RANKS.format(**options))
    environment = {**os.environ, "FORKING_PYTHON": forking_python()}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run(fork_command([sys.executable, str(script)]), **options)
    # Also accept SIGABRT, because a gloo thread may abort on a busy machine
    # when Python exits. See https://github.com/pytorch/pytorch/pull/179291
    is_torchs = "terminate called without an active exception" in done.stderr and done.returncode == -signal.SIGABRT
    assert done.returncode in codes or is_torchs, done.stderr
    assert "after fit" not in done.stdout
    assert saved_step(tmp_path / "cut") == 4


# Runs that max_time or should_stop ends


class OutOfTime(Callback):
    """A callback that moves Timer's clock past the time limit in one batch."""

    def __init__(self, at):
        self.at, self.batches = at, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches += 1
        if self.batches == self.at:
            timer = next(callback for callback in trainer.callbacks if hasattr(callback, "time_elapsed"))
            timer._offset = 7200


OPTIONS = [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}]


def test_a_run_ended_by_max_time_resumes_only_after_max_time_is_increased(tmp_path, capsys):
    options = {"max_epochs": 3}
    whole = fit(tmp_path / "whole", on_step, train, val_loader, **options)
    limited = {**options, "max_time": "00:01:00:00"}
    loop, _, _ = fit(tmp_path / "cut", on_step, train, val_loader, callbacks=[OutOfTime(8)], **limited)
    assert loop.ending()["ended"] == ["max_time is reached"]
    capsys.readouterr()
    for _ in range(2):
        loop, _, _ = fit(tmp_path / "cut", on_step, train, val_loader, resume="auto", **limited)
        assert loop.global_step == 8
        assert "Nothing is left to train: max_time is reached. For a new run" in capsys.readouterr().err
    resumed = fit(tmp_path / "cut", on_step, train, val_loader, resume="auto", max_time="00:09:00:00", **options)
    assert_same_end(whole, resumed)


def test_resume_auto_after_should_stop_does_not_train_further(tmp_path, capsys):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *batch):
            trainer.should_stop = trainer.global_step == 8

    fit(tmp_path, on_step, train, val_loader, max_epochs=3, callbacks=[Stop()])
    capsys.readouterr()
    loop, _, _ = fit(tmp_path, on_step, train, val_loader, max_epochs=9, resume="auto")
    assert loop.global_step == 8
    assert "Nothing is left to train: should_stop was set." in capsys.readouterr().err


@pytest.mark.parametrize(("options", "at"), once(OPTIONS, [2, 8, 12]), ids=str)
def test_a_run_stopped_mid_epoch_by_max_time_resumes_exactly(tmp_path, options, at):
    """The unfinished epoch gets a row in metrics.csv. The resumed run continues the same epoch."""
    options = {"max_epochs": 3, "log_every_n_steps": 2, **options}
    whole = fit(tmp_path / "whole", on_step, train, val_loader, **options)
    limited = {**options, "callbacks": [OutOfTime(at)], "max_time": "00:01:00:00"}
    _, _, history = fit(tmp_path / "cut", on_step, train, val_loader, **limited)
    steps = -(-at // options.get("accumulate_grad_batches", 1))
    assert history["epoch"].tolist() == list(range((at + 5) // 6))
    assert history["step"].tolist()[-1] == saved_step(tmp_path / "cut") == steps
    assert_resumes(tmp_path, whole, on_step, val_loader, **options)


class SignalInWorker(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 0:
            signal.raise_signal(signal.SIGINT)
        return torch.ones(8), torch.tensor(1)


def test_a_signal_that_reaches_only_a_loader_worker_prints_no_message(tmp_path, capfd):
    """The worker inherits the signal handler, but does not end training."""

    def loader():
        return torch.utils.data.DataLoader(SignalInWorker(), batch_size=2, num_workers=1)

    loop, _, history = fit(tmp_path, on_step, loader, loader, max_epochs=2, num_sanity_val_steps=0)
    assert (loop.global_step, len(history)) == (4, 2)
    assert "stopping" not in capfd.readouterr().err
