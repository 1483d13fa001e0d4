"""Test that both loops resume exactly with every kind of loader, after and within an epoch."""

import functools
import itertools
import random
import tempfile
import warnings
from collections import deque
from dataclasses import dataclass

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from modules import assert_same_weights
from parameters import halve, keep, once, sample
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric_template import FabricLoop, MiniLoop, TensorLoader

# Ignore this warning, because StatefulDataLoader calls a deprecated torch function.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DATA = TensorDataset(X, Y)
LOOPS = {"MiniLoop": (MiniLoop, {}), "FabricLoop": (FabricLoop, {"enable_progress_bar": False})}


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


class Noisy(Dataset):
    """A dataset with its own generator, a counter and a list that changes in place."""

    def __init__(self):
        self.noise, self.reads, self.recent = random.Random(7), 0, []

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.reads += 1
        self.recent.append(self.reads % 5)
        del self.recent[:-3]
        return X[index] + 0.1 * self.noise.random() + 0.01 * sum(self.recent), Y[index]


class Order(Sampler):
    """A sampler with its own generator."""

    def __init__(self):
        self.generator = np.random.default_rng(5)

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(self.generator.permutation(24).tolist())


class OwnOrder(BatchSampler):
    """A batch sampler with its own generator and an epoch number."""

    def __init__(self, sampler, batch_size, drop_last):
        super().__init__(sampler, batch_size, drop_last)
        self.generator, self.epoch = np.random.RandomState(5), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.roll(self.generator.permutation(24), self.epoch).tolist()
        return iter([order[start : start + self.batch_size] for start in range(0, 24, self.batch_size)])


class Continues(IterableDataset):
    """A stream with a position as its state. It starts at this position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for index in range(self.position, 24):
            self.position = index + 1
            yield X[index], Y[index]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Shuffles(IterableDataset):
    """A stream that is shuffled with its epoch number as the seed."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(24, generator=seeded(self.epoch))
        return iter([(X[index], Y[index]) for index in order])


class Noise(Dataset):
    """A dataset that draws random numbers whenever an item is read."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.rand(4) + 0.1 * np.random.rand(), Y[index]


class Draws(IterableDataset):
    """A stream that draws random numbers from the same generators as the network's dropout."""

    def __iter__(self):
        for index in range(24):
            yield X[index] + 0.1 * torch.rand(4), Y[index]


LOADERS = {
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "own generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded()),
    "weights": lambda: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler(torch.arange(1, 25.0), 24, generator=seeded())
    ),
    "custom sampler": lambda: DataLoader(DATA, 4, sampler=Order()),
    "sampler in a batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Order(), 5, False)),
    "custom batch sampler": lambda: DataLoader(DATA, batch_sampler=OwnOrder(range(24), 4, False)),
    "stateful, workers": lambda: StatefulDataLoader(DATA, 4, sampler=Order(), num_workers=2),
    "stateful, custom sampler": lambda: StatefulDataLoader(DATA, 4, sampler=Order()),
    "stateful, generator": lambda: StatefulDataLoader(DATA, 4, shuffle=True, generator=seeded()),
    "stateful, custom batch sampler": lambda: StatefulDataLoader(DATA, batch_sampler=OwnOrder(range(24), 4, False)),
    "stateful, weights": lambda: StatefulDataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.ones(24), 24)),
    "stateful, random batches": lambda: StatefulDataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)
    ),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2),
    "changing dataset": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "subset": lambda: DataLoader(Subset(Noisy(), range(20)), 4, shuffle=True),
    "concatenated": lambda: DataLoader(ConcatDataset([DATA, Subset(Noisy(), range(8))]), 4, shuffle=True),
    "stream with a position": lambda: DataLoader(Continues(), 4),
    "stream with an epoch": lambda: DataLoader(Shuffles(), 4),
    "stream with random numbers": lambda: DataLoader(Draws(), 4),
    "stateful, noise in workers": lambda: StatefulDataLoader(Noise(), 4, shuffle=True, num_workers=2),
    "tensors": lambda: TensorLoader(X, Y, batch_size=5, shuffle=True),
    "tensors with a generator": lambda: TensorLoader(X, Y, batch_size=5, shuffle=True, generator=seeded()),
    "list of batches": lambda: list(DataLoader(DATA, 4)),
}


def step(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def make_net():
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 2))


