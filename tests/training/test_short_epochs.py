"""An epoch that max_steps or should_stop ends in its middle has its row. A resume continues in this epoch, exactly.

max_time does the same; see test_signals.py.
"""

import shutil

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import Classifier, by_epoch, make_loader, run_trainer
from runs import assert_same_end, fit, logs_of, tree, val_loader


class Copies(Callback):
    """Copies a run's folder at the end of an epoch, as a kill would leave it there."""

    def __init__(self, root, to, step=None):
        self.root, self.to, self.step = root, to, step

    def on_train_epoch_end(self, trainer, module):
        if self.step not in (None, trainer.global_step):
            return
        shutil.rmtree(self.to, ignore_errors=True)
        shutil.copytree(self.root, self.to)


@pytest.mark.parametrize("words", [{}, {"accumulate_grad_batches": 2}, {"monitor": "val_loss"}], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_max_steps(tmp_path, words, steps):
    """The same command changes nothing; more steps continue exactly."""
    words = {"max_epochs": 3, "log_every_n_steps": 2, **words}
    make, loader = lambda: Classifier(on_step=True), lambda: make_loader(24)
    whole = fit(tmp_path / "whole", make, loader, val_loader, **words)
    first = fit(tmp_path / "cut", make, loader, val_loader, max_steps=steps, **words)
    assert first[0].global_step == steps
    assert first[2]["step"].tolist()[-1] == steps
    rows = logs_of(tmp_path / "cut")
    again = fit(tmp_path / "cut", make, loader, val_loader, max_steps=steps, seed=9, resume="auto", **words)
    assert_same_end(first, again)
    assert logs_of(tmp_path / "cut") == rows
    resumed = fit(tmp_path / "cut", make, loader, val_loader, seed=9, resume="auto", **words)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


class FetchesItself(Classifier):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Classifier, FetchesItself])
def test_killed_at_the_end_of_a_short_epoch(tmp_path, make):
    """The end of the epoch is repeated once."""
    options = {
        "val": val_loader,
        "max_steps": 8,
        "train": lambda: make_loader(24),
        "make_module": lambda: make(by_epoch),
    }
    copy = Copies(tmp_path / "whole", tmp_path / "killed", step=8)
    whole = fit(tmp_path / "whole", callbacks=[copy], **options)
    resumed = fit(tmp_path / "killed", seed=9, resume="last", callbacks=[Copies(tmp_path, None, step=-1)], **options)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "killed") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def test_max_steps_of_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = {"max_epochs": 2, "strategy": "ddp_fork", "devices": 2, "monitor": "val_loss"}
    make, loader = lambda: Classifier(sync_dist=True), lambda: make_loader(48)
    whole = fit(tmp_path / "whole", make, loader, val_loader, **words)
    fit(tmp_path / "cut", make, loader, val_loader, max_steps=4, **words)
    assert_same_end(whole, fit(tmp_path / "cut", make, loader, val_loader, seed=9, resume="auto", **words))
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")


def test_max_steps_without_a_last_checkpoint(tmp_path):
    fit(tmp_path, train=lambda: make_loader(24), max_steps=3, max_epochs=2, save_last=False)
    assert not list(tmp_path.rglob("*.ckpt"))


class StopsAt(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop |= trainer.global_step == self.at


@pytest.mark.parametrize("words", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_should_stop(tmp_path, words):
    """It ends the run in the middle of an epoch, and a resume continues there."""
    words = {"max_epochs": 3, "log_every_n_steps": 2, **words}
    make, loader = lambda: Classifier(on_step=True), lambda: make_loader(24)
    whole = fit(tmp_path / "whole", make, loader, **words)
    _, _, history = fit(tmp_path / "cut", make, loader, callbacks=[StopsAt(4)], **words)
    assert history["step"].tolist()[-1] == 4
    assert_same_end(whole, fit(tmp_path / "cut", make, loader, seed=9, resume="last", **words))
    # steps.csv has a row more, of the step at the stop.
    assert logs_of(tmp_path / "cut")[0] == logs_of(tmp_path / "whole")[0]


def test_resume_from_a_file_of_model_checkpoint(tmp_path):
    """It is saved at the end of the short epoch, which continues with a larger max_steps."""
    make, loader = lambda: Classifier(dropout=0.0), lambda: make_loader(24)
    whole = fit(tmp_path / "whole", make, loader, max_epochs=2)
    saving = ModelCheckpoint(tmp_path / "saved", save_last=True)
    fit(tmp_path / "cut", make, loader, max_epochs=2, max_steps=4, callbacks=[saving])
    path = tmp_path / "saved" / "last.ckpt"
    assert_same_end(whole, fit(tmp_path / "cut", make, loader, seed=9, max_epochs=2, resume=path))


@pytest.mark.parametrize("steps", [4, 6])
def test_resume_from_a_file_of_trainer(tmp_path, steps):
    """A file of a run that max_steps ended continues with the next epoch, as in Trainer."""
    saving = ModelCheckpoint(tmp_path, save_last=True)
    run_trainer(Classifier, lambda: make_loader(24), max_steps=steps, callbacks=[saving], enable_checkpointing=True)
    loop, _, history = fit(tmp_path, train=lambda: make_loader(24), max_epochs=2, resume=tmp_path / "last.ckpt")
    assert (loop.current_epoch, loop.global_step) == (2, steps + 6)
    assert history[["epoch", "step"]].to_numpy().tolist() == [[1, steps + 6]]
