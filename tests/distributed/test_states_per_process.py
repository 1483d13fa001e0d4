"""States that differ between DDP's processes: shards of an optimizer (ZeroRedundancyOptimizer)."""

import warnings

import pytest
import torch
from externally import externally
from lightning.pytorch import seed_everything
from modules import Classifier, by_epoch, make_loader
from runs import Snapshots, copied, loud, same
from torch import nn

from fabric_template import FabricLoop

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


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def zero(parameters, **words):
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01, **words)


def fit(root, make=adam, resume=None, seed=1, kind=Net, ranks=2, **words):
    """A run: its weights, and what it has warned of."""
    seed_everything(seed, verbose=False)
    model = kind(make)
    more = {**loud(root), "save_every_n_steps": 2}
    words = {"strategy": "ddp", "devices": ranks, "max_epochs": 3, **more, **words}
    seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        FabricLoop(**words).fit(model, make_loader(40), make_loader(18, shuffle=False, seed=5), resume=resume)
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
    torch.save(found, f"found{rank}.pt")


def test_an_optimizer_with_a_part_on_each_rank():
    """ZeroRedundancyOptimizer: the weights and files of the optimizer in it, resumed, also by that or by three ranks."""
    codes, errors = externally(redundant)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        assert found == dict.fromkeys(("file", "changed", "buckets"), True)
