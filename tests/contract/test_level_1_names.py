"""Test what loop.setup returns, and how a hand-written loop logs, saves and loads."""

import argparse
import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities import CombinedLoader
from modules import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric_template import FabricLoop, TensorLoader
from fabric_template.errors import CheckpointError


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_setup_keeps_the_parameter_objects_and_their_names(precision):
    bare = make_net()
    loop = FabricLoop(**quiet(precision=precision))
    net, optimizer = loop.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    assert [id(p) for p in net.parameters()] == [id(p) for p in bare.parameters()]
    assert list(net.state_dict()) == list(bare.state_dict())
    # In float32 on one device, setup() returns the network and the optimizer without a wrapper.
    if precision == "32-true":
        assert net is bare
        assert type(optimizer) is torch.optim.SGD
    else:
        assert net.module is bare
    with loop.no_backward_sync(net):
        loop.backward(net(torch.ones(3, 4)).sum())
    net.eval()
    assert not bare[1].training
    net.train()
    loop.backward(net(torch.ones(3, 4)).sum())
    optimizer.step()


def test_fit_accepts_the_model_and_optimizer_that_setup_returned():
    """fit does not wrap the model again, so the weights equal those of a run without setup()."""

    def fitted(through_setup):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loop = FabricLoop(**quiet(precision="bf16-mixed", max_epochs=1))
        given = loop.setup(net, optimizer) if through_setup else (net, optimizer)
        step = lambda net, batch: net(batch).float().square().mean()  # noqa: E731
        loop.fit(given[0], [torch.ones(3, 4), torch.zeros(3, 4)], optimizer=given[1], training_step=step)
        return net.state_dict(), loop

    (ours, loop), (plain, _) = fitted(True), fitted(False)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert type(loop.optimizers[0]) is torch.optim.SGD


def log_alone(fabric, loop):
    rank = loop.fabric.global_rank
    loop.print("once")
    loop.log_dict({"epoch": 0, "own": rank, "all": rank})
    loop.log_dict({"epoch": 1, "own": rank, "all": 1 + rank}, sync_dist=True)


