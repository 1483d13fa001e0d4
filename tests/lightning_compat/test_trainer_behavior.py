"""Logged steps of evaluations, hyperparameters, resume and errors are as under Trainer."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS, Notes
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from modules import quiet
from torch.utils.data import DataLoader
from torchmetrics import Metric

from fabric_template import FabricLoop

WORDS = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}


class ByStep(BoringModel):
    """Logs each batch of its validations, of two loaders."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)

    def val_dataloader(self):
        return [DataLoader(RandomDataset(32, 2 + n)) for n in range(2)]


@pytest.mark.parametrize("reloads", [0, 1, 2])
@pytest.mark.parametrize("sanity", [0, 2])
def test_loaders_made_again_count_their_batches_from_zero(reloads, sanity, tmp_path):
    rows = []
    words = {**WORDS, "max_epochs": 4, "num_sanity_val_steps": sanity, "reload_dataloaders_every_n_epochs": reloads}
    for kind in LOOPS.values():
        trainer = kind(**quiet(**words, logger=Notes(), val_check_interval=1, default_root_dir=str(tmp_path)))
        trainer.fit(ByStep())
        rows.append(trainer.loggers[0].rows)
    assert rows[0] == rows[1]
    first = [step for step, values in rows[1] if "x/dataloader_idx_0" in values]
    each = {0: range(24), 1: [*range(6)] * 4, 2: [*range(12)] * 2}[reloads]
    assert first == list(each)


def test_what_is_saved_there_is_of_where_it_stands(tmp_path):
    """The next epoch is shown, and nothing else: a file that on_train_start saves is as the one that is resumed."""

    class Saves(BoringModel):
        def on_train_start(self):
            self.trainer.save_checkpoint(tmp_path / f"{self.trainer.global_step}.ckpt")

    pl.seed_everything(1, verbose=False)
    keeps = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, filename="end")
    words = {**WORDS, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    FabricLoop(**quiet(**{**words, "max_epochs": 1}, callbacks=[keeps])).fit(BoringModel())
    whole, again = BoringModel(), BoringModel()
    for model, path in ((Saves(), "end"), (whole, "end"), (again, "3")):
        FabricLoop(**quiet(**words)).fit(model, resume=tmp_path / f"{path}.ckpt")
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), again.parameters(), strict=True))


class Breaks(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("broken")
        self.log("a", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        return super().training_step(batch, batch_idx)


def test_what_was_logged_last_is_seen_after_an_error(tmp_path):
    for kind in LOOPS.values():
        trainer = kind(**quiet(**WORDS, default_root_dir=str(tmp_path)))
        with pytest.raises(RuntimeError, match="broken"):
            trainer.fit(Breaks())
        assert trainer.callback_metrics == {"a": 1.0, "a_step": 1.0}
        assert trainer.progress_bar_metrics == {"a_step": 1.0}


def test_a_path_that_was_set_gives_way_to_one_that_is_passed(tmp_path):
    loop = FabricLoop(**quiet(max_epochs=1, limit_train_batches=1, limit_val_batches=0))
    loop.fit(model := BoringModel())
    loop.save_checkpoint(tmp_path / "set.ckpt")
    loop.save_checkpoint(tmp_path / "passed.ckpt")
    for kind in LOOPS.values():
        trainer = kind(**quiet(max_epochs=2, limit_train_batches=1, limit_val_batches=0))
        trainer.ckpt_path = str(tmp_path / "set.ckpt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, ckpt_path=str(tmp_path / "passed.ckpt"))
        assert trainer.ckpt_path == str(tmp_path / "passed.ckpt")


class Worded(Metric):
    """Computes what is no tensor."""

    def update(self):
        pass

    def compute(self):
        return "much"


def test_a_metric_that_computes_no_tensor(tmp_path):
    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.metric = Worded()

        def training_step(self, batch, batch_idx):
            self.metric.update()
            self.log("m", self.metric, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    for kind in LOOPS.values():
        with pytest.raises(
            ValueError, match=r"^The `.compute\(\)` return of the metric logged as 'm' must be a tensor. Found much"
        ):
            kind(**quiet(**WORDS, default_root_dir=str(tmp_path))).fit(Model())
