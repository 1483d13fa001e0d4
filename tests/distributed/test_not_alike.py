"""What DDP's ranks do not have alike (gloo, two and three ranks): an optimizer's state, buffers, weights, hooks.

Each is saved as it is, or said, or refused. The ranks write what they have found, and it is read here.
"""

import warnings

import pytest
import torch
from externally import externally
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch import seed_everything
from modules import Classifier, by_epoch, make_loader
from runs import Snapshots, copied, loud, same
from torch import nn

from fabric_template import FabricLoop, MiniLoop

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own use of what it has deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer

HOME = "checkpoints/run/version_0"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Ranks are forked: they write beside each other, and have one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Net(Classifier):
    """With the optimizer that it is given."""

    def __init__(self, make):
        super().__init__(by_epoch)
        self.make = make
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def configure_optimizers(self):
        return self.make(self.parameters())


class Hooked(DDPStrategy):
    """With a communication hook."""

    def __init__(self, register):
        super().__init__()
        self.register = register

    def setup_module(self, module):
        ddp = super().setup_module(module)
        self.register(ddp)
        return ddp


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def zero(parameters, **words):
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01, **words)


def fit(root, make=adam, resume=None, seed=1, kind=Net, ranks=2, loop=FabricLoop, **words):
    """A run: its weights, and what it has warned of."""
    seed_everything(seed, verbose=False)
    model = kind(make)
    more = {} if loop is MiniLoop else {**loud(root), "save_every_n_steps": 2}
    words = {"strategy": "ddp", "devices": ranks, "max_epochs": 3, **more, **words}
    seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop(**words).fit(model, make_loader(40), make_loader(18, shuffle=False, seed=5), resume=resume)
    return dict(model.state_dict()), [str(one.message) for one in told]


def moments(root):
    """What a file says of the first optimizer."""
    return torch.load(f"{root}/{HOME}/last.ckpt", weights_only=True)["optimizer_states"][0]["state"]


def redundant(rank):
    found = {}
    plain, _ = fit("adam", callbacks=[Snapshots("adam", "snaps")])
    weights, _ = fit("file", zero, callbacks=[Snapshots("file", "file_snaps")])
    found["file"] = same(weights, plain) and same(moments("file"), moments("adam"))
    root = copied(rank, "file_snaps/9", "file9")
    weights, _ = fit(root, zero, resume="auto", seed=7)
    found["file"] &= same(weights, plain) and same(moments(root), moments("adam"))
    for batches, start, other in ((9, "snaps", zero), (5, "file_snaps", adam)):
        root = copied(rank, f"{start}/{batches}", f"{start}{batches}other")
        weights, said = fit(root, other, resume="auto", seed=7)
        found["changed"] = found.get("changed", True) and same(weights, plain) and same(moments(root), moments("adam"))
        found["changed"] &= not any("other" in line for line in said)
    buckets, _ = fit("buckets", lambda parameters: zero(parameters, parameters_as_bucket_view=True))
    found["buckets"] = same(buckets, plain) and same(moments("buckets"), moments("adam"))
    words = {"loop": MiniLoop, "accelerator": "cpu", "name": "mini"}
    one, _ = fit("", default_root_dir="mini_adam", **words)
    two, _ = fit("", zero, default_root_dir="mini_zero", **words)
    found["mini"] = same(one, two)
    torch.save(found, f"found{rank}.pt")


def on_three(rank):
    ends = [fit(f"{name}/9", make, resume="auto", ranks=3)[0] for name, make in THREE.items()]
    torch.save({"same": same(*ends)}, f"three{rank}.pt")


THREE = {"snaps": adam, "file_snaps": zero}


def test_an_optimizer_with_a_part_on_each_rank():
    """ZeroRedundancyOptimizer: the weights and files of the optimizer in it, resumed, also by that or by three ranks."""
    codes, errors = externally(redundant)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        assert found == dict.fromkeys(("file", "changed", "buckets", "mini"), True)
    codes, errors = externally(on_three, ranks=3)
    assert codes == [0, 0, 0], errors
    assert [torch.load(f"three{rank}.pt", weights_only=True) for rank in range(3)] == [{"same": True}] * 3


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


def refused(rank):
    told = []
    overlapping = (lambda parameters: zero(parameters, overlap_with_ddp=True)), {}
    for make, words in (overlapping, (zero, {"strategy": ModelParallelStrategy(sharded, 2, 1)})):
        try:
            fit("refused", make, **words)
        except ValueError as error:
            told.append(str(error))
    torch.save(told, f"told{rank}.pt")


def test_one_that_would_train_nothing_is_refused():
    """By its name, before the first step."""
    codes, errors = externally(refused)
    assert codes == [0, 0], errors
    for rank in range(2):
        assert torch.load(f"told{rank}.pt", weights_only=True) == [
            "ZeroRedundancyOptimizer(overlap_with_ddp=True): a hook of DDP's trains then, and the steps that the loop takes do"
            " nothing: leave overlap_with_ddp out",
            "ZeroRedundancyOptimizer with strategy=ModelParallelStrategy(...), whose ranks have their part of each moment"
            " already: write the optimizer itself, such as torch.optim.Adam(model.parameters())",
        ]


def own_buffers(rank):
    def own():
        return DDPStrategy(broadcast_buffers=False)

    full, _ = fit("full", callbacks=[Snapshots("full", "snaps")], strategy=own())
    found = {}
    for batches in (3, 5, 9):
        weights, _ = fit(copied(rank, f"snaps/{batches}", f"from{batches}"), resume="auto", seed=7, strategy=own())
        found[batches] = same(weights, full)
    torch.save((full["net.1.running_mean"], found), f"found{rank}.pt")


def test_buffers_that_nobody_gives_the_others():
    """Each rank's BatchNorm goes on with its own statistics."""
    codes, errors = externally(own_buffers)
    assert codes == [0, 0], errors
    (mean, found), (other, other_found) = [torch.load(f"found{rank}.pt", weights_only=True) for rank in range(2)]
    assert not torch.equal(mean, other)
    assert found == other_found == {3: True, 5: True, 9: True}
