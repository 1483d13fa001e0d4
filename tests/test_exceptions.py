"""An exception in user code reaches the caller unchanged, with a note of where it came; what is saved resumes exactly."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_data, make_loader
from runs import assert_same_end, fit, logs_of, source_of
from torch.utils.data import DataLoader, Dataset

from fabric_template import TensorLoader


class Broken(RuntimeError):
    pass


class FailsAt(Classifier):
    """Raises in one hook, at one batch of the whole fit."""

    def __init__(self, hook, at, **words):
        super().__init__(on_step=True, **words)
        self.hook, self.at, self.seen = hook, at, 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        self.maybe("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.maybe("on_train_batch_end")

    def maybe(self, hook):
        if (hook, self.seen) == (self.hook, self.at):
            raise Broken("mine")


class FailsToLoad(Dataset):
    """A file that cannot be read, once."""

    def __init__(self, marker):
        self.data, self.marker = make_data(24), marker

    def __len__(self):
        return 24

    def __getitem__(self, i):
        if i == 17 and not self.marker.exists():
            self.marker.write_text("")
            raise Broken("cannot read 17")
        return self.data[i]


def notes(error):
    return getattr(error.value, "__notes__", None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize(
    ("hook", "at", "words", "note"),
    [
        ("training_step", 1, {}, "in epoch 0, at batch 1, after step 0; nothing was saved before"),
        ("training_step", 9, {}, "in epoch 1, at batch 3, after step 8; resume='last' goes on after step 6"),
        (
            "training_step", 9, {"save_every_n_steps": 4},
            "in epoch 1, at batch 3, after step 8; resume='last' goes on after step 8",
        ),
        ("on_train_batch_end", 9, {}, "in epoch 1, at batch 3, after step 9; resume='last' goes on after step 6"),
        ("training_step", 9, {"enable_checkpointing": False}, "in epoch 1, at batch 3, after step 8"),
    ],
)  # fmt: skip
def test_the_note(tmp_path, hook, at, words, note):
    heard = []

    class Hear(Callback):
        def on_exception(self, trainer, module, exception):
            heard.append(exception)

    with pytest.raises(Broken) as error:
        fit(tmp_path, lambda: FailsAt(hook, at), lambda: make_loader(24), max_epochs=3, callbacks=[Hear()], **words)
    assert str(error.value) == "mine"
    assert notes(error) == [f"fabric_template: {note}"]
    assert heard == [error.value]


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_in_the_middle_of_a_step_nothing_inexact_is_saved(tmp_path, hook):
    words = {"max_epochs": 3, "log_every_n_steps": 2, "save_every_n_steps": 3}
    train = lambda: make_loader(24)  # noqa: E731
    whole = fit(tmp_path / "whole", lambda: Classifier(on_step=True), train, **words)
    with pytest.raises(Broken):
        fit(tmp_path / "cut", lambda: FailsAt(hook, 11), train, **words)
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert found["global_step"] == 9
    assert_same_end(
        whole, fit(tmp_path / "cut", lambda: Classifier(on_step=True), train, seed=9, resume="auto", **words)
    )
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


@pytest.mark.parametrize("words", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_between_two_steps_the_state_is_saved(tmp_path, words):
    """A worker cannot read a sample: the steps before are kept."""
    words = {"max_epochs": 2, "log_every_n_steps": 2, **words}
    make = lambda: Classifier(on_step=True)  # noqa: E731
    (tmp_path / "read").write_text("")
    train = lambda name: lambda: DataLoader(FailsToLoad(tmp_path / name), batch_size=4, num_workers=1)  # noqa: E731
    whole = fit(tmp_path / "whole", make, train("read"), **words)
    with pytest.raises(Broken) as error:
        fit(tmp_path / "cut", make, train("not_read"), **words)
    window = words.get("accumulate_grad_batches", 1)
    if sys.version_info >= (3, 11):
        text = f"in epoch 0, at batch 4, after step {4 // window}; resume='last' goes on after step {4 // window}"
        assert notes(error) == [f"fabric_template: {text}"]
    found = torch.load(tmp_path / "cut/checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["global_step"], found["fabric_template"]["batch_idx"]) == (4 // window, 4)
    assert_same_end(whole, fit(tmp_path / "cut", make, train("not_read"), seed=9, resume="auto", **words))
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


def test_a_main_process_that_may_have_drawn_saves_nothing(tmp_path):
    """Without workers a dataset draws its random numbers in this process: what it drew before it failed is not known."""
    with pytest.raises(Broken):
        fit(tmp_path, train=lambda: DataLoader(FailsToLoad(tmp_path / "x"), batch_size=4), max_epochs=2)
    assert not (tmp_path / "checkpoints/run/version_0/last.ckpt").exists()


def test_tensors_that_end_early(tmp_path):
    """TensorLoader draws nothing while it fetches."""

    class Ends(TensorLoader):
        def __iter__(self):
            yield from list(super().__iter__())[:3]
            raise Broken("gone")

    with pytest.raises(Broken):
        fit(tmp_path, train=lambda: Ends(*make_data(24).tensors, batch_size=4), max_epochs=1)
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert (found["global_step"], found["fabric_template"]["batch_idx"]) == (3, 3)


def test_a_hook_that_fails_while_saving_does_not_hide_the_error(tmp_path):
    class Worse(Classifier):
        def on_save_checkpoint(self, checkpoint):
            raise KeyError("another")

    loader = lambda: DataLoader(FailsToLoad(tmp_path / "x"), batch_size=4, num_workers=1)  # noqa: E731
    text = "after Broken, the state could not be saved: KeyError: 'another'"
    with pytest.warns(UserWarning, match=text), pytest.raises(Broken):
        fit(tmp_path, Worse, train=loader, max_epochs=1)


class OneRankFails(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == self.bad and batch_idx == 3:
            raise Broken("only here")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_that_fails_ends_all(tmp_path, monkeypatch, bad):
    """The other waits for it in a collective: it must not wait for ever."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    OneRankFails.bad = bad
    began = time.monotonic()
    with pytest.raises(Exception, match="only here|Connection closed by peer|terminated"):
        fit(tmp_path, OneRankFails, max_epochs=2, strategy="ddp_fork", devices=2)
    assert time.monotonic() - began < 60
    assert not list(tmp_path.rglob("last.ckpt"))


SCRIPT = """
from runs import fit
from test_exceptions import OneRankFails
OneRankFails.bad = {bad}
fit({root!r}, OneRankFails, max_epochs=2, strategy="ddp", devices=2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently there")
def test_one_rank_of_a_script_that_fails_ends_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(source_of("")[-1] + SCRIPT.format(bad=0, root=str(tmp_path / "run")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode in (1, -signal.SIGKILL)
    assert "only here" in done.stderr