class Remembers(nn.Module):
    """A network whose output depends on attributes such as a number, a set and an array."""

    def __init__(self):
        super().__init__()
        self.net, self.count, self.mean, self.hidden = make_net(), 0, np.float32(1), None
        self.bank, self.recent, self.seen, self.named = np.zeros(3, np.float32), deque(maxlen=3), set(), {}

    def forward(self, x):
        if self.training:
            value = float(x.mean())
            self.count += 1
            self.mean = np.float32(0.9 * self.mean + 0.1 * value)
            self.hidden = x.detach().mean(0)
            self.bank[self.count % 3] += value
            self.recent.append(value)
            self.seen.add(self.count % 7)
            self.named["last"] = [value, self.count]
        memory = sum(self.recent) + len(self.seen) + sum(self.named.get("last", [])) + float(self.bank.sum())
        hidden = 0 if self.hidden is None else self.hidden
        return self.net(x + 0.01 * memory + 0.1 * float(self.mean) + 0.1 * hidden)


def train(loop_name, root, make_loader, seed=None, resume=None, make_net=make_net, **options):
    """Train a new model. ``seed`` is set after the model is created and before fit."""
    torch.manual_seed(1)
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    if seed is not None:
        torch.manual_seed(seed)
    kind, quiet = LOOPS[loop_name]
    loop = kind(default_root_dir=root, accelerator="cpu", devices=1, **quiet, **options)
    functions = {"training_step": step, "validation_step": step}
    history = loop.fit(net, make_loader(), DataLoader(DATA, 6), optimizer=optimizer, resume=resume, **functions)
    rows = history.drop(columns=["time", "waiting", "samples_per_second"], errors="ignore").to_dict("records")
    # Leave out NaN, which does not equal itself. For example,
    # val_loss is NaN in the row that a run writes at max_steps.
    return net, [{name: value for name, value in row.items() if value == value} for row in rows]


@functools.cache
def train_without_break(loop_name, name):
    return train(loop_name, tempfile.mkdtemp(), LOADERS[name], max_epochs=3)


# Test FabricLoop only with these loaders, because tests/checkpoint/test_exact_resume.py and tests/data cover the rest.
FABRIC_LOOP_LOADERS = keep(
    LOADERS, "weights", "changing dataset", "stateful, custom sampler", "stateful, custom batch sampler",
    "stateful, weights", "stateful, random batches",
)  # fmt: skip


LIMITS = {"after an epoch": {"max_epochs": 2}, "within an epoch": {"max_steps": 8}}


@pytest.mark.filterwarnings("ignore:resume. .* batches of .*DataLoader are read again")
@pytest.mark.filterwarnings("ignore:resume. Draws draws random numbers")
@pytest.mark.parametrize(("limit", "name"), sample(2, LIMITS, LOADERS))
def test_mini_loop_resumes_exactly_with_each_kind_of_loader(tmp_path, name, limit):
    check_resume(tmp_path, "MiniLoop", name, limit)


@pytest.mark.filterwarnings("ignore:resume. .* batches of .*DataLoader are read again")
@pytest.mark.filterwarnings("ignore:resume. Draws draws random numbers")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", FABRIC_LOOP_LOADERS)
def test_fabric_loop_resumes_exactly_with_each_kind_of_loader(tmp_path, name, limit):
    check_resume(tmp_path, "FabricLoop", name, limit)


def check_resume(tmp_path, loop_name, name, limit):
    make_loader = LOADERS[name]
    expected, rows = train_without_break(loop_name, name)
    train(loop_name, tmp_path / "cut", make_loader, **LIMITS[limit])
    resumed, found = train(loop_name, tmp_path / "cut", make_loader, seed=9, resume="last", max_epochs=3)
    assert_same_weights(expected, resumed)
    assert found == rows


@pytest.mark.parametrize(("loop_name", "limit"), halve(LOOPS, [{"max_epochs": 2}, {"max_steps": 8}]))
def test_a_run_whose_model_changes_its_own_attributes_resumes_exactly(tmp_path, loop_name, limit):
    options = {"make_loader": LOADERS["shuffled"], "make_net": Remembers}
    expected, rows = train(loop_name, tmp_path / "whole", max_epochs=3, **options)
    train(loop_name, tmp_path / "cut", **options, **limit)
    resumed, found = train(loop_name, tmp_path / "cut", seed=9, resume="last", max_epochs=3, **options)
    assert_same_weights(expected, resumed)
    assert found == rows


@pytest.mark.parametrize(("loop_name", "limit"), once(LOOPS, [{"max_steps": 8}, {"max_epochs": 2}, {"max_steps": 12}]))
def test_resuming_a_finished_run_changes_no_weights_and_no_csv_rows(tmp_path, loop_name, limit):
    """The rows include the last row of a run that stops at max_steps within an epoch."""
    make_loader = LOADERS["shuffled"]
    expected, rows = train(loop_name, tmp_path, make_loader, **limit)
    resumed, found = train(loop_name, tmp_path, make_loader, seed=9, resume="auto", **limit)
    assert_same_weights(expected, resumed)
    assert found == rows


