"""LightningModules and data for the parity tests."""

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def make_dataset(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(batch_size=4):
    """Return a shuffled loader with seven batches, the last of which is smaller."""
    return DataLoader(make_dataset(26), batch_size=batch_size, shuffle=True)


def val():
    return DataLoader(make_dataset(10, seed=1), batch_size=4)


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        return iter(make_dataset(20, seed=2))


class Module(pl.LightningModule):
    """A classifier with dropout that logs tensors, metrics and dicts, by step and by epoch."""

    scheduler = None

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=2)
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=2)

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        logits = self(x)
        return cross_entropy(logits, y), logits, y

    def training_step(self, batch, batch_idx):
        loss, logits, y = self.loss(batch)
        self.accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"max_loss": loss, "batch_idx": batch_idx * 1.0}, reduce_fx="max", on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss, logits, y = self.loss(batch)
        self.log("val_loss", loss)
        self.log(f"sum_{dataloader_idx}", logits.sum(), reduce_fx="sum", add_dataloader_idx=False)
        if dataloader_idx == 0:
            self.val_accuracy(logits, y)
            self.log("val_accuracy", self.val_accuracy)

    def on_train_epoch_end(self):
        self.log("epoch_value", torch.rand(1))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class StepScheduler(Module):
    def scheduler(self, optimizer):
        scheduler = LinearLR(optimizer, total_iters=self.trainer.estimated_stepping_batches)
        return {"scheduler": scheduler, "interval": "step", "frequency": 2}


class EpochScheduler(Module):
    def scheduler(self, optimizer):
        return ExponentialLR(optimizer, 0.5)


class Plateau(Module):
    def scheduler(self, optimizer):
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {"scheduler": scheduler, "monitor": "val_loss", "strict": True}


class Manual(Module):
    """A module with manual optimization, which toggles, clips and schedules two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        loss, logits, y = self.loss(batch)
        self.toggle_optimizer(body)
        self.manual_backward(loss)
        self.clip_gradients(body, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        body.step()
        body.zero_grad()
        self.untoggle_optimizer(body)
        head_loss = cross_entropy(self.head(logits.detach()), y)
        self.manual_backward(head_loss)
        head.step()
        head.zero_grad()
        self.log_dict({"train_loss": loss, "head_loss": head_loss}, on_epoch=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        body = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.Adam(self.head.parameters(), lr=0.01)
        return [body, head], [ExponentialLR(body, 0.5)]


class ClosureOptimizer(Module):
    """A module with LBFGS, which calls training_step several times per batch."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnHooks(Module):
    """A module that overrides optimizer_step, zero_grad, clipping, backward and the scheduler step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        clip = gradient_clip_val / (self.current_epoch + 1)
        nn.utils.clip_grad_norm_(self.parameters(), clip)

    def backward(self, loss):
        (loss * 2).backward()

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    scheduler = EpochScheduler.scheduler


class Skipping(Module):
    """A module that returns None from training_step for one batch, and ends the second epoch early."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 1 and batch_idx == 4 else None


class SeveralLoaders(Module):
    """A module whose batches are dicts with a batch from each of two loaders."""

    def training_step(self, batch, batch_idx):
        a, b = super().training_step(batch["a"], batch_idx)["loss"], self.loss(batch["b"])[0]
        return a + b


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(make_dataset(27), batch_size=4 + self.trainer.current_epoch, shuffle=True)

    def val_dataloader(self):
        return [val(), val()]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]
