"""Test that every kind of loader gives the same batches as with Trainer."""

import multiprocessing
import subprocess
import sys
import warnings
from collections import UserDict, defaultdict
from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
from interpreter import fork_command
from lightning.pytorch.utilities import CombinedLoader
from modules import quiet
from pandas import DataFrame
from parameters import halve, once
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fabric_template import FabricLoop, MiniLoop, TensorLoader
from fabric_template.data import loader_state
from fabric_template.data.samplers import TrackingBatchSampler

STAGE_NAMES = ("fit", "validate", "test", "predict")
STAGES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class RecordingModule(pl.LightningModule):
    """A module that records the arguments of its step methods in each stage."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def record(self, *what):
        self.seen.append(what)

    def training_step(self, batch, batch_idx):
        self.record("train", batch, batch_idx)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.record("sanity" if self.trainer.sanity_checking else "val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.record("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.record("predict", batch, batch_idx, dataloader_idx)
        return batch, batch_idx, dataloader_idx

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def both(act, make=RecordingModule, **options):
    """Run `act(loop, module)` with Trainer and FabricLoop.

    Return both results and recorded arguments.
    """
    found = []
    for kind in (pl.Trainer, FabricLoop):
        pl.seed_everything(1, verbose=False)
        module, loop = make(), kind(**quiet(**{"max_epochs": 1, **options}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = act(loop, module)
        found.append((None if isinstance(result, DataFrame) else result, module.seen))
    return found


def assert_both_see(act, make=RecordingModule, **options):
    trainer, loop = both(act, make, **options)
    assert str(trainer) == str(loop)
    return loop


def ones(num, start=0, **options):
    return DataLoader(range(start, start + num), batch_size=2, **options)


# Nested and combined loaders

STRUCTURES = {
    "one": lambda: ones(4),
    "list of one": lambda: [ones(4)],
    "list": lambda: [ones(4), ones(6, 10)],
    "dict": lambda: {"a": ones(4), "b": ones(6, 10)},
    "nested": lambda: {"a": [ones(4), ones(2, 5)], "b": ones(6, 10)},
    "numbers": lambda: [0, 1, 2],
    "range": lambda: range(3),
    "other iterables": lambda: {"a": {0, 1}, "b": range(2, 5)},
}
MODES = ("max_size_cycle", "min_size", "max_size")


def structure(loaders):
    """Return the type names of the loaders, in the same nested structure."""
    if isinstance(loaders, dict):
        return {name: structure(value) for name, value in loaders.items()}
    if isinstance(loaders, list | tuple) and not isinstance(loaders[0], int):
        return [structure(value) for value in loaders]
    return type(loaders).__name__


@pytest.mark.parametrize("call", STAGE_NAMES)
@pytest.mark.parametrize("name", STRUCTURES)
def test_nested_loaders_give_the_same_batches_as_with_trainer(call, name):
    """The test also compares the number of batches and attributes such as loop.train_dataloader."""

    def act(loop, module):
        result = getattr(loop, call)(module, STRUCTURES[name]())
        read = [loop.train_dataloader, loop.val_dataloaders, loop.test_dataloaders, loop.predict_dataloaders]
        counts = loop.num_training_batches, loop.num_val_batches, loop.num_test_batches, loop.num_predict_batches
        structures = [structure(loaders) if loaders is not None else None for loaders in read]
        return result if call == "predict" else None, structures, counts if call != "predict" else counts[-1]

    (_, structures, _), seen = assert_both_see(act)
    assert seen
    assert [loaders is not None for loaders in structures] == [call == other for other in STAGE_NAMES]


@pytest.mark.parametrize("call", ["fit", "validate", "test"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [1.0, 2])
def test_combined_loaders_give_the_same_batches_as_with_trainer(call, mode, limit):
    def act(loop, module):
        getattr(loop, call)(module, CombinedLoader({"a": ones(6), "b": [ones(4, 10), range(4)]}, mode))
        return loop.num_sanity_val_batches, loop.num_val_batches, loop.num_test_batches

    options = {f"limit_{STAGES[call]}_batches": limit}
    _, seen = assert_both_see(act, **options)
    assert len(seen) == (2 if mode == "min_size" or limit == 2 else 4)


# Lists that could contain batches or loaders


class Pair:
    """A batch that can be unpacked because it has __iter__."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter((self.x, self.y))