@pytest.mark.parametrize("loop_name", LOOPS)
def test_a_run_with_a_best_checkpoint_but_no_last_ckpt_resumes_exactly(tmp_path, loop_name):
    """A run that is killed during its first save may have written best.ckpt but not last.ckpt."""
    options = {"monitor": "val_loss", "make_loader": LOADERS["shuffled"]}
    expected, rows = train(loop_name, tmp_path / "whole", max_epochs=3, **options)
    train(loop_name, tmp_path / "cut", max_epochs=1, **options)
    (tmp_path / "cut/checkpoints/run/version_0/last.ckpt").unlink()
    resumed, found = train(loop_name, tmp_path / "cut", seed=9, resume="auto", max_epochs=3, **options)
    assert_same_weights(expected, resumed)
    assert found == rows


@pytest.mark.parametrize("name", LOADERS)
def test_both_loops_end_with_the_same_weights_for_each_kind_of_loader(name):
    (net, rows), (other, found) = (train_without_break(loop, name) for loop in LOOPS)
    assert_same_weights(net, other)
    assert found == rows


class DrawnOrder(list):
    """A list of batches that draws a new order of samples whenever a loop iterates over it."""

    def __iter__(self):
        return iter(torch.randperm(24).view(-1, 4).tolist())


class DrawingDict(dict):
    def items(self):
        torch.rand(1)
        return super().items()


class DrawingTuple(tuple):
    def __iter__(self):
        torch.rand(1)
        return super().__iter__()


@pytest.mark.parametrize("loop_name", LOOPS)
def test_containers_that_draw_random_numbers_do_not_change_the_weights(tmp_path, loop_name):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.3))
        net.table, net.sizes = DrawingDict(a=torch.ones(2)), [DrawingTuple((1, 2))]
        return net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(DATA, batch_sampler=DrawnOrder(range(6)))

    net, optimizer, loader = make()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            step(net, batch).backward()
            optimizer.step()
    kind, options = LOOPS[loop_name]
    other, optimizer, loader = make()
    loop = kind(max_epochs=2, default_root_dir=tmp_path, accelerator="cpu", **options)
    loop.fit(other, loader, optimizer=optimizer, training_step=step)
    assert_same_weights(net, other)


class Graph:
    """A batch that is not a container."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return Graph(self.x.to(device), self.y.to(device))


@pytest.mark.parametrize("loop_name", LOOPS)
def test_fit_accepts_a_list_of_batch_objects_instead_of_a_loader(tmp_path, loop_name):
    pairs = list(DataLoader(DATA, 4))
    expected, _ = train(loop_name, tmp_path, lambda: pairs, max_epochs=2)
    torch.manual_seed(1)
    net = make_net()
    kind, quiet = LOOPS[loop_name]
    loop = kind(default_root_dir=tmp_path, accelerator="cpu", devices=1, max_epochs=2, **quiet)
    graphs = [Graph(*pair) for pair in pairs]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    functions = {"training_step": lambda net, batch: step(net, (batch.x, batch.y)), "validation_step": step}
    loop.fit(net, graphs, DataLoader(DATA, 6), optimizer=optimizer, **functions)
    assert_same_weights(expected, net)


class LongOrder(Sampler):
    """A sampler that shuffles its own long list in place."""

    def __init__(self):
        self.order = list(range(4_000))

    def __len__(self):
        return 24

    def __iter__(self):
        random.Random(self.order[0]).shuffle(self.order)
        return iter([index for index in self.order if index < 24])


class LongArray(LongOrder):
    def __init__(self):
        self.order = np.arange(12_000)

    def __iter__(self):
        np.random.RandomState(self.order[0]).shuffle(self.order)
        return iter(self.order[self.order < 24].tolist())


class CountsInClass(Sampler):
    """A sampler whose counter is a class attribute until the first epoch."""

    passes = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(24, generator=seeded(self.passes)).tolist())


class CountsEpochs(CountsInClass):
    """A sampler that counts its epochs itself, without set_epoch()."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(24, generator=seeded(self.epoch)).tolist())


class CountsBeside(CountsEpochs):
    """A sampler that counts epochs itself in ``epoch``, although it has set_epoch()."""

    def set_epoch(self, epoch):
        pass


class ShufflesInSetEpoch(LongOrder):
    """A sampler that shuffles its list with global random numbers in set_epoch()."""

    def __init__(self):
        self.order = list(range(24))

    def set_epoch(self, epoch):
        self.order[:] = [self.order[index] for index in torch.randperm(24)]

    def __iter__(self):
        return iter(list(self.order))


