"""Test manual optimization with DDP on two processes."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from modules import assert_same_metrics, assert_same_weights, make_loader, run_loop, run_trainer
from torch import nn
from torch.nn.functional import cross_entropy


class Manual(pl.LightningModule):
    """A module that takes an optimizer step in every second batch and returns a detached loss or None."""

    def __init__(self, returns=True):
        super().__init__()
        self.net, self.returns, self.automatic_optimization = nn.Linear(8, 3), returns, False

    def loss_of(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss.detach() if self.returns else None

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Gan(Manual):
    """A module that has two networks with separate backward passes. The second network trains in every second batch."""

    def __init__(self, toggles=False, **options):
        super().__init__(**options)
        self.other, self.toggles = nn.Linear(8, 3), toggles

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        losses = (
            (self.loss_of(batch), first),
            ((self.other(batch[0]) - self.net(batch[0]).detach()).square().mean(), second),
        )
        for loss, optimizer in losses if batch_idx % 2 == 0 else losses[:1]:
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.02) for net in (self.net, self.other)]


class Blocks(Manual):
    """A module that blocks gradient synchronization in two ways, except in every third backward pass."""

    def training_step(self, batch, batch_idx):
        trainer, loss = self.trainer, self.loss_of(batch)
        with (trainer.strategy.block_backward_sync, trainer.model.no_sync, nullcontext)[batch_idx % 3]():
            self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Toggles(Gan):
    """A module that synchronizes the gradients of each optimizer only in every second batch."""

    def training_step(self, batch, batch_idx):
        losses = self.loss_of(batch), cross_entropy(self.other(batch[0]), batch[1])
        for loss, optimizer in zip(losses, self.optimizers(), strict=True):
            with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
                self.manual_backward(loss)
                if batch_idx % 2:
                    optimizer.step()
                    optimizer.zero_grad()


def val():
    return make_loader(18, shuffle=False)


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters=True was specified")
@pytest.mark.parametrize(
    ("make", "unused", "steps"),
    [
        (Manual, False, 4),
        pytest.param(lambda: Manual(returns=False), True, 4, marks=pytest.mark.soak),
        (Blocks, False, 2),
        pytest.param(Gan, True, 16, marks=pytest.mark.soak),
        (lambda: Gan(toggles=True), True, 16),
        (Toggles, True, 8),
    ],
    ids=["one", "unused", "blocked", "gan", "toggled", "toggled without synchronization"],
)
def test_manual_optimization_with_ddp_gives_the_same_weights_as_with_trainer(make, unused, steps):
    ends = []
    for run, strategy in ((run_trainer, pl.strategies.DDPStrategy), (run_loop, DDPStrategy)):
        options = {"start_method": "fork", "find_unused_parameters": unused}
        ends.append(run(make, make_loader, val, max_epochs=2, strategy=strategy(**options), devices=2))
    (trainer, expected), (loop, module) = ends
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    # Compare with a number, because Trainer leaves global_step at 0 in the calling process.
    assert loop.global_step == steps
