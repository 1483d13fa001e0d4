"""Test that loggers, loader methods and prediction writers get Trainer's calls."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import Notes
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from modules import quiet
from torch.utils.data import DataLoader

from fabric_template import FabricLoop

LOOPS = pl.Trainer, FabricLoop


class Module(pl.LightningModule):
    """A module with four loaders. `calls` records where each of them is made."""

    def __init__(self, rate=0.1, calls=None):
        super().__init__()
        self.save_hyperparameters("rate")
        self.layer, self.calls = torch.nn.Linear(1, 1), calls

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).sum())

    def test_step(self, batch, batch_idx):
        self.log("test", self.layer(batch).sum())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch

    def loader(self):
        if self.calls is not None:
            loop = self.trainer
            stages = "training", "validating", "testing", "predicting", "sanity_checking"
            on = [stage for stage in stages if getattr(loop, stage)]
            self.calls.append((loop.current_epoch, str(loop.state.stage.value), on))
        return DataLoader(torch.ones(2, 1))

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Data(pl.LightningDataModule):
    """The same loaders, and hyperparameters of its own."""

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


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize("sanity", [0, 1])
def test_where_loaders_are_made(sanity, reload, every):
    calls = [[], []]
    for make, notes in zip(LOOPS, calls, strict=True):
        options = {"num_sanity_val_steps": sanity, "reload_dataloaders_every_n_epochs": reload}
        loop = make(**quiet(max_epochs=3, check_val_every_n_epoch=every, **options))
        loop.fit(module := Module(calls=notes))
        for stage_name in (loop.validate, loop.test, loop.predict):
            stage_name(module)
    assert calls[0] == calls[1]
    val = (0, "sanity_check", ["sanity_checking"]) if sanity else (0 if every == 1 else 1, "validate", ["validating"])
    assert val in calls[1]


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


def test_our_files_have_the_hyperparameters_of_fit(tmp_path):
    loop = FabricLoop(**quiet(max_epochs=1, logger=True), default_root_dir=tmp_path, name="run")
    loop.fit(Module())
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*.yaml"))}
    loop.test(Module(rate=0.5))
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*.yaml"))} == before
    assert [path.name for path in before] == ["config.yaml", "hparams.yaml"]


@pytest.mark.parametrize("make", LOOPS)
@pytest.mark.parametrize("stage_name", ["fit", "validate", "test", "predict"])
def test_two_values_of_one_hyperparameter_are_refused(tmp_path, make, stage_name):
    loop = make(**quiet(max_epochs=1, logger=CSVLogger(tmp_path)))
    with pytest.raises(RuntimeError, match=r"Error while merging hparams: the keys \['rate'\] are present in both"):
        getattr(loop, stage_name)(Module(rate=0.1), datamodule=Data(rate=0.2))


# Logged steps, a path that was set, errors

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
    for kind in LOOPS:
        trainer = kind(**quiet(**words, logger=Notes(), val_check_interval=1, default_root_dir=str(tmp_path)))
        trainer.fit(ByStep())
        rows.append(trainer.loggers[0].rows)
    assert rows[0] == rows[1]
    first = [step for step, values in rows[1] if "x/dataloader_idx_0" in values]
    each = {0: range(24), 1: [*range(6)] * 4, 2: [*range(12)] * 2}[reloads]
    assert first == list(each)


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


def test_a_path_that_was_set_gives_way_to_one_that_is_passed(tmp_path):
    loop = FabricLoop(**quiet(max_epochs=1, limit_train_batches=1, limit_val_batches=0))
    loop.fit(model := BoringModel())
    loop.save_checkpoint(tmp_path / "set.ckpt")
    loop.save_checkpoint(tmp_path / "passed.ckpt")
    for kind in LOOPS:
        trainer = kind(**quiet(max_epochs=2, limit_train_batches=1, limit_val_batches=0))
        trainer.ckpt_path = str(tmp_path / "set.ckpt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, ckpt_path=str(tmp_path / "passed.ckpt"))
        assert trainer.ckpt_path == str(tmp_path / "passed.ckpt")