class Turns(LongOrder):
    """A sampler whose set_epoch() reverses its order in place and inverts a flag.

    Every second epoch starts with the values from the start of the run.
    """

    def __init__(self, order):
        self.order, self.is_turned = order, False

    def set_epoch(self, epoch):
        self.order.reverse()
        self.is_turned = not self.is_turned

    def __iter__(self):
        indices = [int(index) for index in self.order if index < 24]
        return iter(indices[7:] + indices[:7] if self.is_turned else indices)


class TurnsArray(Turns):
    def set_epoch(self, epoch):
        self.order[:] = self.order[::-1].copy()


class TurnsDict(Turns):
    def set_epoch(self, epoch):
        items = list(self.order.items())
        self.order.clear()
        self.order.update(reversed(items))


class Files(Noisy):
    """A dataset with a long list of names, which its sampler reverses through set_epoch()."""

    def __init__(self):
        self.names = [f"{index % 1000}.png" for index in range(4_000)]

    def set_epoch(self, epoch):
        self.names.reverse()

    def __getitem__(self, index):
        return X[index] + 0.001 * int(self.names[index].removesuffix(".png")), Y[index]


class OrderOfFiles(Sampler):
    def __init__(self, files):
        self.files, self.set_epoch = files, files.set_epoch

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(torch.randperm(24).tolist())


def make_files():
    files = Files()
    return DataLoader(files, 4, sampler=OrderOfFiles(files))


class OrderFromSetEpoch(LongOrder):
    """A sampler whose set_epoch() stores a function, which a checkpoint cannot contain."""

    def __init__(self):
        self.draw = list

    def set_epoch(self, epoch):
        def draw(indices):
            return [indices[index] for index in torch.randperm(24, generator=seeded(epoch + 5))]

        self.draw = draw

    def __iter__(self):
        return iter(self.draw(range(24)))


class LateOrder(OrderFromSetEpoch):
    """A sampler whose function is None until the first call to set_epoch()."""

    def __init__(self):
        self.draw = None

    def __iter__(self):
        return iter(range(24)) if self.draw is None else super().__iter__()


class EagerBatches:
    """A batch sampler that draws all indices in iter(), before the first call to set_epoch()."""

    def __init__(self):
        self.sampler = OrderFromSetEpoch()

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def __len__(self):
        return 6

    def __iter__(self):
        return iter([batch.tolist() for batch in torch.tensor(list(self.sampler)).split(4)])


class LargeTensor(Noisy):
    """A dataset with a 2 MB tensor whose values change without a new tensor version."""

    def __init__(self):
        self.factors = torch.ones(500_000)

    def __getitem__(self, index):
        self.factors.numpy()[7 * index + 3] *= 1.1
        self.factors.data[7 * index + 4] *= 1.1
        return X[index] * self.factors[7 * index + 3] * self.factors[7 * index + 4], Y[index]


class LongMemory(Noisy):
    """A dataset with a long list, a long dict and a nested array, which change in place."""

    def __init__(self):
        self.factors, self.drawn, self.nested = [1.0] * 4_000, {}, {"sums": np.ones(12_000)}
        self.drawn.update(dict.fromkeys(range(24, 4_000), 0.0))

    def __getitem__(self, index):
        self.factors[index] *= 1.1
        self.nested["sums"][index] += 0.1
        self.drawn[index] = self.drawn.get(index, 0.0) + 0.1
        return X[index] * self.factors[index] + self.drawn[index] + self.nested["sums"][index], Y[index]


class IsItsIterator:
    """A loader whose __iter__ starts a new pass and returns the loader itself."""

    def __init__(self):
        self.rest = None

    def __len__(self):
        return 6

    def __iter__(self):
        order = torch.randperm(24).split(4)
        self.rest = iter([(X[indices], Y[indices]) for indices in order])
        return self

    def __next__(self):
        return next(self.rest)


