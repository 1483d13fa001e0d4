"""Test that means over an epoch equal Trainer's, also after a resume within the epoch."""

import random

import pytest
import torch
from modules import Classifier, make_loader, run_loop, run_trainer
from runs import fit, same

NAMES = ("one", "two", "three")


class ManyWays(Classifier):
    """Logs names in some batches only, twice in a batch, in several dtypes and sizes, and changes logged values."""

    def on_train_start(self):
        self.random, self.running = random.Random(7), torch.zeros(())
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        draw = self.random.random
        for name in NAMES:
            for _ in range(int(draw() * 3)):
                value = loss.detach() * draw()
                value = value.double() if draw() < 0.2 else value
                size = None if draw() < 0.6 else int(1 + draw() * 9)
                self.log(name, value, on_step=True, on_epoch=True, batch_size=size)
        self.running += loss.detach()
        self.log("running", self.running, on_step=True, on_epoch=True)
        self.running *= 0.5
        with torch.inference_mode():
            self.log("inferred", loss.detach() * 2, on_step=True, on_epoch=True)
        if batch_idx % 3 == 1:
            self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})
        return loss


@pytest.mark.parametrize(
    ("batch_size", "precision"), [(4, "32-true"), (3, "32-true"), (3, "64-true"), (4, "bf16-mixed")]
)
def test_epoch_means_are_the_same_as_with_trainer(batch_size, precision):
    options = {"max_epochs": 3, "precision": precision, "num_sanity_val_steps": 0}
    loaders = lambda: make_loader(38, batch_size=batch_size)  # noqa: E731
    (trainer, theirs), (loop, ours) = (run(ManyWays, loaders, **options) for run in (run_trainer, run_loop))
    assert len(ours.seen) == len(theirs.seen) > 5
    for mine, wanted in zip([*ours.seen, loop.callback_metrics], [*theirs.seen, trainer.callback_metrics], strict=True):
        other = {name: (mine[name], value) for name, value in wanted.items() if not same(mine[name], value)}
        assert not other
        assert set(mine) == set(wanted)


class Reads(Classifier):
    """Reads a logged value within an epoch, and changes the tensor that it gets."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx == 4:
            self.trainer.callback_metrics["loss_step"].mul_(100)
        return loss


def test_changing_a_tensor_of_callback_metrics_does_not_change_the_epoch_mean(tmp_path):
    """This also holds for a run that is resumed within the epoch."""
    make_train = lambda: make_loader(40, batch_size=4)  # noqa: E731
    _, _, whole = fit(tmp_path / "whole", Reads, make_train, max_epochs=2)
    fit(tmp_path / "cut", Reads, make_train, max_steps=7, max_epochs=2, save_every_n_steps=3)
    _, _, resumed = fit(tmp_path / "cut", Reads, make_train, resume="auto", max_epochs=2)
    assert whole["loss"].tolist() == whole["train_loss"].tolist()
    assert resumed["loss"].tolist() == whole["loss"].tolist()
