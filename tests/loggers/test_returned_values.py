"""Test that the history contains epoch means of both returned and logged values."""

import lightning.pytorch as pl
import pytest
import torch
from both import Notes
from modules import Classifier, make_loader
from runs import Plain, fit, val_loader
from torch import nn
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop, read_logs
from fabric_template.loggers import row as rows


class Half(Plain):
    """A model that returns a dict in training and a pair in validation, and logs one more value in each."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("norm", sum(p.norm() for p in self.net.parameters()), on_step=False, on_epoch=True)
        return {"loss": loss, "size": len(batch[0])}

    def validation_step(self, batch, batch_idx):
        self.log("val_size", float(len(batch[0])), reduce_fx="max")
        return super().validation_step(batch, batch_idx)


class HalfLit(Classifier):
    """A LightningModule that logs the accuracy, and returns the loss and a size."""

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())
        return {"loss": nn.functional.cross_entropy(logits, batch[1]), "size": len(batch[0])}


def without_logging(make):
    """Return a subclass that logs nothing."""

    class Silent(make):
        log = lambda *_, **__: None  # noqa: E731

    return Silent


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (Half, ["train_loss", "train_size", "norm", "val_loss", "val_acc", "val_size"]),
        (HalfLit, ["train_loss", "train_acc", "val_loss", "val_acc"]),
    ],
)
def test_returned_and_logged_values_become_columns_of_the_history(tmp_path, make, columns):
    """Logging other values does not change the epoch means of the returned values."""
    options = {"val": val_loader, "max_epochs": 3, "monitor": "val_loss"}
    loop, module, history = fit(tmp_path / "one", make, **options)
    silent = fit(tmp_path / "silent", without_logging(make), **options)[2]
    assert sorted(history.columns) == sorted(["epoch", "step", "lr", "time", "waiting", *columns])
    assert history["val_loss"].tolist() == silent["val_loss"].tolist()
    assert loop.checkpoint_callback.best_model_score == history["val_loss"].min()
    unseen = {"train_loss", "train_size"} if make is Half else {"val_loss"}
    assert set(columns) - unseen <= loop.callback_metrics.keys()
    (result,) = loop.validate(module, val_loader(), verbose=False)
    if make is Half:
        assert history["train_size"].tolist() == silent["train_size"].tolist()
        assert history["val_acc"].tolist() == silent["val_acc"].tolist()
        assert result == {name: history[name].iloc[-1] for name in ("val_loss", "val_acc", "val_size")}
    else:
        assert result == {"val_acc": history["val_acc"].iloc[-1]}


class Silent(Classifier):
    log = lambda *_, **__: None  # noqa: E731

    def validation_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("make", [Plain, Half, Silent, HalfLit])
def test_mid_epoch_validations_write_rows_to_steps_csv(tmp_path, make):
    """metrics.csv also contains the values of an epoch's last validation."""
    options = {"val": val_loader, "max_epochs": 1, "val_check_interval": 2, "limit_train_batches": 5}
    notes = Notes()
    fit(tmp_path, make, **options)
    steps = read_logs(tmp_path / "logs/run", steps=True)
    assert steps["step"].tolist() == [2, 4]
    assert steps["epoch"].tolist() == [0, 0]
    assert steps["val_loss"].notna().all()
    assert read_logs(tmp_path / "logs/run")["val_loss"].tolist() == steps["val_loss"].tolist()[-1:]
    _, _, history = fit(tmp_path / "notes", make, logger=notes, **options)
    found = [(step, sorted(values.keys() - {"epoch"})) for step, values in notes.rows]
    validated, trained = {
        Plain: (["val_acc", "val_loss"], ["train_loss"]),
        Half: (["val_acc", "val_loss", "val_size"], ["norm", "train_loss", "train_size"]),
        Silent: ([], []),
        HalfLit: (["val_acc"], ["train_acc", "train_loss_epoch"]),
    }[make]
    assert found == [(s, names) for s, names in ((1, validated), (3, validated), (4, trained)) if names]
    assert history["val_loss"].notna().all()
    assert torch.isfinite(torch.tensor(history["train_loss"].tolist())).all()