class SavesEpochs(CountsEpochs):
    """A sampler with a state_dict() that a plain DataLoader never calls."""

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class SavesReads(Dataset):
    """A dataset that counts its reads and returns the count in state_dict()."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.reads += 1
        return X[index] + 0.01 * self.reads, Y[index]

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


WITH_STATE = {
    "sampler with state_dict": lambda: DataLoader(DATA, 4, sampler=SavesEpochs()),
    "dataset with state_dict": lambda: DataLoader(SavesReads(), 4),
    "long order": lambda: DataLoader(DATA, 4, sampler=LongOrder()),
    "long array": lambda: DataLoader(DATA, 4, sampler=LongArray()),
    "counter in a class attribute": lambda: DataLoader(DATA, 4, sampler=CountsInClass()),
    "epoch counter": lambda: DataLoader(DATA, 4, sampler=CountsEpochs()),
    "counter despite set_epoch": lambda: DataLoader(DATA, 4, sampler=CountsBeside()),
    "set_epoch, workers": lambda: DataLoader(DATA, 4, sampler=ShufflesInSetEpoch(), num_workers=2),
    "set_epoch, no workers": lambda: DataLoader(DATA, 4, sampler=ShufflesInSetEpoch()),
    "reversed list": lambda: DataLoader(DATA, 4, sampler=Turns([*range(24)])),
    "reversed list, workers": lambda: DataLoader(DATA, 4, sampler=Turns([*range(24)]), num_workers=2),
    "reversed long list": lambda: DataLoader(DATA, 4, sampler=Turns([*range(4_000)])),
    "reversed long array": lambda: DataLoader(DATA, 4, sampler=TurnsArray(np.arange(12_000))),
    "reversed long deque": lambda: DataLoader(DATA, 4, sampler=Turns(deque(range(12_000)))),
    "reversed long dict": lambda: DataLoader(DATA, 4, sampler=TurnsDict(dict.fromkeys(range(4_000)))),
    "reversed file names": make_files,
    "function from set_epoch": lambda: DataLoader(DATA, 4, sampler=OrderFromSetEpoch()),
    "late function": lambda: DataLoader(DATA, 4, sampler=LateOrder()),
    "eager batches": lambda: DataLoader(DATA, batch_sampler=EagerBatches()),
    "large tensor": lambda: DataLoader(LargeTensor(), 4),
    "long memory": lambda: DataLoader(LongMemory(), 4),
    "is its own iterator": IsItsIterator,
}
LIMITS_OF_STATE = {"within the first epoch": {"max_steps": 3}, **LIMITS}


@functools.cache
def train_without_break_with_state(loop_name, name):
    return train(loop_name, tempfile.mkdtemp(), WITH_STATE[name], max_epochs=3)


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize(("loop_name", "name", "limit"), once(LOOPS, WITH_STATE, LIMITS_OF_STATE))
def test_a_run_whose_loader_changes_its_own_attributes_resumes_exactly(tmp_path, loop_name, name, limit):
    make_loader = WITH_STATE[name]
    expected, rows = train_without_break_with_state(loop_name, name)
    train(loop_name, tmp_path / "cut", make_loader, **LIMITS_OF_STATE[limit])
    resumed, found = train(loop_name, tmp_path / "cut", make_loader, seed=9, resume="last", max_epochs=3)
    assert_same_weights(expected, resumed)
    assert found == rows


@pytest.mark.parametrize(("loop_name", "workers"), halve(LOOPS, [0, 2]))
def test_a_run_resumed_twice_mid_epoch_matches_an_uninterrupted_run_if_set_epoch_changes_the_sampler(
    tmp_path, loop_name, workers
):
    def make_loader():
        return DataLoader(DATA, 4, sampler=Turns([*range(4_000)]), num_workers=workers)

    expected, rows = train(loop_name, tmp_path / "whole", make_loader, max_epochs=4)
    train(loop_name, tmp_path / "cut", make_loader, max_steps=8)
    train(loop_name, tmp_path / "cut", make_loader, seed=5, resume="last", max_steps=10)
    resumed, found = train(loop_name, tmp_path / "cut", make_loader, seed=9, resume="last", max_epochs=4)
    assert_same_weights(expected, resumed)
    assert found == rows


class OrdersItself(nn.Module):
    """A network that chooses the order of the samples in the next epoch. A sampler reads this order."""

    def __init__(self):
        super().__init__()
        self.net, self.order, self.epochs = make_net(), list(range(24)), 0

    def forward(self, x):
        return self.net(x)

    def on_train_epoch_end(self):
        self.epochs += 1
        self.order = torch.randperm(24, generator=seeded(self.epochs)).tolist()


class ReadsOrder(LongOrder):
    def __init__(self, model):
        self.model = model

    def __iter__(self):
        return iter(list(self.model.order))


@pytest.mark.parametrize("limit", LIMITS_OF_STATE)
def test_mini_loop_resumes_exactly_if_the_sampler_depends_on_the_model(tmp_path, limit):
    made = []

    def make_model():
        made.append(OrdersItself())
        return made[-1]

    def run(folder, **options):
        def make_loader():
            return DataLoader(DATA, 4, sampler=ReadsOrder(made[-1]))

        return train("MiniLoop", tmp_path / folder, make_loader, make_net=make_model, **options)

    expected, rows = run("whole", max_epochs=3)
    run("cut", **LIMITS_OF_STATE[limit])
    resumed, found = run("cut", seed=9, resume="last", max_epochs=3)
    assert_same_weights(expected, resumed)
    assert found == rows


class Killed(Exception):
    """An error that ends a run as a crash would, after the loop has saved a checkpoint."""


def make_kill_switch(last):
    """Return a function that raises Killed when it is called for the ``last``-th time."""
    batches = []

    def count_batch():
        batches.append(1)
        if len(batches) == last:
            raise Killed

    return count_batch


class RanksSamples(nn.Module):
    """A network with an array of ranks. A sampler sorts the samples by rank.

    Args:
        hook: The hook that writes new ranks.
        is_in_place: Whether the hook changes the array in place or assigns a new one.
        last: The number of batches after which the run is killed, or None.
    """

    def __init__(self, hook, is_in_place, last):
        super().__init__()
        self.net, self.ranks, self.writes = make_net(), np.arange(24.0), 0
        self.hook, self.is_in_place = hook, is_in_place
        # Count batches in a function. A checkpoint contains no functions, so a resumed run does not restore the count.
        self.count_batch = make_kill_switch(last)

    def forward(self, x):
        return self.net(x)

    def write(self, hook):
        if hook != self.hook:
            return
        self.writes += 1
        ranks = np.random.RandomState(self.writes).rand(24)
        if self.is_in_place:
            self.ranks[:] = ranks
        else:
            self.ranks = ranks

    def on_train_start(self):
        self.write("on_train_start")

    def on_train_batch_end(self, *_):
        self.write("on_train_batch_end")
        self.count_batch()

    def on_train_epoch_end(self):
        self.write("on_train_epoch_end")


class SortsByRank(Sampler):
    def __init__(self, find_ranks):
        self.find_ranks = find_ranks

    def __len__(self):
        return 24

    def __iter__(self):
        yield from np.argsort(np.asarray(self.find_ranks())).tolist()


KILLS = {"first epoch": [4], "second epoch": [9], "twice": [9, 2], "third epoch": [17], "after an epoch": [7]}
EVERY_STEP = {"MiniLoop": {"validate_every_n_steps": 1}, "FabricLoop": {"save_every_n_steps": 1}}


def check_killed_run(loop_name, root, run, kills):
    """Kill a run after each of the given numbers of batches, and compare it with an uninterrupted run."""
    options = {**EVERY_STEP[loop_name], "max_epochs": 3}
    expected, rows = run(root / "whole", None, **options)
    for number, last in enumerate(kills):
        with pytest.raises(Killed):
            run(root / "cut", last, seed=4 if number else None, resume="last" if number else None, **options)
    resumed, found = run(root / "cut", None, seed=9, resume="last", **options)
    assert_same_weights(expected, resumed)
    assert found == rows


WRITES = {
    "each batch, killed in the first epoch": ("on_train_batch_end", "first epoch"),
    "each batch, killed twice": ("on_train_batch_end", "twice"),
    "each epoch, killed in the second epoch": ("on_train_epoch_end", "second epoch"),
    "each epoch, killed in the third epoch": ("on_train_epoch_end", "third epoch"),
    "each epoch, killed after an epoch": ("on_train_epoch_end", "after an epoch"),
    "at the start, killed in the first epoch": ("on_train_start", "first epoch"),
}


@pytest.mark.parametrize(("loop_name", "writes", "workers"), once(LOOPS, WRITES, [0, 1]))
def test_a_run_whose_sampler_reads_attributes_of_the_model_resumes_exactly(tmp_path, loop_name, writes, workers):
    hook, kills = WRITES[writes]
    made = []

    def run(root, last, **options):
        def make_model():
            made.append(RanksSamples(hook, kills == "twice", last))
            return made[-1]

        def make_loader():
            model = made[-1]
            return DataLoader(DATA, 4, sampler=SortsByRank(lambda: model.ranks), num_workers=workers)

        return train(loop_name, root, make_loader, make_net=make_model, **options)

    check_killed_run(loop_name, tmp_path, run, KILLS[kills])


class ReadsScale(Dataset):
    """A dataset that reads an attribute of the model. Each worker has a copy of the model."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] * (1 + 0.1 * self.model.writes), Y[index]