class MovablePair(Pair):
    batch_size = 4

    def to(self, device):
        return self


class PairOfItems:
    """A batch that can be unpacked because it has __getitem__."""

    def __init__(self, x, y):
        self.items = {"x": x, "y": y}

    def __getitem__(self, index):
        return list(self.items.values())[index]


class Loads(Pair):
    """A loader that has the attribute batch_size."""

    batch_size = 2

    def __iter__(self):
        return zip(self.x.split(2), self.y.split(2), strict=True)


class LoadsList:
    def __init__(self, x, y):
        self.batches = list(Loads(x, y))

    def __iter__(self):
        return iter(self.batches)


def train_on(loaders):
    """Train on the loaders. Return the sum of each element of each training batch."""
    seen, net = [], torch.nn.Linear(1, 1)

    def step(net, batch):
        parts = batch.values() if isinstance(batch, UserDict) else batch
        seen.append([float(sum(map(torch.sum, part)) if isinstance(part, tuple) else part.sum()) for part in parts])
        return net(torch.ones(1, 1)).sum()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    FabricLoop(**quiet(max_epochs=1)).fit(net, loaders, optimizer=optimizer, training_step=step)
    return seen


X = torch.arange(8.0)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("make", [MovablePair, lambda x, y: UserDict(x=x, y=y)], ids=["with to", "mapping"])
def test_a_list_of_iterable_batches_is_treated_as_one_loader(kind, make):
    assert train_on(kind([make(X, X * 2), make(X * 3, X * 4)])) == [[28.0, 56.0], [84.0, 112.0]]


class MovableLoads(Loads):
    """A loader with a to() method, which usually only batches have."""

    dataset = X

    def to(self, device):
        return self


@pytest.mark.parametrize("make", [Loads, LoadsList, MovableLoads, lambda x, y: TensorLoader(x, y, batch_size=2)])
def test_a_list_of_loaders_of_any_class_is_treated_as_several_loaders(make):
    loaders = [make(X, X), make(X[:4], X[4:])]
    assert train_on(loaders) == [[2.0, 10.0], [10.0, 18.0], [18.0, 10.0], [26.0, 18.0]]


@pytest.mark.parametrize("make", [Pair, PairOfItems])
def test_a_list_of_objects_that_could_be_batches_or_loaders_is_refused(make):
    batches, name = [make(X, X * 2), make(X * 3, X * 4)], make.__name__
    message = f"train_dataloaders: got a list of {name} objects.*A {name} could be a batch or a loader"
    with pytest.raises(TypeError, match=message):
        train_on(batches)
    # Both suggestions in the error message give the intended batches.
    assert train_on(DataLoader(batches, batch_size=None)) == [[28.0, 56.0], [84.0, 112.0]]
    if make is Pair:
        assert train_on(CombinedLoader(batches, "max_size_cycle")) == [[28.0, 84.0], [56.0, 112.0]]


# Loaders that yield the same batch objects in each epoch


class Stores:
    """A loader that yields the same objects in each epoch."""

    def __init__(self, make):
        self.batches = [make(torch.full((2, 1), float(i)), torch.full((2, 1), 3.0 * i)) for i in range(1, 5)]

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(self.batches)


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class FrozenFields:
    """A batch that move_data_to_device refuses."""

    x: torch.Tensor
    y: torch.Tensor


class Encoded:
    """A batch that decodes its values when it is moved."""

    def __init__(self, x, y):
        self.x, self.y = (x * 10).tolist(), y.tolist()

    def to(self, device):
        return Fields(torch.tensor(self.x, device=device) / 10, torch.tensor(self.y, device=device))


