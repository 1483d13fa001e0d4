"""profile: each part of a step has the time that it took, the advice names the cause, and all is as it was afterwards."""

import copy
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy
import pytest
import torch
from clock import Clock
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier, by_step, make_loader, quiet
from runs import same, tree
from test_cli import refused, run
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
)

import fabric_template
from fabric_template import FabricLoop, TensorLoader, profile
from fabric_template.core.errors import Misuse, MisuseOfType
from fabric_template.files.storage import AtomicCheckpointIO
from fabric_template.tools import stopwatch
from fabric_template.tools.profiled import Advice, Profile

LONG = 0.005  # seconds
CLOCK = Clock()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Also what is written for the time being lies here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def on_the_clock(monkeypatch):
    """What is slept is all that takes time: each of the figures is exact."""
    monkeypatch.setattr(stopwatch, "time", CLOCK)


class Slow(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        CLOCK.sleep(LONG / 4)
        return torch.ones(4), torch.zeros(1)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CLOCK.sleep(LONG)
        return grad


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        CLOCK.sleep(LONG)
        return super().step(closure)


class SlowCallback:
    def on_train_batch_end(self, loop):
        CLOCK.sleep(LONG)


class SlowTransfer(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        CLOCK.sleep(LONG)
        return batch


def loss_of(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def small(train=None, step=loss_of, optimizer=torch.optim.SGD, steps=6, words=None, **more):
    """A profile of a net whose own work is nothing."""
    net = nn.Linear(4, 1)
    train = TensorLoader(torch.ones(16, 4), torch.zeros(16, 1), batch_size=4) if train is None else train
    given = {"optimizer": optimizer(net.parameters(), lr=0.1), "training_step": step}
    return profile(FabricLoop(accelerator="cpu", **(words or {})), net, train, steps=steps, **given, **more)


# ---- as methods of the loop


def test_the_loops_own_profile_and_tune_are_the_packages_functions():
    net, loader = nn.Linear(2, 1), TensorLoader(torch.ones(64, 2), batch_size=8)
    given = {
        "optimizer": torch.optim.SGD(net.parameters(), 0.1),
        "training_step": lambda net, batch: net(batch[0]).mean(),
    }
    loop = FabricLoop(accelerator="cpu")
    found = loop.profile(net, loader, steps=5, tries=False, **given)
    assert isinstance(found, Profile)
    assert (len(found.steps), found.samples) == (5, 8)
    tuned = loop.tune(net, loader, only=["fused"], seconds=0.05, **given)
    assert [name for name, _, _ in tuned.trials][:2] == ["as it is", "fused True"]


def test_a_copy_without_tools_says_what_it_lacks(monkeypatch):
    """A folder that is not there is one that cannot be imported."""
    monkeypatch.delitem(vars(fabric_template), "profile", raising=False)
    monkeypatch.setitem(sys.modules, "fabric_template.tools.profiling", None)
    with pytest.raises(
        Misuse, match=r"^loop\.profile needs the folder tools/, which this copy of the loop lacks: copy it, too$"
    ):
        FabricLoop(accelerator="cpu").profile(nn.Linear(1, 1))


# ---- the table


def slow_step(net, batch):
    CLOCK.sleep(LONG)
    return loss_of(net, batch)


CAUSES = {
    "data": {"train": DataLoader(Slow(), 4)},
    "forward": {"step": slow_step},
    "backward": {"step": lambda net, batch: SlowBackward.apply(loss_of(net, batch))},
    "optimizer": {"optimizer": SlowOptimizer},
    "hooks": {"words": {"callbacks": [SlowCallback()]}},
}
ADVICE = {
    "data": "% of a step waits for data: 2 workers could fetch it",
    "forward": "% of a step is the model's own work, forward and backward",
    "backward": "% of a step is the model's own work, forward and backward",
    "optimizer": "% of a step is the optimizer's: fused=True computes it in one pass",
    "hooks": "% of a step is for callbacks and hooks: SlowCallback.on_train_batch_end takes ",
}


@pytest.mark.parametrize("part", CAUSES)
def test_the_time_is_at_its_part(part, on_the_clock):
    found = small(**CAUSES[part], tries=False)
    assert [row.part for row in found.rows] == [part], str(found)
    assert found.mean(part) == pytest.approx(LONG)
    assert len(found.steps) == len(found.whole) == 6
    assert [sum(step.values()) for step in found.steps] == pytest.approx(found.whole)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    advice = found.advice[0]
    assert ADVICE[part].replace("could fetch", "fetch") in advice.what, advice
    assert advice.measured is None
    assert f"\nconsider    {advice.what}\nwrite       {advice.write}" in str(found)


def test_hooks_have_their_names(on_the_clock):
    found = profile(FabricLoop(accelerator="cpu"), SlowTransfer(), make_loader(), steps=3, tries=False)
    name, seconds = next(iter(found.hooks.items()))
    assert name == "SlowTransfer.on_after_batch_transfer"
    assert seconds == found.seconds == pytest.approx(LONG)
    assert f"{name} " in str(found)


def test_steps_by_hand_have_their_parts(on_the_clock):
    class ByHand(Classifier):
        def __init__(self):
            super().__init__(lambda m: SlowOptimizer(m.parameters(), lr=0.1))
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(SlowBackward.apply(nn.functional.cross_entropy(self(batch[0]), batch[1])))
            self.optimizers().step()

    found = profile(FabricLoop(accelerator="cpu"), ByHand(), make_loader(), steps=3, tries=False)
    means = {row.part: found.mean(row.part) for row in found.rows}
    assert means == pytest.approx({"backward": LONG, "optimizer": LONG}), str(found)


def test_a_backward_of_ones_own_has_its_part(on_the_clock):
    class Own(Classifier):
        def backward(self, loss):
            CLOCK.sleep(LONG)
            loss.backward()

    found = profile(FabricLoop(accelerator="cpu"), Own(), make_loader(), steps=3, tries=False)
    assert [row.part for row in found.rows] == ["backward"]


def test_logging_and_checkpoints(tmp_path, monkeypatch):
    clock, save = Clock(look=1e-6), AtomicCheckpointIO.save_checkpoint

    def slow_save(self, *args, **words):
        clock.sleep(LONG)
        return save(self, *args, **words)

    monkeypatch.setattr(stopwatch, "time", clock)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", slow_save)
    words = {"log_every_n_steps": 1, "save_every_n_steps": 1, "monitor": "val_acc", "mode": "max"}
    module = Classifier(on_step=True)
    found = profile(FabricLoop(accelerator="cpu", **words), module, make_loader(), steps=4, tries=False)
    assert {"logging", "checkpoint"} <= {row.part for row in found.rows if row.median > 0}
    assert found.mean("checkpoint") == pytest.approx(LONG, rel=0.01)
    assert found.share("checkpoint") > 0.9
    assert any("saves checkpoints within an epoch" in advice.what for advice in found.advice)
    assert tree(tmp_path) == []


def test_what_is_told_of_it():
    found = small(tries=False)
    assert (found.device, found.samples, found.warm_up) == ("cpu", 4, 5)
    assert found.memory["process"] > 2**20
    first, heads, *_ = str(found).splitlines()
    assert first == "profile     6 steps of 4 samples on cpu, behind 5 to warm up"
    assert heads.split()[:2] == ["share", "median"]
    told = found.as_dict()
    assert json.loads(json.dumps(told))["steps"] == 6
    assert [row["part"] for row in told["parts"]] == [row.part for row in found.rows]


def test_the_table_as_it_is_printed():
    found = Profile(
        [{"data": 0.006, "hooks": 0.001, "rest": 0.001}] * 10, [0.008] * 10, "cpu", 32, 5, {"Mine.on_train_batch_end": 0.001},
        {"process": 300 * 2**20}, "traces", [Advice("75% of a step waits for data", "TensorLoader(x)", 2.0)],
    )  # fmt: skip
    assert (
        str(found)
        == """\
profile     10 steps of 32 samples on cpu, behind 5 to warm up
              share      median  10 % to 90 % of the steps
data          75.0%     6.00 ms  6.00 ms to 6.00 ms         waiting for the next batch
hooks         12.5%     1.00 ms  1.00 ms to 1.00 ms         Mine.on_train_batch_end 1.00 ms
rest          12.5%     1.00 ms  1.00 ms to 1.00 ms         the loop itself
a step       100.0%     8.00 ms  8.00 ms to 8.00 ms
speed       4,000 samples a second
memory      process 300 MB at most
consider    75% of a step waits for data
write       TensorLoader(x)
trace       traces: for chrome://tracing, ui.perfetto.dev or TensorBoard"""
    )


def test_the_picture():
    figure = small(tries=False).plot()
    bars, course = figure.axes
    assert [label.get_text() for label in bars.get_yticklabels()] == [
        "data", "forward", "backward", "optimizer", "logging", "rest"
    ]  # fmt: skip
    assert len(course.patches) == 6 * 6
    assert course.get_title(loc="left") == "6 steps"


# ---- what is advised is tried


def short_step(net, batch):
    CLOCK.sleep(LONG / 4)
    return loss_of(net, batch)


def test_workers_are_tried(on_the_clock):
    """Theirs is another clock: here nobody waits for them."""
    advice = small(train=DataLoader(Slow(), 4, shuffle=True), step=short_step).advice[0]
    assert (
        advice.what
        == "80% of a step waits for data: 2 workers fetch it meanwhile; measured 5.0x: 6.25 ms a step, 1.25 ms with it"
    )
    assert advice.write == "DataLoader(..., num_workers=2, persistent_workers=True)"


def test_tensors_are_tried(on_the_clock, monkeypatch):
    """That samples are taken one by one is what costs."""
    one = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, i: (CLOCK.sleep(LONG / 1024), one(self, i))[1])
    x, y = torch.ones(4096, 4), torch.zeros(4096, 1)
    found = small(train=DataLoader(TensorDataset(x, y), 1024, shuffle=True), step=short_step)
    advice = found.advice[0]
    assert advice.write == "TensorLoader(x, y, batch_size=1024, shuffle=True)"
    assert advice.measured == pytest.approx(5)


def test_fused_is_tried_and_does_not_help_what_sleeps(on_the_clock):
    advice = small(optimizer=SlowOptimizer).advice[0]
    assert advice.measured == pytest.approx(1)
    assert "; measured, that does not help here: " in advice.what
    assert advice.write.startswith("a larger batch")


def test_what_cannot_be_tried_is_said(on_the_clock):
    class Mine(DataLoader):
        pass

    class Unopened(Slow):
        def __getitem__(self, index):
            assert torch.utils.data.get_worker_info() is None, "only here"
            return super().__getitem__(index)

    assert small(train=Mine(Slow(), 4)).advice[0].what.endswith("; not tried, as this Mine is not torch's own")
    advice = small(train=DataLoader(Unopened(), 4)).advice[0]
    assert "; not measured, it failed with AssertionError: " in advice.what


# ---- all is as it was


class Noisy(Dataset):
    """Draws from generators of its own, and from everybody's."""

    def __init__(self):
        self.own, self.numpys = torch.Generator().manual_seed(3), numpy.random.default_rng(4)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = torch.rand(8, generator=self.own) + float(self.numpys.random()) + random.random() + numpy.random.rand()
        return noise.float() + torch.rand(8), torch.tensor(index % 3)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.data, self.generator, self.setups = Noisy(), torch.Generator().manual_seed(5), 0

    def setup(self, stage):
        self.setups += 1
        torch.randperm(9, generator=self.generator)  # as random_split does

    def train_dataloader(self):
        return DataLoader(self.data, 4, shuffle=True, generator=self.generator)


class Counting(pl.Callback):
    seen = 0

    def on_train_batch_end(self, *args):
        self.seen += 1


def states():
    return [random.getstate(), torch.get_rng_state(), [*numpy.random.get_state()[1]]]


def module_fit(root, profiles):
    pl.seed_everything(1, verbose=False)
    module, data, counting = Classifier(by_step), Data(), Counting()
    module.net[0].eval()
    callbacks = [counting, EarlyStopping("train_loss"), ModelCheckpoint(root / "mine", every_n_train_steps=1)]
    loop = FabricLoop(
        **quiet(default_root_dir=str(root), max_epochs=2, callbacks=callbacks, seed=2, enable_checkpointing=True)
    )
    if profiles:
        modes, before = [part.training for part in module.modules()], states()
        for trace in (None, root.parent / "traces"):
            assert len(profile(loop, module, data, steps=7, trace=trace).steps) == 7
        assert [part.training for part in module.modules()] == modes
        assert same(states(), before)
        assert (counting.seen, data.setups, list(root.rglob("*"))) == (0, 0, [])
    torch.rand(1)
    history = loop.fit(module, data)
    return module.state_dict(), history.drop(columns="time").to_csv(), loop.optimizers[0].state_dict(), states()


@pytest.mark.filterwarnings("ignore:.*(does not have many workers|eval mode|no `val_dataloader`)")
def test_a_fit_behind_it_is_that_without_it(tmp_path):
    roots = [tmp_path / "with", tmp_path / "without"]
    for root in roots:
        root.mkdir()
    assert same(module_fit(roots[0], True), module_fit(roots[1], False))


def plain_fit(profiles):
    pl.seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    loader = DataLoader(Noisy(), 4, shuffle=True)

    def step(model, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1])  # by the name from outside

    for batch in loader:
        optimizer.zero_grad()
        step(net, batch).backward()
        optimizer.step()
        scheduler.step()
    loop = FabricLoop(**quiet(max_epochs=2))
    given = {"optimizer": optimizer, "scheduler": {"scheduler": scheduler, "interval": "step"}, "training_step": step}
    if profiles:
        kept = copy.deepcopy([net.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        gradients = [parameter.grad.clone() for parameter in net.parameters()]
        profile(loop, net, loader, steps=4, **given)
        assert same([net.state_dict(), optimizer.state_dict()], kept[:2])
        assert {k: v for k, v in scheduler.state_dict().items() if k[0] != "_"} == {
            k: v for k, v in kept[2].items() if k[0] != "_"
        }
        assert same([parameter.grad for parameter in net.parameters()], gradients)
    loop.fit(net, loader, **given)
    return net.state_dict(), optimizer.state_dict(), states()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_optimizers_and_schedulers_are_as_they_were():
    """Also of a step that takes the net by its name, and not as it is given."""
    assert same(plain_fit(True), plain_fit(False))


def test_the_copy_trains_as_the_original_would():
    """Nothing of an optimizer is lost in a copy: LBFGS's own list of parameters, what a scheduler has wrapped."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []

    class Look:
        def on_train_batch_end(self, loop, module):
            seen.append((float(module.weight.detach().sum()), loop.optimizers[0].param_groups[0]["lr"]))

    Look.__deepcopy__ = lambda self, memo: self
    loop = FabricLoop(accelerator="cpu", callbacks=[Look()])
    before = net.weight.detach().clone()
    loader = TensorLoader(torch.randn(8, 4), torch.randn(8, 1), batch_size=4)
    words = {"optimizer": optimizer, "scheduler": {"scheduler": scheduler, "interval": "step"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile(loop, net, loader, steps=2, training_step=loss_of, tries=False, **words)
    assert len({weight for weight, _ in seen}) > 1
    assert [rate for _, rate in seen[:2]] == pytest.approx([0.01, 0.001])
    assert torch.equal(net.weight, before)


# ---- what it takes


@pytest.mark.parametrize("train", [
    [torch.ones(2, 8)] * 2, {"a": [torch.ones(2, 8)] * 3, "b": TensorLoader(torch.ones(4, 8), batch_size=2)},
], ids=["a list", "several"])  # fmt: skip
def test_loaders_in_other_shapes(train):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch):
            return sum(self.net(part[0]).mean() for part in (batch.values() if isinstance(batch, dict) else [[batch]]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert len(profile(FabricLoop(accelerator="cpu"), Net(), train, steps=9).steps) == 9


def test_other_loops():
    """Words that end a fit early end no profile; a barebones loop has one, too; a fit that is over leaves none in the way."""
    words = {"max_steps": 2, "limit_train_batches": 1, "max_epochs": 1, "accumulate_grad_batches": 2}
    assert len(small(words=words, steps=8, tries=False).steps) == 8
    assert len(small(words={"barebones": True}, tries=False).steps) == 6
    module, loop = Classifier(), FabricLoop(**quiet(fast_dev_run=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.fit(module, make_loader())
    assert len(profile(loop, module, make_loader(), steps=3, tries=False).steps) == 3
    assert module.trainer is loop
    assert loop.global_step == 1


def test_the_trace(tmp_path):
    small(tries=False, trace=tmp_path / "deep" / "traces")
    (path,) = (tmp_path / "deep" / "traces").iterdir()
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("[Strategy]SingleDeviceStrategy.backward") == 3
    assert "aten::mse_loss" in names


def test_what_is_refused(tmp_path):
    net, loader = nn.Linear(4, 1), TensorLoader(torch.ones(8, 4), torch.zeros(8, 1), batch_size=4)
    words = {"optimizer": torch.optim.SGD(net.parameters(), 0.1), "training_step": loss_of}
    loop = FabricLoop(accelerator="cpu", devices=1)
    Path("file").touch()
    for wrong, said in [
        ({"steps": 0}, r"profile\(steps=0\): expected how many steps are timed, 1 or more"),
        ({"steps": "9"}, r"profile\(steps='9'\): expected how many"),
        (
            {"train_dataloaders": iter(loader)},
            "profile got a generator, whose batches a fit would lack then: an iterator is used",
        ),
        (
            {"train_dataloaders": CombinedLoader([loader])},
            "profile got a CombinedLoader: expected a loader, or a list or dict",
        ),
        ({"train_dataloaders": Data(), "datamodule": Data()}, "profile got two datamodules"),
        ({"trace": "file"}, r"profile\(trace='file'\): File exists: expected a folder that can be written"),
        ({"optimizer": None}, "fit got no optimizer"),
        ({"train_dataloaders": []}, "fit got an empty train loader"),
        (
            {"loop": FabricLoop(accelerator="cpu", devices=2)},
            "profile looks at one process, and this loop has 2: write devices=1",
        ),
    ]:
        given = {"loop": loop, "model": net, "train_dataloaders": loader, **words, **wrong}
        with pytest.raises(Misuse, match=said):
            profile(**given)
    net.handle = open("file")  # noqa: SIM115
    with pytest.raises(MisuseOfType, match="profile trains on a copy, and the model cannot be copied .*TextIOWrapper"):
        profile(loop, net, loader, **words)
    net.handle.close()
    del net.handle
    with pytest.raises(ZeroDivisionError):  # its own errors come out as they are
        profile(loop, net, loader, **{**words, "training_step": lambda net, batch: 1 / 0})
    assert tree(tmp_path) == ["file"]


# ---- as it is typed


def test_the_verb(tmp_path, capsys):
    words = ["--accelerator", "cpu", "--steps", 3, "--no_tries", "--data.batch_size", 8]
    code, out, _ = run(capsys, "profile", *words, "--out", "steps.png", "--trace=traces")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "profile     3 steps of 8 samples on cpu, behind 5 to warm up"
    assert lines[-1] == "picture     steps.png"
    assert Path("steps.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(Path("traces").iterdir())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.png", "traces"]
    code, out, _ = run(capsys, "profile", *words, "--json")
    assert json.loads(out)["samples"] == 8


def test_what_is_refused_when_typed(capsys):
    for words, said in [
        (["--steps", "0"], "--steps=0: expected how many steps are timed, 1 or more"),
        (["--steps", "some"], "--steps=some: expected how many"),
        (["--trace"], "--trace has no value: expected --trace VALUE"),
        (["--out", "p.xyz"], "--out p.xyz: expected a picture, such as profile.png; known are"),
        (["--out", "no/p.png"], "--out no/p.png: there is no folder 'no'"),
        (["--json=1"], "--json=1: expected --json alone"),
        (["--resume", "last"], "profile has no option --resume: "),
        (["--max_epoch", "3"], "profile has no option --max_epoch: did you mean --max_epochs?"),
        (
            ["--devices", "2", "--accelerator", "cpu"],
            "profile looks at one process, and this loop has 2: write --devices=1",
        ),
    ]:
        assert said in refused(capsys, "profile", *words)
    assert "--no_tries" in run(capsys, "profile", "--help")[1]
