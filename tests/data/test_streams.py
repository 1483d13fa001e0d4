"""Test exact resume with streams and with loaders that define load_state_dict()."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier
from parameters import keep
from runs import Snapshots, assert_same_end, fit, val_loader
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:resume. .* are read again"),
    pytest.mark.filterwarnings("ignore:resume. .* does not save the RNG states of its workers"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),
]
X = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
Y = torch.arange(24) % 3


class StreamOfIndices(IterableDataset):
    """A stream that yields the samples of ``indices()``. Subclasses keep their position in different ways."""

    def __init__(self, size=24):
        self.size, self.start, self.position = size, 0, 0

    def indices(self):
        yield from range(self.start, self.size)

    def __iter__(self):
        for index in self.indices():
            self.position = index + 1
            yield X[index % 24], Y[index % 24]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


class Sticky(StreamOfIndices):
    """A stream that starts each pass of a resumed run at the loaded position."""


class StickyWithPosition(StreamOfIndices):
    """A stream that sets ``position`` in load_state_dict(), not only when it yields a sample."""

    def load_state_dict(self, state):
        self.start = self.position = state["position"]


class SetsNewAttribute(StreamOfIndices):
    """A stream that creates an attribute in load_state_dict()."""

    def indices(self):
        yield from range(getattr(self, "first", 0), self.size)

    def load_state_dict(self, state):
        self.first = state["position"]


class KeepsState(StreamOfIndices):
    """A stream that keeps the loaded dict and reads the starting position from it in each pass."""

    def __init__(self):
        super().__init__()
        self.starting_state = None

    def indices(self):
        start = self.starting_state["position"] if self.starting_state else 0
        yield from range(start, self.size)

    def load_state_dict(self, state):
        self.starting_state = state


class Resets(StreamOfIndices):
    """A stream that starts later passes from the beginning, not at the loaded position."""

    def indices(self):
        start, self.start = self.start, 0
        yield from range(start, self.size)


class Cursor(StreamOfIndices):
    """A stream that continues each pass where the previous pass ended."""

    def indices(self):
        end = (self.position // 20 + 1) * 20
        while self.position < end:
            yield self.position

    def load_state_dict(self, state):
        self.position = state["position"]


class Epochs(StreamOfIndices):
    """A stream that shuffles with the epoch number as the seed, and skips samples in a resumed run."""

    def __init__(self):
        super().__init__()
        self.epoch, self.skipped = 0, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(24, generator=generator).tolist()
        for index in order[self.skipped :]:
            self.position = order.index(index) + 1
            yield X[index] * (1 + self.epoch), Y[index]
        self.epoch += 1
        self.position = 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.skipped = state["epoch"], state["position"]


class Buffered(StreamOfIndices):
    """A stream that shuffles with a buffer and a generator. Both are part of its state_dict()."""

    def __init__(self):
        super().__init__()
        self.taken, self.buffer, self.generator = 0, [], torch.Generator().manual_seed(2)

    def indices(self):
        for index in range(self.start, self.size):
            self.taken = index + 1
            self.buffer.append(index)
            if len(self.buffer) > 5:
                yield self.buffer.pop(int(torch.randint(5, (), generator=self.generator)))
        while self.buffer:
            yield self.buffer.pop()

    def state_dict(self):
        state = {"position": self.taken, "buffer": list(self.buffer)}
        return {**state, "rng": self.generator.get_state()}

    def load_state_dict(self, state):
        self.start, self.buffer = state["position"], state["buffer"]
        self.generator.set_state(state["rng"])


class OwnLoader:
    """A loader without a length."""

    def __init__(self):
        self.offset = self.taken = 0

    def __iter__(self):
        rows = []
        for index in range(self.offset, 24):
            self.taken = index + 1
            rows.append(index)
            if len(rows) == 4:
                yield X[rows], Y[rows]
                rows = []

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.offset = state["taken"]


class OwnLoaderWithLength(OwnLoader):
    def __len__(self):
        return 6


STREAMS = [Sticky, StickyWithPosition, SetsNewAttribute, KeepsState, Resets, Cursor, Epochs, Buffered]
LOADERS = {kind.__name__: lambda kind=kind: DataLoader(kind(), 4) for kind in STREAMS}
TORCHDATA = {f"torchdata {kind.__name__}": lambda kind=kind: StatefulDataLoader(kind(), 4) for kind in STREAMS}
LOADERS |= {
    "own loader": OwnLoader,
    "own loader with a length": OwnLoaderWithLength,
    "workers": lambda: DataLoader(Sticky(), 4, num_workers=1),
    "torchdata, workers": lambda: StatefulDataLoader(StickyWithPosition(), 4, num_workers=1),
    "combined": lambda: CombinedLoader([DataLoader(Sticky(), 4), OwnLoader()], "max_size"),
    "cycle": lambda: [DataLoader(Sticky(16), 4), OwnLoaderWithLength()],
}


class TakesAll(Classifier):
    def training_step(self, batch, batch_idx):
        while isinstance(batch[0], list | tuple) or batch[0] is None:
            batch = next(part for part in batch if part is not None)
        return super().training_step(batch, batch_idx)


TESTED = (*LOADERS, "torchdata Epochs")
LOADERS |= TORCHDATA


@pytest.mark.parametrize("name", keep(LOADERS, *TESTED))
def test_a_killed_run_on_a_stateful_iterable_dataset_resumes_exactly(tmp_path, name):
    """Kill the run in the middle of the first epoch and after it. Also kill a resumed run."""
    options = {"max_epochs": 3, "save_every_n_steps": 2, "train": LOADERS[name]}
    snapshots = Snapshots(tmp_path / "whole", tmp_path, (2, 5, 6, 12))
    whole = fit(tmp_path / "whole", TakesAll, callbacks=[snapshots], **options)
    batches = whole[0].global_step // 3
    again = [Snapshots(tmp_path / "2", tmp_path / "again", (5, 6, 12))]
    assert_same_end(whole, fit(tmp_path / "2", TakesAll, resume="auto", seed=9, callbacks=again, **options))
    for root in (tmp_path / str(batches), tmp_path / "again" / str(batches)):
        assert_same_end(whole, fit(root, TakesAll, resume="auto", seed=8, **options))


@pytest.mark.filterwarnings("ignore:(Checkpoint directory|The dirpath has changed)")
def test_a_run_saved_after_the_last_batch_of_an_epoch_resumes_exactly(tmp_path):
    """ModelCheckpoint saves at the end of the validation that follows the last batch."""

    def run(root, **options):
        saving = ModelCheckpoint(root / "kept", save_top_k=-1, monitor="val_loss")
        return fit(root, TakesAll, lambda: DataLoader(Epochs(), 4), val_loader, callbacks=[saving], **options)

    whole = run(tmp_path / "whole", max_epochs=3)
    paths = sorted((tmp_path / "whole" / "kept").glob("*.ckpt"))
    for path in paths[:2]:
        assert_same_end(whole, run(tmp_path / path.stem, max_epochs=3, seed=9, resume=path))


def test_resume_warns_if_a_dataset_does_not_reset_its_restored_position_in_later_epochs(tmp_path):
    """The dataset is in a persistent worker, or stores its position outside its attributes."""
    positions = {"start": 0, "position": 0}

    class Hidden(StreamOfIndices):
        def indices(self):
            for index in range(positions["start"], 24):
                positions["position"] = index + 1
                yield index

        def state_dict(self):
            return {"position": positions["position"]}

        def load_state_dict(self, state):
            positions["start"] = state["position"]

    for make in (
        lambda: DataLoader(Hidden(), 4),
        lambda: StatefulDataLoader(StickyWithPosition(), 4, num_workers=2, persistent_workers=True),
    ):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        fit(root, train=make, max_steps=3)
        positions["start"] = 0
        with pytest.warns(UserWarning, match=r"DataLoader has \d+ batches in the resumed epoch, but only \d+ in the"):
            fit(root, train=make, max_epochs=3, max_steps=-1, resume="last")


class StreamOfPositions(StreamOfIndices):
    """A stream that resumes one pass at the loaded position, and starts all later passes from the beginning."""

    first = 0

    def indices(self):
        start, self.first = self.first, 0
        for index in range(start, self.size):
            self.position = index + 1
            yield index

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.first = state["position"]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_resume_warns_that_rng_states_of_workers_are_not_saved(tmp_path, is_persistent):
    """Between epochs, only persistent workers have RNG states."""

    def make():
        return StatefulDataLoader(StreamOfPositions(), 4, num_workers=2, persistent_workers=is_persistent)

    for root, first in ((tmp_path / "between", {"max_epochs": 1}), (tmp_path / "within", {"max_steps": 2})):
        fit(root, train=make, **first)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(root, train=make, max_epochs=2, max_steps=-1, resume="last")
        is_named = any("does not save the RNG states of its workers" in str(w.message) for w in caught)
        assert is_named == (is_persistent or root.name == "within")


def test_resume_refuses_an_iterable_dataset_that_yields_no_batch(tmp_path):
    """If fit raised no error, the resumed run would end without a training step."""
    positions = {"start": 0}

    class Empty(StreamOfIndices):
        def indices(self):
            yield from range(positions["start"], 24)

        def load_state_dict(self, state):
            positions["start"] = state["position"]

    make = lambda: DataLoader(Empty(), 4)  # noqa: E731
    fit(tmp_path, train=make, max_epochs=1)
    with pytest.raises(ValueError, match=r"The train loader \(DataLoader\) yielded no batches .* load_state_dict"):
        fit(tmp_path, train=make, max_epochs=3, resume="last")
