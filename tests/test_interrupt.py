"""Ctrl-C and SIGTERM: the step at hand is finished, the run saved; a notebook gets its history, a script ends."""

import signal
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from runs import assert_same_end, fit, logs_of, source_of, val_loader
from torch import nn

import fabric_template.loop

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
    monkeypatch.setattr(fabric_template.loop, "is_interactive", lambda: True)


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

    with pytest.raises(RuntimeError, match="^mine$"):
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
@pytest.mark.parametrize(("number", "codes"), [("SIGINT", (130, -2)), ("SIGTERM", (143,))])
def test_script(tmp_path, number, codes):
    """The program ends as the signal would end it, after the save; then it is resumed."""
    whole = fit(tmp_path / "whole", train=train, max_epochs=3)
    code = SCRIPT.format(root=str(tmp_path / "cut"), number=number)
    done = subprocess.run(source_of(code), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode in codes, done.stderr
    assert "went on" not in done.stdout
    assert ("KeyboardInterrupt" in done.stderr) == (number == "SIGINT")
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 8
    assert_same_end(whole, fit(tmp_path / "cut", train=train, seed=9, resume="last", max_epochs=3))
