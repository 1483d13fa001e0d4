"""The parts of a step add up, suggestions help, and a profile leaves no trace."""

import json
import random
import re
import tempfile

import lightning.pytorch as pl
import numpy
import pytest
import torch
from clock import Clock
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from modules import Classifier, by_step, make_loader, quiet
from runs import same
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabric_template import FabricLoop, TensorLoader, profile
from fabric_template.tools import step_timer
from fabric_template.tools.profile import profile_command

LONG = 0.005
CLOCK = Clock()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def fake_clock(monkeypatch):
    """Only `CLOCK.sleep` takes time, so the figures are exact."""
    monkeypatch.setattr(step_timer, "time", CLOCK)


class SlowDataset(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        CLOCK.sleep(LONG)
        return torch.ones(4), torch.zeros(1)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CLOCK.sleep(LONG)
        return grad


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        CLOCK.sleep(LONG)
        return super().step(closure)


class SlowCallback:
    def on_train_batch_end(self, *args):
        CLOCK.sleep(LONG)


def loss_of(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def slow_step(net, batch):
    CLOCK.sleep(LONG)
    return loss_of(net, batch)


def profile_net(loader=None, step=loss_of, optimizer=torch.optim.SGD, steps=6, trace=None, **options):
    """Profile a net whose own work takes no time on the fake clock."""
    net = nn.Linear(4, 1)
    if loader is None:
        loader = TensorLoader(torch.ones(16, 4), torch.zeros(16, 1), batch_size=4)
    arguments = {"optimizer": optimizer(net.parameters(), lr=0.1), "training_step": step}
    return FabricLoop(accelerator="cpu", **options).profile(net, loader, steps=steps, trace=trace, **arguments)


# ---- the table and the picture


@pytest.mark.parametrize(("part", "slow"), [
    ("data", {"loader": DataLoader(SlowDataset(), 1)}),
    ("forward", {"step": slow_step}),
    ("backward", {"step": lambda net, batch: SlowBackward.apply(loss_of(net, batch))}),
    ("optimizer", {"optimizer": SlowSGD}),
    ("hooks", {"callbacks": [SlowCallback()]}),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_time_is_charged_to_its_part(part, slow, fake_clock):
    found = profile_net(**slow)
    assert [(row.part, row.milliseconds, row.share) for row in found.rows] == [(part, 5.0, 1.0)]
    assert found.milliseconds == 5.0


def test_manual_optimization_logging_and_transfer_hooks(fake_clock):
    class Manual(Classifier):
        automatic_optimization = False

        def on_after_batch_transfer(self, batch, dataloader_idx):
            CLOCK.sleep(LONG)
            return batch

        def log(self, *args, **kwargs):
            CLOCK.sleep(LONG)

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().zero_grad()
                CLOCK.sleep(LONG)
                self.manual_backward(SlowBackward.apply(nn.functional.cross_entropy(self(batch[0]), batch[1])))
                self.optimizers().step()
            self.log("x", 1.0)

    module = Manual(lambda module: SlowSGD(module.parameters(), lr=0.1))
    found = profile(FabricLoop(accelerator="cpu"), module, make_loader(), steps=3)
    parts = {row.part: row.milliseconds for row in found.rows}
    assert parts == {"forward": 10, "backward": 10, "optimizer": 10, "logging": 5, "hooks": 5}


def test_table_and_picture_show_the_same_numbers_and_add_up():
    """Options that end a fit do not end a profile. A value read in each step is free here, and a note."""
    found = profile_net(step=reading_step, steps=12, accumulate_grad_batches=2, max_steps=1, limit_train_batches=1)
    assert "reads the value of a tensor in each step: free on a CPU" in str(found)
    table = [line.split() for line in str(found).splitlines()[1 : len(found.rows) + 2]]
    assert [cells[0] for cells in table] == [row.part for row in found.rows] + ["step"]
    numbers = [float(cells[1]) for cells in table]
    assert numbers[-1] == pytest.approx(sum(numbers[:-1]))
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    (axes,) = found.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.part for row in found.rows]
    assert [round(bar.get_width(), 3) for bar in axes.patches] == numbers[:-1]
    assert axes.get_title() == f"{numbers[-1]:.3f} ms a step on cpu"


def test_bursts_of_workers_count(fake_clock):
    """Two workers deliver two batches at once: each second step does not wait."""

    class Bursts(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            CLOCK.sleep(LONG * (index % 2))
            return torch.ones(4), torch.zeros(1)

    (row,) = profile_net(DataLoader(Bursts(), 1), steps=20).rows
    assert row.milliseconds == 2.5


# ---- suggestions


def threaded_step(net, batch):
    CLOCK.sleep(LONG * torch.get_num_threads())
    return loss_of(net, batch)


def reading_step(net, batch):
    CLOCK.sleep(LONG / 10)
    loss = loss_of(net, batch)
    assert loss.item() == float(loss)
    return loss


@pytest.fixture
def slow_faults(monkeypatch):
    """Collating tensors in memory and reading a value take time, as on a device."""
    item, sample = torch.Tensor.item, TensorDataset.__getitem__

    def slow_item(tensor):
        CLOCK.sleep(LONG)
        return item(tensor)

    def slow_sample(dataset, index):
        CLOCK.sleep(LONG / 10)
        return sample(dataset, index)

    monkeypatch.setattr(torch.Tensor, "item", slow_item)
    monkeypatch.setattr(TensorDataset, "__getitem__", slow_sample)


IN_MEMORY = TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))


@pytest.mark.parametrize(("fault", "suggestion"), [
    ({"loader": DataLoader(SlowDataset(), 4)}, r"5\.0x \(25\.000 to 5\.000 ms\) by DataLoader\(.*num_workers=[1-9]"),
    ({"loader": DataLoader(IN_MEMORY, 8)}, r"1\.8x .*TensorLoader\(x, y, batch_size=8\)"),
    ({"step": threaded_step}, r"2\.0x \(10\.000 to 5\.000 ms\) by torch.set_num_threads\(1\)"),
    ({"step": reading_step}, r"11\.0x .* by not reading tensors: .*test_profile\.py:\d+ reads the value"),
], ids=["no workers", "tensors in memory", "threads", "item"])  # fmt: skip
def test_each_fault_has_a_suggestion_that_helps(fault, suggestion, fake_clock, slow_faults, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = profile_net(**{"step": slow_step, **fault})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert len(found.suggestions) == 1
    assert re.search(suggestion, found.suggestions[0]), found.suggestions
    assert f"\nfaster: {found.suggestions[0]}" in str(found)


@pytest.mark.parametrize("loader", [DataLoader(IN_MEMORY, 8), DataLoader(SlowDataset(), 1, num_workers=1)])
def test_what_does_not_help_is_not_suggested(loader, fake_clock, monkeypatch):
    """Neither a healthy training nor a change that fails has a suggestion."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    found = profile_net(loader, slow_step)
    assert (found.suggestions, found.notes) == ([], [])


# ---- nothing changes


class NoisyDataset(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = random.random() + numpy.random.rand()
        return torch.rand(8) + noise, torch.tensor(index % 3)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.generator, self.setups = torch.Generator().manual_seed(5), 0

    def setup(self, stage):
        self.setups += 1

    def train_dataloader(self):
        return DataLoader(NoisyDataset(), 4, shuffle=True, generator=self.generator)


class Counting(pl.Callback):
    seen = 0

    def on_train_batch_end(self, *args):
        self.seen += 1


def random_states():
    return [random.getstate(), torch.get_rng_state(), [*numpy.random.get_state()[1]]]


def fit_module(root, profiles):
    pl.seed_everything(1, verbose=False)
    module, data, counting = Classifier(by_step), Data(), Counting()
    module.net[0].eval()
    callbacks = [counting, EarlyStopping("train_loss"), ModelCheckpoint(root / "mine", every_n_train_steps=1)]
    loop = FabricLoop(**quiet(default_root_dir=str(root), max_epochs=2, callbacks=callbacks, enable_checkpointing=True))
    if profiles:
        before = random_states()
        assert profile(loop, module, data, steps=7).steps == 7
        assert same(random_states(), before)
        assert (module.net[0].training, counting.seen, data.setups) == (False, 0, 0)
        assert list(root.rglob("*")) == []
    history = loop.fit(module, data)
    return module.state_dict(), history.drop(columns="time").to_csv(), loop.optimizers[0].state_dict(), random_states()


def fit_net(root, profiles):
    pl.seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
    loader = DataLoader(NoisyDataset(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    loop = FabricLoop(**quiet(max_epochs=2))
    arguments = {
        "optimizer": optimizer,
        "scheduler": {"scheduler": scheduler, "interval": "step"},
        "training_step": lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
    }
    loop.fit(net, loader, **arguments)
    if profiles:
        profile(loop, net, loader, steps=4, **arguments)
    loop.fit(net, loader, **arguments)
    return net.state_dict(), optimizer.state_dict(), random_states()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fit", [fit_module, fit_net])
def test_a_fit_after_a_profile_is_the_fit_without_it(fit, tmp_path):
    roots = [tmp_path / "with", tmp_path / "without"]
    for root in roots:
        root.mkdir()
    assert same(fit(roots[0], True), fit(roots[1], False))


# ---- errors and the command


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"steps": 0}, ValueError, r"profile\(steps\): got 0, expected an int >= 1"),
    ({"steps": "9"}, ValueError, r"profile\(steps\): got '9'"),
    ({"devices": 2}, ValueError, r"profile\(loop\): got 2 processes, expected one. Write devices=1"),
    ({"loader": iter([])}, TypeError, "got a list_iterator, expected one loader"),
    ({"loader": {"a": []}}, TypeError, "got a dict, expected one loader"),
    ({"loader": []}, ValueError, "got a loader without batches"),
    ({"trace": "no/trace.json"}, ValueError, r"profile\(trace\): got 'no/trace.json', expected a file"),
    ({"callbacks": [Counting()]}, TypeError, "callback that copy.deepcopy refuses .*TextIOWrapper"),
    ({"step": lambda net, batch: 1 / 0}, ZeroDivisionError, "division by zero"),
])  # fmt: skip
def test_errors(arguments, error, message, tmp_path):
    with (tmp_path / "file").open("w") as file:
        for callback in arguments.get("callbacks", ()):
            callback.file = file
        with pytest.raises(error, match=message):
            profile_net(**arguments)


def test_the_command(tmp_path, capsys):
    loop = FabricLoop(accelerator="cpu")
    assert profile_command(loop, Classifier(), Data(), out="steps.png", trace="trace.json", steps=3) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("of 3 steps on cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.png", "trace.json"]
    names = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert "Optimizer.step#SGD.step" in names
    for out in ("no/steps.png", "steps.xyz"):
        with pytest.raises(ValueError, match=f"--out: got {out}, expected a picture"):
            profile_command(loop, Classifier(), Data(), out=out)
