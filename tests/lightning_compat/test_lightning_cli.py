"""Test LightningCLI with FabricLoop in place of Trainer."""

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import nn

from fabric_template import FabricLoop
from fabric_template.tools.cli import main


class LoopCLI(LightningCLI):
    def instantiate_trainer(self, **options):
        self.trainer_class = FabricLoop
        return super().instantiate_trainer(**options)


class Lit(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(32, width), nn.Dropout(0.2), nn.Linear(width, 2))

    def step(self, name, batch):
        loss = self.net(batch).square().mean()
        self.log(name, loss, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step("train_loss", batch)

    def validation_step(self, batch, batch_idx):
        self.step("val_loss", batch)

    def test_step(self, batch, batch_idx):
        self.step("test_loss", batch)

    def predict_step(self, batch, batch_idx):
        return self.net(batch)


SHORT = ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
SHORT += [f"--trainer.limit_{stage}_batches=3" for stage in ("train", "val", "test", "predict")]
SGD = ["--optimizer=SGD", "--optimizer.lr=0.1"]


@pytest.mark.parametrize(
    "typed",
    [
        ["fit", *SGD, "--lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss",
         "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.monitor=val_loss",
         "--trainer.profiler=simple",
         "--trainer.accumulate_grad_batches=2",
         "--model.width=7", "--seed_everything=7"],
        ["test"],
    ],
    ids=["fit", "test"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_fabric_loop_in_lightning_cli_gives_the_same_results_as_trainer(typed, tmp_path, monkeypatch, capsys):
    (by_trainer, there), (by_loop, here) = (run(cli, typed, tmp_path, monkeypatch) for cli in (LightningCLI, LoopCLI))
    assert type(by_loop.trainer) is FabricLoop
    pairs = zip(by_trainer.model.parameters(), by_loop.model.parameters(), strict=True)
    assert all(torch.equal(theirs, ours) for theirs, ours in pairs)
    assert by_trainer.trainer.callback_metrics == by_loop.trainer.callback_metrics
    assert there == here
    assert len(here) == 1


def run(cli, typed, tmp_path, monkeypatch):
    """Run a command line. Return the CLI and the contents of each config.yaml."""
    (folder := tmp_path / cli.__name__).mkdir()
    monkeypatch.chdir(folder)
    done = cli(Lit, BoringDataModule, args=[*typed, *SHORT])
    return done, [yaml.safe_load(path.read_text()) for path in folder.rglob("config.yaml")]


@pytest.mark.filterwarnings("ignore")
def test_the_fit_command_refuses_a_run_whose_config_file_was_written_by_lightning_cli(tmp_path, monkeypatch, capsys):
    run(LoopCLI, ["fit", *SGD], tmp_path, monkeypatch)
    (config,) = tmp_path.rglob("config.yaml")
    assert main(["fit", "--run", str(config.parent)]) != 0
    assert "was written by LightningCLI. Run your own script with --config" in capsys.readouterr().err