def grow(batch):
    """Take x and y from a batch, change the batch in place, and return (x, y)."""
    if isinstance(batch, Fields):
        x, y, batch.x = batch.x, batch.y, batch.x * 2
    else:
        first, last = ("x", "y") if isinstance(batch, dict) else (0, 1)
        x, y, batch[first] = batch[first], batch[last], batch[first] * 2
    return x, y


# Map each kind of batch to (a function that creates it, a function that returns (x, y) and changes it).
STORED = {
    "dict": (lambda x, y: {"x": x, "y": y}, grow),
    "list": (lambda x, y: [x, y], grow),
    "dataclass": (Fields, grow),
    "defaultdict": (lambda x, y: defaultdict(list, x=x, y=y), grow),
    "list in a tuple": (lambda x, y: ("name", [x, y]), lambda batch: grow(batch[1])),
    "popped": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch.pop("x"), batch.pop("y"))),
    "object": (Encoded, grow),
    "object in a dict": (lambda x, y: {"all": Encoded(x, y), "n": 2}, lambda batch: grow(batch.pop("all"))),
}


class Fits(pl.LightningModule):
    def __init__(self, take):
        super().__init__()
        self.net, self.take = torch.nn.Linear(1, 1), take

    def training_step(self, batch, batch_idx):
        x, y = self.take(batch)
        return (self.net(x.to(self.net.weight)) - y).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_on_stored(kind, make_loader, take, **options):
    pl.seed_everything(1, verbose=False)
    options.update(max_epochs=3, accelerator="cpu")
    module, loop = Fits(take), kind(**(options if kind is MiniLoop else quiet(**options)))
    loop.fit(module, make_loader(), make_loader())
    return module.net.weight.item(), float(loop.callback_metrics["val_loss"])


@pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(("name", "precision"), halve(STORED, ["32-true", "64-true"]))
def test_batches_on_a_cpu_are_copied_and_moved_as_with_trainer(name, precision):
    make, take = STORED[name]
    for make_loader in (lambda: Stores(make), lambda: DataLoader(Stores(make).batches, None, collate_fn=lambda x: x)):
        kinds = (pl.Trainer, FabricLoop, MiniLoop)
        results = [train_on_stored(kind, make_loader, take, precision=precision) for kind in kinds]
        assert results[0] == results[1] == results[2]


def test_a_batch_that_cannot_be_copied_reaches_the_training_step_with_a_warning():
    expected = train_on_stored(FabricLoop, lambda: Stores(Fields), lambda batch: (batch.x, batch.y))
    with pytest.warns(UserWarning, match="a batch that cannot be moved to a device .*frozen dataclass"):
        found = train_on_stored(FabricLoop, lambda: Stores(FrozenFields), lambda batch: (batch.x, batch.y))
    assert found == expected


# Refusing objects that are not loaders

NO_LOADERS = {
    "None": None,
    "object": object(),
    "list with an object": [1, object()],
    "list with None": [range(2), None],
}


@pytest.mark.parametrize("call", STAGE_NAMES)
@pytest.mark.parametrize("name", NO_LOADERS)
def test_an_object_that_is_not_a_loader_is_refused(call, name):
    argument = "train_dataloaders" if call == "fit" else "dataloaders"
    with pytest.raises(TypeError, match=rf"An invalid dataloader was passed to `Trainer.{call}\({argument}="):
        getattr(FabricLoop(**quiet(max_epochs=1)), call)(RecordingModule(), NO_LOADERS[name])
    module, method = RecordingModule(), f"{STAGES[call]}_dataloader"
    setattr(module, method, lambda: NO_LOADERS[name])
    with pytest.raises(TypeError, match=f"An invalid dataloader was returned from `RecordingModule.{method}"):
        getattr(FabricLoop(**quiet(max_epochs=1)), call)(module)


def test_an_invalid_validation_loader_is_refused_before_training():
    module = RecordingModule()
    with pytest.raises(TypeError, match=r"An invalid dataloader was passed to `Trainer.fit\(val_dataloaders="):
        FabricLoop(**quiet(max_epochs=1)).fit(module, ones(4), object())
    assert module.seen == []


