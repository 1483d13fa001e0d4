"""Test that FabricLoop reads a TensorLoader exactly as Trainer reads a DataLoader."""

import json
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from modules import quiet
from parameters import sample
from runs import Snapshots, assert_same_end, fit
from torch.utils.data import DataLoader, TensorDataset

from fabric_template import FabricLoop, TensorLoader

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using `DistributedSampler` with the dataloaders", "ignore:You requested to overfit"
)
FORK = {"strategy": "ddp_fork", "devices": 2}
STAGES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class Records(pl.LightningModule):
    """A module that writes the samples of each batch to a separate file for each process."""

    def __init__(self, folder, loaders=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.make = folder, loaders

    def record(self, stage, batch, *place):
        path = f"{self.folder}/{stage}{self.global_rank}.jsonl"
        with open(path, "a") as file:
            print(json.dumps([batch[0].flatten().tolist(), *place]), file=file)
        return batch[0]

    def training_step(self, batch, batch_idx):
        return self.layer(self.record("fit", batch, batch_idx, self.current_epoch)).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        stage = "sanity" if self.trainer.sanity_checking else "validate"
        self.record(stage, batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.record("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.record("predict", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Writer(pl.callbacks.BasePredictionWriter):
    """A callback that records the sample indices of each predicted batch."""

    def __init__(self):
        super().__init__("batch")

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, loader):
        module.record("indices", [torch.tensor(indices)])


def data_loader(num, **options):
    return DataLoader(TensorDataset(torch.arange(float(num))[:, None]), **options)


def tensor_loader(num, **options):
    return TensorLoader(torch.arange(float(num))[:, None], **options)


def two(make):
    return lambda num, **options: {"a": make(num, **options), "b": make(num - 3, **options)}


# Map each case to (options of the loader, options of the loop).
RULES = {
    "last batch": ({}, {}),
    "drop_last": ({"drop_last": True}, {}),
    "limit": ({}, {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 2}),
    "fraction": ({}, {f"limit_{stage}_batches": 0.5 for stage in STAGES.values()}),
    "overfit": ({"shuffle": True}, {"overfit_batches": 2}),
    "overfit by fraction": ({"shuffle": True, "drop_last": True}, {"overfit_batches": 0.5}),
    "fast_dev_run": ({}, {"fast_dev_run": 2}),
    "reload": ({}, {"reload_dataloaders_every_n_epochs": 1}),
    "sanity check": ({}, {"num_sanity_val_steps": 3}),
    "shuffle": ({"shuffle": True}, {}),
    "shuffle, drop_last": ({"shuffle": True, "drop_last": True}, {"max_epochs": 3}),
}


def run_stage(kind, make, folder, call, loader_options, options):
    """Run a stage and return the lines of each file, sorted by file name."""
    folder.mkdir()
    pl.seed_everything(5, verbose=False)
    loop = kind(**quiet(**{"max_epochs": 2, **options}, callbacks=[Writer()]))
    loaders = [make(15, batch_size=3, **loader_options)]
    if call == "fit":
        loaders.append(make(18, batch_size=4, drop_last=loader_options.get("drop_last", False)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(loop, call)(Records(folder), *loaders)
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


def assert_same_batches(tmp_path, call, name, options=None, several=False):
    loader_options, loop_options = RULES[name]
    loop_options = {**loop_options, **(options or {})}
    kinds = [two(data_loader), two(tensor_loader)] if several else [data_loader, tensor_loader]
    arguments = (call, loader_options, loop_options)
    expected = run_stage(pl.Trainer, kinds[0], tmp_path / "trainer", *arguments)
    found = run_stage(FabricLoop, kinds[1], tmp_path / "loop", *arguments)
    assert expected == found
    assert f"{call}0.jsonl" in found


UNSHUFFLED = [name for name in RULES if "shuffle" not in name]


@pytest.mark.parametrize("call", STAGES)
@pytest.mark.parametrize("name", UNSHUFFLED)
def test_a_tensor_loader_gives_the_same_batches_as_a_data_loader(tmp_path, call, name):
    if not (name.startswith("overfit") and call != "fit"):
        assert_same_batches(tmp_path, call, name)


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
@pytest.mark.parametrize("name", ["last batch", "fraction"])
def test_a_list_of_tensor_loaders_gives_the_same_batches_as_data_loaders(tmp_path, call, name):
    assert_same_batches(tmp_path, call, name, several=True)


# Do not test predict with shuffled loaders, for which Trainer's processes draw different orders.
EVALUATED = {
    "validate": ["last batch", "overfit", "shuffle, drop_last"],
    "test": ["limit", "shuffle"],
    "predict": ["drop_last", "fraction"],
}
WITH_TWO_PROCESSES = [("fit", name) for name in RULES]
WITH_TWO_PROCESSES += [(call, name) for call, names in EVALUATED.items() for name in names]


@pytest.mark.parametrize("case", sample(3, WITH_TWO_PROCESSES), ids=" ".join)
def test_two_processes_get_the_same_batches_from_a_tensor_loader_as_from_a_dataloader(tmp_path, case):
    """All processes draw the shuffled order from the same seed."""
    assert_same_batches(tmp_path, *case, FORK)


def test_two_processes_together_predict_each_sample_of_a_shuffled_loader_once(tmp_path):
    options = {"shuffle": True, "drop_last": True}
    found = run_stage(FabricLoop, tensor_loader, tmp_path / "loop", "predict", options, FORK)
    predicted = [json.loads(line)[0] for rank in (0, 1) for line in found[f"predict{rank}.jsonl"]]
    assert [len(batch) for batch in predicted] == [3, 3, 2, 3, 3, 1]
    assert sorted(sum(predicted, [])) == list(range(15))
    indices = [json.loads(line)[0] for rank in (0, 1) for line in found[f"indices{rank}.jsonl"]]
    assert indices == predicted


def labeled(**options):
    x = torch.randn(26, 8, generator=torch.Generator().manual_seed(2))
    return TensorLoader(x, torch.arange(26) % 3, batch_size=4, **options)


def with_generator():
    return labeled(shuffle=True, generator=torch.Generator().manual_seed(4))


RESUMES = {
    "in order": (labeled, {}),
    "global random numbers": (lambda: labeled(shuffle=True), {}),
    "own generator": (with_generator, {}),
    "limit": (with_generator, {"limit_train_batches": 5}),
    "reload": (with_generator, {"reload_dataloaders_every_n_epochs": 1}),
    "overfit": (with_generator, {"overfit_batches": 3}),
    "drop_last": (
        lambda: labeled(shuffle=True, drop_last=True),
        {"accumulate_grad_batches": 2, "save_every_n_steps": 1},
    ),
}


@pytest.mark.parametrize(("name", "devices"), [*[(name, 1) for name in RESUMES], ("own generator", 2), ("overfit", 2)])
def test_a_killed_run_with_a_tensor_loader_resumes_exactly(tmp_path, name, devices):
    make, options = RESUMES[name]
    options = {"max_epochs": 3, "save_every_n_steps": 2, "train": make, **options}
    kills = [3, 8] if devices == 1 else [7]
    if devices == 2:
        options.update(FORK)
    snapshots = Snapshots(tmp_path / "whole", tmp_path, kills)
    whole = fit(tmp_path / "whole", callbacks=[snapshots], **options)
    for batch in kills:
        root = tmp_path / str(batch)
        assert list(root.rglob("last.ckpt"))
        assert_same_end(whole, fit(root, seed=99, resume="auto", **options))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.t().contiguous().t(), lambda x: x[::2], lambda x: x.half()])
def test_in_place_operations_on_a_batch_do_not_change_the_data(make, shuffle):
    x = make(torch.arange(24.0).reshape(8, 3))
    before = x.clone()
    loader = TensorLoader(x, x[:, 0], batch_size=3, shuffle=shuffle)
    loop = FabricLoop(**quiet(max_epochs=2))
    net = torch.nn.Linear(3, 1)

    def step(net, batch):
        for part in batch:
            part.sub_(1)
        return net(batch[0].float()).mean()

    given = loop.setup(torch.nn.Linear(1, 1), None, loader)[1]
    for batch in [*loader, *given]:
        batch[0].zero_()
        batch[1].add_(2)
    loop.fit(net, loader, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=step)
    assert torch.equal(x, before)


def test_a_batch_keeps_the_memory_format_of_the_data():
    x = torch.ones(6, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for batch, _ in TensorLoader(x, torch.arange(6), batch_size=4):
        assert batch.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shuffle": "no"}, "got shuffle='no', expected True or False"),
        ({"drop_last": "x"}, "got drop_last='x', expected True or False"),
        ({"shuffle": None}, "got shuffle=None, expected True or False"),
        ({"drop_last": 2}, "got drop_last=2, expected True or False"),
        ({"batch_size": 2.0}, r"got batch_size=2\.0, expected an int >= 1"),
        # The patterns allow two forms, because NumPy before 2.0 prints these values as True and 0.
        ({"batch_size": np.bool_(True)}, "got batch_size=(np.)?True_?, expected an int >= 1"),
        ({"batch_size": np.int64(0)}, r"got batch_size=(np.int64\(0\)|0), expected an int >= 1"),
        ({"generator": 3}, "got generator=3, expected a torch.Generator on the CPU. Write generator="),
        ({"generator": np.random.default_rng(0)}, "got generator=.*, expected a torch.Generator"),
    ],
)
def test_a_tensor_loader_refuses_options_of_the_wrong_type(options, text):
    with pytest.raises((TypeError, ValueError), match=f"^TensorLoader: {text}"):
        tensor_loader(4, **options)


def test_a_tensor_loader_accepts_numpy_numbers_as_options():
    loader = tensor_loader(5, batch_size=np.int64(2), shuffle=np.False_, drop_last=np.True_)
    assert [batch.flatten().tolist() for (batch,) in loader] == [[0.0, 1.0], [2.0, 3.0]]
    assert (loader.batch_size, type(loader.batch_size), len(loader)) == (2, int, 2)
