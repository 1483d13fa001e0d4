"""Small modules, and functions that train them with lightning.Trainer and with FabricLoop."""

import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from fabric_template import FabricLoop

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Before Lightning 2.5.3, Trainer does not resume exactly, because it creates the training loader's iterator twice.
HAS_EXACT_TRAINER = hasattr(pl.loops.fit_loop._FitLoop, "is_resuming")
# In torch 2.6, the state of SWALR contains a function, which is loaded only with weights_only=False.
HAS_PLAIN_SWALR = hasattr(torch.optim.swa_utils.SWALR, "_set_anneal_func")

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 in this torch version needs CUDA"
)


def weight_averaging(name="WeightAveraging", **options):
    """Return Lightning's callback with this name. If Lightning is too old to have it, skip the test."""
    if not hasattr(pl.callbacks, name):
        pytest.skip(f"needs {name} from a newer Lightning")
    return getattr(pl.callbacks, name)(**options)


def shard_module(module, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh["data_parallel"])


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def by_step(module):
    """Return SGD, and a scheduler that steps after each optimizer step."""
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}}


def by_epoch(module):
    """Return Adam, and a scheduler that steps after each epoch."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return [optimizer], [CosineAnnealingLR(optimizer, 4)]


def make_data(num=40, features=8, classes=3, seed=0):
    """Return a small dataset that a model can learn: inputs ``(num, features)`` and labels ``(num,)``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, features, generator=generator)
    y = (x @ torch.randn(features, classes, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def make_loader(num=40, batch_size=4, shuffle=True, seed=0, **options):
    return DataLoader(make_data(num, seed=seed), batch_size=batch_size, shuffle=shuffle, **options)


class Classifier(pl.LightningModule):
    """An MLP with dropout that logs train_loss, train_acc, val_loss and val_acc."""

    def __init__(self, optimizers=None, dropout=0.2, hidden=16, **log):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 3))
        self.make_optimizers = optimizers or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
        self.log_options = {"on_epoch": True, **log}

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, **self.log_options)
        self.log("train_acc", (logits.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return self.make_optimizers(self)


class Gan(pl.LightningModule):
    """A GAN whose generator steps in each batch, and whose critic accumulates two batches."""

    def __init__(self, toggles=True, every=2):
        super().__init__()
        self.automatic_optimization = False
        self.toggles, self.every = toggles, every
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3))
        self.critic = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        fake = self.generator(torch.randn(len(batch[0]), 4))
        if self.toggles:
            self.toggle_optimizer(of_generator)
        loss = -self.critic(fake).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        if self.toggles:
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_critic)
        critic_loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
        self.manual_backward(critic_loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            of_critic.step()
            of_critic.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(of_critic)
        for scheduler in self.lr_schedulers()[: 2 if batch_idx % self.every else 1]:
            scheduler.step()
        self.log_dict({"g": loss, "c": critic_loss}, on_step=True, on_epoch=True)
        return {"loss": loss + critic_loss}

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in optimizers]


def quiet(**options):
    """Return options that make Trainer and FabricLoop write no files and print nothing."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }


def run_trainer(make_module, make_train, make_val=None, seed=1, fit=None, **options):
    """Train with lightning.Trainer. Return (trainer, module)."""
    pl.seed_everything(seed, verbose=False)
    module = make_module()
    loaders = (make_train(), make_val() if make_val else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**quiet(**options))
        trainer.fit(module, *loaders, **(fit or {}))
    return trainer, module


def run_loop(make_module, make_train, make_val=None, seed=1, fit=None, **options):
    """Train with FabricLoop. Return (loop, module)."""
    pl.seed_everything(seed, verbose=False)
    module = make_module()
    loaders = (make_train(), make_val() if make_val else None)
    loop = FabricLoop(**quiet(**options))
    loop.fit(module, *loaders, **(fit or {}))
    return loop, module


def assert_same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


def assert_same_metrics(one, other):
    first, second = dict(one.callback_metrics), dict(other.callback_metrics)
    assert sorted(first) == sorted(second)
    different = {k: (first[k], second[k]) for k in first if not torch.equal(first[k], second[k])}
    assert not different, different


def assert_parity(make_module, make_train, make_val=None, **options):
    """Train a module with Trainer and FabricLoop. Compare weights, callback_metrics, epoch and step."""
    trainer, expected = run_trainer(make_module, make_train, make_val, **options)
    loop, module = run_loop(make_module, make_train, make_val, **options)
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    assert (trainer.current_epoch, trainer.global_step) == (loop.current_epoch, loop.global_step)
    return trainer, loop
