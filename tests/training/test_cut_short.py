"""An epoch that max_steps or should_stop ends in its middle has its row; what is saved goes on in this epoch, exactly.

max_time does the same; see test_interrupt.py.
"""

import shutil

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import Classifier, make_loader, run_trainer
from runs import assert_same_end, fit, logs_of, val_loader


class Copies(Callback):
    """Copies a run's folder in one hook, as a kill would leave it there."""

    def __init__(self, root, to):
        self.root, self.to = root, to

    def on_train_epoch_end(self, trainer, module):
        shutil.rmtree(self.to, ignore_errors=True)
        shutil.copytree(self.root, self.to)


@pytest.mark.parametrize("words", [{}, {"accumulate_grad_batches": 2}, {"monitor": "val_loss"}], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_max_steps(tmp_path, words, steps):
    """Reached in the middle of an epoch: its row is written; the same command changes nothing, more steps go on exactly."""
    words = {"max_epochs": 3, "log_every_n_steps": 2, **words}
    make, loader = lambda: Classifier(on_step=True), lambda: make_loader(24)
    whole = fit(tmp_path / "whole", make, loader, val_loader, **words)
    copies = [Copies(tmp_path / "cut", tmp_path / "killed")]
    first = fit(tmp_path / "cut", make, loader, val_loader, max_steps=steps, callbacks=copies, **words)
    assert first[0].global_step == steps
    assert first[2]["step"].tolist()[-1] == steps
    rows = logs_of(tmp_path / "cut")
    for folder in ("cut", "killed", "killed"):
        again = fit(tmp_path / folder, make, loader, val_loader, max_steps=steps, seed=9, resume="auto", **words)
        assert_same_end(first, again)
        assert logs_of(tmp_path / folder) == rows
        resumed = fit(shutil.copytree(tmp_path / folder, tmp_path / f"on_{folder}", dirs_exist_ok=True), make, loader,
                      val_loader, seed=9, resume="auto", **words)  # fmt: skip
        assert_same_end(whole, resumed)
        assert logs_of(tmp_path / f"on_{folder}") == logs_of(tmp_path / "whole")
        shutil.rmtree(tmp_path / f"on_{folder}")


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
    """Set in the middle of an epoch, it ends the run; a resume goes on in this epoch."""
    words = {"max_epochs": 3, "log_every_n_steps": 2, **words}
    make, loader = lambda: Classifier(on_step=True), lambda: make_loader(24)
    whole = fit(tmp_path / "whole", make, loader, **words)
    _, _, history = fit(tmp_path / "cut", make, loader, callbacks=[StopsAt(4)], **words)
    assert history["step"].tolist()[-1] == 4
    assert_same_end(whole, fit(tmp_path / "cut", make, loader, seed=9, resume="last", **words))
    # the row of the step at which it was to stop is one more
    assert logs_of(tmp_path / "cut")[0] == logs_of(tmp_path / "whole")[0]


def test_an_epoch_that_was_cut_short_goes_on_from_a_callbacks_file(tmp_path):
    """ModelCheckpoint saves at the end of the epoch, which is not its end when max_steps grows."""
    make, loader = lambda: Classifier(dropout=0.0), lambda: make_loader(24)
    whole = fit(tmp_path / "whole", make, loader, max_epochs=2)
    saving = ModelCheckpoint(tmp_path / "saved", save_last=True)
    fit(tmp_path / "cut", make, loader, max_epochs=2, max_steps=4, callbacks=[saving])
    path = tmp_path / "saved" / "last.ckpt"
    assert_same_end(whole, fit(tmp_path / "cut", make, loader, seed=9, max_epochs=2, resume=path))


@pytest.mark.parametrize("steps", [4, 6])
def test_trainers_file_of_an_epoch_that_max_steps_cut_short(tmp_path, steps):
    """It stands in the middle of the epoch, which goes on for as many batches as were left."""
    saving = ModelCheckpoint(tmp_path, save_last=True)
    run_trainer(Classifier, lambda: make_loader(24), max_steps=steps, callbacks=[saving], enable_checkpointing=True)
    loop, _, history = fit(tmp_path, train=lambda: make_loader(24), max_epochs=2, resume=tmp_path / "last.ckpt")
    assert (loop.current_epoch, loop.global_step) == (2, 12)
    assert history[["epoch", "step"]].to_numpy().tolist() == ([[0, 6]] if steps == 4 else []) + [[1, 12]]
