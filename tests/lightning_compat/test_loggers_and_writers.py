"""Test that loggers get Trainer's calls, and that values are kept after an error."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from modules import quiet
from torch.utils.data import DataLoader

from fabric_template import FabricLoop

LOOPS = pl.Trainer, FabricLoop


class Module(pl.LightningModule):
    """A module with four loaders."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters("rate")
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).sum())

    def test_step(self, batch, batch_idx):
        self.log("test", self.layer(batch).sum())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch

    def loader(self):
        return DataLoader(torch.ones(2, 1))

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Data(pl.LightningDataModule):
    """Has the module's loaders, and hyperparameters of its own."""

    def __init__(self, rate=0.1, size=3):
        super().__init__()
        self.save_hyperparameters()

    def loader(self):
        return DataLoader(torch.ones(2, 1))

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class RecordingLogger(CSVLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.calls = []

    def log_hyperparams(self, params=None):
        self.calls.append(("hyperparameters", dict(params)))
        super().log_hyperparams(params)

    def log_graph(self, model, input_array=None):
        self.calls.append("graph")

    def log_metrics(self, metrics, step=None):
        self.calls.append(("metrics", sorted(metrics), step))
        super().log_metrics(metrics, step)

    def save(self):
        self.calls.append("save")
        super().save()

    def finalize(self, status):
        self.calls.append(("finalize", status))
        super().finalize(status)


@pytest.mark.parametrize("stage_name", ["fit", "validate", "test", "predict"])
def test_loggers_get_hyperparameters_in_each_stage(tmp_path, stage_name):
    calls = []
    for make in LOOPS:
        logger = RecordingLogger(tmp_path / make.__name__)
        loop = make(**quiet(max_epochs=1, logger=logger))
        getattr(loop, stage_name)(Module(), datamodule=Data(size=3))
        calls.append(logger.calls)
    assert calls[0] == calls[1]
    assert calls[1][:3] == [("hyperparameters", {"rate": 0.1, "size": 3}), "graph", "save"]


# Values after an error

WORDS = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}


class Breaks(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("broken")
        self.log("a", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        return super().training_step(batch, batch_idx)


def test_what_was_logged_last_is_seen_after_an_error(tmp_path):
    for kind in LOOPS:
        trainer = kind(**quiet(**WORDS, default_root_dir=str(tmp_path)))
        with pytest.raises(RuntimeError, match="broken"):
            trainer.fit(Breaks())
        assert trainer.callback_metrics == {"a": 1.0, "a_step": 1.0}
        assert trainer.progress_bar_metrics == {"a_step": 1.0}
