"""What public scripts for several processes do: sharded losses, loaders of every kind, closures under spawn."""

import lightning.pytorch as pl
import pytest
import torch
from externally import externally
from modules import Classifier, make_data, make_loader, quiet, run_trainer, sgd
from runs import same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

from fabric_template import FabricLoop


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---- a sharded loss


def in_parallel():
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def by_columns(net, mesh):
    """Shard the logits by columns, for torch's loss_parallel()."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(
        net, mesh["tensor_parallel"], ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    )


def make_net():
    torch.manual_seed(1)
    return nn.Linear(8, 4)


class Whole(pl.LightningModule):
    """As Lightning's example of tensor parallelism, on one device."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch):
        loss = under(self.net, batch)
        self.log("mine", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def backward(self, *args, **words):
        with in_parallel():
            super().backward(*args, **words)

    def validation_step(self, batch):
        return under(self.net, batch)

    def predict_step(self, batch):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def under(net, batch):
    with in_parallel():
        return cross_entropy(net(batch[0]), batch[1])


class Sharded(Whole):
    def configure_model(self):
        if not hasattr(self.net.weight, "full_tensor"):  # which each verb calls
            by_columns(self.net, self.device_mesh)


class Filled(Sharded):
    """Made on the meta device and filled by a hook."""

    def on_train_start(self):
        self.was_empty = bool((self.net.bias.full_tensor() == 0).all())
        for value, parameter in zip(make_net().parameters(), self.net.parameters(), strict=True):
            one = torch.distributed.tensor.distribute_tensor(
                value.detach(), parameter.device_mesh, parameter.placements
            )
            parameter.data.copy_(one)


def train():
    return make_loader(16, shuffle=False)


def by_module(kind, **words):
    loop = FabricLoop(**quiet(max_epochs=2, **words))
    with loop.init_module(empty_init=kind is Filled):
        model = kind()
    loop.fit(model, train(), make_loader(8, shuffle=False, seed=5))
    weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.state_dict().values()]
    predicted = loop.predict(model, train())
    return {"weights": weights, "metrics": dict(loop.callback_metrics), "predicted": torch.cat(predicted)}


def train_with_sharded_loss(rank):
    found = {}
    for kind in (Sharded, Filled):
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        found[kind.__name__] = by_module(kind, strategy=strategy, devices=2)
    torch.save(found, f"found{rank}.pt")


def test_a_sharded_loss_is_logged_and_returned():
    """Values are those of one process, also of a module that was made on the meta device."""
    codes, errors = externally(train_with_sharded_loss)
    assert codes == [0, 0], errors
    alone = by_module(Whole)
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        for kind in ("Sharded", "Filled"):
            assert found[kind]["metrics"].keys() == alone["metrics"].keys()
            for name in ("weights", "metrics", "predicted"):
                torch.testing.assert_close(found[kind][name], alone[name], rtol=0, atol=1e-6)


# ---- loaders that do not shuffle


def weighted():
    sampler = WeightedRandomSampler(torch.arange(40) + 1.0, 40, generator=torch.Generator().manual_seed(2))
    return DataLoader(make_data(), batch_size=4, sampler=sampler)


def own():
    return DataLoader(make_data(), batch_size=4, sampler=DistributedSampler(make_data(), shuffle=False))


LOADERS = {"unshuffled": lambda: make_loader(shuffle=False), "weighted": weighted, "own": own}


def train_each(rank):
    found, options = {}, quiet(strategy="ddp", devices=2, max_epochs=2)
    # Scripts for DDP start so, and a DistributedSampler asks for the group.
    torch.distributed.init_process_group("gloo")
    for name, make in LOADERS.items():
        pl.seed_everything(1, verbose=False)
        model = Classifier(sgd)
        FabricLoop(**options).fit(model, make())
        found[name] = dict(model.state_dict())
    torch.save(found, f"found{rank}.pt")
    torch.distributed.destroy_process_group()


def test_loaders_that_do_not_shuffle_have_trainers_order():
    """With several processes Trainer shuffles every training loader, but for one with a DistributedSampler."""
    codes, errors = externally(train_each)
    assert codes == [0, 0], errors
    found = torch.load("found1.pt", weights_only=True)
    for name in ("unshuffled", "weighted"):
        _, module = run_trainer(lambda: Classifier(sgd), LOADERS[name], max_epochs=2, strategy="ddp_fork", devices=2)
        assert same(dict(module.state_dict()), found[name])
    assert same(torch.load("found0.pt", weights_only=True)["own"], found["own"])


# ---- what cannot be pickled


def step(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def test_closures_are_refused_by_strategies_that_spawn():
    net = nn.Linear(8, 3)
    loop = FabricLoop(**quiet(max_epochs=1, devices=2), strategy="ddp_spawn")
    with pytest.raises(TypeError) as caught:
        loop.fit(net, make_loader(), training_step=lambda net, batch: step(net, batch), optimizer=sgd(net))
    assert "strategy: got one that spawns processes" in str(caught.value)
    assert "<lambda>" in str(caught.value)