def test_loaders_of_a_datamodule_are_not_combined_with_loaders_of_the_module():
    """Like Trainer, FabricLoop does not combine the loaders of a datamodule and a module."""

    class Module(RecordingModule):
        def train_dataloader(self):
            return ones(2, 100)

        val_dataloader = test_dataloader = train_dataloader

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return ones(4)

    _, seen = assert_both_see(lambda loop, module: loop.fit(module, datamodule=Data()), Module)
    assert [place[0] for place in seen] == ["train", "train"]
    with pytest.raises(TypeError, match="pass a datamodule that defines test_dataloader"):
        FabricLoop(**quiet()).test(Module(), datamodule=Data())


# Iterable datasets, empty loaders and limits


class Stream(IterableDataset):
    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return iter(range(self.num))


class Sized(Stream):
    def __len__(self):
        return self.num


@pytest.mark.parametrize("call", STAGE_NAMES)
def test_iterable_datasets_give_the_same_batches_as_with_trainer(call):
    _, seen = assert_both_see(lambda loop, module: getattr(loop, call)(module, ones_of(Stream(5))))
    assert [len(place[1]) for place in seen] == [2, 2, 1]
    _, seen = assert_both_see(
        lambda loop, module: getattr(loop, call)(module, [ones_of(Stream(9)), ones_of(Stream(3))]),
        **{f"limit_{STAGES[call]}_batches": 3},
    )
    assert len(seen) == (3 if call == "fit" else 5)


def ones_of(stream):
    return DataLoader(stream, batch_size=2)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("call", STAGE_NAMES)
def test_an_iterable_dataset_cannot_be_limited_to_a_fraction_of_its_batches(call):
    limit = {f"limit_{STAGES[call]}_batches": 0.5}
    for make in (pl.Trainer, FabricLoop):
        with pytest.raises(Exception, match=r"When using an `IterableDataset`, .* must be `1.0` or an int"):
            getattr(make(**quiet(max_epochs=1, **limit)), call)(RecordingModule(), ones_of(Stream(5)))
        with pytest.raises(Exception, match="Please increase the `limit_.*_batches` argument. Try at least"):
            getattr(make(**quiet(max_epochs=1, **dict.fromkeys(limit, 0.1))), call)(RecordingModule(), ones(4))


def test_fit_warns_and_does_not_train_if_the_module_has_an_empty_loader():
    """An empty loader that is passed to fit raises an error."""

    class Empty(RecordingModule):
        def train_dataloader(self):
            return []

    def act(loop, module):
        loop.fit(module)
        return loop.num_training_batches, loop.current_epoch, loop.global_step

    assert assert_both_see(act, Empty) == ((0, 0, 0), [])
    with pytest.warns(UserWarning, match="across ranks is zero. Please make sure this was your intention"):
        FabricLoop(**quiet(max_epochs=1)).fit(Empty())


# Reloading loaders, and calls to set_epoch()


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("reload", [0, 1, 3])
def test_loaders_are_reloaded_every_n_epochs(sanity, every, reload):
    class Makes(RecordingModule):
        def train_dataloader(self):
            self.record("make train", self.current_epoch)
            return ones(2)

        def val_dataloader(self):
            self.record("make val", self.current_epoch)
            return ones(2)

    options = dict(num_sanity_val_steps=sanity, check_val_every_n_epoch=every, reload_dataloaders_every_n_epochs=reload)
    _, seen = assert_both_see(lambda loop, module: loop.fit(module), Makes, max_epochs=6, **options)
    assert ("make train", 1) not in seen or reload == 1


