"""Test resuming with different loaders, and the cost of resuming in the middle of an epoch."""

import itertools
import warnings

import pytest
import torch
from modules import Classifier, make_data, make_loader
from parameters import halve
from resume_loaders import Stream, loader, streams
from runs import Record, Snapshots, fit, same
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from fabric_template import FabricLoop, MiniLoop
from fabric_template.data.loader_state import ResumableLoader
from fabric_template.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")
SIZE = 1000


def resume_at(make, done):
    """Return the batches that follow the first ``done`` batches, and a loader that resumes there."""
    torch.manual_seed(3)
    batches = list(make())
    torch.manual_seed(3)
    loader = ResumableLoader(make())
    assert sum(1 for _ in itertools.islice(loader, done)) == done
    state, rng_state = loader.state_dict(is_in_pass=True), torch.get_rng_state()
    # Close the first loader, because its workers may otherwise continue to read samples.
    loader.close()
    resumed = ResumableLoader(make())
    resumed.load_state_dict(state)
    torch.set_rng_state(rng_state)
    return batches[done:], resumed


SAMPLERS = {
    "in order": lambda data: {"batch_size": 2},
    "shuffled": lambda data: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "replacement": lambda data: {"batch_size": 2, "sampler": RandomSampler(data, replacement=True)},
    "distributed": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, 2, 1)},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 2, False)},
    "batch_size=None": lambda data: {"batch_size": None, "shuffle": True},
    "workers": lambda data: {"batch_size": 2, "shuffle": True, "num_workers": 2},
}


class CountsReads:
    def __init__(self):
        # A resumed run would restore a tensor attribute, but not a Record, which is a subclass of list.
        self.reads = Record([torch.zeros(1, dtype=torch.int64).share_memory_()])

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.reads[0] += 1
        return index


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumed_data_loader_does_not_read_earlier_samples_again(name):
    data = CountsReads()

    def make():
        return DataLoader(data, **SAMPLERS[name](data), generator=torch.Generator().manual_seed(5))

    expected, resumed = resume_at(make, len(make()) - 10)
    data.reads[0].zero_()
    found = list(resumed)
    assert [torch.as_tensor(b).tolist() for b in found] == [torch.as_tensor(b).tolist() for b in expected]
    assert data.reads[0].item() == sum(torch.as_tensor(batch).numel() for batch in found)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), pytest.param(2, 3, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
def test_resume_warns_about_a_different_number_of_workers(tmp_path, before, after):
    """The batches contain the same samples, but the workers draw different random numbers."""

    def make(workers):
        return lambda: make_loader(24, num_workers=workers)

    seen = []

    class RecordsSums(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0].sum().item())
            return super().training_step(batch, batch_idx)

    copies = Snapshots(tmp_path / "whole", tmp_path / "at")
    options = {"save_every_n_steps": 1, "max_epochs": 2}
    fit(tmp_path / "whole", RecordsSums, make(before), callbacks=[copies], **options)
    expected, seen[:] = seen[3:6], []
    with pytest.warns(UserWarning, match=rf"num_workers was \[{before}\] and is now \[{after}\]"):
        fit(tmp_path / "at/3", RecordsSums, make(after), seed=9, resume="last", **options)
    assert seen[:3] == expected


class TakesSeveral(Classifier):
    """A module that trains on the batch of the first loader, even if there are several loaders."""

    def training_step(self, batch, batch_idx):
        x, y = batch[0] if isinstance(batch[0], list) else batch
        return super().training_step((x.repeat(1, 2), y), batch_idx)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_resuming_with_a_different_number_of_loaders_is_refused(tmp_path):
    fit(tmp_path, TakesSeveral, lambda: [loader(), loader()], max_epochs=1)
    with (
        pytest.warns(UserWarning, match=r"batch size was \[4, 4\] and is now \[4\]"),
        pytest.raises(ValueError, match="number of training loaders is 1, but was 2 in the saved run. .* use load="),
    ):
        fit(tmp_path, TakesSeveral, loader, resume="last", max_epochs=2)


def test_resuming_mid_epoch_is_refused_if_the_batch_size_differs(tmp_path):
    """At the end of an epoch, a different batch size only causes a warning."""
    other = lambda: make_loader(24, batch_size=6)  # noqa: E731
    fit(tmp_path, train=lambda: make_loader(24), max_steps=4)
    message = r"middle of an epoch, when the batch size was \[4\]. Now the batch size is \[6\].* use load="
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, train=other, max_steps=8, resume="last")
    fit(tmp_path / "whole", train=lambda: make_loader(24), max_epochs=1)
    with pytest.warns(UserWarning, match=r"batch size was \[4\] and is now \[6\]"):
        loop, *_ = fit(tmp_path / "whole", train=other, max_epochs=2, resume="last")
    assert loop.global_step == 10


