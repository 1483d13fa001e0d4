"""Small data loaders of many kinds, for tests of resuming."""

import random

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from fabric_template.data.tensor_loader import TensorLoader


def tensors(num=24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num, 4, generator=generator), torch.arange(num) % 3


class Samples(Dataset):
    """A dataset that adds random noise from Python, NumPy and torch to its samples."""

    def __init__(self, num=24):
        self.data = TensorDataset(*tensors(num))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.1 * (random.random() + np.random.rand()) + 0.1 * torch.rand(4), y


class Stream(IterableDataset):
    """An iterable dataset without state. Each worker yields its own share of the samples."""

    def __init__(self, num=24, noisy=False):
        self.data, self.noisy = TensorDataset(*tensors(num)), noisy

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, len(self.data), step):
            x, y = self.data[index]
            yield (x + 0.1 * torch.rand(4) if self.noisy else x), y


class StatefulStream(Stream):
    """An iterable dataset whose state is the number of samples that it has yielded."""

    def __init__(self, num=24):
        super().__init__(num)
        self.position = 0

    def __iter__(self):
        while self.position < len(self.data):
            self.position += 1
            yield self.data[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StatefulLoader:
    """A loader that has no length, shuffles, and saves its position."""

    def __init__(self):
        self.data, self.generator = TensorDataset(*tensors()), torch.Generator().manual_seed(3)
        self.position, self.order = 0, []

    def __iter__(self):
        if self.position in (0, 6):
            self.position, self.order = 0, torch.randperm(24, generator=self.generator).tolist()
        while self.position < 6:
            self.position += 1
            yield self.data[self.order[4 * self.position - 4 : 4 * self.position]]

    def state_dict(self):
        return {"at": self.position, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position, self.order = state["at"], state["order"]
        self.generator.set_state(state["generator"])


class Endless:
    """A sampler that draws indices endlessly, and has no length."""

    def __init__(self):
        self.generator = seeded()

    def __iter__(self):
        while True:
            yield int(torch.randint(24, (), generator=self.generator))


def seeded():
    return torch.Generator().manual_seed(7)


def loader(dataset=None, **options):
    options = {"batch_size": 4, "shuffle": True, **options}
    return DataLoader(Samples() if dataset is None else dataset, **options)


def with_sampler(make, **options):
    return lambda: loader(sampler=make(Samples()), shuffle=None, **options)


def streams(kind=Stream, **options):
    return lambda: DataLoader(kind(), batch_size=4, **options)


def combined(mode, **options):
    return lambda: CombinedLoader([loader(**options), loader(Samples(10), generator=seeded())], mode)


class ShufflesInIter(list):
    def __iter__(self):
        return iter(torch.randperm(24).view(6, 4).tolist())


def seed_worker(worker):
    random.seed(torch.initial_seed() + 7)


def torchdata_loader(dataset=Samples, **options):
    return lambda: StatefulDataLoader(dataset(), **{"batch_size": 4, "shuffle": True, **options})


def stream_and_short_loader():
    """Combine a stream with a loader that restarts in the middle of the stream."""
    return CombinedLoader([streams()(), loader(Samples(8), num_workers=1)], "max_size_cycle")


WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
LOADERS = {
    "no workers": loader,
    "sampler generator": with_sampler(lambda data: RandomSampler(data, generator=seeded())),
    "workers": lambda: loader(**WORKERS),
    "batch sampler, persistent": lambda: DataLoader(Samples(), batch_sampler=ShufflesInIter(range(6)), **PERSISTENT),
    "three workers": lambda: loader(num_workers=3, prefetch_factor=1, generator=seeded()),
    "persistent": lambda: loader(**PERSISTENT),
    "TensorLoader": lambda: TensorLoader(*tensors(), batch_size=4, shuffle=True),
    "TensorLoader, generator": lambda: TensorLoader(*tensors(), batch_size=4, shuffle=True, generator=seeded()),
    "list": lambda: list(DataLoader(TensorDataset(*tensors()), batch_size=4)),
    "stream": streams(),
    "noisy stream": streams(lambda: Stream(noisy=True)),
    "stream, persistent": streams(lambda: Stream(noisy=True), **PERSISTENT),
    "stream, persistent, drop_last": streams(lambda: Stream(26, noisy=True), drop_last=True, **PERSISTENT),
    "stateful stream": streams(StatefulStream),
    "stateful loader": StatefulLoader,
    "torchdata": torchdata_loader(),
    "torchdata, workers": torchdata_loader(lambda: TensorDataset(*tensors()), **WORKERS),
    "torchdata, noise in workers": torchdata_loader(**WORKERS),
    "torchdata, sampler": lambda: StatefulDataLoader(Samples(), 4, sampler=StatefulDistributedSampler(Samples(), 1, 0)),
    "torchdata, stream": torchdata_loader(StatefulStream, shuffle=None),
    "worker_init_fn": lambda: loader(worker_init_fn=seed_worker, **WORKERS),
    "stream and short loader": stream_and_short_loader,
    "max_size_cycle": combined("max_size_cycle"),
    "min_size": combined("min_size"),
    "max_size": combined("max_size"),
    "sequential": combined("sequential"),
    "combined, workers": combined("max_size_cycle", **WORKERS),
    "cycle of streams": lambda: [streams()(), streams(lambda: Stream(10))()],
    "max_size of streams": lambda: CombinedLoader([streams()(), streams(lambda: Stream(10))()], "max_size"),
}
