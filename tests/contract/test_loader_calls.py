"""Test that both loops call iter() and set_epoch() in the same order as Trainer or a hand-written loop."""

import functools
import itertools
import subprocess
import tempfile

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from modules import assert_same_weights, quiet
from runs import python_command
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric_template import FabricLoop, MiniLoop

LOOPS = {
    "FabricLoop": (FabricLoop, {"num_sanity_val_steps": 0, "enable_progress_bar": False}),
    "MiniLoop": (MiniLoop, {}),
}
X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X)


def make_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1))


def compute_loss(net, batch):
    return (net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        return compute_loss(self.net, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", compute_loss(self.net, batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Shuffles:
    """A loader that shuffles its batches in __iter__, before the first batch is requested."""

    def __init__(self, num=5):
        self.num = num

    def __len__(self):
        return self.num

    def __iter__(self):
        return iter([(X[4 * index : 4 * index + 4],) for index in torch.randperm(self.num).tolist()])


class ShufflesItself(Shuffles):
    """A loader that is its own iterator, and counts the calls to __iter__."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        self.order = np.random.permutation(self.num).tolist()
        return self

    def __next__(self):
        if not self.order:
            raise StopIteration
        index = self.order.pop()
        return (X[4 * index : 4 * index + 4] * self.passes,)


class ShufflesInSetEpoch:
    """A sampler that shuffles in set_epoch()."""

    def __init__(self, generator=None):
        self.order, self.generator = list(range(20)), generator

    def set_epoch(self, epoch):
        self.order = torch.randperm(20, generator=self.generator).tolist()

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(self.order)


def shuffled_in_set_epoch(seed=None, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(DATA, 4, sampler=ShufflesInSetEpoch(generator), **options)


LOADERS = {
    "shuffles in iter": Shuffles,
    "is its own iterator": ShufflesItself,
    "set_epoch draws from the global generator": shuffled_in_set_epoch,
    "set_epoch has its own generator, workers": lambda: shuffled_in_set_epoch(3, num_workers=2),
}


class CountsEpochs:
    """A sampler that counts its epochs after the last index."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 20

    def __iter__(self):
        yield from torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1


class CountsBatches(CountsEpochs):
    """A batch sampler that chooses larger indices after each epoch."""

    def __len__(self):
        return 4

    def __iter__(self):
        yield from ([4 * index + self.epoch % 4] * 2 for index in range(4))
        self.epoch += 1


class Resets:
    """A loader that is its own iterator, and returns to its first batch only after the last one."""

    def __init__(self):
        self.position = 0

    def __len__(self):
        return 5

    def __iter__(self):
        return self

    def __next__(self):
        self.position = (self.position + 1) % 6
        if self.position == 0:
            raise StopIteration
        return (X[4 * self.position - 4 : 4 * self.position],)


class Continues:
    """A loader that stores its position, and resets it after the last batch."""

    def __init__(self):
        self.position, self.order = 0, []

    def __len__(self):
        return 5

    def __iter__(self):
        if self.position == 0:
            self.order = torch.randperm(5).tolist()
        while self.position < 5:
            self.position += 1
            index = self.order[self.position - 1]
            yield (X[4 * index : 4 * index + 4],)
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state):
        self.position, self.order = state["position"], list(state["order"])


# These loaders run code after their last batch, so the loops must read them to the end.
LOADERS_WITH_CODE_AT_THE_END = {
    "sampler": lambda: DataLoader(DATA, 4, sampler=CountsEpochs()),
    "sampler, workers": lambda: DataLoader(DATA, 4, sampler=CountsEpochs(), num_workers=2),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=CountsBatches()),
    "iterator": Resets,
    "state_dict": Continues,
}


def train_by_hand(loader, val, net, optimizer):
    """Train with a hand-written loop."""
    for epoch in range(3):
        net.train()
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            compute_loss(net, batch).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            for batch in val:
                compute_loss(net, batch)


