"""Models in parts on two ranks (gloo): FSDP2 with DDP's weights, tensor parallelism, checkpoints in pieces that any run reads.

The ranks come by themselves, as under torchrun; each writes what it has found, and it is read here.
"""

import lightning.pytorch as pl
import pytest
import torch
from externally import externally
from lightning.fabric.strategies import ModelParallelStrategy
from modules import Classifier, Gan, by_epoch, make_loader, quiet, sgd
from runs import loud
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop

TWO = {"accelerator": "cpu", "devices": 2}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Ranks are forked: they write beside each other, and have one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for part in model.modules():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def split(model, mesh):
    """Tensor parallelism: the first layer by columns, the last by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh["tensor_parallel"], {"net.0": ColwiseParallel(), "net.3": RowwiseParallel()})


def fsdp(**words):
    return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, **words)


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


def whole_state(item):
    """The same nest with whole tensors."""
    if isinstance(item, dict):
        return {key: whole_state(value) for key, value in item.items()}
    return item.full_tensor() if hasattr(item, "full_tensor") else item


def trained(strategy, make, seed=1, root=None, resume=None, validates=True, given=None, **words):
    """Fit; what has come of it: weights and optimizer states, whole, the metrics and the loop."""
    pl.seed_everything(seed, verbose=False)
    model = make()
    words = {"devices": 2, "max_epochs": 2, **(quiet() if root is None else loud(root)), **words}
    loop = FabricLoop(strategy=strategy, **words)
    pl.seed_everything(1, verbose=False)
    loop.fit(model, train(), val() if validates else None, resume=resume, **(given or {}))
    states = [whole_state(optimizer.state_dict()["state"]) for optimizer in loop.optimizers]
    net = model if isinstance(model, nn.Module) else model.net
    return whole_state(net.state_dict()), states, {k: float(v) for k, v in loop.callback_metrics.items()}, loop, model


def furthest(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


class Adam(Classifier):
    def __init__(self):
        super().__init__(by_epoch)


class Meta(Classifier):
    """Makes its layers where they take no memory; each rank gets its part of them only."""

    def configure_model(self):
        if self.net is None or not isinstance(self.net, nn.Sequential):
            return
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))


class Trainers(Classifier):
    """Written for Trainer's strategy: it shards itself by its mesh."""

    def __init__(self):
        super().__init__(sgd)

    def configure_model(self):
        shard(self, self.device_mesh)


class Object:
    """A plain object with steps, for rung 3."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def by_functions(net):
    return {
        "training_step": lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
        "optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    }


# ---- the weights of DDP

CASES = {
    "plain": (Adam, {}),
    "accumulate": (Adam, {"accumulate_grad_batches": 3}),
    "clip_value": (Adam, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clip_norm": (Adam, {"gradient_clip_val": 0.1}),
    "bf16_mixed": (Adam, {"precision": "bf16-mixed"}),
    "bf16_true": (Adam, {"precision": "bf16-true"}),
    "by_hand": (Gan, {}),
    "object": (Object, {"validates": False}),
}


def against_ddp(rank):
    reduced = []
    real = torch.distributed.reduce_scatter_tensor

    def counted(*args, **words):
        reduced.append(1)
        return real(*args, **words)

    torch.distributed.reduce_scatter_tensor = counted
    found = {}
    for name, (make, words) in CASES.items():
        weights, states, metrics, *_ = trained("ddp", make, **words)
        reduced.clear()
        # each rank begins with weights of its own, and is given rank zero's, as DDP gives them
        ours, our_states, our_metrics, loop, model = trained(fsdp(), make, seed=1 + rank, **words)
        found[name] = furthest(weights, ours), metrics == our_metrics, len(reduced)
        if name == "plain":
            before = metrics["val_loss"]
            found["again"] = loop.validate(model, val(), verbose=False)[0]["val_loss"] == before
            more = FabricLoop(strategy=fsdp(), **quiet(devices=2, max_epochs=1))
            more.fit(model, train())  # a second fit of what is in parts already
            found["more"] = more.global_step
    net = nn.Sequential(nn.Linear(8, 3))
    loop = FabricLoop(strategy=fsdp(), **quiet(devices=2, max_epochs=1))
    loop.fit(net, train(), **by_functions(net))
    found["functions"] = type(net[0].weight).__name__
    found["predicted"] = len(loop.predict(net, val(), predict_step=lambda net, batch: net(batch[0])))
    found["trainers"] = trained(pl.strategies.ModelParallelStrategy(2, 1), Trainers)[2] == trained("ddp", Classifier)[2]
    torch.save(found, f"found{rank}.pt")


def test_fsdp2_has_the_weights_of_ddp():
    """Exactly, but for the norm of all gradients, which is added up in another order; and gradients go over once a window."""
    codes, errors = externally(against_ddp)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        exact = {name: found[name][:2] for name in CASES if name not in ("clip_norm", "by_hand")}
        assert exact == dict.fromkeys(exact, (0.0, True))
        assert max(found["clip_norm"][0], found["by_hand"][0]) < 1e-6
        # 10 batches of two ranks are 10 windows of one, or 4 of three and the epoch's last two; of 2 layers each
        assert (found["plain"][2], found["accumulate"][2]) == (20, 8)
        assert (found["again"], found["more"], found["functions"], found["predicted"]) == (True, 5, "DTensor", 3)
        assert found["trainers"]