def test_metrics_of_several_loaders_have_the_same_names_as_with_trainer(tmp_path):
    class Two(Half):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            if dataloader_idx:
                self.log("val_loss", 5.0)
            return Plain.validation_step(self, batch, batch_idx)

    loop, module, history = fit(tmp_path, Two, val=lambda: [val_loader(), val_loader()], max_epochs=1)
    results = loop.validate(module, [val_loader(), val_loader()], verbose=False)
    assert [sorted(result) for result in results] == [
        [f"{name}/dataloader_idx_{index}" for name in ("val_acc", "val_loss")] for index in (0, 1)
    ]
    everything = results[0] | results[1]
    assert everything["val_loss/dataloader_idx_1"] == 5.0
    assert everything["val_acc/dataloader_idx_0"] == everything["val_acc/dataloader_idx_1"]
    assert history[list(everything)].iloc[0].to_dict() == everything


# Batches are lists of images of several sizes, so no tensor has the number of samples as its first dimension.

SIZES = [[(3, 4, 5), (3, 6, 4)], [(3, 4, 4)]]


def make_images():
    batches = [
        ([torch.full(size, float(i)) for size in sizes], [{"boxes": torch.zeros(5, 4)} for _ in sizes])
        for i, sizes in enumerate(SIZES, 1)
    ]
    return DataLoader(batches, batch_size=None)


class ImageSteps:
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)

    def training_step(self, batch, batch_idx):
        self.log("other", 1.0, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return 0 * self.net.weight.sum() + batch[0][0].mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_other", 1.0, batch_size=len(batch[0]))
        return batch[0][0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class ImageModule(ImageSteps, nn.Module):
    pass


class LitImageModule(ImageSteps, pl.LightningModule):
    pass


@pytest.mark.parametrize("make", [ImageModule, LitImageModule])
def test_epoch_means_of_returned_values_use_the_batch_size_passed_to_log(tmp_path, make):
    """A warning about the batch size would fail this test, because warnings are errors."""
    _, _, history = fit(tmp_path, make, make_images, make_images, max_epochs=1)
    assert history[["train_loss", "other", "val_loss", "val_other"]].iloc[0].tolist() == pytest.approx(
        [4 / 3, 1, 4 / 3, 1]
    )


def test_the_time_of_a_resumed_epoch_includes_the_time_before_the_checkpoint(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(rows.time, "monotonic", lambda: now[0])

    class Slow(Plain):
        def setup(self, stage):
            now[0] += 1000

        def training_step(self, batch):
            now[0] += 10
            return super().training_step(batch)

    options = {"max_epochs": 2, "save_every_n_steps": 1}
    fit(tmp_path, Slow, lambda: make_loader(8), max_steps=3, **options)
    resumed = fit(tmp_path, Slow, lambda: make_loader(8), resume="auto", **options)[2]
    assert resumed["time"].tolist() == [20.0, 20.0]


class Interrupts(Exception):
    pass


@pytest.mark.parametrize("place", ["step", "hook"])
@pytest.mark.parametrize("epochs", [{0}, {1}, {0, 2}, {1, 2, 3}], ids=str)
@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_returned_values_are_averaged_in_epochs_that_log_no_value_with_the_same_name(tmp_path, kind, epochs, place):
    """The test covers the epochs before and after the run is resumed."""

    class Model(nn.Linear):
        def training_step(self, batch):
            return self.compute("train_loss", batch)

        def validation_step(self, batch):
            return self.compute("val_loss", batch)

        def compute(self, name, batch):
            loss = (self(batch) - 1).square().mean()
            if place == "step" and loop.current_epoch in epochs:
                loop.log(name, loss.detach() + 100, on_step=False, on_epoch=True)
            return loss

        def on_validation_epoch_end(self):
            if place == "hook" and loop.current_epoch in epochs:
                loop.log("val_loss", torch.tensor(100.0))

        def on_train_epoch_end(self):
            if place == "hook" and loop.current_epoch in epochs:
                loop.log("train_loss", torch.tensor(100.0))
            if loop.current_epoch == stop:
                raise Interrupts

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(folder, **options):
        torch.manual_seed(1)
        nonlocal loop
        loop = kind(default_root_dir=tmp_path / folder, accelerator="cpu", max_epochs=4)
        batches = [torch.ones(2, 1), torch.zeros(2, 1)]
        history = loop.fit(Model(1, 1), batches, batches, **options)
        return history[["train_loss", "val_loss"]].to_dict("list"), dict(loop.callback_metrics)

    loop, stop = None, None
    whole, metrics = run("whole")
    for values in whole.values():
        assert {epoch for epoch, value in enumerate(values) if value >= 100} == epochs
    stop = 2
    with pytest.raises(Interrupts):
        run("cut")
    stop = None
    assert run("cut", resume="last") == (whole, metrics)
