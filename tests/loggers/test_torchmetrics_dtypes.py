"""Test that torchmetrics values have the same dtype as with Trainer, in each precision."""

import pytest
import torch
import torchmetrics as tm
from modules import Classifier, make_loader, run_loop, run_trainer
from runs import same, val_loader


class Measured(Classifier):
    def __init__(self):
        super().__init__()
        self.means = torch.nn.ModuleDict({"train_mean": tm.MeanMetric(), "val_most": tm.MaxMetric()})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.means["train_mean"].update(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.means["val_most"].update(self.trainer.callback_metrics["train_loss"] / 3)

    def on_train_epoch_end(self):
        self.log_dict({name: mean.compute() for name, mean in self.means.items()})
        for mean in self.means.values():
            mean.reset()


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true", "bf16-mixed"])
def test_computed_metrics_have_the_same_dtype_as_with_trainer(precision):
    options = {"max_epochs": 2, "precision": precision, "num_sanity_val_steps": 0}
    (trainer, _), (loop, _) = (run(Measured, make_loader, val_loader, **options) for run in (run_trainer, run_loop))
    theirs, ours = (dict(sorted(one.callback_metrics.items())) for one in (trainer, loop))
    assert same(theirs, ours), (theirs, ours)


class Logged(Classifier):
    """A module that logs metrics updated with float64 values."""

    def __init__(self):
        super().__init__()
        self.most, self.mean = tm.MaxMetric(), tm.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for name in ("most", "mean"):
            metric = getattr(self, name)
            metric(loss.detach().double() / 3)
            self.log(name, metric, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
def test_logged_metrics_have_the_same_dtype_as_with_trainer(precision):
    options = {"max_epochs": 2, "precision": precision}
    (trainer, _), (loop, _) = (run(Logged, make_loader, None, **options) for run in (run_trainer, run_loop))
    theirs, ours = (dict(sorted(one.callback_metrics.items())) for one in (trainer, loop))
    assert same(theirs, ours), (theirs, ours)
