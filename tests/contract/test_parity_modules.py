"""Test that FabricLoop and Trainer end with the same weights for each kind of LightningModule."""

import warnings

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torchmetrics
from modules import Classifier, assert_parity, make_loader, run_loop
from torch import nn


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


class WithMetrics(Classifier):
    """A module that logs a torchmetrics object per step and per epoch, and a MetricCollection."""

    def __init__(self):
        super().__init__()
        options = {"task": "multiclass", "num_classes": 3}
        self.train_accuracy = torchmetrics.Accuracy(**options)
        self.val_metrics = torchmetrics.MetricCollection(
            [torchmetrics.Accuracy(**options), torchmetrics.F1Score(**options, average="macro")], prefix="val_"
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.train_accuracy(logits, y)
        self.log("acc", self.train_accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self(x), y)
        self.log_dict(self.val_metrics)


class Everywhere(Classifier):
    """A module that logs in every hook that allows it, with every reduction."""

    def on_train_start(self):
        self.log("at_start", 1.0)

    def on_train_epoch_start(self):
        self.log("epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        self.log("batch_start", float(batch_idx), on_epoch=True, reduce_fx="max")

    def on_before_zero_grad(self, optimizer):
        self.log("zero", float(self.global_step), on_step=False, on_epoch=True, reduce_fx="sum")

    def on_after_backward(self):
        self.log("grad", self.net[0].weight.grad.abs().sum(), on_epoch=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("out", outputs["loss"], on_step=True, on_epoch=True, reduce_fx="min", batch_size=2)

    def on_validation_epoch_end(self):
        self.log("val_end", float(self.current_epoch) + 0.5)

    def on_train_epoch_end(self):
        self.log("epoch_end", float(self.global_step))

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_batch_end", float(batch_idx), on_step=True, on_epoch=True)


class Stepped(Classifier):
    """A module that creates its scheduler with trainer.estimated_stepping_batches."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class NoIdx(Classifier):
    def training_step(self, batch):
        return super().training_step(batch, 0)

    def validation_step(self, batch):
        return super().validation_step(batch, 0)


class Frozen(Classifier):
    """A module with a submodule that must stay in eval mode."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(8)
        self.bn.eval()

    def forward(self, x):
        return self.net(self.bn(x + 1))


class Clips(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


CLIPPING = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (WithMetrics, {"val_check_interval": 0.5}),
        (Everywhere, {"val_check_interval": 0.5}),
        (Everywhere, {"accumulate_grad_batches": 3}),
        (Stepped, {"accumulate_grad_batches": 3}),
        (NoIdx, {}),
        (Frozen, {}),
        (Clips, CLIPPING),
    ],
)
def test_fabric_loop_and_trainer_train_each_module_to_equal_weights(module, options):
    assert_parity(module, train, val, max_epochs=3, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 0.5, "limit_val_batches": 0.6},
        {"max_epochs": -1, "max_steps": 5, "accumulate_grad_batches": 4},
        {"val_check_interval": 7, "check_val_every_n_epoch": None, "num_sanity_val_steps": -1},
        {"fast_dev_run": 2},
        {"fast_dev_run": True, "overfit_batches": 3},
        {"precision": "bf16-true"},
    ],
)
def test_fabric_loop_and_trainer_give_the_same_weights_with_the_same_arguments(options):
    assert_parity(Classifier, train, val, **{"max_epochs": 3, **options})


def test_loaders_with_workers_give_the_same_weights_as_with_trainer():
    assert_parity(Classifier, lambda: make_loader(40, num_workers=2), val, max_epochs=2)


def test_fabric_loop_and_trainer_train_a_pytorch_lightning_module_to_equal_weights():
    """The package pytorch_lightning has its own LightningModule class."""

    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    pl.seed_everything(1, verbose=False)
    expected = Other()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, max_epochs=2,
        )  # fmt: skip
        trainer.fit(expected, train())
    loop, module = run_loop(Other, train, max_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))
    assert {k: v.item() for k, v in trainer.callback_metrics.items()} == {
        k: v.item() for k, v in loop.callback_metrics.items()
    }
