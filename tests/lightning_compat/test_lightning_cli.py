"""LightningCLI with FabricLoop in place of Trainer, by one overridden method."""

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
    def instantiate_trainer(self, **words):
        self.trainer_class = FabricLoop
        return super().instantiate_trainer(**words)


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
         "--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.monitor=val_loss", "--trainer.profiler=simple",
         "--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=out", "--trainer.accumulate_grad_batches=2",
         "--model.width=7", "--seed_everything=7"],
        ["test"],
    ],
    ids=["fit", "test"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_typed(typed, tmp_path, monkeypatch, capsys):
    (by_trainer, there), (by_loop, here) = (run(cli, typed, tmp_path, monkeypatch) for cli in (LightningCLI, LoopCLI))
    assert type(by_loop.trainer) is FabricLoop
    pairs = zip(by_trainer.model.parameters(), by_loop.model.parameters(), strict=True)
    assert all(torch.equal(theirs, ours) for theirs, ours in pairs)
    assert by_trainer.trainer.callback_metrics == by_loop.trainer.callback_metrics
    assert there == here
    assert len(here) == 1


def run(cli, typed, tmp_path, monkeypatch):
    """The command line that has run, and what its config.yaml says."""
    (folder := tmp_path / cli.__name__).mkdir()
    monkeypatch.chdir(folder)
    done = cli(Lit, BoringDataModule, args=[*typed, *SHORT])
    return done, [yaml.safe_load(path.read_text()) for path in folder.rglob("config.yaml")]


@pytest.mark.filterwarnings("ignore")
def test_goes_on_from_its_config_file(tmp_path, monkeypatch, capsys):
    """The config.yaml of a run, more epochs, and its checkpoint, in Trainer's words: as if it had never stopped."""
    done, (config,) = run(LoopCLI, ["fit", *SGD], tmp_path, monkeypatch)
    assert config["trainer"]["max_epochs"] == 2
    assert config["optimizer"]["class_path"] == "torch.optim.SGD"
    path, saved = (next(iter(tmp_path.rglob(name))) for name in ("config.yaml", "last.ckpt"))
    typed = ["fit", f"--config={path}", f"--ckpt_path={saved}", "--trainer.max_epochs=4"]
    with pytest.raises(RuntimeError, match="to NOT exist"):  # the run stays in its folder
        LoopCLI(Lit, BoringDataModule, args=typed)
    more = LoopCLI(Lit, BoringDataModule, args=typed, save_config_kwargs={"overwrite": True})
    assert (done.trainer.global_step, more.trainer.global_step, more.trainer.current_epoch) == (6, 12, 4)
    assert yaml.safe_load(path.read_text())["trainer"]["max_epochs"] == 4
    whole = LoopCLI(Lit, BoringDataModule, args=["fit", *SGD, *SHORT, "--trainer.max_epochs=4"])
    pairs = zip(whole.model.parameters(), more.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)

    # `runs` reads Lightning's words as the loop's own
    capsys.readouterr()
    assert main(["runs"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [[f"run/version_{number}", "finished", "4"] for number in range(2)]
    assert [row.split()[-1].partition("=")[0] for row in rows] == ["ckpt_path"] * 2  # in which alone they differ
