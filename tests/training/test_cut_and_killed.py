"""A run that max_steps ended in the middle of an epoch, killed before the end of that epoch: its end comes, once."""

import shutil
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from modules import Classifier, by_epoch, make_loader
from runs import assert_same_end, fit, logs_of, tree, val_loader


class Handed(Classifier):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class CopyAtTheEnd(Callback):
    def __init__(self, root, to):
        self.root, self.to = root, to

    def on_train_epoch_end(self, trainer, module):
        if trainer.global_step == 8 and not Path(self.to).exists():
            shutil.copytree(self.root, self.to)


@pytest.mark.parametrize("make", [Classifier, Handed])
def test_its_end_comes_once(tmp_path, make):
    words = {"val": val_loader, "max_steps": 8, "train": lambda: make_loader(24), "make_module": lambda: make(by_epoch)}
    copy = CopyAtTheEnd(tmp_path / "whole", tmp_path / "killed")
    whole = fit(tmp_path / "whole", callbacks=[copy], **words)
    resumed = fit(tmp_path / "killed", seed=9, resume="last", callbacks=[copy], **words)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "killed") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
