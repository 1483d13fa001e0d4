"""Test which batches, graphs and copies of attributes a loop keeps in memory."""

import gc
import mmap
import tracemalloc
import weakref

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from modules import make_data
from parameters import sample
from runs import with_files
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from fabric_template import FabricLoop, MiniLoop


class Stop(Exception):
    pass


class OwnSGD(torch.optim.SGD):
    """An optimizer that gets a closure, because its class is not defined in torch."""


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_data(24))


class Watched(pl.LightningModule):
    """A module that raises an error in the n-th call to a hook, and keeps weak references to the last tensors."""

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


def make_loop(loop_class, **options):
    """Create a loop that runs on the CPU and prints nothing."""
    silent = {"enable_progress_bar": False, "enable_model_summary": False} if loop_class is FabricLoop else {}
    return loop_class(accelerator="cpu", **silent, **options)


class Regression(nn.Module):
    """A model whose validation counts the training tensors that are still in memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.references, self.alive = {"batch": [], "output": [], "loss": []}, []

    def training_step(self, batch, batch_idx):
        output = self.layer(batch[0])
        tensors = {"batch": batch[0], "output": output, "loss": output.mean()}
        for name, tensor in tensors.items():
            self.references[name].append(weakref.ref(tensor))
        return {"loss": tensors["loss"], "output": output}

    def validation_step(self, batch, batch_idx):
        self.alive.append(self.count())
        return self.layer(batch[0]).mean()

    def count(self):
        return {name: sum(ref() is not None for ref in refs) for name, refs in self.references.items()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_validation_keeps_only_the_last_training_batch_in_memory(tmp_path, loop_class):
    model, loop = Regression(), make_loop(loop_class, max_epochs=2, default_root_dir=tmp_path)
    loop.fit(model, DataLoader(make_data(24), batch_size=4), DataLoader(make_data(8), batch_size=4))
    assert model.alive
    assert max(counts["batch"] for counts in model.alive) == 1
    assert loop.fabric is not None
    assert model.count() == {"batch": 0, "output": 0, "loss": 0}


class State:
    """An object with a ``state_dict`` that contains many arrays."""

    def __init__(self):
        self.values = [np.full(5_000, float(number)) for number in range(500)]

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


LARGE = {
    "list of arrays": lambda: [np.full(5_000, float(number)) for number in range(500)],
    "list of lists": lambda: [list(range(2_000)) for _ in range(2_000)],
    "object with a state_dict": State,
}


class Measured(Regression):
    def training_step(self, batch, batch_idx):
        self.size = tracemalloc.get_traced_memory()[0]
        return self.layer(batch[0]).mean()


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("name", LARGE)
def test_fit_keeps_no_copy_of_a_large_attribute(tmp_path, loop_class, name):
    model, dataset = Measured(), make_data(8)
    owner = model if name == "object with a state_dict" else dataset
    owner.large = LARGE[name]()
    loop = make_loop(loop_class, max_epochs=1, default_root_dir=tmp_path)
    tracemalloc.start()
    try:
        loop.fit(model, DataLoader(dataset, batch_size=4))
    finally:
        tracemalloc.stop()
    # Each attribute takes about 20 or 30 MB.
    assert model.size < 5e6


class CountsCopies(nn.Module):
    """A model that counts the tensors in memory, except gradients, that have the shape of its weight."""

    def __init__(self):
        super().__init__()
        self.layer, self.copies = nn.Linear(8, 777), set()

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        # Collect garbage, because torch.load leaves a reference cycle.
        gc.collect()
        tensors = [part for part in gc.get_objects() if type(part) in (torch.Tensor, nn.Parameter)]
        self.copies.add(len({t.data_ptr() for t in tensors if t.shape == self.layer.weight.shape}))
        return self.layer(batch[0]).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_a_loop_frees_the_weights_that_it_has_read_from_a_checkpoint(tmp_path, loop_class):
    def create(epochs):
        # Free the previous model.
        gc.collect()
        return CountsCopies(), make_loop(loop_class, max_epochs=epochs, default_root_dir=tmp_path)

    def load():
        return DataLoader(make_data(16), batch_size=4)

    model, loop = create(1)
    loop.fit(model, load())
    assert model.copies == {1}
    for option in ({"resume": "last"}, {"load": "last"}):
        del model, loop
        model, loop = create(2)
        loop.fit(model, load(), **option)
        assert model.copies == {1}
    del model, loop
    model, loop = create(1)
    loop.validate(model, load(), load="last")
    assert model.copies == {1}


# Each value is larger than 256 MB. The system allocates memory only for the parts that are written.
HUGE = {"dict of an array": lambda: {"x": np.zeros(2**25 + 1)}, "file in memory": lambda: mmap.mmap(-1, 2**28 + 1)}


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("name", HUGE)
def test_fit_never_copies_a_huge_attribute(tmp_path, loop_class, name):
    dataset = make_data(8)
    dataset.huge = HUGE[name]()
    loop = make_loop(loop_class, max_epochs=1, default_root_dir=tmp_path)
    tracemalloc.start()
    try:
        loop.fit(Regression(), DataLoader(dataset, batch_size=4))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6


class Average:
    """A large running average of the inputs."""

    def __init__(self):
        self.value = torch.zeros(20_000)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Averaged(Regression):
    def __init__(self):
        super().__init__()
        self.average = Average()

    def training_step(self, batch, batch_idx):
        self.average.value[batch_idx] += batch[0].sum()
        return self.layer(batch[0]).mean() * self.average.value[:4].mean()


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_resume_restores_a_large_object_with_a_state_dict(tmp_path, loop_class):
    models = []
    for folder, epochs, resume in (("a", 2, None), ("b", 1, None), ("b", 2, "last")):
        torch.manual_seed(0)
        model = Averaged()
        loop = make_loop(loop_class, max_epochs=epochs, default_root_dir=tmp_path / folder)
        loop.fit(model, DataLoader(make_data(16), batch_size=4), resume=resume)
        models.append(model)
    assert torch.equal(models[0].average.value, models[2].average.value)
    assert torch.equal(models[0].layer.weight, models[2].layer.weight)