def test_a_hand_written_loop_on_two_processes_logs_each_row_once(monkeypatch, capfd):
    """Both processes log the same row. With sync_dist, the row contains the means over the processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loop = FabricLoop(**quiet(logger=True, name="ranks", devices=2, strategy="ddp_fork"))
    loop.fabric.launch(log_alone, loop)
    assert capfd.readouterr().out == "once\n"
    assert Path("logs/ranks/version_0/metrics.csv").read_text() == "epoch,own,all\n0,0,0\n1,0.5,1.5\n"


def read_passes(loader, epochs=None):
    """Return the samples of three passes. Call set_epoch() before each pass whose epoch is not None."""
    passes = []
    for epoch in epochs or [None] * 3:
        if epoch is not None:
            loader.set_epoch(epoch)
        passes.append([sample for (batch,) in loader for sample in batch.tolist()])
    return passes


def record_passes(fabric, loop):
    x = torch.arange(11)
    made = [TensorLoader(x, batch_size=3, shuffle=True) for _ in range(3)]
    made.append(DataLoader(TensorDataset(x), batch_size=3, shuffle=True))
    found = loop.setup(make_net(), None, *made)[1:]
    epochs = [None, [2, 1, 0], [5, None, None], None]
    passes = [read_passes(*given) for given in zip(found, epochs, strict=True)]
    # A loader that does not shuffle, such as one for mid-epoch validation, has the same order in each pass.
    passes.append(read_passes(loop.setup(make_net(), None, TensorLoader(x, batch_size=2))[1]))
    Path(f"passes{loop.fabric.global_rank}.json").write_text(json.dumps(passes))


def test_two_processes_reshuffle_a_tensor_loader_in_each_epoch(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loop = FabricLoop(**quiet(devices=2, strategy="ddp_fork", seed=3))
    loop.fabric.launch(record_passes, loop)
    ranks = [json.loads(Path(f"passes{rank}.json").read_text()) for rank in (0, 1)]
    for plain, by_hand, continued, of_data_loader, in_order in ranks:
        assert plain == of_data_loader
        assert by_hand == plain[::-1]
        # The pass with set_epoch(5) is followed by passes with the epoch numbers 6 and 7, so all six orders differ.
        assert len({str(order) for order in [*plain, *continued]}) == 6
        assert in_order[0] == in_order[1] == in_order[2]
    for passes in zip(*ranks, strict=True):
        for first, second in zip(*passes, strict=True):
            assert set(first) | set(second) == set(range(11))


def setup_other_loaders(fabric, loop):
    class Divided(list):
        def for_rank(self, rank, world_size, seed):
            return self[rank::world_size]

    class Stream:
        def __iter__(self):
            return iter([torch.ones(1), torch.zeros(1)])

    is_first = loop.fabric.global_rank == 0
    text = "^loop.setup: got a Stream, which setup does not divide among the processes. Pass a DataLoader"
    with pytest.warns(UserWarning, match=text) if is_first else nullcontext():
        assert len(list(loop.setup(make_net(), None, Stream())[1])) == 2
    # A loader that setup() has returned must not be divided again.
    loader = loop.setup(make_net(), None, DataLoader(range(6)))[1]
    assert len(list(loop.setup(make_net(), None, loader)[1])) == 3
    assert loop._setup_loader(Divided([0, 1, 2, 3])) == [[0, 2], [1, 3]][loop.fabric.global_rank]
    Path(f"done{loop.fabric.global_rank}").touch()


def test_setup_warns_about_a_loader_that_it_cannot_divide_among_processes(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loop = FabricLoop(**quiet(devices=2, strategy="ddp_fork"))
    loop.fabric.launch(setup_other_loaders, loop)
    assert Path("done0").exists()
    assert Path("done1").exists()


def make_scheduler():
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make_net().parameters(), lr=0.1), 1)


LOADER = TensorLoader(torch.ones(4, 4), batch_size=2)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: [LOADER], "a list"),
        (lambda: (LOADER, LOADER), "a tuple"),
        (lambda: {"train": LOADER}, "a dict"),
        (lambda: CombinedLoader([LOADER]), "a CombinedLoader"),
        (make_scheduler, "a StepLR"),
        (lambda: make_scheduler().optimizer, "an SGD"),
        (make_net, "a Sequential"),
        (lambda: TensorDataset(torch.ones(4, 4)), "a TensorDataset"),
        (lambda: torch.ones(4, 4), "a Tensor"),
        (lambda: "data/train", "'data/train'"),
        (lambda: None, "None"),
    ],
)
def test_setup_refuses_an_argument_that_is_not_a_loader(make, name):
    loop, net = FabricLoop(**quiet()), make_net()
    with pytest.raises(
        TypeError, match=f"^loop.setup: got {name}, expected a loader. Pass each loader as a separate argument"
    ):
        loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), LOADER, make())


def test_loop_setup_returns_an_iterable_of_batches_unchanged_if_there_is_one_process():
    batches = (torch.ones(2, 4) for _ in range(3))
    assert FabricLoop(**quiet()).setup(make_net(), None, batches)[1] is batches


# States that loop.save and loop.load accept or refuse

CONTAINERS = {
    "last": deque([1.0, 2.0], maxlen=2),
    "rows": range(2, 9, 3),
    "nested": {"a": [deque([range(3)], maxlen=4)], "b": (1, {"c": torch.ones(2)})},
    "counts": Counter("aab"),
    "groups": defaultdict(list, {1: [2]}),
    "ordered": OrderedDict(b=1, a=2),
    "shape": torch.Size([2, 3]),
    "bytes": b"ab",
    "text": "ab",
    "numbers": {1, 2},
}


def test_loop_load_returns_lists_dicts_and_sets_unchanged(tmp_path):
    loop, path = FabricLoop(**quiet()), tmp_path / "mine.ckpt"
    loop.save(path, {**CONTAINERS, "net": make_net()})
    # The values in ``state`` that load() replaces may also be containers.
    state = {"net": make_net(), "last": deque([0.0], maxlen=2), "rows": range(3), "nested": {}}
    found = {**loop.load(path, state), **state}
    del found["net"]
    assert str(dict(sorted(found.items()))) == str(dict(sorted(CONTAINERS.items())))
    assert all(type(found[name]) is type(value) for name, value in CONTAINERS.items())
    assert (found["last"].maxlen, found["nested"]["a"][0].maxlen) == (2, 4)


Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Settings:
    lr: float = 0.1


@pytest.mark.skipif("weights_only" not in signature(Fabric.load).parameters, reason="needs a newer Lightning")
@pytest.mark.parametrize("value", [argparse.Namespace(lr=0.1), Settings(), Point(1, 2), [Point(1, 2)]])
def test_load_needs_weights_only_false_to_read_custom_objects(tmp_path, value):
    loop, path = FabricLoop(**quiet()), tmp_path / "mine.ckpt"
    loop.save(path, {"args": value, "epoch": 3})
    with pytest.raises(CheckpointError, match=r"in the part 'args.*If you trust the file, pass weights_only=False"):
        loop.load(path, {"args": None})
    assert loop.load(path, {}, weights_only=False) == {"args": value, "epoch": 3}


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize("state", [make_net(), None, [1], "net"], ids=["module", "None", "list", "text"])
def test_save_and_load_refuse_a_state_that_is_not_a_dict(tmp_path, method, state):
    loop = FabricLoop(**quiet())
    with pytest.raises(TypeError, match=rf"^loop.{method}: got .*, expected a path and a dict. Write loop.{method}\("):
        getattr(loop, method)(tmp_path / "mine.ckpt", state)
    assert not list(tmp_path.iterdir())


def test_load_raises_an_error_about_a_missing_key_or_file(tmp_path):
    loop, path = FabricLoop(**quiet()), tmp_path / "mine.ckpt"
    loop.save(path, {"epoch": 3})
    state = {"epoch": 0, "optimizer": None}
    with pytest.raises(KeyError, match="^loop.load: got the key 'optimizer', expected keys of the checkpoint"):
        loop.load(path, state)
    assert state == {"epoch": 0, "optimizer": None}
    with pytest.raises(FileNotFoundError, match=r"^loop.load: got '.*no.ckpt', but this file does not exist"):
        loop.load(tmp_path / "no.ckpt", {})
