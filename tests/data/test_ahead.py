"""prefetch=True: the next batch comes while a step computes; the same numbers, the same position, whatever the loader.

Without a GPU a thread of its own stands in for the stream beside: order, last batch and positions are the loop's either way.
tests/cuda/test_ahead_there.py has the stream.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from modules import Classifier, make_data, make_loader, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabric_template import FabricLoop, TensorLoader
from fabric_template.data import ahead


class Lane:
    """A thread that brings batches."""

    def __init__(self, move):
        self.move, self.thread, self.sent, self.received = move, ThreadPoolExecutor(1), 0, 0
        self.most_under_way = 0

    def send(self, batch):
        self.sent += 1
        self.most_under_way = max(self.most_under_way, self.sent - self.received)
        return ahead.Coming(None, self.thread.submit(self.move, batch))

    def receive(self, coming):
        self.received += 1
        return coming.arrived.result()


@pytest.fixture
def lanes(monkeypatch):
    made = []

    def lane_of(run, transfer, has_hooks):
        made.append(Lane(lambda batch: apply_to_collection(batch, torch.Tensor, torch.clone)))
        run.data.transfer = lambda batch, index: batch  # of a device that is not the CPU
        return made[-1]

    monkeypatch.setattr(ahead, "lane_of", lane_of)
    yield made
    for lane in made:
        lane.thread.shutdown()


class Drawing(Dataset):
    """Items that draw from the generator from which dropout draws, in this process."""

    def __init__(self):
        self.x, self.y = make_data(38).tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(Drawing()[index] for index in range(38))


LOADERS = {  # and how many batches are under way at most
    "workers": (lambda: make_loader(38, num_workers=1), 2),
    "tensors": (lambda: TensorLoader(*make_data(38).tensors, batch_size=4, shuffle=True), 2),
    "drawing": (lambda: DataLoader(Drawing(), batch_size=4, shuffle=True), 1),
    "no-length": (lambda: DataLoader(Streamed(), batch_size=4), 2),
    "two": (lambda: [make_loader(40), make_loader(16)], 1),
}


class Two(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0] if isinstance(batch[0], list) else batch, batch_idx)  # of two loaders


def fit(path, make, stop=None, resume=None, **words):
    """Train, up to an interrupt; the weights, what each step saw, and the random numbers that come next."""
    words = {
        **quiet(max_epochs=2, save_every_n_steps=1, **words),
        "enable_checkpointing": True,
        "default_root_dir": path,
    }
    loop = FabricLoop(**words)
    torch.manual_seed(1)
    module, seen = Two(), []
    step = module.training_step

    def training_step(batch, batch_idx):
        if stop is not None and loop.global_step == stop:
            raise KeyboardInterrupt
        seen.append((batch_idx, loop.is_last_batch))
        return step(batch, batch_idx)

    module.training_step = training_step
    with contextlib.suppress(KeyboardInterrupt):
        loop.fit(module, make(), resume=resume)
    return [*module.parameters()], seen, torch.get_rng_state()


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:resume. DataLoader is asked again for the 3 batches")
def test_the_same_numbers_and_positions(tmp_path, lanes, name):
    """... also where a run is broken off in the middle of an epoch and goes on."""
    make, most = LOADERS[name]
    weights, seen, random = fit(tmp_path / "plain", make)
    beside = fit(tmp_path / "beside", make, prefetch=True)
    assert lanes[0].sent == lanes[0].received == 20
    assert lanes[0].most_under_way == most
    cut = fit(tmp_path / "cut", make, stop=13, prefetch=True)
    resumed = fit(tmp_path / "cut", make, resume="last", prefetch=True)
    assert beside[1] == seen == cut[1] + resumed[1]
    for found in (beside, resumed):
        assert all(torch.equal(a, b) for a, b in zip(found[0], weights, strict=True))
        assert torch.equal(found[2], random)


def test_on_the_cpu_it_says_so():
    with pytest.warns(
        UserWarning, match="prefetch=True does nothing here: batches are used where they are made, on the cpu"
    ):
        FabricLoop(**quiet(max_epochs=1, prefetch=True)).fit(Classifier(), make_loader())