def test_resume_rereads_and_skips_batches_of_loaders_without_state_dict():
    expected, resumed = resume_at(streams(Stream), 4)
    with pytest.warns(UserWarning, match="resume: 4 batches of DataLoader are read again .* StatefulDataLoader"):
        assert same(list(resumed), expected)


class ShufflesChunks:
    """A sampler that shuffles chunks of four samples, either at the start or, if ``is_lazy`` is set, one by one."""

    def __init__(self, is_lazy):
        self.is_lazy = is_lazy

    def __len__(self):
        return 24

    def __iter__(self):
        chunks = ((torch.randperm(4) + start).tolist() for start in range(0, 24, 4))
        yield from itertools.chain.from_iterable(chunks if self.is_lazy else list(chunks))


class Pairs:
    """A batch sampler that yields pairs of indices."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return 12

    def __iter__(self):
        indices = iter(self.sampler)
        yield from zip(indices, indices, strict=True)


@pytest.mark.parametrize(
    ("argument", "num_workers", "is_lazy"),
    halve(["sampler", "batch_sampler", "without batches"], [0, 1], [True, False]),
)
def test_resume_warns_about_samplers_that_draw_random_numbers_during_the_epoch(is_lazy, num_workers, argument):
    def make():
        sampler = ShufflesChunks(is_lazy)
        given = {"sampler": sampler, "batch_size": 2}
        if argument == "batch_sampler":
            given = {"batch_sampler": Pairs(sampler)}
        if argument == "without batches":
            given["batch_size"] = None
        return DataLoader(range(24), num_workers=num_workers, **given)

    _, resumed = resume_at(make, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(resumed)) == (19 if argument == "without batches" else 7)
    found = [str(one.message) for one in caught if "draws random numbers" in str(one.message)]
    kind = "Pairs" if argument == "batch_sampler" else "ShufflesChunks"
    assert len(found) == is_lazy
    assert all(f"the sampler {kind} draws" in text for text in found)


@pytest.mark.parametrize("is_lazy", [True, False])
def test_mini_loop_warns_about_samplers_that_draw_random_numbers_during_the_epoch(is_lazy):
    def train(max_steps, **fit_arguments):
        loader = DataLoader(make_data(24), batch_size=2, sampler=ShufflesChunks(is_lazy))
        MiniLoop(max_steps=max_steps, accelerator="cpu").fit(Classifier(), loader, **fit_arguments)

    train(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(20, resume="last")
    found = [one for one in caught if "the sampler ShufflesChunks draws" in str(one.message)]
    assert len(found) == is_lazy


class ShufflesBuffer(IterableDataset):
    """An iterable dataset that draws each sample from a buffer."""

    def __init__(self, generator=None):
        self.generator = generator
        self.data = make_data(24)

    def __iter__(self):
        buffer = []
        for sample in self.data:
            buffer.append(sample)
            if len(buffer) > 6:
                yield buffer.pop(int(torch.randint(len(buffer), (), generator=self.generator)))
        yield from buffer


class PicksBatches:
    """A loader with a length that draws each batch at random from the remaining batches."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return 6

    def __iter__(self):
        left = list(make_loader(24, shuffle=False))
        while left:
            yield left.pop(int(torch.randint(len(left), (), generator=self.generator)))


STREAMS = {
    "ShufflesBuffer": lambda generator: DataLoader(ShufflesBuffer(generator), 4),
    "PicksBatches": PicksBatches,
}


@pytest.mark.filterwarnings("ignore:resume. .* are read again")
@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("name", STREAMS)
def test_resume_warns_about_streams_that_draw_random_numbers_during_the_epoch(tmp_path, kind, name, has_generator):
    def train(root, max_epochs=2, seed=1, **options):
        torch.manual_seed(seed)
        module = Classifier()
        loader = STREAMS[name](torch.Generator().manual_seed(2) if has_generator else None)
        loop = kind(max_epochs=max_epochs, accelerator="cpu", default_root_dir=root, max_steps=options.pop("steps", -1))
        loop.fit(module, loader, **options)
        return module

    expected = train(tmp_path / "whole")
    train(tmp_path / "cut", steps=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = train(tmp_path / "cut", seed=9, resume="last")
    found = [one for one in caught if f"{name} draws random numbers" in str(one.message)]
    assert len(found) == (not has_generator)
    assert not has_generator or same(expected.state_dict(), resumed.state_dict())


class AddsWorker:
    """A dataset whose samples depend on the worker's id and seed, and on an attribute."""

    offset = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return torch.tensor([index, info.id, info.seed, self.offset])


def set_offset(worker):
    torch.utils.data.get_worker_info().dataset.offset = 10 * worker


@pytest.mark.parametrize("done", [1, 2, 5])
def test_data_loader_workers_keep_their_ids_in_a_resumed_run(done):
    expected, resumed = resume_at(lambda: DataLoader(AddsWorker(), 3, num_workers=2, worker_init_fn=set_offset), done)
    assert same(list(resumed), expected)
