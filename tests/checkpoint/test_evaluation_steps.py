"""Test that validation steps are counted over all evaluations of a run, also after a resume."""

import lightning.pytorch as pl
import pytest
import torch
from modules import Classifier, make_loader

from fabric_template import FabricLoop


class PerStep(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("v", self(batch[0]).sum(), on_step=True, on_epoch=True)


class Ended(Exception):
    """Ends a run."""


class Ends(pl.Callback):
    """Ends the run before this training batch, counted over all epochs."""

    def __init__(self, train):
        self.train = train

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.train:
            raise Ended


def steps(root, ends=None, resume=None, **words):
    """Return the lines of steps.csv after 3 epochs of 10 batches, validated on 5 and 3 batches."""
    torch.manual_seed(1)
    loop = FabricLoop(
        accelerator="cpu", max_epochs=3, name="run", log_every_n_steps=5, save_every_n_steps=1, default_root_dir=root,
        enable_progress_bar=False, enable_model_summary=False, callbacks=ends, **words,
    )  # fmt: skip
    val = [make_loader(num, shuffle=False, seed=5) for num in (18, 10)]
    try:
        loop.fit(PerStep(), make_loader(), val, resume=resume)
    except Ended:
        return None
    return (root / "logs/run/version_0/steps.csv").read_text().splitlines()


@pytest.mark.parametrize(
    "extra", [{}, {"val_check_interval": 3}, {"reload_dataloaders_every_n_epochs": 2, "val_check_interval": 5}], ids=str
)
def test_validation_steps_are_counted_on(tmp_path, extra):
    whole = steps(tmp_path / "whole", **extra)
    for train in (4, 10, 26):
        root = tmp_path / str(train)
        assert steps(root, Ends(train), **extra) is None
        assert steps(root, resume="last", **extra) == whole
