"""An exception in user code reaches the caller unchanged, with a note of where it came; what is saved resumes exactly."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from interpreter import ready, ready_python
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from modules import Classifier, make_data, make_loader
from runs import assert_same_end, fit, logs_of, same, source_of, val_loader
from torch.utils.data import DataLoader, Dataset

from fabric_template import TensorLoader

pytestmark = pytest.mark.filterwarnings("ignore:resume. Still.counts had changed")  # by which it knows where to break


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


EXACT = "resume='last' goes on after step"
INEXACT = "resume='FOLDER/exception.ckpt' goes on after step"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize(
    ("hook", "at", "words", "note"),
    [
        ("training_step", 1, {}, "in epoch 0, at batch 0, after step 0; nothing was saved before"),
        ("training_step", 3, {}, f"in epoch 0, at batch 2, after step 2; {INEXACT} 2, not to the bit"),
        (
            "training_step", 9, {},
            f"in epoch 1, at batch 2, after step 8; {EXACT} 6, to the bit; {INEXACT} 8, not to the bit",
        ),
        ("training_step", 9, {"save_every_n_steps": 4}, f"in epoch 1, at batch 2, after step 8; {EXACT} 8"),
        (
            "on_train_batch_end", 9, {},
            f"in epoch 1, at batch 2, after step 9; {EXACT} 6, to the bit; {INEXACT} 9, not to the bit",
        ),
        ("training_step", 9, {"enable_checkpointing": False}, "in epoch 1, at batch 2, after step 8"),
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
    folder = tmp_path / "checkpoints/run/version_0"
    assert notes(error) == [f"fabric_template: {note.replace('FOLDER', str(folder))}"]
    assert heard == [error.value]
    assert (folder / "exception.ckpt").exists() == ("exception.ckpt" in note)


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_what_is_not_exact_lies_beside_what_is(tmp_path, hook):
    words = {"max_epochs": 3, "log_every_n_steps": 2, "save_every_n_steps": 3}
    train = lambda: make_loader(24)  # noqa: E731
    whole = fit(tmp_path / "whole", lambda: Classifier(on_step=True), train, **words)
    with pytest.raises(Broken):
        fit(tmp_path / "cut", lambda: FailsAt(hook, 11), train, **words)
    folder = tmp_path / "cut/checkpoints/run/version_0"
    steps = {
        name: torch.load(folder / name, weights_only=True)["global_step"] for name in ("last.ckpt", "exception.ckpt")
    }
    assert steps == {"last.ckpt": 9, "exception.ckpt": 10 + (hook == "on_train_batch_end")}
    assert_same_end(
        whole, fit(tmp_path / "cut", lambda: Classifier(on_step=True), train, seed=9, resume="auto", **words)
    )
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


def test_last_means_the_inexact_one_only_where_there_is_no_other(tmp_path):
    words = {"max_epochs": 2, "train": lambda: make_loader(24)}
    with pytest.raises(Broken):
        fit(tmp_path, lambda: FailsAt("training_step", 3), **words)
    path = tmp_path / "checkpoints/run/version_0/exception.ckpt"
    text = (
        "resume: you are resuming from a checkpoint that ended in the middle of a step, by an error or by a hook that saved"
        f" there ('{path}'): training goes on after step 2, not to the bit as without that"
    )
    with pytest.warns(UserWarning, match=re.escape(text)):
        loop, _, history = fit(tmp_path, resume="last", **words)
    assert (loop.global_step, history["epoch"].tolist(), history["step"].tolist()) == (12, [0, 1], [6, 12])


class Still(Classifier):
    """Draws no random numbers, and fails where it is told: what its error leaves is exact but for the sums of the epoch."""

    def __init__(self, hook=None, at=0, manual=False):
        super().__init__(dropout=0.0)
        self.hook, self.at, self.counts, self.automatic_optimization = hook, at, {}, not manual

    def maybe(self, hook):
        self.counts[hook] = self.counts.get(hook, 0) + 1
        if (hook, self.counts[hook]) == (self.hook, self.at):
            raise Broken("mine")

    def training_step(self, batch, batch_idx):
        self.maybe("training_step")
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.maybe("before the step")
        self.optimizers().step()
        return None

    def validation_step(self, batch, batch_idx):
        self.maybe("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, *_):
        self.maybe("on_train_batch_start")

    def on_before_backward(self, loss):
        self.maybe("on_before_backward")

    def on_before_optimizer_step(self, optimizer):
        self.maybe("on_before_optimizer_step")

    def on_train_batch_end(self, *_):
        self.maybe("on_train_batch_end")

    def on_validation_epoch_end(self):
        self.maybe("on_validation_epoch_end")

    def on_train_epoch_end(self):
        self.maybe("on_train_epoch_end")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        *[(hook, at) for hook in ("training_step", "on_train_batch_start", "on_before_backward") for at in (2, 8, 12)],
        *[("on_before_optimizer_step", at) for at in (2, 4, 6)],
        *[("on_train_batch_end", at) for at in (2, 7, 12)],
        *[(hook, at) for hook in ("validation_step", "on_validation_epoch_end") for at in (2, 3)],
        ("on_train_epoch_end", 2),
    ],
)
@pytest.mark.parametrize(
    "words", [{}, {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4, "val_check_interval": 3}], ids=str
)
def test_every_batch_is_trained_once(tmp_path, hook, at, words):
    """What is saved beside stands at the last window that was done; validations and hooks that were to come, come."""
    words = {"max_epochs": 3, "num_sanity_val_steps": 0, **words}
    loaders = lambda: make_loader(24, shuffle=False), val_loader  # noqa: E731  an order would be drawn anew
    loop, module, history = fit(tmp_path / "whole", Still, *loaders, **words)
    with pytest.raises(Broken) as error:
        fit(tmp_path / "cut", lambda: Still(hook, at), *loaders, **words)
    path = tmp_path / "cut/checkpoints/run/version_0/exception.ckpt"
    if path.exists():
        with pytest.warns(UserWarning, match="in the middle of a step"):
            resumed = fit(tmp_path / "cut", Still, *loaders, seed=9, resume=path, **words)
    else:  # nothing was new
        if sys.version_info >= (3, 11):
            assert re.search("after step (0; nothing|(\\d+); resume='last' goes on after step \\2$)", notes(error)[0])
        resumed = fit(tmp_path / "cut", Still, *loaders, resume="auto", **words)
    assert same(module.state_dict(), resumed[1].state_dict())
    assert resumed[0].global_step == loop.global_step
    columns = ["epoch", "step", "val_loss", "lr"]
    assert resumed[2][columns].to_csv() == history[columns].to_csv()


@pytest.mark.parametrize("hook", ["training_step", "before the step", "on_train_batch_end", "validation_step"])
def test_manual_optimization(tmp_path, hook):
    words = {"max_epochs": 2, "num_sanity_val_steps": 0}
    train = lambda: make_loader(24, shuffle=False)  # noqa: E731
    whole = fit(tmp_path / "whole", lambda: Still(manual=True), train, val_loader, **words)
    at = 4 if hook == "validation_step" else 3
    with pytest.raises(Broken):
        fit(tmp_path / "cut", lambda: Still(hook, at, manual=True), train, val_loader, **words)
    with pytest.warns(UserWarning, match="in the middle of a step"):
        resumed = fit(tmp_path / "cut", lambda: Still(manual=True), train, val_loader, resume="last", **words)
    assert same(whole[1].state_dict(), resumed[1].state_dict())
    assert resumed[0].global_step == whole[0].global_step


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


def test_a_main_process_that_may_have_drawn_saves_nothing_exact(tmp_path):
    """Without workers a dataset draws its random numbers in this process: what it drew before it failed is not known."""
    with pytest.raises(Broken):
        fit(tmp_path, train=lambda: DataLoader(FailsToLoad(tmp_path / "x"), batch_size=4), max_epochs=2)
    folder = tmp_path / "checkpoints/run/version_0"
    assert [path.name for path in folder.glob("*.*ckpt*")] == ["exception.ckpt"]
    found = torch.load(folder / "exception.ckpt", weights_only=True)
    assert (found["global_step"], found["fabric_template"]["batch_idx"]) == (4, 4)


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
    with pytest.raises(Exception, match="only here|Connection closed by peer|terminated"):
        fit(tmp_path, OneRankFails, max_epochs=2, strategy="ddp_fork", devices=2)
    assert not list(tmp_path.rglob("last.ckpt"))


def test_a_callback_that_saves_then_waits_for_nobody(tmp_path, monkeypatch):
    """A checkpoint needs the part of each rank, and the other does not know of the error."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    OneRankFails.bad, words = 0, {"strategy": "ddp_fork", "devices": 2}
    told = tmp_path / "told"

    class Rescue(OnExceptionCheckpoint):
        def on_exception(self, trainer, module, exception):
            try:
                super().on_exception(trainer, module, exception)
            except RuntimeError as error:
                told.write_text(str(error))

    with pytest.raises(Exception, match="only here|Connection closed by peer|terminated"):
        fit(tmp_path, OneRankFails, max_epochs=2, callbacks=[Rescue(tmp_path, "rescued")], **words)
    assert told.read_text() == (
        "an error has ended the run on this rank, and the others cannot be asked for their part of a checkpoint: with several"
        " processes none is saved then; resume='last' goes on from the one before"
    )
    assert not list(tmp_path.rglob("*.ckpt"))


SCRIPT = """
from runs import fit
from test_exceptions import OneRankFails
OneRankFails.bad = {bad}
fit({root!r}, OneRankFails, max_epochs=2, strategy="ddp", devices=2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals end programs differently there")
def test_one_rank_of_a_script_that_fails_ends_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(source_of("", __file__)[-1] + SCRIPT.format(bad=0, root=str(tmp_path / "run")))
    environment = {**os.environ, "READY_PYTHON": ready_python()}
    words = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run(ready([sys.executable, str(script)]), **words)
    is_torchs = "terminate called without an active exception" in done.stderr and done.returncode == -signal.SIGABRT
    assert done.returncode in (1, -signal.SIGKILL) or is_torchs, done.stderr  # see test_interrupt.py
    assert "only here" in done.stderr