def collate_with(model):
    def collate(samples):
        x, y = default_collate(samples)
        return x * (1 + 0.1 * model.writes), y

    return collate


class Scale:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return x * (1 + 0.1 * self.model.writes)


class ScalesInTransform(TensorDataset):
    """A dataset with a list of transforms that refer to the model."""

    def __init__(self, model):
        super().__init__(X, Y)
        self.transforms = [Scale(model)]

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return self.transforms[0](x), y


def collate_for(model, samples):
    return collate_with(model)(samples)


READS_MODEL = {
    "dataset": lambda model: {"dataset": ReadsScale(model)},
    "transform": lambda model: {"dataset": ScalesInTransform(model)},
    "collate_fn": lambda model: {"dataset": DATA, "collate_fn": collate_with(model)},
    "partial": lambda model: {"dataset": DATA, "collate_fn": functools.partial(collate_for, model)},
}


@pytest.mark.parametrize(("name", "loop_name"), halve(READS_MODEL, LOOPS))
def test_a_run_resumes_exactly_if_workers_read_attributes_of_the_model(tmp_path, name, loop_name):
    made = []

    def make_loader():
        return DataLoader(batch_size=4, shuffle=True, num_workers=2, **READS_MODEL[name](made[-1]))

    def run(root, last, **options):
        def make_model():
            made.append(RanksSamples("on_train_batch_end", False, last))
            return made[-1]

        return train(loop_name, root, make_loader, make_net=make_model, **options)

    check_killed_run(loop_name, tmp_path, run, [9])