class EpochSampler(RandomSampler):
    """A sampler that records the arguments of set_epoch()."""

    epochs: list

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("in_batches", [False, True])
def test_set_epoch_is_called_with_the_same_epochs_as_in_trainer(in_batches):
    def make():
        sampler = EpochSampler(range(4))
        sampler.epochs = []
        options = {"batch_sampler": BatchSampler(sampler, 2, True)} if in_batches else {"sampler": sampler}
        return DataLoader(range(4), **options), sampler.epochs

    def act(loop, module):
        loaders = [make() for _ in range(5)]
        loop.fit(module, loaders[0][0], loaders[1][0])
        loop.validate(module, loaders[2][0])
        loop.test(module, loaders[3][0])
        loop.predict(module, loaders[4][0])
        return [epochs for _, epochs in loaders]

    (expected, _), (epochs, _) = both(act)
    assert expected == epochs == [[0], [0, 0], [1], [1], [] if in_batches else [1]]


# Warnings about loaders, and loaders of fit and validate


def warnings_of(call="validate", loader=None, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(FabricLoop(**quiet(max_epochs=1, **options)), call)(RecordingModule(), loader)
    texts = [str(warning.message) for warning in caught]
    # Ignore Python's own warning about forking a process that has threads.
    others = ("is multi-threaded, use of fork",)
    return [text for text in texts if not any(other in text for other in others)]


def test_a_loader_with_few_workers_causes_a_warning(monkeypatch):
    assert warnings_of(loader=ones(4)) == []
    monkeypatch.setattr("lightning.fabric.utilities.data._num_cpus_available", lambda: 8)
    (few,) = warnings_of(loader=ones(4))
    assert few.startswith("The 'val_dataloader' does not have many workers which may be a bottleneck")
    assert "`num_workers=7`" in few
    assert warnings_of(loader=ones(4, num_workers=2)) == []


def test_importing_the_package_adds_no_warning_filter():
    """The test imports the dependencies first, because they add warning filters."""
    code = (
        "import warnings, jsonargparse, pandas, torchmetrics, lightning.pytorch;"
        " before = list(warnings.filters); import fabric_template.loop, fabric_template.mini;"
        " import fabric_template.data.loaders; assert warnings.filters == before, warnings.filters"
    )
    subprocess.run(fork_command([sys.executable, "-c", code]), check=True)


def test_an_iterable_dataset_with_a_length_causes_a_warning():
    (text,) = warnings_of(loader=ones_of(Sized(4)))
    assert text.startswith("Your `IterableDataset` has `__len__` defined")


def test_overfit_batches_turns_off_shuffling_in_fit_but_not_in_validate():
    class Both(RecordingModule):
        def val_dataloader(self):
            return ones(8, shuffle=True)

        def train_dataloader(self):
            return ones(8, shuffle=True)

    loop, module = FabricLoop(**quiet(max_epochs=2, overfit_batches=2)), Both()
    with pytest.warns(UserWarning, match="You requested to overfit but enabled (train|val) dataloader shuffling"):
        loop.fit(module)
    assert [batch.tolist() for what, batch, *_ in module.seen if what == "train"] == [[0, 1], [2, 3]] * 2
    assert isinstance(loop.val_dataloaders.sampler, SequentialSampler)
    loop.validate(module)
    assert isinstance(loop.val_dataloaders.sampler, RandomSampler)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_validate_with_a_loader_does_not_call_the_hooks_of_an_earlier_datamodule(stage):
    """Like Trainer, FabricLoop ignores the hooks of the earlier datamodule, which might normalize images."""

    class Scaled(pl.LightningDataModule):
        def train_dataloader(self):
            return ones(4, 1)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch * 10

    def act(loop, module):
        loop.fit(module, datamodule=Scaled())
        return getattr(loop, stage)(module, ones(4, 1))

    _, seen = assert_both_see(act)
    assert [batch.tolist() for _, batch, *_ in seen] == [[10, 20], [30, 40], [1, 2], [3, 4]]


@pytest.mark.parametrize("stage", STAGE_NAMES)
def test_only_fit_records_dataset_attributes_for_resuming(stage, monkeypatch):
    """Comparing a list of a million paths takes seconds, and only fit saves checkpoints."""
    recorded = []

    class RecordingState(loader_state.PlainState):
        def __init__(self, parts):
            super().__init__(parts)
            recorded.extend(parts.values())

    monkeypatch.setattr(loader_state, "PlainState", RecordingState)
    loop = FabricLoop(**quiet(max_epochs=1))
    getattr(loop, stage)(RecordingModule(), ones(8))
    assert bool(recorded) == (stage == "fit")


# Loaders passed to predict, and loader workers that must exit when the run ends


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
def test_predict_refuses_a_combined_loader_whose_mode_is_not_sequential(mode):
    """Trainer also refuses the other modes, because predict returns a separate list of predictions for each loader."""

    class Doubles(pl.LightningModule):
        def predict_step(self, batch, batch_idx):
            return 2 * batch[0]

    loaders = CombinedLoader([DataLoader(torch.zeros(4, 1)), DataLoader(torch.ones(3, 1))], mode)
    for kind in (pl.Trainer, FabricLoop):
        loop = kind(**quiet(logger=False))
        with pytest.raises(ValueError, match=r'only supports the `CombinedLoader\(mode="sequential"\)` mode'):
            loop.predict(Doubles(), loaders)


def test_predict_does_not_change_the_given_loader():
    loader = ones(5, drop_last=True)
    given = dict(vars(loader))
    loop = FabricLoop(**quiet())
    assert [batch.tolist() for batch, *_ in loop.predict(RecordingModule(), loader)] == [[0, 1], [2, 3], [4]]
    assert vars(loader) == given
    assert isinstance(loop.predict_dataloaders.batch_sampler, TrackingBatchSampler)
    assert loop.predict_dataloaders.batch_sampler.seen == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("kind", ["plain", "channels_last", "a subclass"])
def test_a_shuffled_tensor_loader_gives_the_same_batches_as_indexing_by_randperm(kind):
    x = torch.randn(10, 3, 4, 4).to(memory_format=torch.channels_last)
    if kind != "channels_last":
        x = x.contiguous()
    if kind == "a subclass":
        x = torch.nn.Parameter(x)
    batches = list(TensorLoader(x, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    for (batch,), rows in zip(batches, order.split(4), strict=True):
        expected = x[rows]
        assert type(batch) is type(expected)
        assert torch.equal(batch, expected)
        assert (batch.stride(), batch.requires_grad) == (expected.stride(), expected.requires_grad)


class Ends(RecordingModule):
    """A module that raises the given error, if any, in its 12th batch."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if self.error is not None and len(self.seen) == 11:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("loop", "error"), once([FabricLoop, MiniLoop], [None, ValueError("mine"), KeyboardInterrupt()])
)
def test_fit_leaves_no_worker_process_if_it_ends_mid_epoch(loop, error):
    """The garbage collector would wait five seconds for each remaining worker."""
    dataset, before = [torch.zeros(1)] * 16, multiprocessing.active_children()
    caught, loop = None, loop(max_steps=13, accelerator="cpu")
    try:
        loop.fit(Ends(error), DataLoader(dataset, batch_size=2, num_workers=2))
    except (ValueError, KeyboardInterrupt) as raised:
        # Keep the error and its frames, as a notebook does, because they could keep the worker processes alive.
        caught = raised
    assert loop.global_step == (13 if error is None else 11), caught
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def raise_error(*_):
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("loop", "hook", "stage"),
    halve(
        [FabricLoop, MiniLoop],
        ["on_validation_epoch_start", "validation_step", "on_validation_epoch_end"],
        ["fit", "validate"],
    ),
)
def test_an_error_in_validation_leaves_no_worker_process(loop, hook, stage):
    module, before = Ends(), multiprocessing.active_children()
    module.validation_step = lambda batch, batch_idx: batch.sum()
    setattr(module, hook, raise_error)
    val = DataLoader([torch.zeros(1)] * 16, batch_size=2, num_workers=1)
    given = ([torch.zeros(1, 1)], val) if stage == "fit" else (val,)
    with pytest.raises(ValueError, match="mine") as _caught:
        getattr(loop(accelerator="cpu", max_epochs=1), stage)(module, *given)
    assert [child for child in multiprocessing.active_children() if child not in before] == []
