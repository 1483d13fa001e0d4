"""Test manual optimization with the module's own optimizers, and with loop.optimizers."""

import lightning.pytorch as pl
import pytest
import torch
from modules import assert_parity, make_loader
from runs import fit
from torch import nn


class Own(pl.LightningModule):
    """A module that steps an optimizer that `configure_optimizers` does not return."""

    returned = None

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(8, 3)
        self.mine = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.mine.zero_grad()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        self.mine.step()
        self.log("train_loss", loss, on_epoch=True)

    def configure_optimizers(self):
        return self.returned


class OwnOfNone(Own):
    returned = []  # noqa: RUF012


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize("make", [Own, OwnOfNone])
def test_a_module_that_creates_its_own_optimizers_gives_the_same_weights_as_with_trainer(make):
    assert_parity(make, make_loader, max_epochs=2)


class Shown:
    """A plain object that steps loop.optimizers."""

    automatic_optimization = False

    def __init__(self):
        self.one, self.two = nn.Linear(8, 4), nn.Linear(4, 3)

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self.two(self.one(batch[0])), batch[1])
        for optimizer in self.loop.optimizers:
            optimizer.zero_grad()
        self.loop.backward(loss)
        for optimizer in self.loop.optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.two)]


@pytest.mark.parametrize(
    ("options", "end"), [({"max_steps": 26, "max_epochs": 50}, (2, 26)), ({"max_epochs": 1}, (1, 20))]
)
def test_a_training_step_method_can_call_optimizer_step(tmp_path, options, end):
    """Each of ten batches has two optimizer steps. max_steps and save_every_n_steps count both."""

    class LoopSetter(pl.Callback):
        def on_fit_start(self, loop, module):
            module.loop = loop

    loop, module, history = fit(tmp_path, Shown, callbacks=[LoopSetter()], save_every_n_steps=3, **options)
    assert (loop.current_epoch, loop.global_step) == end
    assert history["step"].iloc[-1] == end[1]
    assert all(isinstance(optimizer, torch.optim.SGD) for optimizer in loop.optimizers)