def train(loop, name, is_lightning_module=False, root=".", resume=None, seed=1, **options):
    """Train for three epochs, and return the network."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    module, loader = Module(), {**LOADERS, **LOADERS_WITH_CODE_AT_THE_END}[name]()
    # At the end of an epoch, also validate on the loaders that run code after their last batch.
    is_shared = name in LOADERS_WITH_CODE_AT_THE_END and "validate_every_n_steps" not in options
    val = loader if is_shared else Shuffles(2)
    optimizer = module.configure_optimizers()
    if loop == "hand":
        train_by_hand(loader, val, module.net, optimizer)
    elif loop == "Trainer":
        pl.Trainer(**quiet(max_epochs=3, num_sanity_val_steps=0)).fit(module, loader, val)
    else:
        kind, defaults = LOOPS[loop]
        loop = kind(max_epochs=3, accelerator="cpu", default_root_dir=root, **defaults, **options)
        if is_lightning_module:
            loop.fit(module, loader, val, resume=resume)
        else:
            steps = {"training_step": compute_loss, "validation_step": compute_loss}
            loop.fit(module.net, loader, val, optimizer=optimizer, resume=resume, **steps)
    return module.net


@functools.cache
def train_reference(name, is_lightning_module):
    return train("Trainer" if is_lightning_module else "hand", name)


@pytest.mark.parametrize("is_lightning_module", [True, False])
@pytest.mark.parametrize(("loop", "name"), itertools.product(LOOPS, LOADERS))
def test_both_loops_call_iter_and_set_epoch_like_trainer_or_a_hand_written_loop(
    tmp_path, loop, name, is_lightning_module
):
    net = train(loop, name, is_lightning_module, tmp_path)
    assert_same_weights(train_reference(name, is_lightning_module), net)


KILLED = """
import os
import test_loader_calls as tests
steps, compute_loss = [], tests.compute_loss
def kill(net, batch):
    steps.append(net.training)
    if sum(steps) == {steps}:
        os._exit(9)
    return compute_loss(net, batch)
