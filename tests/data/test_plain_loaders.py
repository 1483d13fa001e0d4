"""Test exact resume with samplers, datasets and collate functions that have state."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier
from parameters import leave
from resume_loaders import Stream, seeded
from runs import Snapshots, assert_same_end, fit
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:resume. .* are read again"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]
X = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
Y = torch.arange(24) % 3
WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


class NumpySampler(Sampler):
    """A sampler that draws the order of all samples at the start of each pass over the data."""

    def __init__(self, size=24):
        self.rng, self.size = np.random.default_rng(5), size

    def __iter__(self):
        return iter(self.rng.permutation(self.size).tolist())

    def __len__(self):
        return self.size


class DrawsEach(NumpySampler):
    """A sampler that draws each index when it is requested."""

    def __init__(self):
        super().__init__()
        self.rngs = [random.Random(5), np.random.RandomState(6)]

    def __iter__(self):
        for index in range(self.size):
            yield self.rngs[index % 2].randint(0, self.size - 1)


class Counts(NumpySampler):
    """A sampler whose order depends on how often it has been iterated."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(np.random.default_rng(self.passes).permutation(self.size).tolist())


class OwnBatches(BatchSampler):
    """A batch sampler that shuffles with its own generator, and counts how often it is iterated."""

    def __init__(self, sampler=None, batch_size=4, drop_last=False):
        super().__init__(SequentialSampler(X) if sampler is None else sampler, batch_size, drop_last)
        self.generator, self.passes = random.Random(7), 0

    def __iter__(self):
        self.passes += 1
        batches = list(super().__iter__())
        self.generator.shuffle(batches)
        yield from batches[self.passes % 2 :] + batches[: self.passes % 2]


class Noisy(Dataset):
    """A dataset that adds noise from its own generator, and counts its reads if ``counts`` is set."""

    def __init__(self, make=lambda: np.random.default_rng(4), counts=False):
        self.noise, self.reads, self.counts = make(), 0, counts

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.reads += self.counts
        if isinstance(self.noise, torch.Generator):
            return X[index] + torch.randn((), generator=self.noise) + 0.01 * self.reads, Y[index]
        return X[index] + self.noise.random() + 0.01 * self.reads, Y[index]


class NoisyStream(IterableDataset):
    """A stream without state_dict(), whose samples depend on its attributes."""

    def __init__(self):
        self.noise, self.passes = np.random.default_rng(4), 0

    def __iter__(self):
        self.passes += 1
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, len(X), step):
            yield X[index] * self.passes + self.noise.random(), Y[index]


class Mixes:
    """A collate function that mixes samples."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(9)

    def __call__(self, samples):
        x, y = default_collate(samples)
        weight = torch.rand((), generator=self.generator)
        return weight * x + (1 - weight) * x.flip(0), y

    def method(self, samples):
        return self(samples)


def mixes(samples, mix, scale):
    x, y = mix(samples)
    return x * scale, y


class OwnLoader:
    """A loader that is not a DataLoader. Its order depends on how often the loader has been iterated."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for rows in torch.randperm(24, generator=torch.Generator().manual_seed(self.passes)).split(4):
            yield X[rows], Y[rows]

    def __len__(self):
        return 6


