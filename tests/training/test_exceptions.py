"""Test that an exception in user code reaches the caller and that the run resumes exactly."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from interpreter import fork_command, forking_python
from modules import Classifier, make_data, make_loader
from parameters import halve, once
from runs import assert_same_end, fit, logs_of, python_command, val_loader
from torch.utils.data import DataLoader, Dataset

from fabric_template import TensorLoader


class Broken(RuntimeError):
    pass


class Fails(Classifier):
    """A module that raises an error in the n-th call to a hook."""

    def __init__(self, hook=None, at=0, manual=False):
        super().__init__(on_step=True)
        self.hook, self.at, self.counts, self.automatic_optimization = hook, at, {}, not manual

    def _count(self, hook):
        self.counts[hook] = self.counts.get(hook, 0) + 1
        if (hook, self.counts[hook]) == (self.hook, self.at):
            raise Broken("mine")

    def training_step(self, batch, batch_idx):
        self._count("training_step")
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self._count("before the step")
        self.optimizers().step()
        return None

    def validation_step(self, batch, batch_idx):
        self._count("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, *_):
        self._count("on_train_batch_start")

    def on_before_backward(self, loss):
        self._count("on_before_backward")

    def on_before_optimizer_step(self, optimizer):
        self._count("on_before_optimizer_step")

    def on_train_batch_end(self, *_):
        self._count("on_train_batch_end")

    def on_validation_epoch_end(self):
        self._count("on_validation_epoch_end")

    def on_train_epoch_end(self):
        self._count("on_train_epoch_end")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train():
    return make_loader(24)


PLACES = [
    *[("training_step", at) for at in (2, 8, 12)],
    ("on_train_batch_start", 8),
    ("on_before_backward", 12),
    ("on_before_optimizer_step", 4),
    *[("on_train_batch_end", at) for at in (2, 7, 12)],
    *[(hook, at) for hook in ("validation_step", "on_validation_epoch_end") for at in (2, 3)],
    ("on_train_epoch_end", 2),
]
OPTIONS = {
    "each epoch": {},
    "each step": {"save_every_n_steps": 1},
    "accumulation": {"save_every_n_steps": 2, "accumulate_grad_batches": 2},
    "mid-epoch validation": {"accumulate_grad_batches": 4, "val_check_interval": 3},
}


@functools.cache
def fit_without_break(name):
    root = Path(tempfile.mkdtemp())
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "log_every_n_steps": 1, **OPTIONS[name]}
    return fit(root, Fails, train, val_loader, **options), logs_of(root)


@pytest.mark.parametrize(("place", "name"), once(PLACES, OPTIONS), ids=str)
def test_a_run_resumes_exactly_after_an_exception(tmp_path, place, name):
    """A resumed run continues from the newest checkpoint, as after SIGKILL."""
    hook, at = place
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "log_every_n_steps": 1, **OPTIONS[name]}
    loaders = train, val_loader
    whole, logs = fit_without_break(name)
    with pytest.raises(Broken):
        fit(tmp_path / "cut", lambda: Fails(hook, at), *loaders, **options)
    saved = [path.name for path in (tmp_path / "cut").rglob("*.ckpt")]
    assert set(saved) <= {"last.ckpt"}
    # Without a checkpoint, resume="auto" starts a new run, which needs the first run's seed.
    resumed = fit(tmp_path / "cut", Fails, *loaders, resume="auto", seed=9 if saved else 1, **options)
    assert_same_end(whole, resumed)
    assert logs == logs_of(tmp_path / "cut", version=0 if saved else 1)


MANUAL = {"max_epochs": 2, "num_sanity_val_steps": 0, "save_every_n_steps": 2}


@functools.cache
def fit_manually_without_break():
    return fit(Path(tempfile.mkdtemp()), lambda: Fails(manual=True), train, val_loader, **MANUAL)


@pytest.mark.parametrize("hook", ["training_step", "before the step", "on_train_batch_end", "validation_step"])
def test_a_run_with_manual_optimization_resumes_exactly_after_an_exception(tmp_path, hook):
    loaders, options, whole = (train, val_loader), MANUAL, fit_manually_without_break()
    at = 4 if hook == "validation_step" else 3
    with pytest.raises(Broken):
        fit(tmp_path / "cut", lambda: Fails(hook, at, manual=True), *loaders, **options)
    resumed = fit(tmp_path / "cut", lambda: Fails(manual=True), *loaders, resume="last", seed=9, **options)
    assert_same_end(whole, resumed)


class HalfStep(torch.optim.Adam):
    """An optimizer whose step() raises an error after it has changed weights and moments."""

    steps, fails_at = 0, None

    def step(self, closure=None):
        result = super().step(closure)
        HalfStep.steps += 1
        if HalfStep.steps == HalfStep.fails_at:
            raise MemoryError("in the step")
        return result


@pytest.mark.parametrize(("options", "resume"), halve([{}, {"save_every_n_steps": 1}], ["auto", "last"]), ids=str)
def test_no_half_updated_weights_are_saved_after_an_error_in_an_optimizer_step(tmp_path, monkeypatch, options, resume):
    class HalfStepModule(Classifier):
        def configure_optimizers(self):
            return HalfStep(self.parameters(), lr=0.02)

    options = {"max_epochs": 3, "train": train, "val": val_loader, **options}
    whole = fit(tmp_path / "whole", HalfStepModule, **options)
    monkeypatch.setattr(HalfStep, "steps", 0)
    monkeypatch.setattr(HalfStep, "fails_at", 9)
    with pytest.raises(MemoryError, match="in the step"):
        fit(tmp_path / "cut", HalfStepModule, **options)
    monkeypatch.setattr(HalfStep, "fails_at", None)
    resumed = fit(tmp_path / "cut", HalfStepModule, resume=resume, seed=9, **options)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "cut")


class UnreadableOnce(Dataset):
    """A dataset that raises an error the first time sample 17 is read."""

    def __init__(self, marker):
        self.data, self.marker = make_data(24), marker

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 17 and not self.marker.exists():
            self.marker.write_text("")
            raise Broken("cannot read 17")
        return self.data[index]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_run_resumes_exactly_after_a_worker_fails_to_read_a_sample(tmp_path, options):
    """The dataset raises the error in a DataLoader worker."""
    options = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": 1, **options}
    make = lambda: Classifier(on_step=True)  # noqa: E731
    (tmp_path / "read").write_text("")
    loader = lambda name: lambda: DataLoader(UnreadableOnce(tmp_path / name), batch_size=4, num_workers=1)  # noqa: E731
    whole = fit(tmp_path / "whole", make, loader("read"), **options)
    with pytest.raises(Broken) as caught:
        fit(tmp_path / "cut", make, loader("unread"), **options)
    # The worker processes must have ended even though the error keeps the loop's frames alive.
    assert caught.value.__traceback__ is not None
    assert not multiprocessing.active_children()
    assert_same_end(whole, fit(tmp_path / "cut", make, loader("unread"), seed=9, resume="last", **options))


def test_a_run_can_resume_after_an_error_in_its_loader(tmp_path):
    class FailingLoader(TensorLoader):
        def __iter__(self):
            yield from list(super().__iter__())[:3]
            raise Broken("gone")

    make = lambda: FailingLoader(*make_data(24).tensors, batch_size=4)  # noqa: E731
    with pytest.raises(Broken):
        fit(tmp_path, train=make, max_epochs=1, save_every_n_steps=1)
    loop, _, _ = fit(
        tmp_path, train=lambda: TensorLoader(*make_data(24).tensors, batch_size=4), max_epochs=1, resume="last"
    )
    assert loop.global_step == 6


# An error in one of several processes


class OneRankFails(Classifier):
    rank = 0

    def training_step(self, batch, batch_idx):
        if self.global_rank == self.rank and batch_idx == 3:
            raise Broken("only here")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_forked_processes_end_if_one_process_fails(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(OneRankFails, "rank", rank)
    with pytest.raises(Exception, match="only here|Connection closed by peer|terminated"):
        fit(tmp_path, OneRankFails, max_epochs=2, strategy="ddp_fork", devices=2)
    assert not list(tmp_path.rglob("*.ckpt"))


SCRIPT = """
from runs import fit
from test_exceptions import OneRankFails
fit({root!r}, OneRankFails, max_epochs=2, strategy="ddp", devices=2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently on Windows")
def test_all_processes_of_a_script_end_if_one_process_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(python_command("", __file__)[-1] + SCRIPT.format(root=str(tmp_path / "run")))
    environment = {**os.environ, "FORKING_PYTHON": forking_python()}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run(fork_command([sys.executable, str(script)]), **options)
    # Also accept SIGABRT, because a gloo thread may abort when Python exits. test_signals.py links to the issue.
    is_torchs = "terminate called without an active exception" in done.stderr and done.returncode == -signal.SIGABRT
    assert done.returncode in (1, -signal.SIGKILL) or is_torchs, done.stderr
    assert "only here" in done.stderr