tests.compute_loss = kill
tests.train({loop!r}, {name!r}, {is_lightning_module}, {root!r}, "auto", **{options})
"""


def kill_and_resume(root, loop, name, is_lightning_module, steps, **options):
    """Kill a run in a training step, and resume it in this process."""
    code = KILLED.format(**{**locals(), "root": str(root)})
    ended = subprocess.run(python_command(code, __file__), check=False)
    assert ended.returncode == 9
    assert list(root.rglob("last.ckpt"))
    return train(loop, name, is_lightning_module, root, "auto", 9, **options)


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize(
    ("loop", "name", "is_lightning_module", "steps"),
    [
        ("FabricLoop", "shuffles in iter", False, 4),
        ("MiniLoop", "shuffles in iter", True, 4),
        ("MiniLoop", "is its own iterator", True, 9),
        ("FabricLoop", "set_epoch draws from the global generator", False, 4),
        ("MiniLoop", "set_epoch draws from the global generator", True, 4),
        ("FabricLoop", "set_epoch has its own generator, workers", False, 4),
        ("MiniLoop", "set_epoch has its own generator, workers", True, 4),
    ],
)
def test_a_killed_run_resumes_exactly_if_iter_or_set_epoch_shuffles_the_data(
    tmp_path, loop, name, is_lightning_module, steps
):
    options = {"validate_every_n_steps": 2}
    expected = train(loop, name, is_lightning_module, tempfile.mkdtemp(), **options)
    resumed = kill_and_resume(tmp_path, loop, name, is_lightning_module, steps, **options)
    assert_same_weights(expected, resumed)


@pytest.mark.filterwarnings("ignore:.*contains an iterator that continues across epochs")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LOADERS_WITH_CODE_AT_THE_END)
def test_both_loops_read_a_loader_to_its_end_like_a_for_loop(tmp_path, loop, name):
    assert_same_weights(train_reference(name, False), train(loop, name, False, tmp_path))


@pytest.mark.parametrize("name", [name for name in LOADERS_WITH_CODE_AT_THE_END if "sampler" in name])
@pytest.mark.parametrize("loop", LOOPS)
def test_training_a_lightning_module_runs_no_sampler_code_after_the_last_batch(tmp_path, loop, name):
    assert_same_weights(train_reference(name, True), train(loop, name, True, tmp_path))


def test_fabric_loop_reads_each_of_several_validation_loaders_to_its_end(tmp_path):
    net, batches = make_net(), []
    loop = FabricLoop(max_epochs=2, default_root_dir=tmp_path, accelerator="cpu", **LOOPS["FabricLoop"][1])
    loaders = {"first": Continues(), "second": Resets()}
    steps = {"training_step": compute_loss, "validation_step": lambda net, batch: batches.append(batch)}
    with pytest.warns(UserWarning, match="returned no value"):
        loop.fit(net, DataLoader(DATA, 4), loaders, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **steps)
    assert len(batches) == 20


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize(
    ("loop", "name", "steps"),
    [
        ("FabricLoop", "sampler", 9),
        ("MiniLoop", "sampler", 10),
        ("FabricLoop", "batch sampler", 7),
        ("MiniLoop", "batch sampler", 11),
        ("MiniLoop", "iterator", 8),
        ("FabricLoop", "state_dict", 14),
        ("MiniLoop", "state_dict", 9),
    ],
)
def test_a_killed_run_resumes_exactly_if_its_loader_is_read_to_the_end(tmp_path, loop, name, steps):
    options = {"save_every_n_steps": 1} if loop == "FabricLoop" else {"validate_every_n_steps": 3}
    expected = train(loop, name, False, tempfile.mkdtemp(), **options)
    assert_same_weights(expected, kill_and_resume(tmp_path, loop, name, False, steps, **options))


class Longer:
    """A loader with a wrong length."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(DataLoader(DATA, 4))


class Grows(torch.utils.data.Dataset):
    """A curriculum, which gets more samples in each epoch."""

    size = 8

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return DATA[index]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("is_growing", "length"), [(False, 4), (True, 2)])
def test_a_loader_that_yields_more_batches_than_its_length_is_refused(tmp_path, loop, is_growing, length):
    module, data = Module(), Grows()
    module.net.on_train_epoch_end = lambda: setattr(data, "size", data.size + 8)
    loop = LOOPS[loop][0](max_epochs=2, accelerator="cpu", default_root_dir=tmp_path)
    loader = DataLoader(data, 4, shuffle=True) if is_growing else Longer()
    with pytest.raises(ValueError, match=rf"loader: got more than {length} batches, but len\(loader\) was {length}"):
        loop.fit(module.net, loader, optimizer=module.configure_optimizers(), training_step=compute_loss)


class KeepsIterator(DataLoader):
    """A loader that continues one iterator over 25 batches, and yields five of them in each epoch."""

    def __init__(self, **options):
        super().__init__(DATA, 4, sampler=torch.randperm(100) % 20, **options)
        self.iterator = super().__iter__()

    def __len__(self):
        return 5

    def __iter__(self):
        return itertools.islice(self.iterator, 5)


@pytest.mark.filterwarnings("ignore:checkpoint. .* cannot be saved")
@pytest.mark.parametrize("workers", [0, 1])
def test_mini_loop_refuses_to_resume_a_loader_that_keeps_an_iterator(tmp_path, workers):
    def fit(epochs, **options):
        loop = MiniLoop(max_epochs=epochs, default_root_dir=tmp_path, accelerator="cpu")
        loop.fit(Module(), KeepsIterator(num_workers=workers), **options)

    fit(2)
    with pytest.raises(ValueError, match="without the positions of the loader.s iterators"):
        fit(3, resume="last")