def test_an_attribute_still_shares_memory_with_a_weight_after_resuming(tmp_path):
    class Shares(RanksSamples):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.view, self.held = self.net[0].weight.data, [self.net[0].bias]

    for loop_name in LOOPS:
        made = []

        def run(root, last, loop_name=loop_name, made=made, **options):
            def make_model():
                made.append(Shares("on_train_batch_end", False, last))
                return made[-1]

            def make_loader():
                return DataLoader(DATA, 4, sampler=SortsByRank(lambda model=made[-1]: model.ranks))

            return train(loop_name, root, make_loader, make_net=make_model, **options)

        check_killed_run(loop_name, tmp_path / loop_name, run, [9])
        assert made[-1].view.data_ptr() == made[-1].net[0].weight.data_ptr()
        assert made[-1].held[0] is made[-1].net[0].bias


class Places(Sampler):
    """A sampler with an array of indices and the position of the first one."""

    def __init__(self, size):
        self.places, self.first = np.arange(size), 0

    def __len__(self):
        return 24

    def __iter__(self):
        order = self.places[self.places < 24].tolist()
        yield from order[self.first :] + order[: self.first]


def move_first(loader):
    loader.sampler.first = 5


def turn_in_place(loader):
    loader.sampler.places[:] = loader.sampler.places[::-1].copy()


def assign_turned(loader):
    loader.sampler.places = loader.sampler.places[::-1].copy()


CHANGES = {
    "a number": (move_first, 24),
    "an array in place": (turn_in_place, 15_000),
    "a new array": (assign_turned, 15_000),
}


@pytest.mark.parametrize(("loop_name", "change", "workers"), once(LOOPS, CHANGES, [0, 1]))
def test_a_run_resumes_exactly_even_if_on_train_start_changes_the_sampler(tmp_path, loop_name, change, workers):
    change_sampler, size = CHANGES[change]
    loaders = []

    class ChangesLoader(RanksSamples):
        def on_train_start(self):
            change_sampler(loaders[-1])

    def run(root, last, **options):
        def make_loader():
            loaders.append(DataLoader(DATA, 4, sampler=Places(size), num_workers=workers))
            return loaders[-1]

        def make_model():
            return ChangesLoader("", False, last)

        return train(loop_name, root, make_loader, make_net=make_model, **options)

    check_killed_run(loop_name, tmp_path, run, [4, 2])


def test_mini_loop_calls_iter_and_set_epoch_once_per_epoch(tmp_path):
    calls = []

    class Loader(IsItsIterator):
        def __iter__(self):
            calls.append("iter")
            return super().__iter__()

    class CountedOrder(Order):
        def set_epoch(self, epoch):
            calls.append(epoch)

    train("MiniLoop", tmp_path, Loader, max_epochs=2)
    assert calls == ["iter", "iter"]
    calls.clear()
    train("MiniLoop", tmp_path, lambda: DataLoader(DATA, 4, sampler=CountedOrder()), max_epochs=2)
    assert calls == [0, 1]