class SubLoader(DataLoader):
    """A DataLoader whose batches depend on how often the loader has been iterated."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        for x, y in super().__iter__():
            yield x * self.passes, y


def tensors(**options):
    return DataLoader(TensorDataset(X, Y), **{"batch_size": 4, **options})


def noisy(*arguments, dataset=None, **options):
    data = Noisy(*arguments) if dataset is None else dataset
    return DataLoader(data, **{"batch_size": 4, "shuffle": True, **options})


def nested():
    return ConcatDataset([Subset(Noisy(), range(10)), Subset(Noisy(lambda: random.Random(2)), range(8))])


LOADERS = {
    "sampler": lambda: tensors(sampler=NumpySampler()),
    "sampler, workers": lambda: tensors(sampler=NumpySampler(), **WORKERS),
    "sampler, persistent": lambda: tensors(sampler=NumpySampler(), **PERSISTENT),
    "lazy sampler": lambda: tensors(sampler=DrawsEach()),
    "lazy sampler, workers": lambda: tensors(sampler=DrawsEach(), **WORKERS),
    "lazy sampler, persistent": lambda: tensors(sampler=DrawsEach(), **PERSISTENT),
    "counting sampler": lambda: tensors(sampler=Counts()),
    "counting sampler, workers": lambda: tensors(sampler=Counts(), **WORKERS),
    "batch sampler": lambda: tensors(batch_sampler=OwnBatches(), batch_size=1),
    "batch sampler, workers": lambda: tensors(batch_sampler=OwnBatches(), batch_size=1, **WORKERS),
    "both samplers": lambda: tensors(batch_sampler=OwnBatches(NumpySampler()), batch_size=1),
    "dataset": noisy,
    "dataset, workers": lambda: noisy(**WORKERS),
    "dataset, persistent": lambda: noisy(**PERSISTENT),
    "dataset, torch": lambda: noisy(lambda: torch.Generator().manual_seed(3)),
    "dataset, random, workers": lambda: noisy(lambda: random.Random(3), **WORKERS),
    "dataset, counts": lambda: noisy(lambda: random.Random(3), True),
    "nested datasets": lambda: noisy(dataset=nested()),
    "nested datasets, workers": lambda: noisy(dataset=nested(), **WORKERS),
    "random_split": lambda: noisy(dataset=random_split(Noisy(), [20, 4], seeded())[0]),
    "collate": lambda: tensors(collate_fn=Mixes(), shuffle=True),
    "collate, workers": lambda: tensors(collate_fn=Mixes(), shuffle=True, **WORKERS),
    "collate, persistent": lambda: tensors(collate_fn=Mixes().method, shuffle=True, **PERSISTENT),
    "collate, method": lambda: tensors(collate_fn=Mixes().method),
    "collate, partial": lambda: tensors(collate_fn=partial(mixes, mix=Mixes(), scale=2)),
    "stream": lambda: DataLoader(NoisyStream(), 4),
    "stream, workers": lambda: DataLoader(NoisyStream(), 4, **WORKERS),
    "own loader": OwnLoader,
    "subclass": lambda: SubLoader(TensorDataset(X, Y), 4, shuffle=True),
    "combined with a stream": lambda: CombinedLoader(
        [noisy(lambda: random.Random(3), True), OwnLoader(), stream()], "max_size"
    ),
    "cycle": lambda: [noisy(batch_size=8), tensors(sampler=Counts())],
}


def stream():
    return DataLoader(Stream(), 4)


class TakesAll(Classifier):
    """A module that trains on the batch of the first loader that has a batch left."""

    def training_step(self, batch, batch_idx):
        while isinstance(batch[0], list | tuple) or batch[0] is None:
            batch = next(part for part in batch if part is not None)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "name",
    leave(LOADERS, "sampler, persistent", "lazy sampler, workers", "lazy sampler, persistent",
          "counting sampler, workers", "batch sampler, workers", "dataset, counts", "dataset, random, workers",
          "nested datasets, workers", "stream, workers", "collate, persistent", "collate, workers", "collate, method"),
)  # fmt: skip
def test_a_run_with_stateful_samplers_or_datasets_resumes_exactly(tmp_path, name):
    options = {"max_epochs": 3, "save_every_n_steps": 2, "train": LOADERS[name]}
    snapshots = Snapshots(tmp_path / "whole", tmp_path, (5, 6, 8, 10))
    whole = fit(tmp_path / "whole", TakesAll, callbacks=[snapshots], **options)
    batches = whole[0].global_step
    for batch in (batches // 3, batches // 2 + 1):
        root = tmp_path / str(batch)
        assert list(root.rglob("last.ckpt"))
        assert_same_end(whole, fit(root, TakesAll, resume="auto", seed=9, **options))
