"""What public scripts for several processes do, as it stands there: losses in parts, optimizers and loaders of every kind.

Ranks (gloo) come by themselves, as under torchrun; each writes what it has found, and it is read here.
"""

import gc

import lightning.pytorch as pl
import pytest
import torch
from externally import externally
from lightning.fabric.strategies import ModelParallelStrategy
from modules import Classifier, make_data, make_loader, quiet, run_trainer, sgd
from runs import same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

from fabric_template import FabricLoop, MiniLoop
from fabric_template.errors import ConfigurationError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Ranks are forked: they write beside each other, and have one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---- a loss in parts


def in_parallel():
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def by_columns(net, mesh):
    """Logits in parts, of which torch's `loss_parallel` makes a loss in parts."""
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


class InParts(Whole):
    def configure_model(self):
        if not hasattr(self.net.weight, "full_tensor"):  # which each verb calls
            by_columns(self.net, self.device_mesh)


class Filled(InParts):
    """Made without memory; its own hook fills it, as the example's does."""

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


def loss_in_parts(rank):
    found = {}
    for kind in (InParts, Filled):
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        found[kind.__name__] = by_module(kind, strategy=strategy, devices=2)
    loop = FabricLoop(**quiet(max_epochs=1, devices=2), strategy=ModelParallelStrategy(by_columns, 1, 2))
    with pytest.raises(ConfigurationError) as caught:
        loop.fit(
            make_net(), train(), training_step=under,
            optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        )  # fmt: skip
    found["told"] = str(caught.value)
    torch.save(found, f"found{rank}.pt")


def test_a_loss_in_parts_is_logged_and_returned():
    """Whole, under their names, with the numbers of one process; also of a module that gets its memory only in fit."""
    codes, errors = externally(loss_in_parts)
    assert codes == [0, 0], errors
    alone = by_module(Whole)
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        for kind in ("InParts", "Filled"):
            assert found[kind]["metrics"].keys() == alone["metrics"].keys()
            for name in ("weights", "metrics", "predicted"):
                torch.testing.assert_close(found[kind][name], alone[name], rtol=0, atol=1e-6)
        assert found["told"] == (
            "Linear computes its loss under loss_parallel(), which its backward needs, too: write a method"
            " backward(self, loss) beside training_step, with `with loss_parallel(): loss.backward()` in it"
        )


# ---- loaders that do not shuffle


def weighted():
    sampler = WeightedRandomSampler(torch.arange(40) + 1.0, 40, generator=torch.Generator().manual_seed(2))
    return DataLoader(make_data(), batch_size=4, sampler=sampler)


def own():
    return DataLoader(make_data(), batch_size=4, sampler=DistributedSampler(make_data(), shuffle=False))


LOADERS = {"unshuffled": lambda: make_loader(shuffle=False), "weighted": weighted, "own": own}


def in_which_order(rank):
    found, words = {}, {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "max_epochs": 2}
    torch.distributed.init_process_group("gloo")  # as scripts for DDP begin; a sampler of one's own asks for it
    for name, make in LOADERS.items():
        for kind in (FabricLoop, MiniLoop):
            pl.seed_everything(1, verbose=False)
            model, more = Classifier(sgd), quiet() if kind is FabricLoop else {"name": name}
            kind(**{**more, **words}).fit(model, make())
            found[f"{name} {kind.__name__}"] = dict(model.state_dict())
    torch.save(found, f"found{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_loader_that_does_not_shuffle_has_trainers_order():
    """Over several ranks Trainer shuffles what it trains on, so both loops do; an order of one's own stays."""
    codes, errors = externally(in_which_order)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        for name in LOADERS:
            assert same(found[f"{name} FabricLoop"], found[f"{name} MiniLoop"])
    for name in ("unshuffled", "weighted"):
        _, module = run_trainer(lambda: Classifier(sgd), LOADERS[name], max_epochs=2, strategy="ddp_fork", devices=2)
        assert same(dict(module.state_dict()), found[f"{name} FabricLoop"])


# ---- what no process can be sent


def step(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def test_what_cannot_be_sent_to_a_spawned_process_is_said():
    """Before any begins, in words that say what to write; pickle's own are among them."""
    net = nn.Linear(8, 3)
    loop = FabricLoop(**quiet(max_epochs=1, devices=2), strategy="ddp_spawn")
    with pytest.raises(TypeError) as caught:
        loop.fit(net, make_loader(), training_step=lambda net, batch: step(net, batch), optimizer=sgd(net))
    assert str(caught.value).startswith(
        "a strategy that spawns sends all that a run is given to its processes by pickle"
    )
    assert "<lambda>" in str(caught.value)
    assert str(caught.value).endswith(
        "write functions and classes at the top of a file, or strategy='ddp' in a script, 'ddp_fork' in a notebook"
    )


# ---- a script that opens its group once more


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        raise ArithmeticError("on all ranks")


def left(rank):
    from fabric_template.process import again

    torch.distributed.init_process_group("gloo")
    words = quiet(max_epochs=1, strategy="ddp", devices=2)
    with pytest.raises(ArithmeticError):
        FabricLoop(**words).fit(Fails(), make_loader())
    FabricLoop(**words).fit(Classifier(), make_loader())
    (met,) = again._MET
    assert met() is not None
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    gc.collect()
    torch.save(met() is None, f"found{rank}.pt")


def test_nothing_holds_a_group_that_its_script_has_left():
    """Else its store stays, and the next group at that port finds in it where those listened that are gone, and hangs."""
    codes, errors = externally(left)
    assert codes == [0, 0], errors
    assert [torch.load(f"found{rank}.pt") for rank in range(2)] == [True, True]
