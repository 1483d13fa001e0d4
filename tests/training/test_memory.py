"""Test that a loop keeps neither a batch nor the graph of a loss after a run."""

import gc
import weakref

import lightning.pytorch as pl
import pytest
import torch
from modules import make_data
from parameters import sample
from runs import with_files
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from fabric_template import FabricLoop


class Stop(Exception):
    pass


class OwnSGD(torch.optim.SGD):
    """An optimizer that gets a closure, because its class is not defined in torch."""


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_data(24))


class Watched(pl.LightningModule):
    """Fails in the ``at``-th call to a hook, and keeps weak references to the last tensors."""

    def __init__(self, hook, at, manual=False, optimizer=torch.optim.SGD):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
        self.hook, self.at, self.count, self.references = hook, at, 0, {}
        self.automatic_optimization, self.optimizer = not manual, optimizer
        if hook not in (None, "training_step", "validation_step"):
            setattr(self, hook, self.fail)

    def fail(self, *_):
        self.count += 1
        if self.count == self.at:
            raise Stop

    def step(self, batch, hook):
        hidden = torch.tanh(self.net[0](batch[0]))
        loss = cross_entropy(self.net[1](hidden.pow(2)), batch[1])
        tensors = {"loss": loss, "hidden": hidden, "batch": batch[0]}
        self.references = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
        if self.hook == hook:
            self.fail()
        return {"loss": loss, "hidden": hidden}

    def training_step(self, batch, batch_idx):
        output = self.step(batch, "training_step")
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(output["loss"])
            self.optimizers().step()
        return output

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "validation_step")["loss"]

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)

    def alive(self):
        gc.collect()
        return [name for name, reference in self.references.items() if reference() is not None]


PLACES = [
    (None, 0), ("training_step", 3), ("on_before_backward", 3), ("on_after_backward", 3),
    ("on_before_optimizer_step", 3), ("on_train_batch_end", 3), ("validation_step", 2), ("on_validation_batch_end", 2),
    ("on_train_epoch_end", 1),
]  # fmt: skip


OPTIONS = {
    "automatic": {},
    "manual": {"manual": True},
    "closure": {"optimizer": OwnSGD},
    "accumulation": {"accumulate_grad_batches": 2},
    "stream": {"data": Stream},
}


@pytest.mark.parametrize(("place", "name"), sample(4, PLACES, OPTIONS), ids=str)
def test_fit_releases_batches_and_autograd_graphs(tmp_path, place, name):
    (hook, at), options = place, dict(OPTIONS[name])
    data = options.pop("data", lambda: make_data(24))()
    module = Watched(hook, at, options.pop("manual", False), options.pop("optimizer", torch.optim.SGD))
    loop = FabricLoop(**with_files(tmp_path, max_epochs=2, num_sanity_val_steps=0, **options))
    try:
        loop.fit(module, DataLoader(data, batch_size=4), DataLoader(make_data(16), batch_size=8))
    except Stop:
        assert hook is not None
        assert loop.ending()["ended"] == ["Stop: "]
    else:
        assert hook is None
    assert module.references
    assert module.alive() == []
    assert loop.run is not None


@pytest.mark.parametrize("hook", [None, "validation_step", "on_validation_batch_end"])
def test_validate_releases_batches_and_autograd_graphs(tmp_path, hook):
    module, loop = Watched(hook, 2), FabricLoop(**with_files(tmp_path))
    try:
        loop.validate(module, DataLoader(make_data(16), batch_size=8), verbose=False)
    except Stop:
        assert hook is not None
    assert module.alive() == []
    assert loop.run is not None