class ReadsList:
    """A loader of a user-defined class around a list of batches."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(self.batches)


def make_batches():
    return [(x.clone(), y) for x, y in DataLoader(DATA, 4)]


class ScalesBatches(pl.LightningModule):
    """A network that scales the batches in place."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        batch = (x.clone(), y)
        x.mul_(1.1)
        return step(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class RotatesIndices(ScalesBatches):
    """A network that rotates the batch sampler's lists after an epoch."""

    def training_step(self, batch, batch_idx):
        return step(self.net, batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        loader = getattr(self.trainer, "train_loader", None) or self.trainer.train_dataloader
        if batch_idx == 5:
            loader.batch_sampler.append(loader.batch_sampler.pop(0))


LISTS = {
    "list of batches": (ScalesBatches, make_batches),
    "lists of indices": (
        RotatesIndices,
        lambda: DataLoader(DATA, batch_sampler=[list(range(i, i + 4)) for i in range(0, 24, 4)]),
    ),
    "loader around a list": (ScalesBatches, lambda: ReadsList(make_batches())),
    "dataset of batches": (ScalesBatches, lambda: DataLoader(make_batches(), batch_size=None, shuffle=True)),
}


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize(("loop_name", "name", "limit"), once(LOOPS, LISTS, LIMITS_OF_STATE))
def test_in_place_changes_to_the_batches_or_indices_of_a_loader_are_restored(tmp_path, loop_name, name, limit):
    make_model, make_loader = LISTS[name]

    def run(root, resume=None, **options):
        torch.manual_seed(1)
        model, (kind, quiet) = make_model(), LOOPS[loop_name]
        loop = kind(default_root_dir=tmp_path / root, accelerator="cpu", **quiet, **options)
        loop.fit(model, make_loader(), resume=resume)
        return model

    expected = run("whole", max_epochs=3)
    run("cut", **LIMITS_OF_STATE[limit])
    assert_same_weights(expected, run("cut", resume="last", max_epochs=3))


class ContinuesIterator(Order):
    """A sampler that continues the same iterator in each epoch."""

    def __init__(self):
        self.indices = itertools.cycle(range(20))

    def __iter__(self):
        return itertools.islice(self.indices, 24)


class ReadsIterator(Noise):
    """A dataset that also reads from an endless iterator."""

    def __init__(self):
        self.others = itertools.cycle(range(20))

    def __getitem__(self, index):
        return X[index] + X[next(self.others)], Y[index]


class StreamsIterator(IterableDataset):
    def __init__(self):
        self.indices = itertools.cycle(range(20))

    def __iter__(self):
        for index in itertools.islice(self.indices, 24):
            yield X[index], Y[index]


UNSAVED = {
    "indices": lambda: DataLoader(DATA, 4, sampler=ContinuesIterator()),
    "others": lambda: DataLoader(ReadsIterator(), 4),
    "contains an iterator|indices": lambda: DataLoader(StreamsIterator(), 4),
}


@pytest.mark.parametrize("name", UNSAVED)
@pytest.mark.parametrize("loop_name", LOOPS)
def test_fit_warns_about_loader_state_that_is_not_saved(tmp_path, loop_name, name):
    with pytest.warns(UserWarning, match=name):
        train(loop_name, tmp_path, UNSAVED[name], max_epochs=1)


@pytest.mark.filterwarnings("ignore:checkpoint. .*the position of", "ignore:train_dataloaders", "ignore:resume")
@pytest.mark.parametrize("loop_name", LOOPS)
def test_a_run_stopped_in_the_first_epoch_resumes_exactly_if_the_dataset_reads_an_iterator(tmp_path, loop_name):
    """A resumed run reads the finished batches again, even from a DataLoader without workers."""
    expected, rows = train(loop_name, tmp_path / "whole", UNSAVED["others"], max_epochs=1)
    train(loop_name, tmp_path / "cut", UNSAVED["others"], max_steps=3)
    resumed, found = train(loop_name, tmp_path / "cut", UNSAVED["others"], seed=9, resume="last", max_epochs=1)
    assert_same_weights(expected, resumed)
    assert found == rows


class RestartsIterator(ContinuesIterator):
    """A sampler that creates a new iterator in each epoch."""

    def __iter__(self):
        self.indices = iter(range(24))
        yield from self.indices


@pytest.mark.parametrize("loop_name", LOOPS)
def test_fit_does_not_warn_about_an_iterator_that_restarts_each_epoch(tmp_path, loop_name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "checkpoint: ")
        train(loop_name, tmp_path, IsItsIterator, max_epochs=2)
        train(loop_name, tmp_path, lambda: DataLoader(DATA, 4, sampler=RestartsIterator()), max_epochs=3)


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("loop_name", LOOPS)
def test_fit_accepts_batches_that_are_objects_with_slots(tmp_path, loop_name):
    loader = DataLoader(DATA, 4, collate_fn=lambda samples: Slots(*default_collate(samples)))
    net, (kind, quiet) = make_net(), LOOPS[loop_name]
    loop = kind(default_root_dir=tmp_path, accelerator="cpu", max_epochs=1, **quiet)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    history = loop.fit(net, loader, optimizer=optimizer, training_step=lambda net, b: step(net, (b.x, b.y)))
    assert history["step"].tolist() == [6]
