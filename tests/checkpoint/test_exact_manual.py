"""Manual optimization, killed at every batch or ended by an error: it goes on behind the step that was done, to the bit."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, Gan, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of
from torch import nn


def loader():
    return make_loader(20)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("toggles", [True, False], ids=["toggled", "plain"])
def test_killed_at_every_batch(tmp_path, toggles, every):
    words = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": every}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    make = lambda: Gan(toggles)  # noqa: E731
    whole = fit(whole_root, make, loader, callbacks=[Snapshots(whole_root, copies)], **words)
    for batches in range(min(every, 2), 10):
        root = copies / str(batches)
        assert_same_end(whole, fit(root, make, loader, seed=99, resume="last", **words))
        assert logs_of(root) == logs_of(whole_root), f"killed after {batches} batches"


class Saved(Callback):
    """Notes which step last.ckpt is of, before each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        path = Path("checkpoints/run/version_0/last.ckpt")
        if path.exists():
            self.seen.append(torch.load(path, weights_only=True)["global_step"])


def test_no_multiple_is_passed_by(tmp_path):
    """One step in a batch, two in the next: one that goes from one to three has passed the second."""
    saved = Saved()
    fit(".", Gan, loader, callbacks=[saved], max_epochs=1, save_every_n_steps=2)
    assert saved.seen == [3, 4, 6]


class Boom(Exception):
    pass


@pytest.mark.parametrize("where", ["between", "on_train_batch_end", "after"])
def test_an_error_behind_the_step(tmp_path, where):
    """What is kept beside last.ckpt goes on with the next batch: no step is taken twice."""

    class Fails(Gan):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            if where == "between" and batch_idx == 2:
                raise Boom
            return output

    class Hook(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if where == "on_train_batch_end" and batch_idx == 2:
                raise Boom

    class Log(pl.loggers.Logger):
        name, version = "log", 0

        def log_hyperparams(self, *args, **words):
            pass

        def log_metrics(self, metrics, step=None):
            if where == "after" and step == 2:
                raise Boom

    words = {"max_epochs": 1, "logger": [Log()], "log_every_n_steps": 1, "version": 0}
    with pytest.raises(Boom):
        fit(".", Fails, loader, callbacks=[Hook()], **words)
    state = torch.load("checkpoints/run/version_0/exception.ckpt", weights_only=True)
    assert (state["fabric_template"]["batch_idx"], state["global_step"]) == (3, 4)
    with pytest.warns(
        UserWarning, match="ended in the middle of a step, by an error .*: training goes on after step 4"
    ):
        resumed = fit(".", Gan, loader, resume="checkpoints/run/version_0/exception.ckpt", max_epochs=1)
    assert resumed[0].global_step == 4 + 2 + 1


class Saves(Callback):
    """Saves after each batch, whether it has stepped or not."""

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(Path(trainer.default_root_dir, "checkpoints/run/version_0/last.ckpt"))


class Sparse(Classifier):
    """A sparse embedding, whose gradient waits for every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(8, 3, sparse=True)

    def forward(self, x):
        return self.words(x.argmax(1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.words.parameters(), lr=0.05)


def test_a_sparse_gradient_that_waits_goes_through_a_checkpoint(tmp_path):
    words = {"max_epochs": 1, "save_every_n_steps": 1}
    copies = Snapshots(tmp_path / "whole", tmp_path / "killed")
    whole = fit(tmp_path / "whole", Sparse, loader, callbacks=[copies, Saves()], **words)
    for batches in (3, 4):
        assert_same_end(whole, fit(tmp_path / "killed" / str(batches), Sparse, loader, seed=99, resume="last", **words))
